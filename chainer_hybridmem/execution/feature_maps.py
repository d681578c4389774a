"""One feature map of the running graph, and what can be done with it."""

from __future__ import annotations

import enum
from typing import Any

from chainer_hybridmem.devices.protocol import Device, HostCopy, Root, Transfer
from chainer_hybridmem.graph import SlotRef


class State(enum.Enum):
    """Where the contents of a feature map are."""

    RESIDENT = 'resident'  # on the device, in the graph
    LEAVING = 'leaving'  # like resident, and being copied to the host
    AWAY = 'away'  # on the host only
    COMING = 'coming'  # being copied to the device, not in the graph yet
    GONE = 'gone'  # nowhere: to be recomputed


class LiveMap:
    """A storage with the graph's references to it.

    Every method may be called in any state and does nothing where there is
    nothing to do, so that a plan and an eviction never fight.

    While it is resident only the graph holds its memory, so that the graph's
    death frees it as it does without us.

    Attributes:
        allocation (int): Id of the allocation that forward made.
        storage (int): Id in the profile; -1 if no plan knows it.
        nbytes (int): Size.
        state (State): Where the contents are.
        slots (list of SlotRef): The graph's references.
        copy (HostCopy or None): Contents on the host.
        differentiated (bool): A function that backward has called reads it as well.
        outdated (bool): It is of an earlier iteration: whoever uses its memory
            anew, such as a buffer for input, may have changed the contents.
    """

    __slots__ = (
        '_device', '_root', '_transfer', '_valid',
        'allocation', 'copy', 'differentiated', 'nbytes', 'outdated',
        'slots', 'state', 'storage',
    )  # fmt: skip

    def __init__(self, device: Device, allocation: int, nbytes: int) -> None:
        self._device = device
        self._root: Root | None = None  # only while it is coming
        self._transfer: Transfer | None = None
        self._valid = False  # whether the host copy has the contents
        self.allocation = allocation
        self.nbytes = nbytes
        self.storage = -1
        self.slots: list[SlotRef] = []
        self.copy: HostCopy | None = None
        self.differentiated = False
        self.outdated = False
        self.state = State.RESIDENT

    @property
    def transfer(self) -> Transfer | None:
        """The copy under way; it keeps the memory alive."""
        return self._transfer

    def alive(self) -> bool:
        """Whether any part of the graph can still ask for it."""
        return any(slot.alive() for slot in self.slots)

    def is_at(self, root: Root) -> bool:
        """Whether the graph has it there now."""
        return self._resident_root() is root

    def add(self, slot: SlotRef, root: Root) -> None:
        """Adds a reference the graph has just made.

        An array that was released is back when the user still held it and a
        function retains it again.
        """
        self.slots.append(slot)
        if self.state not in (State.RESIDENT, State.LEAVING):
            self._arrived(root)

    def renew(self, root: Root) -> None:
        """Takes the contents as they are in memory now; the copy is worth nothing."""
        if self._transfer is not None:
            self._device.wait(self._transfer)
        self._arrived(root)
        self._valid = self.outdated = False

    def start_swap_out(self) -> int:
        """Starts the copy to the host; returns the bytes copied."""
        if self.state is not State.RESIDENT or self._valid:
            return 0  # feature maps never change: an old copy is still right
        root = self._resident_root()
        if root is None:
            return 0
        self.copy, self._transfer = self._device.swap_out(root, self.copy)
        self.state = State.LEAVING
        return self.nbytes

    def release(self) -> None:
        """Waits for the copy to the host and frees the device memory."""
        if self.state is State.RESIDENT and self._valid:
            self._leave(State.AWAY)
        elif self.state is State.LEAVING:
            assert self._transfer is not None
            self._device.wait(self._transfer)
            self._valid = True
            self._leave(State.AWAY)

    def drop(self) -> None:
        """Frees the device memory; a copy on the host stays valid."""
        if self.state is State.LEAVING:
            self.release()
        elif self.state is State.COMING:
            self.finish_swap_in()
        if self.state is State.RESIDENT:
            self._leave(State.AWAY if self._valid else State.GONE)

    def start_swap_in(self) -> int:
        """Takes device memory and starts the copy; returns the bytes copied."""
        if self.state is not State.AWAY or self.copy is None:
            return 0
        self._root = self._device.allocate(self.nbytes)
        self._transfer = self._device.swap_in(self.copy, self._root)
        self.state = State.COMING
        return self.nbytes

    def finish_swap_in(self) -> None:
        """Waits for the copy to the device and puts it into the graph."""
        if self.state is State.COMING:
            assert self._transfer is not None
            self._device.wait(self._transfer)
            self._arrived(self._root)

    def refill(self, root: Root) -> None:
        """Puts recomputed contents into the graph."""
        if self.state in (State.AWAY, State.GONE):
            self._arrived(root)

    def forget(self) -> None:
        """Lets go of everything without touching the graph."""
        if self._transfer is not None:
            self._device.wait(self._transfer)
        self._root = self._transfer = None
        self.slots.clear()

    def _resident_root(self) -> Root | None:
        for slot in self.slots:
            array = slot.get()
            if array is not None:
                return self._device.root(array)
        return None

    # An interrupt may come anywhere: at every moment the state leads to the contents.
    def _arrived(self, root: Any) -> None:
        for slot in self.slots:
            slot.put(self._device.restore(root, slot.view))
        self.state = State.RESIDENT
        self._root = self._transfer = None

    def _leave(self, state: State) -> None:
        self.state = state
        for slot in self.slots:
            slot.put(None)
        self._root = self._transfer = None
