"""One feature map of the running graph, and what can be done with it.

Note: [held arrays]
    The program may hold an array that the graph has, and may write into it: plain
    Chainer's backward sees that. A copy of it would have to be looked after, and taking
    it away frees nothing. So a map leaves only when the graph alone has its memory
    (graph_slots, ``is_exclusive``), and what leaves nobody can write into. What is held
    when it is to leave stays, and leaves once the program lets go of it (mover, [maps
    that wait]). It is never dropped after that: a replay does not know what has been
    written.
    What has come back is compared with its copy before it leaves again, where the host
    can read the memory: a backward function may write over its attributes. Where the
    host cannot, it is copied once more if such a function has had it. What no
    backward is expected to read is let go of also where others hold it, Chainer's loop
    for example; if it is asked for after all while they do, it is that very array.

Note: [closed doors]
    From the moment its copy begins, a map is not in the graph: a read of the graph
    waits for the copy (graph, [attributes that are away]). So the program cannot get
    hold of it, and write into it, while it is copied.

Note: [forgotten maps]
    A map that nothing in the graph can read any more is forgotten. Functions, a plan or
    a queue may still name it, as one that a nested backward function might have read.
    So it is one that is not away, has no slots and no copy: whatever they ask of it,
    nothing happens.

Note: [graphs in cycles]
    A graph that is part of a cycle dies when Python's collector runs: whenever an
    object is made, also between two looks at one map.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.errors import HostFullError, OutOfMemoryError, SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.chainer_access.graph import SlotRef
from chainer_hybridmem.training.devices.protocol import (
    Array,
    Device,
    HostCopy,
    Root,
    Transfer,
)
from chainer_hybridmem.training.execution.fingerprints import Fingerprints
from chainer_hybridmem.training.execution.graph_slots import (
    GraphSlots,
    Prints,
    copy_memory,
    find_nothing,
    track_memory,
)


class HostSide:
    """Moves the contents of one map between the device and the host.

    Args:
        device (Device): Starts copies and waits for them.
        nbytes (int): Size of the map.

    Attributes:
        copy (HostCopy or None): Space on the host.
        tier (Tier or None): Where the space should lie; None where there is room.
        valid (bool): Whether the host copy has the contents.
        suspect (bool): A function that may write over them has had them since.
        memory (Root or None): Device memory of the copy under way.
        transfer (Transfer or None): The copy under way.
    """

    __slots__ = (
        '_device', '_nbytes', 'copy', 'memory', 'suspect', 'tier', 'transfer', 'valid',
    )  # fmt: skip

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self.copy: HostCopy | None = None
        self.tier: Tier | None = None
        self.valid = self.suspect = False
        self.memory: Root | None = None
        self.transfer: Transfer | None = None

    # -- space ----------------------------------------------------------------
    def close(self) -> None:
        """Gives the space back."""
        if self.copy is not None:
            self.copy.close()
            self.copy = None

    def let_go(self, close: bool) -> None:
        """Has no copy from here on.

        Args:
            close: Whether the space is given back; else a plan owns it.
        """
        if close:
            self.close()
        self.copy, self.valid = None, False

    def take_space(self) -> bool:
        """Makes sure that there is space; False if the host has no room."""
        if self.copy is None:
            try:
                self.copy = self._device.copies.host_copy(self._nbytes, self.tier)
            except HostFullError:
                return False
        return True

    # -- contents -------------------------------------------------------------
    def differs_from(self, root: Root | None) -> bool:
        """Whether device memory has other contents, or may have where none can look."""
        if root is None or self.copy is None:
            return False
        if self._device.clock.asynchronous:
            return self.suspect
        return not self._device.copies.same_contents(self.copy, root)

    # -- copies ---------------------------------------------------------------
    def start_copy_out(self, root: Root) -> None:
        """Starts a copy of device memory to the host."""
        self.copy, self.transfer = self._device.copies.swap_out(root, self.copy)
        self.memory, self.suspect = root, False

    def start_copy_in(self, root: Root) -> None:
        """Starts a copy of the contents to device memory."""
        assert self.copy is not None
        self.transfer = self._device.copies.swap_in(self.copy, root)
        self.memory = root

    def wait(self) -> None:
        """Waits for the copy under way.

        Raises:
            SwapStoreError: If it has failed.
        """
        assert self.transfer is not None
        self._device.copies.wait(self.transfer)

    def let_finish(self) -> None:
        """Waits for a copy whose result is not needed."""
        if self.transfer is not None:
            with contextlib.suppress(SwapStoreError):
                self._device.copies.wait(self.transfer)

    def end_copy(self) -> None:
        """Lets go of the copy and of its device memory."""
        self.memory = self.transfer = None


class State(enum.Enum):
    """Where the contents of a feature map are."""

    RESIDENT = 'resident'  # on the device, in the graph
    LEAVING = 'leaving'  # being copied to the host, not in the graph any more
    AWAY = 'away'  # on the host only
    COMING = 'coming'  # being copied to the device, not in the graph yet
    GONE = 'gone'  # nowhere: to be recomputed


class LiveMap:
    """A storage with the graph's references to it.

    Every method may be called in any state and does nothing where there is nothing to
    do, so that a plan and an eviction never fight. When a copy fails, the contents are
    where they were before it, and it may be tried again. While the map is resident only
    the graph holds its memory: the graph's death frees it as in plain Chainer.

    Attributes:
        allocation (int): Id of the allocation that forward made.
        nbytes (int): Size.
        state (State): Where the contents are.
        slots (GraphSlots): The graph's references.
        host (HostSide): Its host copy.
        prints (Fingerprints): What the contents must be.
        storage (int): Id in the profile; -1 if no plan knows it.
        uses (tuple of int): Serial numbers of the functions whose backward is still to
            read it. Python's collector does not count a tuple of numbers.
        outlives (bool): A backward will ask for it that is no part of the plan.
        may_be_written (bool): Others than the graph may have had it: no replay may take
            its place.
    """

    __slots__ = (
        '__weakref__', '_device', '_held', 'allocation', 'host', 'may_be_written',
        'nbytes', 'outlives', 'prints', 'slots', 'state', 'storage', 'uses',
    )  # fmt: skip

    def __init__(self, device: Device, allocation: int, nbytes: int) -> None:
        self._device = device
        self._held: Callable[[], Root | None] = find_nothing  # since it was let go of
        self.allocation = allocation
        self.nbytes = nbytes
        self.slots = GraphSlots(device)
        self.host = HostSide(device, nbytes)
        self.prints = Fingerprints(device, self.slots)
        self.storage = -1
        self.outlives = self.may_be_written = False
        self.uses: tuple[int, ...] = ()
        self.state = State.RESIDENT

    # -- what the graph and the plan say --------------------------------------
    def begin_iteration(self) -> None:
        """Belongs to an older iteration from here on; no plan knows it."""
        self.storage = -1
        self.outlives = self.may_be_written = False
        self.slots.begin_iteration()
        self.prints.begin_iteration()

    def follow(self, storage: int, tier: Tier | None, copy: HostCopy | None) -> None:
        """Is a storage of the plan from here on.

        Args:
            storage: Its id.
            tier: Where its host copy should lie.
            copy: Space from an earlier iteration.
        """
        self.storage, host = storage, self.host
        host.tier = tier
        if host.copy is None:
            host.copy = copy

    def leave_plan(self) -> None:
        """Is no storage of a plan from here on."""
        self.follow(-1, None, None)

    def expect_read(self, serial: int) -> None:
        """The backward of a function will read it."""
        if serial not in self.uses:
            self.uses = (*self.uses, serial)

    def end_read(self, serial: int, written: bool = False) -> None:
        """The backward of a function has read it.

        Args:
            serial: Of the function.
            written: Whether it may write over its attributes.
        """
        if written and self.slots.has_attribute():
            self.host.suspect = True
        if serial in self.uses:
            self.uses = tuple(use for use in self.uses if use != serial)

    def outlive(self) -> None:
        """A backward will ask for it that is no part of the plan."""
        self.outlives = True

    def add(self, reference: SlotRef) -> None:
        """Adds a reference that the graph has just made: the array may have changed."""
        self.slots.append(reference)
        self.host.valid = False

    def renew(self, root: Root) -> None:
        """Takes the contents as they are in memory now; the copy is worth nothing."""
        self.host.let_finish()
        self._arrived(root)
        self.host.valid = False

    def hand_out(self) -> None:
        """The program has the array now, and may write into it."""
        self.host.valid = False
        self.may_be_written = True
        self.prints.watch()

    def forget(self) -> None:
        """Lets go of everything without touching the graph; see [forgotten maps]."""
        self.host.let_finish()
        self.host.end_copy()
        self.host.let_go(close=self.storage < 0)
        self.slots.clear()
        self.state = State.RESIDENT

    # -- to the host ----------------------------------------------------------
    def start_swap_out(self) -> int:
        """Starts the copy to the host, if that has room; returns the bytes copied."""
        if self.state is not State.RESIDENT or self.host.valid:
            return 0  # release() compares the old copy
        if not self.is_alone():
            self.may_be_written = True
            return 0
        if self._find_array() is None or not self.host.take_space():
            return 0
        return self._start_copy()

    def is_alone(self) -> bool:
        """Whether the graph alone has the memory; see [held arrays]."""
        return self.slots.is_exclusive()

    def _find_array(self) -> Array | None:
        return self.slots.find_array()

    def _start_copy(self) -> int:
        """Copies nothing if the graph has died meanwhile: see [graphs in cycles]."""
        array = self._find_array()
        if array is None:
            return 0
        self.prints.is_rewritten()  # which is noted while there is memory to look at
        self.host.start_copy_out(self._device.arrays.root(array))
        self.state = State.LEAVING
        self.slots.empty()
        return self.nbytes

    def release(self) -> None:
        """Waits for the copy to the host and frees the device memory."""
        host = self.host
        if self.state is State.RESIDENT and host.valid and self.is_alone():
            if not host.differs_from(self.slots.find_root()):
                self._leave(State.AWAY)
                return
            host.valid = False
            self.prints.rewrite()
            self._start_copy()
        if self.state is State.LEAVING:
            self._wait_or_keep()
            host.valid = True
            self._leave(State.AWAY)

    def finish_and_stay(self) -> None:
        """Waits for a copy to the host; the graph has the memory again."""
        if self.state is State.LEAVING:
            with contextlib.suppress(SwapStoreError):
                self._wait_or_keep()
                self._arrived(self.host.memory)
                self.host.valid = True

    def _wait_or_keep(self) -> None:
        try:
            self.host.wait()
        except SwapStoreError:  # the contents are where they were
            self._arrived(self.host.memory)
            raise

    def drop(self) -> None:
        """Frees the device memory; nothing will make a copy of the contents.

        It is away where the host has a valid copy, else gone. It stays where others
        have it, or had it, and may write: no replay makes what they write. What no
        function reads again is let go, whoever else has it.
        """
        if self.state is State.LEAVING:
            self.release()
        elif self.state is State.COMING:
            self.finish_swap_in()
        if self.state is not State.RESIDENT:
            return
        if self.host.valid and self.may_be_read:
            self.release()
        elif self.host.valid:
            self._let_go(State.AWAY)
        elif self.may_be_written:
            return
        elif not self.uses:
            self.prints.forget_digests()
            self._let_go(State.GONE)
        elif self.is_alone():
            self.prints.take_before_drop()  # fingerprints, [checked replays]
            self._leave(State.GONE)
        else:
            self.may_be_written = True

    def _let_go(self, state: State) -> None:
        """Leaves, whoever else has the memory."""
        self._held = track_memory(self._device, self._find_array())
        self._leave(state)

    @property
    def is_away(self) -> bool:
        """Whether the device has no memory for it."""
        return self.state in (State.AWAY, State.GONE)

    @property
    def is_awaited(self) -> bool:
        """Whether a backward is expected to read it."""
        return bool(self.uses) or self.outlives

    @property
    def may_be_read(self) -> bool:
        """Whether any function may ask for it again, as far as one knows.

        A backward function may write over its attributes, and run twice.
        """
        return self.is_awaited or self.slots.has_attribute()

    # -- to the device --------------------------------------------------------
    def start_swap_in(self) -> int:
        """Takes device memory and starts the copy; returns the bytes copied."""
        if not self._is_on_host():
            return 0
        held = self._held()
        if held is not None:
            self._return(held)
            return 0
        memory = self._device.memory.allocate(self.nbytes)
        if not self._is_on_host():  # but forgotten: see [graphs in cycles]
            return 0
        self.host.start_copy_in(memory)
        self.state = State.COMING
        return self.nbytes

    def _is_on_host(self) -> bool:
        return self.state is State.AWAY and self.host.copy is not None

    def finish_swap_in(self) -> None:
        """Waits for the copy to the device and puts it into the graph."""
        if self.state is State.COMING:
            try:
                self.host.wait()
            except SwapStoreError:
                self.state = State.AWAY
                self.host.end_copy()
                raise
            self._arrived(self.host.memory)

    def refill(self, root: Root, what: str) -> bool:
        """Puts recomputed contents into the graph.

        A copy on the host that has been made since counts more: it comes back where it
        differs, or where the host cannot compare now.

        Args:
            root: The contents.
            what: Told later, if only then they turn out to be others.

        Returns:
            bool: Whether the contents are what they were.
        """
        asynchronous = self._device.clock.asynchronous
        if self.state is State.AWAY and (asynchronous or self.host.differs_from(root)):
            self.start_swap_in()
            self.finish_swap_in()
        elif self.is_away:
            held, final = self._held(), self.prints.final
            if held is None:
                self.prints.compare_later(what, root)
                self._arrived(root)
                return self.prints.match(final)
            self._return(held)
        return True

    def refuse(self, final: Prints) -> None:
        """Is gone again: what has been put into it is not what forward had made.

        Args:
            final: What its fingerprints must be.
        """
        self._leave(State.GONE)
        self.prints.expect(final)

    # -- elsewhere on the device ----------------------------------------------
    def relocate(self) -> None:
        """Moves what the graph alone has to other device memory.

        So a recording finds out where a plan may release what the host has no room for:
        what it leaves is freed as if it had gone to the host.
        """
        root = self.slots.find_root() if self.state is State.RESIDENT else None
        if root is None or self.host.copy is not None:
            return
        with self._device.memory.without_reclaim():
            try:
                target = self._device.memory.allocate(self.nbytes)
            except OutOfMemoryError:
                return  # no room here either
        copy_memory(self._device, target, root, self.nbytes)
        self._arrived(target)
        self.prints.watch()  # else a recording looks at the former memory alone

    # -- every way ends here --------------------------------------------------
    def _return(self, root: Root) -> None:
        """Puts an array that others have held back into the graph."""
        self.renew(root)
        self.may_be_written = True

    # An interrupt may come anywhere: at every moment the state leads to the contents.
    def _arrived(self, root: Any) -> None:
        self.slots.fill(root)
        self.state = State.RESIDENT
        self.host.end_copy()
        self.prints.forget()

    def _leave(self, state: State) -> None:
        if self.state is State.RESIDENT:
            self.state = state if self.slots else State.RESIDENT
            self.slots.empty()
        else:
            self.state = state
        self.host.end_copy()
