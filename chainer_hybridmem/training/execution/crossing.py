"""Parks and recalls parameters and optimizer states.

Note: [crossing]
    Parameters and optimizer states leave and return inside one iteration, the last
    ones in the hook behind the last backward function: no hook runs before the update.
    Every path that ends an iteration restores all arrays that are still away. Recorded
    iterations park states: what is freed and allocated for that is no part of the
    recording.

Note: [watched owners]
    From the moment the copy starts, the owner is watched (:mod:`.owners`). A read of
    the array while it is being copied waits for that; the copy does not count, for the
    array may change. A later read restores it first. An array that others have, too,
    stays, so that both see what the update writes. At the end of an iteration
    everything is restored.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.training.chainer_access.owners import Owner
from chainer_hybridmem.training.devices.protocol import Array, Device, View
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import LiveMaps
from chainer_hybridmem.training.execution.replayer import Restorer
from chainer_hybridmem.training.execution.table import ActionTable


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
        """Starts the copy, unless others have the array; returns the bytes copied."""
        nbytes = super().start_swap_out()
        if nbytes:
            self._owner.watch(functools.partial(self._recall, self), self.nbytes)
        return nbytes

    def release(self) -> None:
        """Waits for the copy and frees the memory."""
        if self.state is not State.LEAVING:
            return
        try:
            super().release()
        except SwapStoreError:  # it has not left
            self._owner.unwatch()
            raise

    def is_alone(self) -> bool:
        """Whether the owner alone has the array and its memory."""
        array, places = self._owner.get(), self._owner.count_places()
        arrays = {} if array is None else {id(array): array}
        array = None  # every reference counts
        fields: dict[int, set[object]] = {key: set(range(places)) for key in arrays}
        return self._owner.alone() and self._device.arrays.held_by_none_but(
            arrays, fields
        )

    def relocate(self) -> None:
        """Its owner says who else holds it: nothing is to be found out."""

    def finish_and_stay(self) -> None:
        """Waits for a copy, which does not count: the array may change from here on."""
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
        self.host.valid = False  # the update changes it

    def _leave(self, state: State) -> None:
        super()._leave(state)
        self._owner.put(None)


class Crossing:
    """Knows the arrays of owners that leave in this iteration.

    Args:
        device (Device): Where the arrays are.
        maps (LiveMaps): Is told which allocations stay.
        restorer (Restorer): Brings arrays back.

    Attributes:
        arrays (list of PersistentMap): Those that may be away.
    """

    def __init__(self, device: Device, maps: LiveMaps, restorer: Restorer) -> None:
        self._device = device
        self._maps = maps
        self._restorer = restorer
        self.arrays: list[PersistentMap] = []
        self._by_node: weakref.WeakKeyDictionary[Any, PersistentMap] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, table: ActionTable | None, holders: Iterable[Owner]) -> None:
        """Starts an iteration.

        Args:
            table: Which arrays leave.
            holders: Owners of the parameters and optimizer states that may leave.
        """
        if table is None:
            return
        for owner in holders:
            storage, array = table.crossing.get(owner.label, -1), owner.get()
            if storage < 0 or array is None:
                continue
            live = PersistentMap(self._device, owner, array, self._recall)
            self._maps.planned.assign(live, storage)
            self.arrays.append(live)
            if owner.node is not None:
                self._by_node[owner.node] = live

    def switch(self) -> None:
        """Moves every array into another plan, which the iteration goes on with."""
        for live in self.arrays:
            self._maps.planned.move_by_label(live, live.label)

    def park(self, holders: Iterable[Owner]) -> None:
        """Moves arrays out for an iteration that is recorded, as far as they may.

        They are restored before the update if a table says where it is, else when the
        update reads them.
        """
        for owner in holders:
            array = owner.get()
            if array is None or array.nbytes < self._maps.minimum_map_bytes:
                continue
            live = PersistentMap(self._device, owner, array, self._recall)
            self._maps.note_parked(live.allocation)
            self.arrays.append(live)
            array = None  # only its owner may have it
            live.start_swap_out()
        for live in self.arrays:
            live.release()

    def _recall(self, live: PersistentMap) -> None:
        """Restores an array because the program reads it, or time is up."""
        live.finish_and_stay()
        if live.state is not State.RESIDENT:
            self._restorer.bring_back(live)
            self._maps.note_permanent(live.allocation)
        if live.storage < 0:  # parked: no plan owns the copy
            self._maps.note_parked(live.allocation)
            live.host.close()

    def recall_read_by(self, function: Any) -> None:
        """Restores the parameters that a function reads."""
        for node in function.inputs if self.arrays else ():
            live = self._by_node.get(node)
            if live is not None:
                self._recall(live)

    def recall_all(self) -> None:
        """Restores every array: the update comes next."""
        for live in self.arrays:
            self._recall(live)

    def end(self) -> None:
        """Every array that crosses iterations is where its owner expects it."""
        with contextlib.ExitStack() as stack:  # one that fails does not stop the others
            for live in self.arrays:
                stack.callback(self._recall, live)
        self.arrays.clear()
        self._by_node.clear()
