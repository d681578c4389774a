"""Does to the live graph what the plan says.

It tells each part what the hooks of a session see, and follows the plan: a table of
actions by operation. What the plan does not cover is passive mode: evict when an
allocation does not fit, bring back before backward needs it (evictor).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.planning.records.profile import MINIMUM_MAP_BYTES, Slot
from chainer_hybridmem.planning.records.rules import Rules
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.devices.protocol import Device, HostCopy
from chainer_hybridmem.training.execution.crossing import Crossing
from chainer_hybridmem.training.execution.evictor import (
    Evictor,
    PassiveRules,
    Prefetcher,
)
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import LiveMaps
from chainer_hybridmem.training.execution.mover import Counters, Mover, Observers
from chainer_hybridmem.training.execution.replayer import Asked, Recipes, Restorer
from chainer_hybridmem.training.execution.table import ActionTable
from chainer_hybridmem.training.recompute import trust


class Executor:
    """Executes one plan after the other on the graphs of one session.

    Args:
        device (Device): Where the feature maps are.
        minimum_map_bytes (int): Smaller maps are left alone.
        rules (tuple of Rule): What is obeyed without a plan, as far as memory allows.

    Attributes:
        maps (LiveMaps): Every feature map of the running graph.
        ledger (Ledger): Its functions.
        functions (LiveFunctions): Those of them that are known.
        crossing (Crossing): Parameters and optimizer states that leave.
        evictor (Evictor): Makes room without a plan.
        observers (Observers): Are told what happens.
        awaits_forward (bool): Whether it is to be told when the forward function that
            has begun last has computed.
    """

    def __init__(
        self,
        device: Device,
        minimum_map_bytes: int = MINIMUM_MAP_BYTES,
        rules: Rules = (),
    ) -> None:
        maps = self.maps = LiveMaps(device, minimum_map_bytes)
        self.ledger = maps.ledger
        self.functions = maps.functions
        self._device = device
        self._planned = maps.planned
        self.observers = Observers()
        self._mover = Mover(maps.planned, self._may_be_needed, self.observers)
        self._recipes = Recipes(device, maps)
        self._restorer = Restorer(
            device, maps, self._mover, self._recipes, self.observers
        )
        self.crossing = Crossing(device, maps, self._restorer)
        self._prefetcher = Prefetcher(device, maps, self._mover)
        self.evictor = Evictor(
            device,
            maps,
            self._mover,
            self._restorer,
            self._prefetcher,
            PassiveRules(rules),
        )
        self.awaits_forward = False
        self._busy: Collection[int] | None = None  # operations; None: all
        maps.answer_reads(weakref.WeakMethod(self._restorer.answer_read))

    # -- what others are told -------------------------------------------------
    @property
    def counters(self) -> Counters:
        """What this iteration has moved."""
        return self._mover.counters

    def _may_be_needed(self, live: LiveMap) -> bool:
        """Whether backward may still read a map."""
        return bool(live.uses) and self.functions.may_read(live)

    def report_to(self, asked: Asked, count_updates: Callable[[], int]) -> None:
        """Says who wants to know of functions, in every iteration.

        Args:
            asked: Gets a function and the slots of its maps when the program reads
                what is away, or may be.
            count_updates: Tells how often parameters have been updated.
        """
        self._recipes.ask_for_updates(count_updates)
        self._restorer.tell_asked(asked)

    # -- iterations -----------------------------------------------------------
    def begin(
        self,
        table: ActionTable | None,
        copies: dict[int, HostCopy],
        holders: Iterable[owners.Owner] = (),
        others: Iterable[ActionTable] = (),
        outliving: Collection[Slot] = (),
    ) -> None:
        """Starts an iteration.

        Args:
            table: What to do; None for passive mode.
            copies: Host copies by storage id, reused from iteration to
                iteration; new ones are added.
            holders: Owners of the parameters and optimizer states that may leave.
            others: Plans with which the iteration may go on.
            outliving: Slots of maps that later iterations will ask for.
        """
        self.settle()
        self._busy = None if table is None else table.busy
        self._mover.begin_iteration()
        self.maps.begin_iteration(outliving)
        self._planned.begin(table, copies)
        self._recipes.begin(others)
        self._prefetcher.begin()
        self.evictor.begin_iteration()
        self.crossing.begin(table, holders)
        self._clear_older(table)

    def switch(
        self,
        table: ActionTable,
        copies: dict[int, HostCopy],
        k: int,
        outliving: Collection[Slot] = (),
    ) -> bool:
        """Goes on with another plan, for iterations that begin like this one.

        Args:
            table: What to do from here on; what it has done by now is done.
            copies: Its host copies by storage id.
            k: The next operation.
            outliving: As for :meth:`begin`.

        Returns:
            bool: Whether a map leaves later than planned.
        """
        self.know_all()
        self._planned.switch(table, copies)
        self._prefetcher.switch()
        self._recipes.switch()
        self.maps.switch(outliving)
        self.crossing.switch()
        self._clear_older(table)
        return self._mover.apply_missed(table, k)

    def _clear_older(self, table: ActionTable | None) -> None:
        if table is not None and not table.passive:
            memory = self._device.memory
            needed_bytes = memory.used_bytes + table.growth_bytes
            self.evictor.start_clearing(needed_bytes - memory.limit_bytes)

    def leave_plan(self) -> None:
        """Ends guidance for the rest of the iteration: passive from here on."""
        self.know_all()
        self._follow_nothing()
        self._prefetcher.switch()

    def _follow_nothing(self) -> None:
        self._planned.end()
        self._recipes.end()

    def end_iteration(self) -> None:
        """Ends an iteration: forgets the maps of graphs that have died.

        And parameters that were made in it: a link that learns its size from its first
        input had none when the iteration began.
        """
        self._follow_nothing()
        self.crossing.end()
        self.maps.forget_dead()

    def settle(self) -> None:
        """Like :meth:`end_iteration`; living graphs keep what they need."""
        self.end_iteration()
        self.maps.end_iteration()

    def close(self, whole: bool = False) -> None:
        """Brings back what a living graph may still ask for, or makes it again.

        As far as it fits: what no backward has read yet comes first. A later read of
        what does not come back is an error.

        Args:
            whole: Whether also what only a second backward can ask for is made again.
        """
        self._follow_nothing()
        living = [
            live
            for live in self.maps
            if live.slots.are_alive()
            and (whole or live.state is not State.GONE or live.may_be_read)
        ]
        living.sort(key=lambda live: not live.uses)
        with self._device.memory.without_reclaim():
            for live in living:
                with contextlib.suppress(SessionError, MemoryError):
                    self._restorer.bring_back(live)

    def abandon(self) -> None:
        """Lets go of every feature map as it is; restores what crosses iterations."""
        self._follow_nothing()
        self.maps.forget_all()
        self.evictor.spare.clear()
        self.crossing.end()

    @property
    def graph_is_dead(self) -> bool:
        """Whether no function of the iteration is in a graph any more."""
        self.evictor.spare.clear()  # it holds nodes
        return self.ledger.all_dead and self._recipes.all_dead

    # -- what the hooks call --------------------------------------------------
    def _act(self, k: int, table: ActionTable) -> None:
        """Does what the plan has before operation k."""
        self._mover.move(k, table)
        if k in table.source_drops:
            self._recipes.drop_sources(k)
        replays = table.replays.get(k)
        if replays:
            self._restorer.replay_all(replays, table.recipes)

    def before_forward(self, k: int, function: Any) -> bool:
        """Before forward operation k issues anything.

        Returns:
            bool: Whether it is idle: the plan does nothing to it, nor to what it leaves
            in the graph, so that it may be noted; see [noted functions].
        """
        self.evictor.operation += 1
        recipes, table, busy = self._recipes, self._planned.table, self._busy
        self.awaits_forward = False
        is_applied_again = id(function) in self.functions.by_id
        if table is not None:
            may_replay = k in recipes.replayed
            if may_replay:
                if is_applied_again:  # the copy has what it keeps, too
                    self._restorer.bring_back_read_by(function)
                recipes.prepare(k, function)
            if k in table.acting or self.observers.follow or self._mover.waiting:
                self._act(k, table)
            if may_replay:
                recipes.start_drawing()
                self.awaits_forward = True
                busy = None
        if is_applied_again:
            self._restorer.bring_back_read_by(function)
        return busy is not None and k not in busy and not self.observers.judge

    def after_forward(self, function: Any) -> None:
        """After a forward function has computed."""
        if self.awaits_forward:
            self._recipes.finish_drawing(function)

    def complete(self, k: int, function: Any, serial: int = -1) -> None:
        """After forward operation k: finds what it left in the graph.

        Args:
            k: Its number; -1 for a function that a backward function has called, so
                that one can differentiate once more.
            function: The function.
            serial: Its place in the order in which functions have run; -1 if it has
                run after all others that are known.
        """
        known = self.functions.know(function)
        if k >= 0:
            self._recipes.note_run(k, known)
        self.ledger.number(known, function, serial)
        if known.recipe is not None:
            self._recipes.keep_leaves(k, function)
            self._recipes.keep_sources(k, function)
        maps = self.maps.find_left(k, function, known.serial)
        if known.forget_drawing_recipe():
            for live in maps:  # they cannot be made again
                live.outlive()
        for live in self.maps.find_evicted(function):
            if live not in maps:
                maps.append(live)
        if k < 0:  # it may keep the function that has called it, or what that reads
            maps.extend(live for live in self.evictor.busy if live not in maps)
            for live in maps:
                live.outlive()
        known.note_maps(maps or ())
        if self.observers.members:
            self.observers.made(maps)

    def before_backward(self, k: int, function: Any) -> None:
        """Before backward operation k: acts, then makes sure nothing is missing."""
        evictor, table, observers = self.evictor, self._planned.table, self.observers
        evictor.operation += 1
        if observers.members:
            observers.backward_runs(self.maps)
        waiting = self._mover.waiting
        if waiting:
            for live in self.maps.find(function):
                waiting.pop(live, None)
        if table is not None and (k in table.acting or observers.follow or waiting):
            self._act(k, table)
        if self.crossing.arrays:
            self.crossing.recall_read_by(function)
        known = self.functions.by_id.get(id(function))
        maps = () if known is None else known.maps
        if known is None or known.serial < 0:
            self.ledger.start_backward(function)
        if maps:
            evictor.hold(maps)
        for live in maps:
            if live.state is not State.RESIDENT:
                self._restorer.bring_back(live)
        if self._prefetcher.active:
            self._prefetcher.prefetch(-1 if known is None else known.serial)
            self._prefetcher.open_window()
        if observers.members:
            observers.reads(k, function, maps)

    def after_backward(self, k: int, function: Any) -> None:
        """After backward operation k: drops what is not needed any more.

        Done here because Chainer's backward loop takes hold of the next
        function's inputs before that function's hook runs.
        """
        known = self.functions.by_id.get(id(function))
        maps = () if known is None else known.maps
        if self.observers.members:
            self.observers.has_read(k, function, maps)
        if known is None or known.serial < 0:
            self.ledger.end_backward(function)
        else:
            blind = bool(maps) and self._device.clock.asynchronous
            written = blind and trust.may_write_over(function)
            for live in maps:
                live.slots.forget_replaced()
                live.end_read(known.serial, written)
            self.evictor.let_go(maps)
        if self._prefetcher.active:
            self._prefetcher.close_window()
        table = self._planned.table
        if table is None:
            return
        if k + 1 in table.drops:
            self._mover.drop_all(k + 1, table)
        if k + 1 == table.update and self.crossing.arrays:
            self._act(k + 1, table)
            self.crossing.recall_all()

    def restore_maps(self, function: Any) -> None:
        """A function that is applied once more finds its attributes."""
        self._restorer.bring_back_read_by(function)

    # -- noted functions: see the ledger --------------------------------------
    def know_all(self) -> tuple[int, Any] | None:
        """All that is noted of this iteration becomes known; nothing is idle any more.

        Returns:
            tuple: Operation and function that was noted last, whose forward may still
            run; None if none was noted.
        """
        self._busy = None
        origin, (noted, ended, running) = self.ledger.origin, self.ledger.take()
        for k, serial, function in noted:
            self.know(k, function, serial, origin)
        self._mark_backward_done(ended, running)
        return (noted[-1][0], noted[-1][2]) if noted else None

    def know_older(self, count: int) -> None:
        """So many functions of older graphs become known.

        No plan is followed any more, which would take their maps, and host copies that
        later iterations use, for its own.
        """
        self._planned.end()
        functions, ended = self.ledger.take_older(count)
        for origin, k, serial, function in functions:
            self.know(k, function, serial, origin)
        self._mark_backward_done(ended, ())
        # Some may be maps of the plan, too, as an input that both graphs read.
        for _, _, _, function in functions:
            self._planned.hand_over(self.maps.find(function))

    def know_more(self, k: int, count: int) -> None:
        """So many more noted functions become known: what is needed last comes first.

        Args:
            k: The operation under way.
            count: Of functions.
        """
        ledger = self.ledger
        if ledger.older:
            self.know_older(count)
            return
        ended = ledger.take_ended(count)
        for function in ended:
            self.know(k, function, 0)
        self._mark_backward_done(ended, ())
        if not ended:
            for number, serial, function in ledger.take_next(count):
                self.know(number, function, serial, ledger.origin)

    def know_running(self, k: int) -> None:
        """What backward functions under way read must not go; see know_more()."""
        running = self.ledger.find_running()
        for function in running:
            self.know(k, function)
        self._mark_backward_done((), running)

    def know(self, k: int, function: Any, serial: int = -1, origin: Any = None) -> None:
        """What a function has left in the graph is known from now on.

        Args:
            k: Its operation; -1 for a nested one.
            function: The function.
            serial: Its place in the order of functions; -1 if it comes last.
            origin: The iteration that has run it, if the operation is its forward.
        """
        if graph.is_unfinished(function) or self.functions.is_known(function):
            return
        if origin is not None and k >= 0:
            self.functions.know(function).belong_to(origin, k)
        self.complete(k, function, serial)

    def before_unknown(self) -> None:
        """Before a backward function that is not known and misses nothing."""
        self.evictor.operation += 1
        self._prefetcher.prefetch(self.ledger.serial)
        self._prefetcher.open_window()

    def open_window(self) -> None:
        """What is taken from here on, the function under way takes."""
        self._prefetcher.open_window()

    def _mark_backward_done(self, ended: Iterable[Any], running: Iterable[Any]) -> None:
        """Takes note of backward functions that have run before their maps were known.

        Args:
            ended: Functions whose backward has come to its end.
            running: Those whose backward runs now.
        """
        for function in ended:
            known = self.functions.find(function)
            if known is not None:
                for live in known.maps:
                    live.end_read(known.serial)
        for function in running:
            self.evictor.hold(self.maps.find(function))
