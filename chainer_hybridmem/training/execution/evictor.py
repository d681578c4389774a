"""Makes room when an allocation does not fit: chooses what leaves that no plan sends.

Note: [passive mode]
    Backward uses maps in the reverse order of the functions that retain them, so the
    map whose last user came first is needed last: it is evicted first. Maps of older
    graphs come before those of younger ones. What others than the graph hold
    stays. While one map leaves, the
    copy of the next one begins; in backward what is needed next comes back as far
    as memory is free, and is the first to go again. Rules are obeyed as far as memory
    allows: maps that are to be kept, or not to be swapped, leave when nothing else is
    left.

Note: [garbage]
    Reference cycles keep arrays alive until Python collects them: those of the
    program, or frames that an error inside a library has held on to. A plan leaves no
    room for them. So before an allocation is refused, they are collected, once in each
    operation. That takes a tenth of a second, so nothing is collected on the way there,
    and where a function can run in parts instead, only as often as pays, see
    [price].

Note: [price]
    A rescue that helps is worth what it costs: without it, training would end. One that
    has not helped has taken time for nothing, and where the program can go on without
    it, as a function that runs in parts can, it comes again in every operation. So the
    time that it may take in vain is a small share of all time. Where an error would
    follow, it is tried whatever it costs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from chainer_hybridmem import timing
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.rules import Rules
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import LiveMaps
from chainer_hybridmem.training.execution.mover import Mover
from chainer_hybridmem.training.execution.replayer import Restorer

MOST_REMEMBERED = 10_000  # names of functions


class PassiveRules:
    """Knows which functions of the running graph make maps that leave last.

    Args:
        rules (tuple of Rule): What the user says; only what keeps maps counts here.

    Attributes:
        active (bool): Whether there are rules to be noted.
    """

    def __init__(self, rules: Rules) -> None:
        keeping = [
            rule
            for rule in rules
            if rule.most_bytes is None
            and Action.SWAP not in rule.actions
            and Action.KEEP in rule.actions
        ]
        self._names = functools.lru_cache(MOST_REMEMBERED)(
            lambda label, operation: any(
                rule.names(label, operation) for rule in keeping
            )
        )
        self._staying: graph.ByOwner[bool] = graph.ByOwner()
        self.active = bool(keeping)

    def note(self, function: Any, label: str, operation: int) -> None:
        """A forward function is about to run, and there are rules.

        Args:
            function: The function.
            label: Its path and name.
            operation: Its number in the iteration.
        """
        if self._names(label, operation):
            self._staying[function] = True

    def stays(self, live: LiveMap) -> bool:
        """Whether a map leaves only if nothing else can."""
        for reference in live.slots:
            node = reference.node
            maker = reference.function if node is None else node.creator_node
            if maker is not None and self._staying.get(maker):
                return True
        return False


SHARE = 0.02  # of all time, that may be spent in vain


class Rescue:
    """Something that may free memory; see [price].

    Args:
        act (callable): Tries to free memory.
        measure (callable): Tells the bytes in use.

    Attributes:
        vain_seconds (float): What tries have cost since one has freed memory.
    """

    def __init__(self, act: Callable[[], object], measure: Callable[[], int]) -> None:
        self._act = act
        self._measure = measure
        self._start = timing.now()
        self.vain_seconds = 0.0

    @property
    def pays(self) -> bool:
        """Whether another try is not too dear, should it be in vain."""
        return self.vain_seconds <= SHARE * (timing.now() - self._start)

    def run(self) -> bool:
        """Tries it; returns whether it has freed memory."""
        start, before = timing.now(), self._measure()
        self._act()
        helped = self._measure() < before
        seconds = timing.now() - start
        self.vain_seconds = 0.0 if helped else self.vain_seconds + seconds
        return helped


def find_next_use(live: LiveMap) -> int:
    """When backward needs a map: the later, the smaller."""
    uses = live.uses
    return max(uses) if uses else -1


class Prefetcher:
    """Starts swap-ins of stray maps as far as memory is free; see evictor.

    A stray map is away although no plan brings it back.

    Args:
        device (Device): Has the memory.
        maps (LiveMaps): All feature maps.
        mover (Mover): Starts the copies.

    Attributes:
        active (bool): Whether maps may be stray.
    """

    def __init__(self, device: Device, maps: LiveMaps, mover: Mover) -> None:
        self._device = device
        self._maps = maps
        self._mover = mover
        self._queue: list[LiveMap] | None = None  # the next one last; None: not made
        self._load_before = 0  # of the operation under way
        self._transient_bytes = 0  # that a backward function takes at most
        self.active = False

    def begin(self) -> None:
        """Starts an iteration, with a plan or without."""
        self.active = self._maps.planned.table is None
        self._queue = None

    def switch(self) -> None:
        """The iteration goes on with another plan, or with none."""
        self.active = True
        self._queue = None

    def open_window(self) -> None:
        """What is taken from here on, the function under way takes."""
        self._device.memory.reset_window()
        self._load_before = self._device.memory.used_bytes

    def count_evicted(self, nbytes: int) -> None:
        """The function under way has taken the place of so much, which has left."""
        self._load_before -= nbytes

    def close_window(self) -> None:
        """The backward function under way has ended."""
        taken = self._device.memory.window_peak_bytes - self._load_before
        self._transient_bytes = max(self._transient_bytes, taken)

    def put_off(self, live: LiveMap) -> None:
        """A map that was on its way back leaves again: it comes back first."""
        if self._queue is not None:
            self._queue.append(live)

    def prefetch(self, serial: int) -> None:
        """Brings back what backward needs after a function, as far as memory is free.

        Args:
            serial: Of the function; what came later is not on the way.
        """
        if self._queue is None:
            self._queue = self._find_stray(serial)
        queue, device = self._queue, self._device
        if not queue:
            return
        free_bytes = (
            device.memory.limit_bytes - device.memory.used_bytes - self._transient_bytes
        )
        while queue:
            live = queue[-1]
            if live.state is State.AWAY and live.slots.are_alive():
                if live.nbytes > free_bytes:
                    return
                try:
                    with device.memory.without_reclaim():
                        self._mover.start_swap_in(live)
                except MemoryError:  # not in one piece
                    return
                free_bytes -= live.nbytes
            queue.pop()

    def _find_stray(self, serial: int) -> list[LiveMap]:
        table = self._maps.planned.table
        scheduled: Collection[int] = () if table is None else table.swapped
        stray = [
            live
            for live in self._maps
            if live.state is State.AWAY
            and live.storage not in scheduled
            and -1 < find_next_use(live) <= serial
        ]
        stray.sort(key=find_next_use)
        return stray


@dataclasses.dataclass(frozen=True)
class Shortage:
    """What was in memory when an allocation could not be made to fit, in bytes.

    Attributes:
        used_bytes (int): Everything.
        busy_bytes (int): Feature maps that the running function reads.
        held_bytes (int): Feature maps that the program holds itself.
        stuck_bytes (int): Feature maps that could not be copied out.
    """

    used_bytes: int
    busy_bytes: int
    held_bytes: int
    stuck_bytes: int


class Evictor:
    """Chooses the maps that leave without a plan.

    Args:
        device (Device): Has the memory.
        maps (LiveMaps): All feature maps.
        mover (Mover): Moves them.
        restorer (Restorer): Gives up what stays for replays alone.
        prefetcher (Prefetcher): Is told what does not come back yet.
        rules (PassiveRules): Tell which leave last.

    Attributes:
        operation (int): Counts the operations before which the executor does anything.
        spare (dict): Arrays by node that are given up first.
        rules (PassiveRules): Likewise.
        busy (set of LiveMap): Maps that backward functions under way read.
        collection (Rescue): Collects garbage.
        shortage (Shortage or None): The last one.
    """

    def __init__(
        self,
        device: Device,
        maps: LiveMaps,
        mover: Mover,
        restorer: Restorer,
        prefetcher: Prefetcher,
        rules: PassiveRules,
    ) -> None:
        self._device = device
        self._maps = maps
        self._mover = mover
        self._restorer = restorer
        self._prefetcher = prefetcher
        self.rules = rules
        self._operation = 0  # of which the next three tell
        self._stuck: set[LiveMap] = set()  # cannot go
        self._found_held: set[LiveMap] = set()  # nor these, while the program has them
        self._collected = False  # garbage
        self.collection = Rescue(
            device.memory.collect_garbage, lambda: device.memory.used_bytes
        )
        self.operation = 0
        self.spare: dict[Any, Array] = {}
        self.busy: set[LiveMap] = set()
        self.shortage: Shortage | None = None

    def begin_iteration(self) -> None:
        """No backward function runs."""
        self.busy.clear()

    def _note_operation(self) -> None:
        """What could not go in an earlier operation may go now."""
        if self._operation != self.operation:
            self._operation = self.operation
            self._stuck.clear()
            self._found_held.clear()
            self._collected = False

    def hold(self, maps: Iterable[LiveMap]) -> None:
        """A backward function is about to read maps."""
        self.busy.update(maps)

    def let_go(self, maps: Iterable[LiveMap]) -> None:
        """A backward function has read maps."""
        self.busy.difference_update(maps)

    # -- when memory is short -------------------------------------------------
    def reclaim(self, missing_bytes: int) -> None:
        """Frees device memory because an allocation does not fit.

        First releases what is being copied out anyway, then evicts; see
        [passive mode].

        Raises:
            SwapStoreError: If too little could go because copies have failed.
        """
        self._note_operation()
        device = self._device
        used_bytes = device.memory.used_bytes
        goal = used_bytes - missing_bytes
        self.spare.clear()
        self._restorer.give_up_sources()
        leaving = [
            live
            for live in self._maps
            if live.state is State.LEAVING and live not in self.busy
        ]
        candidates = itertools.chain(leaving, self._find_candidates())
        failure: SwapStoreError | None = None
        while device.memory.used_bytes > goal:
            live = next(candidates, None)
            if live is None:
                break
            try:
                self.evict(live)
            except SwapStoreError as error:  # another one may get through
                failure = error
                self._stuck.add(live)
        if device.memory.used_bytes > goal:
            self._maps.forget_dead()  # copies on their way to what has died
        self._prefetcher.count_evicted(used_bytes - device.memory.used_bytes)
        if device.memory.used_bytes > goal:
            self.shortage = self._take_stock()
            if failure is not None:
                raise failure
        elif self._maps.planned.table is None:
            self._begin_next(candidates, missing_bytes)

    def collect_garbage(self, missing_bytes: int, optional: bool = False) -> None:
        """Nothing else can go, and an allocation would be refused; see [garbage].

        Args:
            missing_bytes: That are to be freed.
            optional: Whether there is another way if the allocation is refused.
        """
        self._note_operation()
        if self._collected or (optional and not self.collection.pays):
            return
        self._collected = True
        self.collection.run()
        self.reclaim(missing_bytes)

    def _find_candidates(self) -> Iterator[LiveMap]:
        """Yields what can go; the map that is needed last comes first."""
        stay: set[LiveMap] = set()
        if self.rules.active:
            stay.update(live for live in self._maps if self.rules.stays(live))
        turns = (False, True) if stay else (False,)
        for last, state in itertools.product(turns, (State.RESIDENT, State.COMING)):
            maps = [
                live
                for live in self._maps
                if live.state is state and (live in stay) is last
            ]
            # By both, and cheaper than a tuple for each of many maps.
            maps.sort(key=find_next_use)
            maps.sort(key=operator.attrgetter('may_be_written'))
            for live in maps:
                if live in self.busy or live in self._stuck or live.state is not state:
                    continue
                if live in self._found_held and not live.is_alone():
                    continue
                if live.slots.are_alive() and not live.slots.are_held():
                    yield live

    def _begin_next(self, candidates: Iterable[LiveMap], wanted_bytes: int) -> None:
        """Begins to copy out what will have to go next."""
        for live in candidates:
            if wanted_bytes <= 0 or live.state is not State.RESIDENT:
                return
            try:
                self._mover.start_swap_out(live)
            except SwapStoreError:
                return
            wanted_bytes -= live.nbytes

    def evict(self, live: LiveMap) -> None:
        """Frees the device memory of a map, or finds out that it cannot go."""
        if live.state is State.COMING:
            self._mover.finish_swap_in(live)
            self._prefetcher.put_off(live)
        self._mover.put_away(live)
        if live.state is State.RESIDENT:
            (self._stuck if live.is_alone() else self._found_held).add(live)
        elif live.uses or live.slots.name_present():  # else an iteration has left it
            self._mover.counters.count_eviction(live.storage >= 0)

    def _take_stock(self) -> Shortage:
        resident = [
            live
            for live in self._maps
            if live.state in (State.RESIDENT, State.LEAVING) and live.slots.are_alive()
        ]
        busy = sum(live.nbytes for live in resident if live in self.busy)
        held = sum(
            live.nbytes
            for live in resident
            if live not in self.busy and (live.slots.are_held() or live.may_be_written)
        )
        stuck = sum(live.nbytes for live in resident) - busy - held
        return Shortage(self._device.memory.used_bytes, busy, held, stuck)

    # -- older graphs ---------------------------------------------------------
    def start_clearing(self, missing_bytes: int) -> None:
        """Begins to copy out maps of older graphs, whose memory a plan will need.

        Args:
            missing_bytes: The plan needs so much more than is free.
        """
        self._note_operation()
        for live in self._find_candidates():
            if missing_bytes <= 0:
                return
            if not live.slots.name_present():
                self._mover.start_swap_out(live)
                missing_bytes -= live.nbytes

    def clear(self) -> None:
        """Copies out what is left of older graphs, so that no recording counts it."""
        self._note_operation()
        candidates = list(self._find_candidates())
        for live in candidates:
            self._mover.start_swap_out(live)
        for live in candidates:
            self.evict(live)

    def drop_graphs(self) -> None:
        """Frees the maps of graphs with which the program does not go on.

        What it holds in variables is its own.
        """
        self.busy.clear()
        self._stuck.clear()
        for live in self._find_candidates():
            with contextlib.suppress(SwapStoreError):
                live.drop()
