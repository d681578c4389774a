"""One feature map of the running graph, and what can be done with it.

Note: [held arrays]
    The program may hold an array that has left the graph, and may write into it: plain
    Chainer's backward would see that. So a map that comes back is that very array as
    long as any reference keeps it alive. A host copy is right only as long as only the
    graph has the array: where a function retains it again, it may have changed.
    The program may also write into it and let go of it before backward. So what others
    hold then has a fingerprint: what has changed when its memory is freed is copied.
    What has come back is compared with its copy before it leaves again, where the host
    can read the memory (fingerprints, [late digests]).

Note: [closed doors]
    From the moment its copy begins, a map is not in the graph: a read of the graph
    calls the copy off (graph, [attributes that are away]). So the program cannot get
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
import weakref
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
        memory (Root or None): Device memory of the copy under way.
        transfer (Transfer or None): The copy under way.
    """

    __slots__ = (
        '_device', '_lost', '_nbytes', 'copy', 'memory', 'tier', 'transfer', 'valid',
    )  # fmt: skip

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._lost: SwapStoreError | None = None  # why the contents are nowhere
        self.copy: HostCopy | None = None
        self.tier: Tier | None = None
        self.valid = False
        self.memory: Root | None = None
        self.transfer: Transfer | None = None

    # -- space ----------------------------------------------------------------
    def prefer(self, tier: Tier | None) -> None:
        """Says where new space should lie."""
        self.tier = tier

    def reuse(self, copy: HostCopy | None) -> None:
        """Takes the space of an earlier iteration if the map has none."""
        if self.copy is None:
            self.copy = copy

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
    def set_valid(self, valid: bool) -> None:
        """Says whether the host copy has the contents."""
        self.valid = valid

    def differs_from(self, root: Root | None) -> bool:
        """Whether device memory has other contents, where the host can look at it."""
        if root is None or self.copy is None or self._device.clock.asynchronous:
            return False
        return not self._device.copies.same_contents(self.copy, root)

    def save(self, memory: Root) -> None:
        """Writes device memory into the host copy at once.

        Raises:
            SwapStoreError: If it cannot be written.
        """
        self.let_finish()
        self.end_copy()
        if self.copy is None:
            self.copy = self._device.copies.host_copy(self._nbytes, self.tier)
        self._device.copies.fill(self.copy, memory)
        self.valid = True

    def lose(self, error: BaseException) -> None:
        """Notes that what the program has written could not be kept."""
        self._lost = SwapStoreError(
            f'{self._nbytes} bytes of a feature map that the program has changed '
            f'could not be kept ({type(error).__name__}: {error}). Run the '
            f'iteration again, or change a copy instead.'
        )
        self.valid = False

    def refuse_lost(self) -> None:
        """Does nothing as long as the contents are somewhere, or can be made again.

        Raises:
            SwapStoreError: If they could not be kept when the program had changed them.
        """
        if self._lost is not None:
            raise SwapStoreError(str(self._lost))

    # -- copies ---------------------------------------------------------------
    def start_copy_out(self, root: Root) -> None:
        """Starts a copy of device memory to the host."""
        self.copy, self.transfer = self._device.copies.swap_out(root, self.copy)
        self.memory = root

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
        uses (set of int): Serial numbers of the functions whose backward reads it.
        outlives (bool): A backward will ask for it that is no part of the plan.
        held_by_program (bool): Others than the graph have had it when it was to leave.
        relocated (bool): It has been moved on the device.
    """

    __slots__ = (
        '__weakref__', '_device', '_held', '_look', 'allocation', 'held_by_program',
        'host', 'nbytes', 'outlives', 'prints', 'relocated', 'slots', 'state',
        'storage', 'uses',
    )  # fmt: skip

    def __init__(self, device: Device, allocation: int, nbytes: int) -> None:
        self._device = device
        self._held: Callable[[], Root | None] = find_nothing  # see [held arrays]
        self._look: object = None  # see Device.last_look
        self.allocation = allocation
        self.nbytes = nbytes
        self.slots = GraphSlots(device)
        self.host = HostSide(device, nbytes)
        self.prints = Fingerprints(device, self.slots)
        self.storage = -1
        self.outlives = self.held_by_program = self.relocated = False
        self.uses: set[int] = set()
        self.state = State.RESIDENT

    # -- what the graph and the plan say --------------------------------------
    def begin_iteration(self) -> None:
        """Belongs to an older iteration from here on; no plan knows it."""
        self.storage = -1
        self.outlives = self.held_by_program = False
        self.slots.begin_iteration()
        self.prints.begin_iteration()

    def follow(self, storage: int, tier: Tier | None, copy: HostCopy | None) -> None:
        """Is a storage of the plan from here on.

        Args:
            storage: Its id.
            tier: Where its host copy should lie.
            copy: Space from an earlier iteration.
        """
        self.storage = storage
        self.host.prefer(tier)
        self.host.reuse(copy)

    def leave_plan(self) -> None:
        """Is no storage of a plan from here on."""
        self.follow(-1, None, None)

    def outlive(self) -> None:
        """A backward will ask for it that is no part of the plan."""
        self.outlives = True

    def add(self, reference: SlotRef, array: Array) -> None:
        """Adds a reference that the graph has just made to an array.

        A released array that others held is back with it; see [held arrays].
        """
        self.slots.add(reference)
        host = self.host
        if host.transfer is not None:
            host.let_finish()
        if self.state is not State.RESIDENT:
            self._return(self._device.arrays.root(array))
        elif host.valid:
            host.set_valid(False)

    def renew(self, root: Root) -> None:
        """Takes the contents as they are in memory now; the copy is worth nothing."""
        self.host.let_finish()
        self._return(root)

    def hand_out(self) -> None:
        """The program has the array now, and may write into it."""
        self.host.set_valid(False)
        self.held_by_program = True
        self.prints.note_handed_out()

    def forget(self) -> None:
        """Lets go of everything without touching the graph; see [forgotten maps]."""
        self.host.let_finish()
        self.host.end_copy()
        self.host.let_go(close=self.storage < 0)
        self._look = None
        self.slots.forget()
        self.state = State.RESIDENT

    # -- to the host ----------------------------------------------------------
    def start_swap_out(self) -> int:
        """Starts the copy to the host, if that has room; returns the bytes copied."""
        if self.state is not State.RESIDENT or self.host.valid:
            return 0  # release() compares the old copy
        if self._find_array() is None or not self.host.take_space():
            return 0
        return self.nbytes if self._start_copy() else 0

    def _find_array(self) -> Array | None:
        return self.slots.find_array()

    def _start_copy(self) -> bool:
        """Whether there is still something to copy: see [graphs in cycles]."""
        self.prints.take_before_copy()
        array = self._find_array()
        if array is None:
            return False
        self._held = track_memory(self._device, array)
        self.host.start_copy_out(self._device.arrays.root(array))
        self.state = State.LEAVING
        self.slots.clear()
        return True

    def release(self) -> None:
        """Waits for the copy to the host and frees the device memory."""
        host, prints = self.host, self.prints
        if self.state is State.RESIDENT and host.valid:
            if not host.differs_from(self.slots.find_root()):
                prints.take_before_copy()
                self._leave(State.AWAY)
                return
            host.set_valid(False)
            prints.rewrite()
            self._start_copy()
        if self.state is State.LEAVING:
            self._wait_or_keep()
            if prints.final and prints.accept_changes(host.memory):
                host.start_copy_out(host.memory)
                self._wait_or_keep()
            if prints.digests:
                prints.expect_unwritten(host.memory, self.nbytes)
            host.set_valid(True)
            self._leave(State.AWAY)

    def stay(self) -> None:
        """Calls a copy to the host off: the graph has it again."""
        if self.state is State.LEAVING:
            alone = not self.prints.final
            with contextlib.suppress(SwapStoreError):
                self._wait_or_keep()
                self._arrived(self.host.memory)
                self.host.set_valid(alone)

    def _wait_or_keep(self) -> None:
        try:
            self.host.wait()
        except SwapStoreError:  # the contents are where they were
            self._arrived(self.host.memory)
            raise

    def drop(self) -> None:
        """Frees the device memory, unless the program may have changed the contents."""
        if self.state is State.LEAVING:
            self.release()
        elif self.state is State.COMING:
            self.finish_swap_in()
        if self.state is not State.RESIDENT:
            return
        if self.host.valid and self.may_be_read:
            self.release()
        elif self.host.valid:
            self._leave(State.AWAY)
        elif not self.held_by_program:
            self.prints.forget_digests()
            if self.uses:
                self.prints.take_before_drop()  # fingerprints, [checked replays]
            self._leave(State.GONE)

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

        Raises:
            SwapStoreError: If the program has changed them, and that is lost.
        """
        self.host.refuse_lost()
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
        self._held = find_nothing  # that memory has the wrong contents
        self.prints.expect(final)

    def return_if_held(self) -> bool:
        """Puts what has left back if others still have it; whether that is so."""
        root = self._held() if self.is_away else None
        if root is None:
            return False
        self._return(root)
        return True

    # -- elsewhere on the device ----------------------------------------------
    def relocate(self) -> None:
        """Moves it to other device memory if the host had no room for it.

        What it leaves is freed as if it had gone to the host: so a recording finds out
        whether others hold it, and whether a plan may release it.
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
        final = self.prints.find_before_move()
        self._held = track_memory(self._device, self._find_array())
        self._arrived(target)
        self.relocated = True
        self.prints.expect(final)
        del root
        self._watch()

    def undo_relocation(self) -> None:
        """Undoes :meth:`relocate`: others may have the array, and have changed it."""
        written, root = self.look_for_writes(), self._held()
        moved = self.slots.find_root() if written and root is not None else None
        if moved is not None:  # through the graph; in plain Chainer, to both
            copy_memory(self._device, root, moved, self.nbytes)
        self.relocated, self._look = False, None
        self.prints.expect({})
        if root is not None:
            self._return(root)

    def look_for_writes(self) -> bool:
        """Whether the program has written into it where it has been moved to."""
        root = self.slots.find_root() if self.relocated else None
        return root is not None and self.prints.accept_changes(root)

    # -- every way ends here --------------------------------------------------
    def _return(self, root: Root) -> None:
        """Puts an array that others have held back into the graph."""
        self._arrived(root)
        self.host.set_valid(False)
        self.held_by_program = True

    # An interrupt may come anywhere: at every moment the state leads to the contents.
    def _arrived(self, root: Any) -> None:
        self.slots.fill(root)
        self.state = State.RESIDENT
        self.host.end_copy()
        self._look = None
        self.prints.forget()

    def _leave(self, state: State) -> None:
        if self.state is State.RESIDENT:
            self._held = track_memory(self._device, self._find_array())
            self.state = state if self.slots else State.RESIDENT
            self.slots.clear()
        else:
            self.state = state
        self.host.end_copy()
        self._watch()

    # -- what others do to it while it is away --------------------------------
    def _watch(self) -> None:
        """See [held arrays]."""
        root = self._held() if self.prints.pending else None
        if root is None:
            return
        this = weakref.ref(self)

        def look(address: int) -> None:
            live = this()
            if live is not None:
                live._take_last_look(address)

        self._look = self._device.arrays.last_look(root, look)

    def _take_last_look(self, address: int) -> None:
        """Its last other reference is gone, and its memory is about to be freed."""
        self._look = None
        if self.state is State.RESIDENT and not self.relocated:
            return
        try:
            memory = self._device.arrays.memory_at(address, self.nbytes)
            if not self.prints.final:
                self.prints.expect_unwritten(memory, self.nbytes)
            elif self.prints.accept_changes(memory):
                self._take_in(memory)
        except BaseException as error:  # Python drops what a callback raises
            self.host.lose(error)
            self.state = State.GONE
            if not isinstance(error, Exception):
                raise  # Ctrl-C: at least Python says that it has been ignored

    def _take_in(self, memory: Root) -> None:
        """Takes in what the program has written."""
        if not self.relocated:
            self.host.save(memory)
            self.state = State.AWAY
            return
        root = self.slots.find_root()
        copy_memory(self._device, root, memory, self.nbytes)
