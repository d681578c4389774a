"""What a session knows about one signature, and how it learns it.

An iteration is a sequence of forward and backward functions with their shapes: its
signature. Each signature goes through the same stages: one passive iteration gives a
draft, profiling iterations swap every feature map of the draft, then a plan is made
and followed.

Note: [habits of a family]
    Which signature an iteration has, only its end tells. Until then it follows the plan
    of one that begins in the same way. So all signatures that begin alike share what is
    learnt about any of them: what later iterations ask of one may be asked of each.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chainer_hybridmem.planning.layouts.arena import Arena, IterationLog
from chainer_hybridmem.planning.records.plan import Plan, Tier
from chainer_hybridmem.planning.records.profile import Profile, Slot
from chainer_hybridmem.planning.records.rules import Rules
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    make_problem,
    with_parts,
    with_profile,
)
from chainer_hybridmem.training.devices.protocol import HostCopy
from chainer_hybridmem.training.execution.table import ActionTable, compile_plan
from chainer_hybridmem.training.recording.stopwatch import Times
from chainer_hybridmem.training.session.guides.forecast import Forecast
from chainer_hybridmem.training.session.guides.operation_key import (
    OperationKey,
    find_fingerprint,
)
from chainer_hybridmem.training.session.guides.profiling_plan import (
    make_undisturbed,
    makes_states,
    merge_recordings,
    swap_everything,
    with_median_times,
)
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.planning_time import PlanningTime
from chainer_hybridmem.training.splitting.rules import Way
from chainer_hybridmem.training.splitting.splitter import Place

LOGGED_ITERATIONS = 2  # in a row, from which an arena is laid out


class PlanArena:
    """Whether a plan's iterations get an arena, which one, and what it waits for.

    Args:
        wanted (bool): Whether plans are made so that their arena fits.
        spare_bytes (int): What plans must leave of the limit, because an iteration
            has needed more than its plan's trace tells.

    Attributes:
        laid_out (Arena or None): Offsets for what the plan's iterations allocate.
        draft (Arena or None): Those that the plan's trace tells, as long as there are
            no others: without any, iterations would evict, and other allocations would
            be logged.
        logs (list of IterationLog): Guided iterations in a row, as long as there is no
            arena.
        missing_bytes (int): What an arena has not found beside the pool's blocks.
        refusal (str): Why there is none for good; empty if an earlier run knows.
    """

    def __init__(self, wanted: bool = True, spare_bytes: int = 0) -> None:
        self.wanted = wanted
        self.spare_bytes = spare_bytes
        self.refusal = ''
        self.laid_out: Arena | None = None
        self.draft: Arena | None = None
        self.missing_bytes = 0
        self.logs: list[IterationLog] = []

    def begin_anew(self) -> None:
        """Forgets what is known about arenas of other plans; the arena stays."""
        self.spare_bytes = 0
        self.wanted, self.refusal = True, ''

    def lose_plan(self) -> None:
        """The plan changes, and its arena is no use any more."""
        self.logs.clear()
        self.laid_out = self.draft = None
        self.missing_bytes = 0

    @property
    def offsets(self) -> Arena | None:
        """Those of the next iteration."""
        return self.laid_out or self.draft

    # -- iterations -----------------------------------------------------------
    def note_log(self, log: IterationLog | None) -> None:
        """An iteration has ended; without a log, the next ones count from one again."""
        if log is None:
            self.logs.clear()
        else:
            self.logs.append(log)

    @property
    def is_logged(self) -> bool:
        """Whether enough iterations are logged to lay out an arena."""
        return len(self.logs) == LOGGED_ITERATIONS

    def take_logs(self) -> tuple[IterationLog, IterationLog]:
        """Hands the logs out; they are forgotten here."""
        first, second = self.logs
        self.logs.clear()
        return first, second

    # -- what becomes of it ---------------------------------------------------
    def lay_out(self, arena: Arena) -> None:
        """The next iterations allocate in this arena."""
        self.laid_out, self.draft = arena, None

    def find_no_place(self, missing_bytes: int) -> None:
        """The device has no memory for the arena: the pool keeps too much of it."""
        self.laid_out = self.draft = None
        self.missing_bytes = missing_bytes

    def exceed(self, spare_bytes: int) -> None:
        """The arena exceeds the limit: the next plan leaves so much more.

        A second time, there is no arena for good.
        """
        self.missing_bytes = 0
        if self.spare_bytes:
            self.refuse('its allocations have exceeded the limit twice')
        self.spare_bytes += spare_bytes

    def refuse(self, why: str) -> None:
        """There is no arena from now on, for this reason."""
        self.laid_out = self.draft = None
        self.reject(why)

    def reject(self, why: str) -> None:
        """No plan is made for an arena from now on, for this reason."""
        self.wanted, self.refusal = False, why

    def reconsider(self, reason: str) -> tuple[bool, str]:
        """Wants an arena again if this is why there is none.

        Returns:
            tuple: What was wanted before; see :meth:`restore`.
        """
        before = self.wanted, self.refusal
        self.wanted = self.wanted or self.refusal == reason
        return before

    def restore(self, before: tuple[bool, str]) -> None:
        """Wants what was wanted before :meth:`reconsider`."""
        self.wanted, self.refusal = before

    def explain_absence(self, planned: bool) -> str | None:
        """What an arena waits for, or why there is none; None if it stands.

        Args:
            planned: Whether iterations follow a plan.
        """
        if self.laid_out is not None:
            return None
        if not self.wanted:
            return f'none: {self.refusal or "found out in an earlier run"}'
        if not planned:
            return 'waits for a plan'
        return (
            f'waits for two iterations in a row that follow the plan; '
            f'{len(self.logs)} logged'
        )


TIMING_RUNS = 3  # iterations whose times replace those of profiling
LONGEST_WAIT = 4  # iterations, at most, for an arena before a plan is timed


class PlanPace:
    """Times of a plan's iterations, and how often the plan has changed for them.

    A plan's first iterations are slow: their memory is new, an arena is laid out after
    them, and other processes may still plan. So a plan is timed after one iteration at
    its offsets, or two where other ranks follow it late.

    Attributes:
        timings (list): Times of the operations, per timed guided iteration.
        timed_again (bool): The plan has changed after it was timed.
        iterations (int): Those that have followed this plan or another one.
    """

    def __init__(self) -> None:
        self.timings: list[list[Times]] = []
        self.timed_again = False
        self.iterations = 0
        self._followed = 0  # iterations of the plan
        self._rested = 0  # those of them at their offsets, if it has any
        self._lag = 0  # iterations by which other ranks change plans later

    # -- times ----------------------------------------------------------------
    @property
    def wants_times(self) -> bool:
        """Whether the plan's next iteration is to be timed."""
        lag = self._lag
        waited = self._rested > lag or self._followed >= LONGEST_WAIT + lag
        return waited and not self.timed

    @property
    def timed(self) -> bool:
        """Whether enough iterations have been timed."""
        return len(self.timings) >= TIMING_RUNS

    def note_times(self, times: list[Times]) -> None:
        """A guided iteration has been timed."""
        self.timings.append(times)

    def assume(self, times: list[Times]) -> None:
        """Earlier runs have timed enough iterations, with these times."""
        self.timings = [times] * TIMING_RUNS

    def forget_times(self) -> None:
        """The times are those of another plan."""
        self.timings.clear()

    def change_timed_plan(self) -> None:
        """Another plan suits the times better; its own times tell more."""
        self.timed_again = True
        self.timings.clear()

    def time_again(self) -> None:
        """Times of another day count, and another plan may follow from them."""
        self.timings.clear()
        self.timed_again = False

    def wait_for_ranks(self) -> None:
        """Other ranks take this plan's changes over an iteration later.

        Until their arenas stand, this rank waits for them in all-reduce operations.
        """
        self._lag = 1

    # -- changes --------------------------------------------------------------
    def note_iteration(self, at_offsets: bool) -> None:
        """An iteration has followed the plan, with its arena if there is to be any."""
        self.iterations += 1
        self._followed += 1
        self._rested += at_offsets

    def change_plan(self) -> None:
        """Another plan is followed from now on."""
        self._followed = self._rested = 0


EVICTING_ITERATIONS = 3  # in a row under a plan, after which there is another one


class ForeignMemory:
    """Memory that a guide's plans leave free for the program.

    Args:
        nbytes (int): What plans leave free.

    Attributes:
        refused_bytes (int or None): Held so much, no plan fits beside it.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.refused_bytes: int | None = None
        self._evicting = 0  # iterations in a row that have evicted

    def end_iteration(self, evicted: bool) -> bool:
        """A guided iteration has ended.

        Returns:
            bool: Whether so many in a row have evicted that there must be another plan.
        """
        self._evicting = self._evicting + 1 if evicted else 0
        if self._evicting < EVICTING_ITERATIONS:
            return False
        self._evicting = 0
        return True

    def is_refused(self, held_bytes: int) -> bool:
        """Whether it is known that no plan fits beside so much."""
        return self.refused_bytes is not None and held_bytes >= self.refused_bytes

    def refuse(self, held_bytes: int, former_bytes: int) -> None:
        """No plan fits beside what is held: plans leave free what they did."""
        self.nbytes, self.refused_bytes = former_bytes, held_bytes


class ProgramHabits:
    """What iterations that begin alike have been seen to do with their maps.

    Args:
        outliving (set of Slot): Of maps that later iterations have asked for.
        recomputes (bool): No later backward comes over its graph after an update.
    """

    def __init__(
        self,
        outliving: Iterable[Slot] = (),
        recomputes: bool = True,
    ) -> None:
        self.outliving = set(outliving)
        self.recomputes = recomputes

    def add(self, other: ProgramHabits) -> None:
        """All that others have been seen to do."""
        self.outliving |= other.outliving
        self.recomputes = self.recomputes and other.recomputes


class Stage(enum.Enum):
    """How much is known about a signature."""

    WARM_UP = 'warm-up'
    PROFILING = 'profiling'
    GUIDED = 'guided'
    PASSIVE = 'passive'  # known, but no plan fits


class Guide:
    """One signature: its profile, its plan and its host copies.

    Args:
        signature (list of OperationKey): One key per operation, in order.
        spent (PlanningTime): What the first recording has cost, if anything.

    Attributes:
        stage (Stage): How much is known.
        problem (Problem or None): Made of the profile.
        plan (Plan or None): Once it is guided.
        table (ActionTable or None): What to do in the next iteration.
        copies (dict): Host copies by storage id.
        recordings (list of Profile): Of profiling iterations.
        ways (dict): Functions that run in parts, and how, by place.
        forecast (Forecast or None): What its iterations will need; None if they fit.
        spent (PlanningTime): What profiles and plans have cost in this session.
        pace (PlanPace): When the plan is timed and may change.
        arena (PlanArena): Offsets for what the plan's iterations allocate.
        foreign (ForeignMemory): What plans leave free for the program.
        habits (ProgramHabits): What the program does with maps in iterations that
            begin like these.
        profiled_again (bool): Its plan was given up for another recording.
        tries_parts (bool): Its recordings tell what functions need in parts.
    """

    def __init__(
        self,
        signature: list[OperationKey],
        spent: PlanningTime | None = None,
        ways: dict[Place, Way] | None = None,
        arena: PlanArena | None = None,
        foreign: ForeignMemory | None = None,
        habits: ProgramHabits | None = None,
    ) -> None:
        self.signature = signature
        self.stage = Stage.WARM_UP
        self.problem: Problem | None = None
        self.plan: Plan | None = None
        self.table: ActionTable | None = None
        self.copies: dict[int, HostCopy] = {}
        self.recordings: list[Profile] = []
        self.ways = {} if ways is None else ways
        self.forecast: Forecast | None = None
        self.spent = PlanningTime() if spent is None else spent
        self.pace = PlanPace()
        self.arena = PlanArena() if arena is None else arena
        self.foreign = ForeignMemory() if foreign is None else foreign
        self.habits = ProgramHabits() if habits is None else habits
        self.profiled_again = False
        self.tries_parts = False
        self._has_waited = False  # for optimizer states

    @functools.cached_property
    def fingerprint(self) -> int:
        """Of the forward functions of its iterations."""
        return find_fingerprint(self.signature)

    # -- what its iterations are for ------------------------------------------
    @property
    def wants_times(self) -> bool:
        """Whether the next guided iteration is to be timed."""
        return self.stage is Stage.GUIDED and self.pace.wants_times

    @property
    def timed(self) -> bool:
        """Whether enough guided iterations have been timed."""
        return self.pace.timed

    @property
    def wants_log(self) -> bool:
        """Whether the next guided iteration is to be logged for an arena."""
        arena = self.arena
        return self.stage is Stage.GUIDED and arena.laid_out is None and arena.wanted

    def explain_no_arena(self) -> str | None:
        """What an arena waits for, or why there is none; None if it stands."""
        return self.arena.explain_absence(planned=self.stage is Stage.GUIDED)

    @property
    def trial(self) -> bool:
        """Whether the next iteration replays every function to verify it."""
        return self.stage is Stage.PROFILING and not self.recordings

    # -- profiles -------------------------------------------------------------
    def count_foreign(self, held_bytes: int) -> int:
        """What the program holds beyond what its newest recording knows.

        Args:
            held_bytes: When an iteration begins, beside feature maps.
        """
        known = self.forecast if self.problem is None else self.problem.profile
        return 0 if known is None else max(0, held_bytes - known.initial_bytes)

    def learn(self, profile: Profile, disturbed: bool = False) -> None:
        """Takes in the recording of one of its iterations, the draft first.

        Args:
            profile: The recording.
            disturbed: Whether it contains attempts that the next one will not make.
        """
        self.forget_copies()
        known = self.stage is not Stage.WARM_UP
        if known and makes_states(profile) and self._wait_for_states():
            disturbed = True
        recordings = [*self.recordings, profile] if known and not disturbed else []
        count = len(profile.operations)  # an all-reduce may not come
        recordings = [r for r in recordings if len(r.operations) == count]
        base = recordings[0] if recordings else profile
        table = compile_plan(base, swap_everything(base))
        # Nothing has changed if this has been interrupted by now.
        self.stage, self.recordings, self.table = Stage.PROFILING, recordings, table

    def _wait_for_states(self) -> bool:
        """States come after the first iteration; whether to wait for the next one.

        ChainerMN's first update only hands out parameters. Once is enough: a program
        that makes more in every iteration is planned all the same.
        """
        waits, self._has_waited = not self._has_waited, True
        return waits

    def make_problem(
        self, options: Options, choose_rules: Callable[[Profile], Rules]
    ) -> Problem:
        """The profile with the best times of all recordings, as a problem.

        Args:
            options: What may leave, and where to.
            choose_rules: Those that are about a profile.

        Raises:
            OptionError: If the rules leave a map nothing.
        """
        profile = merge_recordings(self.recordings, self.habits.recomputes)
        problem = make_problem(
            profile,
            options.cross_iteration,
            options.host_limit_bytes,
            options.splitting,
            rules=choose_rules(profile),
        )
        self.problem = make_undisturbed(problem, swap_everything(profile))
        return self.problem

    def make_timed_problem(self) -> Problem:
        """The problem with the median times of the guided iterations."""
        assert self.problem is not None and self.plan is not None
        before, plan = self.problem, self.plan
        profile = with_median_times(before.profile, self.pace.timings, plan)
        self.problem = make_undisturbed(with_profile(before, profile), plan)
        return self.problem

    # -- plans ----------------------------------------------------------------
    @contextlib.contextmanager
    def planning_anew(self) -> Iterator[None]:
        """Forgets what former plans have taught about arenas.

        Where no plan is found, the former one stays, and what is known of it.
        """
        known = copy.copy(self.arena)
        self.arena.begin_anew()
        try:
            yield
        except BaseException:
            self.arena = known
            raise

    def follow(self, problem: Problem, plan: Plan) -> None:
        """From now on iterations are guided by this plan."""
        self.forget_copies()
        if self.plan is None or _actions(plan) != _actions(self.plan):
            self.arena.lose_plan()
            self.pace.change_plan()
        for part in plan.parts:
            way = Way(part.cut, part.parts, part.exact)
            self.ways[part.operation, part.function, part.name] = way
        self.problem, self.plan = with_parts(problem, plan.parts), plan
        self.stage = Stage.GUIDED
        limited = problem.host_limit_bytes is not None
        self.table = compile_plan(problem.profile, plan, limited)

    def find_host_bytes(self) -> tuple[int, int] | None:
        """What its plan's host copies take in RAM and on disk; None without a plan."""
        if self.problem is None or self.plan is None or self.table is None:
            return None
        ram, disk = (self.plan.tier_bytes(self.problem.profile, tier) for tier in Tier)
        return ram + self.table.unique_bytes, disk

    def give_up(self) -> None:
        """No plan fits: its iterations go on in passive mode."""
        self.forget_copies()
        self.stage, self.table = Stage.PASSIVE, None
        self.recordings.clear()

    # -- what its iterations show ---------------------------------------------
    def profile_again(self, in_parts: bool = False) -> None:
        """What has been recorded does not do: once more from the draft.

        Args:
            in_parts: Whether functions are tried in parts, too.
        """
        assert self.problem is not None
        self.forget_copies()
        profile = self.problem.profile
        self.stage, self.profiled_again = Stage.PROFILING, True
        self.tries_parts = self.tries_parts or in_parts
        self.recordings.clear()
        self.pace.forget_times()
        self.table = compile_plan(profile, swap_everything(profile))

    def forget_copies(self) -> None:
        """Gives all host copies back: storage ids are about to change."""
        while self.copies:  # an interruption leaves none that is closed
            _, host_copy = self.copies.popitem()
            host_copy.close()


def _actions(plan: Plan) -> tuple[Any, ...]:
    return plan.maps, plan.replays, plan.sources
