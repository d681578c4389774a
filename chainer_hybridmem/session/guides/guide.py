"""What a session knows about one signature, and how it learns it.

An iteration is a sequence of forward and backward functions with their shapes: its
signature. Each signature goes through the same stages: one passive iteration gives a
draft, profiling iterations swap every feature map of the draft, then a plan is made
and followed.
"""

from __future__ import annotations

import enum
from typing import Any

from chainer_hybridmem.devices.protocol import HostCopy
from chainer_hybridmem.execution.table import ActionTable, compile_plan
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.profile import Profile, Slot
from chainer_hybridmem.records.rules import Rules
from chainer_hybridmem.records.splits import EXACT, Splitting
from chainer_hybridmem.session.guides.forecast import Forecast
from chainer_hybridmem.session.guides.foreign_memory import ForeignMemory
from chainer_hybridmem.session.guides.operation_key import OperationKey
from chainer_hybridmem.session.guides.plan_arena import PlanArena
from chainer_hybridmem.session.guides.plan_pace import PlanPace
from chainer_hybridmem.session.guides.profiling_plan import (
    make_undisturbed_problem,
    makes_states,
    merge_recordings,
    swap_everything,
    with_median_times,
)
from chainer_hybridmem.session.guides.program_habits import ProgramHabits
from chainer_hybridmem.session.setting.planning_time import PlanningTime
from chainer_hybridmem.simulation.problem import (
    CrossIteration,
    Problem,
    with_parts,
    with_plain_peak,
    with_rules,
)
from chainer_hybridmem.splitting.rules import Way
from chainer_hybridmem.splitting.splitter import Place


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
        self._has_waited = False  # for optimizer states

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
    def watched(self) -> set[Slot] | None:
        """Of maps that the program may write into; None as long as it is learnt."""
        return self.habits.written if self.stage is Stage.GUIDED else None

    @property
    def trial(self) -> bool:
        """Whether the next iteration replays every function to verify it."""
        return self.stage is Stage.PROFILING and not self.recordings

    # -- profiles -------------------------------------------------------------
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

    def expect(self, forecast: Forecast | None) -> None:
        """Its iterations will need so much; None if they fit."""
        self.forecast = forecast

    def make_problem(
        self,
        cross_iteration: CrossIteration = False,
        host_limit_bytes: int | None = None,
        splitting: Splitting = EXACT,
    ) -> Problem:
        """The profile with the best times of all recordings, as a problem.

        Args:
            cross_iteration: As in :func:`.simulation.make_problem`.
            host_limit_bytes: Likewise.
            splitting: Likewise.
        """
        profile = merge_recordings(self.recordings, self.habits.recomputes)
        plan = swap_everything(profile)
        self.problem = make_undisturbed_problem(
            profile, plan, cross_iteration, host_limit_bytes, splitting
        )
        return self.problem

    def make_timed_problem(self) -> Problem:
        """The problem with the median times of the guided iterations."""
        assert self.problem is not None and self.plan is not None
        before = self.problem
        timed = make_undisturbed_problem(
            with_median_times(before.profile, self.pace.timings),
            self.plan,
            before.cross_iteration,
            before.host_limit_bytes,
            before.splitting,
            before.parts,
        )
        self.problem = with_plain_peak(timed, before.in_core.plain_peak_bytes)
        return self.obey(before.rules)

    def obey(self, rules: Rules) -> Problem:
        """The problem under rules that its plans obey.

        Raises:
            OptionError: If the rules leave a map nothing.
        """
        assert self.problem is not None
        self.problem = with_rules(self.problem, rules)
        return self.problem

    # -- plans ----------------------------------------------------------------
    def begin_planning(self) -> None:
        """Forgets what former plans have taught about arenas and changes."""
        self.arena.begin_anew()
        self.pace.begin_anew()

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
        self.table = compile_plan(problem.profile, plan)

    def give_up(self) -> None:
        """No plan fits: its iterations go on in passive mode."""
        self.forget_copies()
        self.stage, self.table = Stage.PASSIVE, None
        self.recordings.clear()

    # -- what its iterations show ---------------------------------------------
    def share(self, habits: ProgramHabits) -> None:
        """What is learnt about iterations that begin alike is learnt about these."""
        self.habits = habits

    def profile_again(self) -> None:
        """The iterations are not what has been recorded: once more from the draft."""
        assert self.problem is not None
        self.forget_copies()
        profile = self.problem.profile
        self.stage, self.profiled_again = Stage.PROFILING, True
        self.recordings.clear()
        self.pace.forget_times()
        self.table = compile_plan(profile, swap_everything(profile))

    def forget_copies(self) -> None:
        """Gives all host copies back: storage ids are about to change."""
        while self.copies:  # an interruption leaves none that is closed
            _, copy = self.copies.popitem()
            copy.close()


def _actions(plan: Plan) -> tuple[Any, ...]:
    return plan.maps, plan.replays
