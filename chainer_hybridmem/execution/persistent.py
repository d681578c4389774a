"""A parameter or optimizer state that leaves and comes back in one iteration.

Note: [watched owners]
    From the moment the copy starts, the owner is watched (:mod:`.owners`). A read of
    the array while it is being copied calls the copy off: the array may change. A later
    read restores it first. Others that have the array itself keep its memory alive;
    then it is put back at once, so that both see what the update writes. At the end of
    an iteration everything is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.chainer_access.owners import Owner
from chainer_hybridmem.devices.protocol import Array, Device, View
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.execution.live_map import LiveMap, State


class PersistentMap(LiveMap):
    """One array of an owner, for one iteration; see [watched owners].

    Args:
        device (Device): Where the array is.
        owner (Owner): Who holds it.
        array (Array): The array.
        recall (callable): Called with this map when the program reads the array.
    """

    __slots__ = ('_lost', '_owner', '_recall', '_view', 'label')

    def __init__(
        self,
        device: Device,
        owner: Owner,
        array: Array,
        recall: Callable[[PersistentMap], None],
    ) -> None:
        root = device.arrays.root(array)
        super().__init__(
            device, device.arrays.allocation_id(array), device.arrays.root_bytes(root)
        )
        self.label = owner.label
        self._owner = owner
        self._recall = recall
        self._view: View = device.arrays.capture(array)
        self._lost: str | None = None  # why its values are nowhere

    def start_swap_out(self) -> int:
        """Starts the copy, unless the array is shared; returns the bytes copied."""
        if not self._owner.alone():
            return 0
        nbytes = super().start_swap_out()
        if nbytes:
            self._owner.watch(functools.partial(self._recall, self), self.nbytes)
        return nbytes

    def release(self) -> None:
        """Waits for the copy and frees the memory, unless others have it."""
        if self.state is not State.LEAVING:
            return
        try:
            super().release()
        except SwapStoreError:  # it has not left
            self._owner.unwatch()
            raise
        self.return_if_held()

    def vacate(self) -> None:
        """Its owner says who else holds it: nothing is to be found out."""

    def stay(self) -> None:
        """Calls a copy off: the array may change from here on."""
        if self.state is State.LEAVING:
            self.host.let_finish()
            self._owner.unwatch()
            self._keep()

    def _keep(self) -> None:
        """The owner has it all the time."""
        self.state = State.RESIDENT
        self.host.end_copy()

    def start_swap_in(self) -> int:
        """See :class:`LiveMap`.

        Raises:
            SwapStoreError: If its values are lost.
        """
        if self._lost is not None:
            raise SwapStoreError(self._lost)
        return super().start_swap_in()

    def finish_swap_in(self) -> None:
        """Waits for the array; see :class:`LiveMap`. A failed copy is tried once more.

        Raises:
            SwapStoreError: If that fails, too: there is no other copy.
        """
        try:
            super().finish_swap_in()
        except SwapStoreError:
            try:
                self.start_swap_in()
                super().finish_swap_in()
            except SwapStoreError as error:
                self._lost = (
                    f'{self._owner.label} ({self.nbytes} bytes) cannot be read back, '
                    f'its values are lost: go on with a new model from a snapshot. '
                    f'{error}'
                )
                raise SwapStoreError(self._lost) from error

    def _find_array(self) -> Array | None:
        return self._owner.get()

    def _arrived(self, root: Any) -> None:
        array = self._device.arrays.restore(root, self._view)
        self._owner.put(array)
        self._owner.unwatch()
        self.allocation = self._device.arrays.allocation_id(array)
        super()._arrived(root)
        self.host.set_valid(False)  # the update changes it

    def _leave(self, state: State) -> None:
        super()._leave(state)
        self._owner.put(None)
