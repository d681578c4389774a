"""A parameter or optimizer state that leaves and comes back in one iteration.

Note: [nobody misses it]
    From the moment its copy starts, the owner is watched (:mod:`.owners`). Who asks
    for the array while it is being copied keeps it: the copy is forgotten, and the
    array may change. Who asks later gets it back first. Who has the array itself
    keeps its memory alive; then it is put back at once, so that what the update
    writes is seen by both. At the end of an iteration everything is at home.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices.protocol import Array, Device, Root, View
from chainer_hybridmem.execution.feature_maps import LiveMap, State
from chainer_hybridmem.owners import Owner


class PersistentMap(LiveMap):
    """One array of an owner, for one iteration; see [nobody misses it].

    Args:
        device (Device): Where the array is.
        owner (Owner): Who holds it.
        array (Array): The array.
        recall (callable): Called with this map when somebody asks for the array.
    """

    __slots__ = ('_owner', '_recall', '_view')

    def __init__(
        self,
        device: Device,
        owner: Owner,
        array: Array,
        recall: Callable[[PersistentMap], None],
    ) -> None:
        root = device.root(array)
        super().__init__(device, device.allocation_id(array), device.root_bytes(root))
        self._owner = owner
        self._recall = recall
        self._view: View = device.capture(array)

    def alive(self) -> bool:
        """The owner outlives every graph."""
        return True

    def start_swap_out(self) -> int:
        """Starts the copy, unless the array is shared; returns the bytes copied."""
        if not self._owner.alone():
            return 0
        nbytes = super().start_swap_out()
        if nbytes:
            self._owner.watch(functools.partial(self._recall, self))
        return nbytes

    def release(self) -> None:
        """Waits for the copy and frees the memory, unless somebody else has it."""
        if self.state is not State.LEAVING:
            return
        held = _memory_of(self._device, self._owner.get())
        super().release()
        root = held()
        if root is not None:
            self._arrived(root)

    def vacate(self) -> None:
        """Its owner says who else holds it: nothing is to be found out."""

    def stay(self) -> None:
        """Calls a copy off: the array may change from here on."""
        if self.state is State.LEAVING:
            assert self._transfer is not None
            self._device.wait(self._transfer)
            self._transfer = None
            self.state = State.RESIDENT
            self._owner.unwatch()

    def _resident_root(self) -> Root | None:
        array = self._owner.get()
        return None if array is None else self._device.root(array)

    def _arrived(self, root: Any) -> None:
        array = self._device.restore(root, self._view)
        self._owner.put(array)
        self._owner.unwatch()
        self.allocation = self._device.allocation_id(array)
        super()._arrived(root)
        self._valid = False  # the update changes it

    def _leave(self, state: State) -> None:
        super()._leave(state)
        self._owner.put(None)


def _memory_of(device: Device, array: Array) -> Callable[[], Root | None]:
    """Tells the allocation of an array for as long as somebody has it."""
    try:
        return weakref.ref(device.root(array))
    except TypeError:  # CuPy's memory; there, views refer to the array they are of
        reference = weakref.ref(array)

    def root() -> Root | None:
        alive = reference()
        return None if alive is None else device.root(alive)

    return root
