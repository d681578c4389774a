"""One feature map of the running graph, and what can be done with it.

Note: [held arrays]
    The user may hold an array that has left the graph, and may write into it: plain
    Chainer's backward would see that. So a map that comes back is that very array if
    anybody still has it. A copy on the host is right only as long as nobody but the
    graph had the array: where a function retains it again, it may have changed.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices.protocol import (
    Array,
    Device,
    HostCopy,
    Root,
    Transfer,
    View,
)
from chainer_hybridmem.errors import HostFullError, OutOfMemoryError, SwapStoreError
from chainer_hybridmem.graph import SlotRef
from chainer_hybridmem.plan import Tier
from chainer_hybridmem.profile import Slot


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
    nothing to do, so that a plan and an eviction never fight. When a copy has failed,
    the contents are where they were before it, and it may be tried again.

    While it is resident only the graph holds its memory, so that the graph's
    death frees it as it does without us.

    Attributes:
        allocation (int): Id of the allocation that forward made.
        storage (int): Id in the profile; -1 if no plan knows it.
        nbytes (int): Size.
        state (State): Where the contents are.
        slots (list of SlotRef): The graph's references.
        copy (HostCopy or None): Contents on the host.
        older (int): How many of the references are of older iterations.
        outlives (bool): A backward will ask for it that is no part of the plan.
        sticks (bool): Somebody but the graph has had it when it was to go.
        tier (Tier or None): Where its copy should lie; None where there is room.
        vacated (bool): It has been moved on the device.
        uses (set of int): Serial numbers of the functions whose backward reads it.
    """

    __slots__ = (
        '_device', '_held', '_root', '_transfer', '_valid',
        'allocation', 'copy', 'nbytes', 'older', 'outlives', 'slots', 'state',
        'sticks', 'storage', 'tier', 'uses', 'vacated',
    )  # fmt: skip

    def __init__(self, device: Device, allocation: int, nbytes: int) -> None:
        self._device = device
        self._held: Callable[[], Root | None] = nothing  # see [held arrays]
        self._root: Root | None = None  # only while it is coming
        self._transfer: Transfer | None = None
        self._valid = False  # whether the host copy has the contents
        self.allocation = allocation
        self.nbytes = nbytes
        self.storage = -1
        self.slots: list[SlotRef] = []
        self.copy: HostCopy | None = None
        self.older = 0
        self.outlives = self.sticks = self.vacated = False
        self.tier: Tier | None = None
        self.uses: set[int] = set()
        self.state = State.RESIDENT

    @property
    def present(self) -> bool:
        """Whether the graph has it now."""
        return self.state in (State.RESIDENT, State.LEAVING)

    @property
    def transfer(self) -> Transfer | None:
        """The copy under way; it keeps the memory alive."""
        return self._transfer

    def begin_iteration(self) -> None:
        """What has been so far belongs to older iterations; no plan knows them."""
        self.older = len(self.slots)
        self.storage = -1
        self.outlives = self.sticks = False

    def present_slots(self) -> list[Slot]:
        """Names of the references that the present iteration has made."""
        return [reference.slot for reference in self.slots[self.older :]]

    def slots_of(self, operation: int) -> list[Slot]:
        """Names of the references that an operation of any iteration has made."""
        names = (reference.slot for reference in self.slots)
        return [slot for slot in names if slot.operation == operation]

    def alive(self) -> bool:
        """Whether any part of the graph can still ask for it."""
        return any(slot.alive() for slot in self.slots)

    @property
    def copied(self) -> bool:
        """Whether the copy on the host has the contents."""
        return self._valid

    def is_at(self, root: Root) -> bool:
        """Whether the graph has it there now."""
        return self._resident_root() is root

    def renew(self, root: Root) -> None:
        """Takes the contents as they are in memory now; the copy is worth nothing."""
        self._let_finish()
        self._return(root)

    def held(self) -> bool:
        """Whether a Variable of the program holds the memory, as far as one knows."""
        return any(slot.held() for slot in self.slots)

    def returned(self) -> bool:
        """Puts what has left back if somebody else has it; whether that is so."""
        root = self._held() if self.state is State.AWAY else None
        if root is None:
            return False
        self._return(root)
        return True

    def add(self, slot: SlotRef, root: Root) -> None:
        """Adds a reference the graph has just made.

        An array that was released is back when the user still held it and a
        function retains it again; see [held arrays].
        """
        self.slots.append(slot)
        self._let_finish()
        if self.state is State.RESIDENT:
            self._valid = False
        else:
            self._return(root)

    def leave_replaced(self) -> None:
        """Forgets the attributes to which their functions have given other arrays."""
        replaced = [slot for slot in self.slots if slot.replaced()]
        if replaced:
            self.older -= sum(slot in replaced for slot in self.slots[: self.older])
            self.slots = [slot for slot in self.slots if slot not in replaced]

    def start_swap_out(self) -> int:
        """Starts the copy to the host; returns the bytes copied.

        It stays where it is if the host has no room for it.
        """
        if self.state is not State.RESIDENT or self._valid:
            return 0  # feature maps never change: an old copy is still right
        root = self._resident_root()
        if root is None:
            return 0
        if self.copy is None:
            try:
                self.copy = self._device.host_copy(self.nbytes, self.tier)
            except HostFullError:
                return 0
        self.copy, self._transfer = self._device.swap_out(root, self.copy)
        self.state = State.LEAVING
        return self.nbytes

    def release(self) -> None:
        """Waits for the copy to the host and frees the device memory."""
        if self.state is State.RESIDENT and self._valid:
            self._leave(State.AWAY)
        elif self.state is State.LEAVING:
            self._wait_or(State.RESIDENT)
            self._valid = True
            self._leave(State.AWAY)

    def vacate(self) -> None:
        """Moves it to other device memory if the host had no room for it.

        What it leaves is freed as if it had gone to the host: so a recording finds out
        who else holds it, and whether a plan may release it.
        """
        root = self._resident_root() if self.state is State.RESIDENT else None
        if root is None or self.copy is not None:
            return
        whole = View(0, (self.nbytes,), (1,), '|u1')
        with self._device.without_reclaim():
            try:
                target = self._device.allocate(self.nbytes)
            except OutOfMemoryError:
                return  # no room here either
        self._device.restore(target, whole)[...] = self._device.restore(root, whole)
        self._held = memory_of(self._device, self._resident_array())
        self._arrived(target)
        self.vacated = True

    def move_back(self) -> None:
        """After :meth:`vacate`: somebody may have the array, and have changed it."""
        self.vacated = False
        root = self._held()
        if root is not None:
            self._return(root)

    def drop(self) -> None:
        """Frees the device memory; a copy on the host stays valid.

        What somebody has changed perhaps, nobody can make again: it stays.
        """
        if self.state is State.LEAVING:
            self.release()
        elif self.state is State.COMING:
            self.finish_swap_in()
        if self.state is State.RESIDENT and (self._valid or not self.sticks):
            self._leave(State.AWAY if self._valid else State.GONE)

    def start_swap_in(self) -> int:
        """Takes device memory and starts the copy; returns the bytes copied."""
        if self.state is not State.AWAY or self.copy is None:
            return 0
        held = self._held()
        if held is not None:
            self._return(held)
            return 0
        root = self._device.allocate(self.nbytes)
        self._transfer = self._device.swap_in(self.copy, root)
        self._root = root
        self.state = State.COMING
        return self.nbytes

    def finish_swap_in(self) -> None:
        """Waits for the copy to the device and puts it into the graph."""
        if self.state is State.COMING:
            self._wait_or(State.AWAY)
            self._arrived(self._root)

    def refill(self, root: Root) -> None:
        """Puts recomputed contents into the graph."""
        if self.state in (State.AWAY, State.GONE):
            held = self._held()
            if held is None:
                self._arrived(root)
            else:
                self._return(held)

    def forget(self) -> None:
        """Lets go of everything without touching the graph."""
        self._let_finish()
        self._root = self._transfer = None
        self.slots.clear()

    def _let_finish(self) -> None:
        """Waits for a copy whose result nobody needs."""
        if self._transfer is not None:
            with contextlib.suppress(SwapStoreError):
                self._device.wait(self._transfer)

    def _wait_or(self, former: State) -> None:
        """Waits for the copy; if it has failed, the contents are where they were."""
        assert self._transfer is not None
        try:
            self._device.wait(self._transfer)
        except SwapStoreError:
            self.state = former
            self._root = self._transfer = None
            raise

    def _resident_root(self) -> Root | None:
        array = self._resident_array()
        return None if array is None else self._device.root(array)

    def _resident_array(self) -> Array | None:
        return next((a for slot in self.slots if (a := slot.get()) is not None), None)

    def _return(self, root: Root) -> None:
        """Puts an array that somebody held back into the graph."""
        self._arrived(root)
        self._valid = False
        self.sticks = True

    # An interrupt may come anywhere: at every moment the state leads to the contents.
    def _arrived(self, root: Any) -> None:
        for slot in self.slots:
            slot.put(self._device.restore(root, slot.view))
        self.state = State.RESIDENT
        self._root = self._transfer = None

    def _needed(self) -> bool:
        """Whether anything has a place for it."""
        return bool(self.slots)

    def _leave(self, state: State) -> None:
        self._held = memory_of(self._device, self._resident_array())
        self.state = state if self._needed() else State.RESIDENT
        for slot in self.slots:
            slot.put(None)
        self._root = self._transfer = None


def nothing() -> None:
    """Nobody holds it."""


def memory_of(device: Device, array: Array | None) -> Callable[[], Root | None]:
    """Tells the allocation of an array for as long as somebody has it."""
    if array is None:
        return nothing
    try:
        return weakref.ref(device.root(array))
    except TypeError:  # CuPy's memory; there, views refer to the array they are of
        reference = weakref.ref(array)

    def root() -> Root | None:
        alive = reference()
        return None if alive is None else device.root(alive)

    return root
