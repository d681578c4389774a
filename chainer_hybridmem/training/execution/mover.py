"""Starts copies, waits for them, counts them and tells listeners.

Note: [maps that wait]
    What others hold when a plan has it leave stays in the graph: taking it away would
    free nothing (live_map, [held arrays]). It leaves before the first operation at
    which the graph alone has it, unless a backward function reads it first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from chainer_hybridmem import timing
from chainer_hybridmem.training.devices.protocol import Completion
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import PlannedMaps
from chainer_hybridmem.training.execution.table import ActionTable

T = TypeVar('T')


class Observer:
    """Listens to the executor; what it does not override goes by.

    What wraps an action (``move``, ``wait``, ``replay``, ``run_again``) has to do it.

    Attributes:
        judges (bool): Whether it looks at every feature map, and tells by itself if a
            replay has made another one.
        follows (bool): Whether it is told that nothing moves before an operation.
    """

    judges = False
    follows = True

    # -- functions ------------------------------------------------------------
    def made(self, maps: Sequence[LiveMap]) -> None:
        """A function has left maps in the graph."""

    def backward_runs(self, maps: Iterable[LiveMap]) -> None:
        """A backward function is about to run; of all maps there are."""

    def reads(self, k: int, function: Any, maps: Sequence[LiveMap]) -> None:
        """Backward operation k is about to read maps."""

    def has_read(self, k: int, function: Any, maps: Sequence[LiveMap]) -> None:
        """Backward operation k has read maps."""

    # -- movements ------------------------------------------------------------
    def leaves(self, live: LiveMap) -> None:
        """The memory of a map is about to go, if it is still there."""

    def copy(self, kind: str, storage: int, completion: Completion) -> None:
        """A copy has been started; its kind is ``'swap-out'`` or ``'swap-in'``."""

    def released(self) -> None:
        """What leaves before an operation has left."""

    def move(self, operation: int, action: Callable[[], None]) -> None:
        """Does what a plan moves before an operation."""
        action()

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        """Does something that may wait for a copy."""
        action()

    def use(self, storage: int) -> None:
        """The next operation uses what has been swapped in."""

    # -- replays --------------------------------------------------------------
    def replay(self, operation: int, action: Callable[[], None]) -> None:
        """Runs one replay of the plan."""
        action()

    def run_again(self, functions: Sequence[Any], action: Callable[[], T]) -> T:
        """Runs forwards again, with a plan or without; the last one is asked for."""
        return action()


class Observers(Observer):
    """Tells several observers, in the order in which they came.

    Attributes:
        members (list of Observer): These.
        judge (bool): Whether one of them judges.
        follow (bool): Whether one of them follows.
    """

    def __init__(self) -> None:
        self.members: list[Observer] = []
        self.judge = self.follow = False

    def add(self, observer: Observer) -> None:
        """Tells this one, too, from here on."""
        self.members.append(observer)
        self._ask()

    def discard(self, observer: Observer | None) -> None:
        """Tells this one no more, if it is told."""
        self.members = [one for one in self.members if one is not observer]
        self._ask()

    def _ask(self) -> None:
        self.judge = any(one.judges for one in self.members)
        self.follow = any(one.follows for one in self.members)

    def made(self, maps: Sequence[LiveMap]) -> None:
        for one in self.members:
            one.made(maps)

    def backward_runs(self, maps: Iterable[LiveMap]) -> None:
        for one in self.members:
            one.backward_runs(maps)

    def reads(self, k: int, function: Any, maps: Sequence[LiveMap]) -> None:
        for one in self.members:
            one.reads(k, function, maps)

    def has_read(self, k: int, function: Any, maps: Sequence[LiveMap]) -> None:
        for one in self.members:
            one.has_read(k, function, maps)

    def leaves(self, live: LiveMap) -> None:
        for one in self.members:
            one.leaves(live)

    def copy(self, kind: str, storage: int, completion: Completion) -> None:
        for one in self.members:
            one.copy(kind, storage, completion)

    def released(self) -> None:
        for one in self.members:
            one.released()

    def move(self, operation: int, action: Callable[[], None]) -> None:
        for one in self.members:
            action = functools.partial(one.move, operation, action)
        action()

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        for one in self.members:
            action = functools.partial(one.wait, kind, storage, action)
        action()

    def use(self, storage: int) -> None:
        for one in self.members:
            one.use(storage)

    def replay(self, operation: int, action: Callable[[], None]) -> None:
        for one in self.members:
            action = functools.partial(one.replay, operation, action)
        action()

    def run_again(self, functions: Sequence[Any], action: Callable[[], T]) -> T:
        for one in self.members:
            action = functools.partial(one.run_again, functions, action)
        return action()


class Counters:
    """What one iteration has moved.

    Attributes:
        swapped_out_bytes (int): Copied to the host.
        swapped_in_bytes (int): Copied to the device.
        recomputed_bytes (int): Made again by replays.
        replays (int): Forward operations run again.
        evictions (int): Maps evicted because memory was short.
        planned_evictions (int): Of these, maps that a plan had a place for.
        restores (int): Maps brought back without a plan.
        lost_seconds (float): The program has waited for evictions and restores.
    """

    def __init__(self) -> None:
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.recomputed_bytes = 0
        self.replays = 0
        self.evictions = self.planned_evictions = 0
        self.restores = 0
        self.lost_seconds = 0.0

    def count_recomputed(self, nbytes: int) -> None:
        """A replay has made a map of this size again."""
        self.recomputed_bytes += nbytes

    def count_replay(self) -> None:
        """A forward operation is run again."""
        self.replays += 1

    def count_eviction(self, planned: bool) -> None:
        """A map has been evicted; whether a plan had a place for it."""
        self.evictions += 1
        self.planned_evictions += planned

    def count_restore(self) -> None:
        """A map is brought back without a plan."""
        self.restores += 1

    def lose(self, act: Callable[[], None]) -> None:
        """Has an eviction or a restore done; one within another counts once."""
        before, start = self.lost_seconds, timing.now()
        try:
            act()
        finally:
            self.lost_seconds = before + timing.now() - start


class Mover:
    """Moves live maps between device and host, one by one and as a plan says.

    Args:
        planned (PlannedMaps): Finds the maps of a plan; keeps host copies for later
            iterations.
        may_be_needed (callable): Tells whether a backward that has not run yet may read
            a map.
        observers (Observers): Are told.

    Attributes:
        counters (Counters): What this iteration has moved.
        waiting (dict): Maps that others have held when they were to leave, and whether
            their memory is to be free by now.
    """

    def __init__(
        self,
        planned: PlannedMaps,
        may_be_needed: Callable[[LiveMap], bool],
        observers: Observers,
    ) -> None:
        self._planned = planned
        self._may_be_needed = may_be_needed
        self._observers = observers
        self.counters = Counters()
        self.waiting: dict[LiveMap, bool] = {}
        self._dropped_before = -1  # so far the plan's drops are done

    def begin_iteration(self) -> None:
        """Counts from zero; nothing waits."""
        self.counters = Counters()
        self.waiting.clear()
        self._dropped_before = -1

    # -- as the plan says -----------------------------------------------------
    def move(self, k: int, table: ActionTable) -> None:
        """Moves what the plan moves before operation k; replays come after that."""
        if self._observers.members:
            self._observers.move(k, functools.partial(self._move, k, table))
        else:
            self._move(k, table)

    def _move(self, k: int, table: ActionTable) -> None:
        if self.waiting:
            self._move_waiting()
        find_all = self._planned.find_all
        for live in find_all(table.swap_outs.get(k, ())):
            self.start_swap_out(live)
            if live.state is State.RESIDENT and live.may_be_written:
                self.waiting[live] = False
        for live in find_all(table.releases.get(k, ())):
            self._let_leave(live)
        if k != self._dropped_before:
            self.drop_all(k, table)
        if self._observers.members:
            self._observers.released()
        for live in find_all(table.swap_ins.get(k, ())):
            self.start_swap_in(live)
        for live in find_all(table.needs.get(k, ())):
            self.finish_swap_in(live)

    def _move_waiting(self) -> None:
        """Lets those leave that the graph alone has by now."""
        for live, due in tuple(self.waiting.items()):
            if live.is_alone():
                del self.waiting[live]
                if due:
                    self._let_leave(live)
                else:
                    self.start_swap_out(live)

    def _let_leave(self, live: LiveMap) -> None:
        """Frees the device memory of a map, or has it wait; see [maps that wait]."""
        self.waiting.pop(live, None)
        if live.state is State.RESIDENT and not live.is_alone():
            self.waiting[live] = True
            return
        self.put_away(live)
        if live.state is State.RESIDENT:
            self.relocate(live)

    def drop_all(self, k: int, table: ActionTable) -> None:
        """Drops what the plan drops before operation k, for good or to be recomputed.

        That may be done as soon as the operation before it has run.
        """
        self._dropped_before = k
        for live in self._planned.find_all(table.drops.get(k, ())):
            self.drop_planned(live)

    def apply_missed(self, table: ActionTable, k: int) -> bool:
        """Does what a plan does to maps that leave before operation k.

        None is dropped: it may be made of what another plan has dropped already.

        Returns:
            bool: Whether a map was still there, so that it leaves later than planned.
        """
        late = False
        self._dropped_before = -1
        for actions, act in (
            (table.swap_outs, self.start_swap_out),
            (table.releases, self._let_leave),
            (table.drops, self.put_away),
        ):
            for position in sorted(p for p in actions if p < k):
                for live in self._planned.find_all(actions[position]):
                    before = live.state
                    act(live)
                    late = late or live.state is not before
        return late

    # -- to the host ----------------------------------------------------------
    def start_swap_out(self, live: LiveMap) -> None:
        """Starts a copy to the host."""
        if self._observers.members:
            self._observers.leaves(live)
        nbytes = live.start_swap_out()
        self.counters.swapped_out_bytes += nbytes
        self._planned.keep_copy(live)
        if nbytes and self._observers.members:
            self._tell_copy('swap-out', live)

    def release(self, live: LiveMap) -> None:
        """Waits for a copy to the host and frees the device memory."""
        if self._observers.members and _waits(live):
            self._observers.wait('swap-out', live.storage, live.release)
        else:
            live.release()

    def relocate(self, live: LiveMap) -> None:
        """Moves a map that the host has no room for to other device memory."""
        if self._observers.members:
            self._observers.leaves(live)
        live.relocate()

    def put_away(self, live: LiveMap) -> None:
        """Frees the device memory of a map that has to come back."""
        if live.state is State.RESIDENT:
            self.start_swap_out(live)
        self.release(live)

    def drop(self, live: LiveMap) -> None:
        """Frees the device memory of a map that a replay makes again, or nothing."""
        if self._observers.members:
            self._observers.leaves(live)
        live.drop()

    def drop_planned(self, live: LiveMap) -> None:
        """Drops a map as the plan says; what a later backward will ask for is kept.

        The iteration may go on otherwise than the one that was recorded, and ask for
        the gradient of an input, say. What is not made again stays for that, as long as
        it is in the graph of a function that backward can run. Another backward may run
        over the graph as long as it lives: what no replay makes again is copied out for
        that (replayer, [once more]).
        """
        if live.outlives:  # replayer, [later iterations]
            self._let_leave(live)
        elif self._is_irreplaceable(live):
            return
        elif self._observers.members and _waits(live):
            kind = 'swap-out' if live.state is State.LEAVING else 'swap-in'
            self._observers.wait(kind, live.storage, live.drop)
        elif self._planned.is_unique(live):
            self._let_leave(live)
            if live not in self.waiting:
                self.drop(live)  # also where the host has no room for it
        else:
            self.drop(live)
            if live.state is State.RESIDENT and live.uses:
                self._let_leave(live)

    def _is_irreplaceable(self, live: LiveMap) -> bool:
        return (
            self._planned.is_for_good(live)
            and not live.host.valid
            and self._may_be_needed(live)
        )

    # -- to the device --------------------------------------------------------
    def start_swap_in(self, live: LiveMap) -> None:
        """Takes device memory and starts a copy to it."""
        nbytes = live.start_swap_in()
        self.counters.swapped_in_bytes += nbytes
        if nbytes and self._observers.members:
            self._tell_copy('swap-in', live)

    def finish_swap_in(self, live: LiveMap) -> None:
        """Waits for a copy to the device and puts it into the graph."""
        observers = self._observers
        if observers.members and live.state is State.COMING:
            if live.storage >= 0:
                observers.use(live.storage)
            if _waits(live):
                observers.wait('swap-in', live.storage, live.finish_swap_in)
                return
        live.finish_swap_in()

    def _tell_copy(self, kind: str, live: LiveMap) -> None:
        transfer = live.host.transfer
        if transfer is not None:
            self._observers.copy(kind, live.storage, transfer.completion)


def _waits(live: LiveMap) -> bool:
    """Whether a copy of a map is under way and has not finished."""
    transfer = live.host.transfer
    return transfer is not None and not transfer.done()
