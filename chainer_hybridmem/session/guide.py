"""What a session knows about one kind of iteration, and how it learns it.

An iteration is a sequence of forward and backward functions with their shapes:
its signature. Each signature goes through the same stages: one passive
iteration gives a draft, profiling iterations swap every feature map of the
draft, then a plan is made and followed.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.devices.protocol import HostCopy
from chainer_hybridmem.execution.table import ActionTable, compile_plan
from chainer_hybridmem.pools.arena import Arena, IterationLog
from chainer_hybridmem.recording.stopwatch import Times
from chainer_hybridmem.recording.trials import SHORT_SECONDS
from chainer_hybridmem.records.plan import Action, MapPlan, Part, Plan
from chainer_hybridmem.records.profile import Profile, Slot
from chainer_hybridmem.records.splits import EXACT, Splitting
from chainer_hybridmem.search.feedback import Feedback
from chainer_hybridmem.session.forecast import Forecast
from chainer_hybridmem.session.spent import Spent
from chainer_hybridmem.simulation.problem import (
    CrossIteration,
    Problem,
    decided_by,
    make_problem,
    with_parts,
)
from chainer_hybridmem.simulation.timeline import undisturbed_seconds
from chainer_hybridmem.splitting.rules import Way
from chainer_hybridmem.splitting.splitter import Place

Key = tuple[Any, ...]  # what one operation looks like
TIMING_RUNS = 3  # guided iterations whose times replace those of profiling
PROFILING_RUNS = 2
LONGEST_REST = 64  # iterations, at most, between changes for the sake of time


class Stage(enum.Enum):
    """How much is known about a signature."""

    WARM_UP = 'warm-up'
    PROFILING = 'profiling'
    GUIDED = 'guided'
    PASSIVE = 'passive'  # known, but no plan fits


class Guide:
    """One signature: its operations, profile, plan and host copies.

    Attributes:
        keys (list of Key): One per operation, in order.
        stage (Stage): How much is known.
        problem (Problem or None): Made of the profile.
        plan (Plan or None): Once it is guided.
        table (ActionTable or None): What to do in the next iteration.
        copies (dict): Host copies by storage id.
        timings (list): Times of the operations, per timed guided iteration.
        timed_again (bool): The plan has changed after it was timed.
        feedback (Feedback): Late swap-ins of the plan.
        logs (list): Guided iterations in a row, as long as there is no arena.
        arena (Arena or None): Places for what the plan's iterations allocate.
        spare_bytes (int): What plans must leave of the limit, because an iteration
            has needed more than its plan's trace tells.
        wants_arena (bool): Whether plans are made so that their arena fits.
        refusal (str): Why there is none for good.
        rested (int): Iterations of the plan at their places, if there are to be any.
        changes (int): Of the planner's plan, for the sake of time.
        foreign_bytes (int): What the program holds beyond what its profile knows.
        refused_bytes (int or None): So much of that that no plan fits beside it.
        evicting (int): Iterations in a row that have evicted.
        outliving (set of Slot): Of maps that later iterations have asked for.
        written (set of Slot): Of maps that the program has been seen to write into.
        recomputes (bool): No later backward comes over its graph after an update.
        profiled_again (bool): Because they have, although nothing foreign is held.
        ways (dict): Functions that run in parts, and how, by place.
        forecast (Forecast or None): What its iterations will need; None if they fit.
        spent (Spent): What its profiles and plans have cost in this session.
    """

    def __init__(self, keys: list[Key], spent: Spent | None = None) -> None:
        self.keys = keys
        self.spent = Spent() if spent is None else spent
        self.stage = Stage.WARM_UP
        self.problem: Problem | None = None
        self.plan: Plan | None = None
        self.table: ActionTable | None = None
        self.copies: dict[int, HostCopy] = {}
        self.runs: list[Profile] = []
        self.timings: list[list[Times]] = []
        self.timed_again = False
        self.feedback = Feedback()
        self.logs: list[IterationLog] = []
        self.arena: Arena | None = None
        self.outliving: set[Slot] = set()
        self.written: set[Slot] = set()
        self.recomputes = True
        self.foreign_bytes = 0
        self.refused_bytes: int | None = None
        self.evicting = 0
        self.profiled_again = False
        self.ways: dict[Place, Way] = {}
        self.forecast: Forecast | None = None
        self.rested = 0
        self.begin_placing()

    @property
    def wants_times(self) -> bool:
        """Whether the next guided iteration is to be timed."""
        return self.stage is Stage.GUIDED and len(self.timings) < TIMING_RUNS

    @property
    def timed(self) -> bool:
        """Whether enough guided iterations have been timed."""
        return len(self.timings) == TIMING_RUNS

    @property
    def wants_log(self) -> bool:
        """Whether the next guided iteration is to be logged for an arena."""
        return self.stage is Stage.GUIDED and self.arena is None and self.wants_arena

    @property
    def watched(self) -> set[Slot] | None:
        """Of maps that the program may write into; None as long as it is learnt."""
        return self.written if self.stage is Stage.GUIDED else None

    def begin_placing(self) -> None:
        """Forgets what has been found out about arenas of other plans."""
        self.spare_bytes = 0
        self.wants_arena, self.refusal = True, ''
        self.changes = 0

    def refuse_arena(self, why: str) -> None:
        """There is no arena from now on, for this reason."""
        self.arena, self.wants_arena, self.refusal = None, False, why

    @property
    def no_arena(self) -> str | None:
        """What an arena waits for, or why there is none; None if it stands."""
        if self.arena is not None:
            return None
        if not self.wants_arena:
            return f'none: {self.refusal or "found out in an earlier run"}'
        if self.stage is not Stage.GUIDED:
            return 'waits for a plan'
        return (
            f'waits for two iterations in a row that follow the plan; '
            f'{len(self.logs)} logged'
        )

    @property
    def may_change(self) -> bool:
        """Whether there may be another plan for the sake of time now.

        Times are noisy, and each change costs the arena, which takes two iterations to
        be laid out. So it is to be used first, twice as long before each change.
        """
        return self.rested >= min(1 << self.changes, LONGEST_REST)

    def count_change(self) -> None:
        """The plan changes for the sake of time, or cannot."""
        self.changes += 1
        self.rested = 0

    @property
    def trial(self) -> bool:
        """Whether the next iteration replays every function to verify it."""
        return self.stage is Stage.PROFILING and not self.runs

    def learn(self, profile: Profile, disturbed: bool = False) -> None:
        """Takes in the recording of one of its iterations, the draft first.

        Args:
            profile: The recording.
            disturbed: Whether it contains attempts that the next one will not make.
        """
        self.forget_copies()
        known = self.stage is not Stage.WARM_UP
        runs = [*self.runs, profile] if known and not disturbed else []
        base = runs[0] if runs else profile
        table = compile_plan(base, swap_everything(base))
        # Nothing has changed if this has been interrupted by now.
        self.stage, self.runs, self.table = Stage.PROFILING, runs, table

    @property
    def profiled(self) -> bool:
        """Whether enough has been recorded for a plan."""
        return len(self.runs) >= PROFILING_RUNS

    def make_problem(
        self,
        cross_iteration: CrossIteration = False,
        host_limit_bytes: int | None = None,
        splitting: Splitting = EXACT,
    ) -> Problem:
        """The profile with the best times of all runs, as a problem.

        The fastest of several runs is the one least disturbed by other users
        of the machine.

        Args:
            cross_iteration: As in :func:`.simulation.make_problem`.
            host_limit_bytes: Likewise.
            splitting: Likewise.
        """
        base = self.runs[0]
        rows = zip(*(run.operations for run in self.runs), strict=True)
        operations = tuple(
            dataclasses.replace(
                row[0],
                device_seconds=min(op.device_seconds for op in row),
                host_seconds=min(op.host_seconds for op in row),
            )
            for row in rows
        )
        # A long replay was timed once; it is the forward without Chainer around it.
        recipes = tuple(
            recipe
            if recipe.covers or recipe.seconds < SHORT_SECONDS
            else dataclasses.replace(
                recipe,
                seconds=min(
                    recipe.seconds, operations[recipe.operation].device_seconds
                ),
            )
            for recipe in base.recipes
        )
        if not self.recomputes:
            recipes = ()
        profile = dataclasses.replace(base, operations=operations, recipes=recipes)
        plan = swap_everything(profile)
        self.problem = _undisturbed(
            profile, plan, cross_iteration, host_limit_bytes, splitting
        )
        return self.problem

    def make_timed_problem(self) -> Problem:
        """The problem with the median times of the guided iterations."""
        assert self.problem is not None and self.plan is not None
        profile = self.problem.profile
        operations = tuple(
            dataclasses.replace(
                op,
                device_seconds=statistics.median(t.device_seconds for t in times),
                host_seconds=statistics.median(t.host_seconds for t in times),
            )
            for op, times in zip(
                profile.operations, zip(*self.timings, strict=True), strict=True
            )
        )
        profile = dataclasses.replace(profile, operations=operations)
        before = self.problem
        self.problem = _undisturbed(
            profile,
            self.plan,
            before.cross_iteration,
            before.host_limit_bytes,
            before.splitting,
            before.parts,
        )
        return self.problem

    def follow(self, problem: Problem, plan: Plan) -> None:
        """From now on iterations are guided by this plan."""
        self.forget_copies()
        if self.plan is None or _actions(plan) != _actions(self.plan):
            self.logs.clear()
            self.arena = None
            self.rested = 0
            self.feedback = Feedback()
        for part in plan.parts:
            way = Way(part.cut, part.parts, part.exact)
            self.ways[part.operation, part.function, part.name] = way
        self.problem, self.plan = with_parts(problem, plan.parts), plan
        self.stage = Stage.GUIDED
        self.table = compile_plan(problem.profile, plan)

    def outlives(self, slots: Iterable[Slot], updated: bool) -> None:
        """A later iteration has asked for maps with these slots.

        Args:
            slots: Of this guide's iterations.
            updated: Whether parameters have been updated in between.
        """
        self.outliving.update(slots)
        if updated and self.recomputes:
            self.recomputes = False
            if self.stage is Stage.GUIDED:
                self.profile_again()

    def give_up(self) -> None:
        """No plan fits: its iterations go on in passive mode."""
        self.forget_copies()
        self.stage, self.table = Stage.PASSIVE, None
        self.runs.clear()

    def profile_again(self) -> None:
        """The iterations are not what has been recorded: once more from the draft."""
        assert self.problem is not None
        self.forget_copies()
        profile = self.problem.profile
        self.stage, self.profiled_again = Stage.PROFILING, True
        self.runs.clear()
        self.timings.clear()
        self.table = compile_plan(profile, swap_everything(profile))

    def forget_copies(self) -> None:
        """Gives all host copies back: storage ids are about to change."""
        while self.copies:  # an interruption leaves none that is closed
            _, copy = self.copies.popitem()
            copy.close()


def _actions(plan: Plan) -> tuple[Any, ...]:
    return plan.maps, plan.replays


def _undisturbed(
    profile: Profile,
    plan: Plan,
    cross_iteration: CrossIteration,
    host_limit_bytes: int | None,
    splitting: Splitting,
    parts: tuple[Part, ...] = (),
) -> Problem:
    """The problem without what the copies of the recorded plan cost compute."""
    crossed = decided_by(profile, plan)
    problem = make_problem(profile, crossed, host_limit_bytes, splitting, parts)
    decided = {storage.id for storage in problem.maps}
    followed = tuple(entry for entry in plan.maps if entry.storage in decided)
    plan = dataclasses.replace(plan, maps=followed)
    operations = tuple(
        dataclasses.replace(op, device_seconds=seconds)
        for op, seconds in zip(
            profile.operations, undisturbed_seconds(problem, plan), strict=True
        )
    )
    if operations == profile.operations and crossed == cross_iteration:
        return problem
    profile = dataclasses.replace(profile, operations=operations)
    return make_problem(profile, cross_iteration, host_limit_bytes, splitting, parts)


def swap_everything(profile: Profile) -> Plan:
    """The plan of profiling runs: everything out at once, back at need.

    It needs no planning and no more memory than single operations do, so that
    a profile can be made where in-core training is impossible.
    """
    maps = []
    b0 = profile.first_backward
    for storage in profile.feature_maps():
        out = max((storage.producer, *storage.forward_uses)) + 1
        need = storage.backward_uses[0]
        if out > b0 or need < b0:
            continue
        maps.append(
            MapPlan(
                storage=storage.id,
                action=Action.SWAP,
                swap_out_before=out,
                release_before=out,
                swap_in_before=need,
                needed_before=need,
                drop_before=storage.backward_uses[-1] + 1,
            )
        )
    return Plan(
        planner='profiling',
        options={},
        profile_fingerprint=profile.fingerprint(),
        memory_limit_bytes=0,
        maps=tuple(maps),
        replays=(),
        predicted_seconds=0.0,
        predicted_peak_bytes=0,
        in_core_seconds=profile.compute_seconds,
        lower_bound_seconds=profile.compute_seconds,
    )
