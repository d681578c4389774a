"""One feature map of the running graph, and what can be done with it.

Note: [held arrays]
    The user may hold an array that has left the graph, and may write into it: plain
    Chainer's backward would see that. So a map that comes back is that very array if
    anybody still has it. A copy on the host is right only as long as nobody but the
    graph had the array: where a function retains it again, it may have changed.
    The program may also write into it and let go of it before backward. So what others
    hold when it leaves has a fingerprint, which is compared when the last of them lets
    go, just before the memory is freed: what has changed is written into the host copy.
    What has come back is compared with its copy before it leaves again, where the host
    can read the memory. On CUDA fingerprints wait for the GPU: under a plan only maps
    have one that the program was seen to write into while the plan was learnt. Writes
    into others are found out later, see [checked replays].

Note: [closed doors]
    From the moment its copy begins, a map is not in the graph: who asks the graph for
    it calls the copy off (graph, [attributes that are away]). So nobody can get hold of
    it, and write into it, while it is copied.

Note: [checked replays]
    What is dropped has a fingerprint, and a replay must give the same one. Whatever
    has changed since forward (an input, a setting, something outside of the function)
    is then one clear error, never a wrong gradient. On CUDA nobody waits for the
    fingerprints: the error comes when a later iteration begins, or with the end of the
    session (devices/cuda/late_checks).
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import weakref
from collections.abc import Callable, Collection
from typing import Any

from chainer_hybridmem.chainer_access.graph import SlotRef
from chainer_hybridmem.devices.bits import fingerprint
from chainer_hybridmem.devices.protocol import (
    Array,
    Device,
    Digest,
    HostCopy,
    Root,
    Transfer,
    View,
)
from chainer_hybridmem.errors import HostFullError, OutOfMemoryError, SwapStoreError
from chainer_hybridmem.records.plan import Tier
from chainer_hybridmem.records.profile import Slot, SlotKind

_WRITTEN = (
    'The program has written into a feature map of {} bytes and let go of it, which it '
    'did not do while the plan was learnt, and backward has not seen that. Write from '
    'the first iteration on, or into a copy.'
)
Prints = dict[View, int]  # fingerprint of what each view shows


class State(enum.Enum):
    """Where the contents of a feature map are."""

    RESIDENT = 'resident'  # on the device, in the graph
    LEAVING = 'leaving'  # being copied to the host, not in the graph any more
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
        rewritten (bool): The program has written into it in this iteration since it has
            begun to leave.
        watched (bool): Whether to look for what others write, also where that waits
            for the device.
        uses (set of int): Serial numbers of the functions whose backward reads it.
    """

    __slots__ = (
        '__weakref__', '_before', '_device', '_final', '_handed_out', '_held', '_look',
        '_root', '_transfer', '_unsaved', '_valid', 'allocation', 'copy', 'nbytes',
        'older', 'outlives', 'rewritten', 'slots', 'state', 'sticks', 'storage', 'tier',
        'uses', 'vacated', 'watched',
    )  # fmt: skip

    def __init__(self, device: Device, allocation: int, nbytes: int) -> None:
        self._device = device
        self._held: Callable[[], Root | None] = nothing  # see [held arrays]
        self._root: Root | None = None  # only while it is leaving or coming
        self._transfer: Transfer | None = None
        self._valid = False  # whether the host copy has the contents
        self._before: dict[View, Digest] = {}  # of what was dropped, on CUDA
        self._final: Prints = {}  # of the contents that must come back
        self._handed_out: Prints = {}  # of what the program has got through a door
        self._look: object = None  # see Device.last_look
        self._unsaved: SwapStoreError | None = None  # why there are none
        self.allocation = allocation
        self.nbytes = nbytes
        self.storage = -1
        self.slots: list[SlotRef] = []
        self.copy: HostCopy | None = None
        self.older = 0
        self.outlives = self.sticks = self.vacated = self.rewritten = False
        self.watched = True
        self.tier: Tier | None = None
        self.uses: set[int] = set()
        self.state = State.RESIDENT

    @property
    def present(self) -> bool:
        """Whether the graph has it now."""
        return self.state is State.RESIDENT

    @property
    def transfer(self) -> Transfer | None:
        """The copy under way; it keeps the memory alive."""
        return self._transfer

    def begin_iteration(self) -> None:
        """What has been so far belongs to older iterations; no plan knows them."""
        self.older = len(self.slots)
        self.storage = -1
        self.outlives = self.sticks = self.rewritten = False
        self._handed_out = {}

    def present_slots(self) -> list[Slot]:
        """Names of the references that the present iteration has made."""
        return [reference.slot for reference in self.slots[self.older :]]

    def is_of(self, owner: Any, keys: Collection[str]) -> bool:
        """Whether an owner has it in these attributes or, without any, as a node."""
        names = {key.partition('.')[0] for key in keys}
        return any(slot.is_of(owner, names) for slot in self.slots)

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
            return 0  # release() compares the old copy
        if self._resident_root() is None:
            return 0
        if self.copy is None:
            try:
                self.copy = self._device.host_copy(self.nbytes, self.tier)
            except HostFullError:
                return 0
        self._start_copy()
        return self.nbytes

    def _start_copy(self) -> None:
        self._look_around()
        self._held = memory_of(self._device, self._resident_array())
        self._copy_out(self._resident_root())
        self.state = State.LEAVING
        self._take_out()

    def _copy_out(self, root: Root) -> None:
        self.copy, self._transfer = self._device.swap_out(root, self.copy)
        self._root = root

    def _look_around(self) -> None:
        """Before it leaves: what others hold, they may change."""
        self.is_rewritten()
        self._before = {}
        if self._is_held():
            self._final = self.prints()
        elif not self._readable and not self.watched and not self.exclusive():
            self._before = self._digests()

    def release(self) -> None:
        """Waits for the copy to the host and frees the device memory."""
        if self.state is State.RESIDENT and self._valid:
            if not self._differs_from_copy(self._resident_root()):
                self._look_around()
                self._leave(State.AWAY)
                return
            self._valid, self.rewritten = False, True
            self._start_copy()
        if self.state is State.LEAVING:
            self._wait_or(self._keep)
            if self._changed_meanwhile():
                self._copy_out(self._root)
                self._wait_or(self._keep)
            self._compare_later(_WRITTEN.format(self.nbytes), self._root)
            self._valid = True
            self._leave(State.AWAY)

    def _differs_from_copy(self, root: Root | None) -> bool:
        """Whether memory has not what the copy on the host has."""
        if root is None or self.copy is None or not self._readable:
            return False
        return not self._device.same_contents(self.copy, root)

    def _changed_meanwhile(self) -> bool:
        """Whether others have written into it while it was copied."""
        now = self._prints_of(self._root) if self._final else self._final
        if now == self._final:
            return False
        self._final, self.rewritten = now, True
        return True

    def stay(self) -> None:
        """Calls a copy to the host off: the graph has it again."""
        if self.state is not State.LEAVING:
            return
        alone = not self._final
        with contextlib.suppress(SwapStoreError):
            self._wait_or(self._keep)
            self._keep()
            self._valid = alone

    def _keep(self) -> None:
        """It has not left."""
        self._arrived(self._root)

    def hand_out(self) -> None:
        """The program has the array now, and may write into it."""
        self._valid = False
        self.sticks = True
        if not self._handed_out:
            self._handed_out = self.prints()

    def is_rewritten(self) -> bool:
        """Whether the program has written into it, as far as one can tell."""
        before = self._handed_out
        if before and not self.rewritten:
            now = self.prints()
            self.rewritten = any(
                now.get(view, old) != old for view, old in before.items()
            )
        return self.rewritten

    def copy_print(self) -> int | None:
        """Fingerprint of its copy on the host, if only that has the contents."""
        if self.state is not State.AWAY or self.copy is None or not self._readable:
            return None
        return uncounted_fingerprint(self._device.contents(self.copy))

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
        final = self.prints() if self._readable or self._is_held() else {}
        self._held = memory_of(self._device, self._resident_array())
        self._arrived(target)
        self.vacated, self._final = True, final
        del root
        self._watch()

    def move_back(self) -> None:
        """After :meth:`vacate`: somebody may have the array, and have changed it."""
        self.vacated, self._final, self._look = False, {}, None
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
        if self.state is not State.RESIDENT:
            return
        if self._valid and self._comes_back():
            self.release()
        elif self._valid:
            self._leave(State.AWAY)
        elif not self.sticks:
            self._before = {}
            if self.uses and (self._readable or self._is_held()):
                self._final = self.prints()  # see [checked replays]
            elif self.uses:
                self._before = self._digests()
            self._leave(State.GONE)

    def _comes_back(self) -> bool:
        """Whether anybody may ask for it again, as far as one knows.

        A backward function may write over its attributes, and run twice.
        """
        kinds = (slot.slot.kind for slot in self.slots)
        return bool(self.uses) or self.outlives or SlotKind.ATTRIBUTE in kinds

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
            self._wait_or(self._stay_away)
            self._arrived(self._root)

    def _stay_away(self) -> None:
        self.state = State.AWAY
        self._root = self._transfer = None

    def require_contents(self) -> None:
        """Nothing happens as long as the contents are somewhere, or can be made again.

        Raises:
            SwapStoreError: If they could not be kept when the program had changed them.
        """
        if self._unsaved is not None:
            raise SwapStoreError(str(self._unsaved))

    def refill(self, root: Root, what: str) -> bool:
        """Puts recomputed contents into the graph.

        Where there is a copy on the host, which has been made since, that one counts.

        Args:
            root: The contents.
            what: Told later, if only then they turn out to be others.

        Returns:
            bool: Whether the contents are what they were; see [checked replays].

        Raises:
            SwapStoreError: As :meth:`require_contents`.
        """
        self.require_contents()
        if self.state is State.AWAY and self._differs_from_copy(root):
            self.start_swap_in()
            self.finish_swap_in()
        elif self.state in (State.AWAY, State.GONE):
            held, final = self._held(), self._final
            if held is None:
                self._compare_later(what, root)
                self._arrived(root)
                now = self.prints().items() if final else ()
                return all(final.get(view, value) == value for view, value in now)
            self._return(held)
        return True

    def _digests(self) -> dict[View, Digest]:
        """Of the contents as the graph sees them, issued and not waited for."""
        root, checks = self._resident_root(), self._device.late_checks
        if root is None or checks is None:
            return {}
        views = {reference.view for reference in self.slots if reference.alive()}
        digests = {v: checks.digest(self._device.restore(root, v)) for v in views}
        return {view: found for view, found in digests.items() if found is not None}

    def _compare_later(self, what: str, memory: Root) -> None:
        """Memory must have what the contents were when their digests were issued."""
        checks = self._device.late_checks
        if checks is None:
            return
        for view, digest in self._before.items():
            now = checks.digest(self._device.restore(memory, view))
            if now is not None:
                checks.expect_same(digest, now, what)

    def forget(self) -> None:
        """Lets go of everything without touching the graph."""
        self._let_finish()
        self._root = self._transfer = self._look = None
        self.slots.clear()

    def prints(self) -> Prints:
        """Fingerprints of the contents as the graph sees them; empty if it is away."""
        result: Prints = {}
        for reference in self.slots:
            array = reference.get()
            if array is not None and reference.view not in result:
                result[reference.view] = uncounted_fingerprint(array)
        return result

    def _is_held(self) -> bool:
        """Whether others have it who may change it, as far as that is looked for."""
        return (self._readable or self.watched) and not self.exclusive()

    def exclusive(self) -> bool:
        """Whether only the graph has the memory, as far as references can be counted.

        False where that is not certain.
        """
        arrays: dict[int, Array] = {}
        places: dict[int, set[object]] = {}  # of the graph, that refer to each array
        for slot in self.slots:
            array = slot.get()
            if array is not None:
                if slot.shared():
                    return False
                arrays[id(array)] = array
                places.setdefault(id(array), set()).add(slot.place)
        array = None  # every reference counts
        return self._device.arrays.held_by_none_but(arrays, places)

    @property
    def _readable(self) -> bool:
        """Whether the host can look at the memory without waiting for the device."""
        return not self._device.asynchronous

    def _let_finish(self) -> None:
        """Waits for a copy whose result nobody needs."""
        if self._transfer is not None:
            with contextlib.suppress(SwapStoreError):
                self._device.wait(self._transfer)

    def _wait_or(self, go_back: Callable[[], None]) -> None:
        """Waits for the copy; if it has failed, the contents are where they were."""
        assert self._transfer is not None
        try:
            self._device.wait(self._transfer)
        except SwapStoreError:
            go_back()
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
        self._root = self._transfer = self._look = None
        self._final, self._before = {}, {}

    def _needed(self) -> bool:
        """Whether anything has a place for it."""
        return bool(self.slots)

    def _leave(self, state: State) -> None:
        if self.state is State.RESIDENT:
            self._held = memory_of(self._device, self._resident_array())
            self.state = state if self._needed() else State.RESIDENT
            self._take_out()
        else:
            self.state = state
        self._root = self._transfer = None
        self._watch()

    def _take_out(self) -> None:
        for slot in self.slots:
            slot.put(None)

    # -- what others do to it while it is away ----------------------------------
    def _watch(self) -> None:
        """See [held arrays]."""
        root = self._held() if self._final or self._before else None
        if root is None:
            return
        this = weakref.ref(self)

        def look(address: int) -> None:
            live = this()
            if live is not None:
                live._last_look(address)

        self._look = self._device.last_look(root, look)

    def _last_look(self, address: int) -> None:
        """The last one who held its memory has let go, and it is about to be freed."""
        self._look = None
        if self.state is State.RESIDENT and not self.vacated:
            return
        try:
            memory = self._device.memory_at(address, self.nbytes)
            if self._final:
                self._compare(memory)
            else:
                self._compare_later(_WRITTEN.format(self.nbytes), memory)
        except BaseException as error:  # Python drops what a callback raises
            self._unsaved = SwapStoreError(
                f'{self.nbytes} bytes of a feature map that the program has changed '
                f'could not be kept ({type(error).__name__}: {error}). Run the '
                f'iteration again, or change a copy instead.'
            )
            self._valid, self.state = False, State.GONE

    def _compare(self, memory: Root) -> None:
        """Takes in what others have written into the memory."""
        now = self._prints_of(memory)
        if now != self._final:
            self._final, self.rewritten = now, True
            self._save(memory)

    def _prints_of(self, memory: Any) -> Prints:
        return {
            view: uncounted_fingerprint(self._device.restore(memory, view))
            for view in self._final
        }

    def _save(self, memory: Root) -> None:
        """Takes in what the program has written."""
        if self.vacated:
            whole = View(0, (self.nbytes,), (1,), '|u1')
            target = self._device.restore(self._resident_root(), whole)
            target[...] = self._device.restore(memory, whole)
            return
        self._let_finish()
        self._root = self._transfer = None
        if self.copy is None:
            self.copy = self._device.host_copy(self.nbytes, self.tier)
        self._device.fill(self.copy, memory)
        self._valid, self.state = True, State.AWAY


def uncounted_fingerprint(array: Array) -> int:
    """With NumPy's own memory, which the host device does not count."""
    return contextvars.Context().run(fingerprint, array)


def nothing() -> None:
    """Nobody holds it."""


def memory_of(device: Device, array: Array | None) -> Callable[[], Root | None]:
    """Tells the allocation of an array for as long as somebody has it."""
    if array is None:
        return nothing
    held = device.root(array)
    if type(held).__weakrefoffset__:
        return weakref.ref(held)
    # CuPy's memory; there, views refer to the array they are of.
    reference = weakref.ref(array if array.base is None else array.base)

    def root() -> Root | None:
        alive = reference()
        return None if alive is None else device.root(alive)

    return root
