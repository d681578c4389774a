"""Makes room when an allocation does not fit: the one place that decides.

Note: [passive mode]
    Backward uses maps in the reverse order of the functions that retain them, so the
    map whose last user came first is needed last: it is evicted first. Maps of older
    graphs come before those of younger ones. What a live Variable holds cannot go, and
    what turns out to be held otherwise is put back at once. While one map leaves, the
    copy of the next one begins; in backward what is needed next comes back as far
    as memory is free (prefetcher), and is the first to go again. What costs less to
    make again than to copy is dropped (cheap_replays). Rules are obeyed as far as
    memory allows (passive_rules).

Note: [garbage]
    Reference cycles keep arrays alive until Python collects them: those of the
    program, or frames that an error inside a library has held on to. A plan leaves no
    room for them. So before an allocation is refused, they are collected, once in each
    operation. That takes a tenth of a second, so nothing is collected on the way there,
    and where a function can run in parts instead, only as often as pays (rescue,
    [price]).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from chainer_hybridmem.devices.protocol import Array, Device
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.execution.cheap_replays import CheapReplays
from chainer_hybridmem.execution.live_map import LiveMap, State
from chainer_hybridmem.execution.live_maps import LiveMaps
from chainer_hybridmem.execution.movements import Movements
from chainer_hybridmem.execution.passive_rules import PassiveRules
from chainer_hybridmem.execution.prefetcher import Prefetcher, find_next_use
from chainer_hybridmem.execution.rescue import Rescue
from chainer_hybridmem.execution.restorer import Restorer


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
        movements (Movements): Moves them.
        restorer (Restorer): Tells which can be made again.
        prefetcher (Prefetcher): Is told what does not come back yet.
        cheap (CheapReplays): Tells which need not be copied.
        rules (PassiveRules): Tell which leave last, and which are never dropped.

    Attributes:
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
        movements: Movements,
        restorer: Restorer,
        prefetcher: Prefetcher,
        cheap: CheapReplays,
        rules: PassiveRules,
    ) -> None:
        self._device = device
        self._maps = maps
        self._movements = movements
        self._restorer = restorer
        self._prefetcher = prefetcher
        self._cheap = cheap
        self.rules = rules
        self._planned = False  # whether a plan is followed
        self._stuck: set[LiveMap] = set()  # cannot go in this operation
        self._found_held: set[LiveMap] = set()  # nor these, while the program has them
        self._collected = False  # garbage, in this operation
        self.collection = Rescue(gc.collect, lambda: device.memory.used_bytes)
        self.spare: dict[Any, Array] = {}
        self.busy: set[LiveMap] = set()
        self.shortage: Shortage | None = None

    def begin_iteration(self, planned: bool) -> None:
        """Starts an iteration, with a plan or without."""
        self.busy.clear()
        self.follow(planned)

    def follow(self, planned: bool) -> None:
        """Says whether a plan is followed; without one, the next map leaves early."""
        self._planned = planned

    def begin_operation(self) -> None:
        """What could not go in the operation before may go now."""
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
        device = self._device
        used_bytes = device.memory.used_bytes
        goal = used_bytes - missing_bytes
        self.spare.clear()
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
        elif not self._planned:
            self._begin_next(candidates, missing_bytes)

    def collect_garbage(self, missing_bytes: int, optional: bool = False) -> None:
        """Nothing else can go, and an allocation would be refused; see [garbage].

        Args:
            missing_bytes: That are to be freed.
            optional: Whether there is another way if the allocation is refused.
        """
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
            maps.sort(key=operator.attrgetter('sticks'))
            for live in maps:
                if live in self.busy or live in self._stuck or live.state is not state:
                    continue
                if live in self._found_held and not live.slots.is_exclusive():
                    continue
                if live.slots.are_alive() and not live.slots.are_held():
                    yield live

    def _begin_next(self, candidates: Iterable[LiveMap], wanted_bytes: int) -> None:
        """Begins to copy out what will have to go next."""
        for live in candidates:
            if wanted_bytes <= 0 or live.state is not State.RESIDENT:
                return
            try:
                if not self._may_drop(live) or not self._cheap.is_cheaper(live):
                    self._movements.start_swap_out(live)
            except SwapStoreError:
                return
            wanted_bytes -= live.nbytes

    def evict(self, live: LiveMap) -> None:
        """Frees the device memory of a map, or finds out that it cannot go."""
        if live.state is State.COMING:
            self._movements.finish_swap_in(live)
            self._prefetcher.put_off(live)
        if self._may_drop(live) and self._cheap.is_cheaper(live):
            self._movements.drop(live, checked=True)
        else:
            self._movements.put_away(live)
            without_room = live.state is State.RESIDENT and live.host.copy is None
            may_drop = without_room and self._may_drop(live)
            if may_drop and self._restorer.find_maker(live) is not None:
                self._movements.drop(live)
        if live.return_if_held():
            self._found_held.add(live)
        elif live.state is State.RESIDENT:
            self._stuck.add(live)
        elif live.uses or live.slots.name_present():  # else an iteration has left it
            self._movements.counters.count_eviction(live.storage >= 0)

    def _may_drop(self, live: LiveMap) -> bool:
        return not self.rules.is_copied(live)

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
            if live not in self.busy and (live.slots.are_held() or live.sticks)
        )
        stuck = sum(live.nbytes for live in resident) - busy - held
        return Shortage(self._device.memory.used_bytes, busy, held, stuck)

    # -- older graphs ---------------------------------------------------------
    def start_clearing(self, missing_bytes: int) -> None:
        """Begins to copy out maps of older graphs, whose memory a plan will need.

        Args:
            missing_bytes: The plan needs so much more than is free.
        """
        for live in self._find_candidates():
            if missing_bytes <= 0:
                return
            if not live.slots.name_present():
                self._movements.start_swap_out(live)
                missing_bytes -= live.nbytes

    def clear(self) -> None:
        """Copies out what is left of older graphs, so that no recording counts it."""
        candidates = list(self._find_candidates())
        for live in candidates:
            self._movements.start_swap_out(live)
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
