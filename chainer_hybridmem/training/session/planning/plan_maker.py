"""Makes one plan for a guide: within the limit, with an arena that fits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.errors import InfeasibleError, PlanError
from chainer_hybridmem.planning.layouts import planned_trace
from chainer_hybridmem.planning.layouts.arena import (
    Arena,
    IterationLog,
    lay_out,
    logs_of,
)
from chainer_hybridmem.planning.layouts.fitting import fit
from chainer_hybridmem.planning.planners import (
    DEFAULT,
    find_planner,
    make_plan,
    options_of,
)
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.annealing import count_steps
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.deadline import Deadline
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.search.repairs import (
    LARGEST_BYTES,
    defer_drops,
    drop_after_use,
)
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.setting.planning_time import count_time
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.units import format_bytes

Logs = tuple[IterationLog, IterationLog]
Place = Callable[[Logs], Arena]


def plan_with_arena(
    problem: Problem,
    make_plan_for: Callable[[int], Plan],
    place: Place,
    limit_bytes: int,
    spare_bytes: int,
) -> tuple[Plan, Arena | None, bool]:
    """Plans until the arena fits, as far as a plan's trace tells.

    No deadline ends that: planners and layouts are quick once it has passed.

    Args:
        problem: What is planned.
        make_plan_for: Makes a plan for a limit in bytes.
        place: Lays out two logged iterations.
        limit_bytes: What arena and all beside it must fit.
        spare_bytes: What they must leave of it.

    Returns:
        tuple: The plan, its arena if it was laid out, and whether that fits.

    Raises:
        InfeasibleError: If there is no plan for the limit.
    """
    room_bytes = limit_bytes - spare_bytes

    def arena_of(plan: Plan) -> Arena:
        return place(logs_of(planned_trace(problem.profile, plan)))

    def make(planned_bytes: int) -> tuple[Plan, Arena]:
        plan = make_plan_for(planned_bytes)
        arena = arena_of(plan)
        if arena.footprint_bytes > room_bytes:
            # Only now: copies that may begin early forgive a slow link the most.
            plan = relaxed(problem, plan)
            arena = arena_of(plan)
        return plan, arena

    if room_bytes <= 0:
        return make_plan_for(limit_bytes), None, False
    try:
        fitted = fit(make, room_bytes)
    except InfeasibleError:
        if not spare_bytes:
            raise
        return make_plan_for(limit_bytes), None, False
    return fitted.plan, fitted.placed, fitted.fits


# Shares of free memory that are tried one after the other, also after the deadline: a
# try takes 0.05 s for a ResNet-50, and every iteration is faster for it.
ROOMS = 1.0, 0.75, 0.5, 0.25
# Between two iterations, the program waits for what plain ones take, or for a second;
# longer where the limit may not hold without an arena.
PLAIN_ITERATIONS, LEAST_SECONDS, LEAST_SECONDS_NEEDED = 3, 1.0, 12.0
LEAST_BUDGET = 1e-3  # seconds, for a plan that has to be made
NONE_FITS = 'of the plans that were tried, none has one that fits the limit'


class PlanMaker:
    """Makes plans with the session's planner.

    Args:
        runtime (Runtime): Says what is wanted, and where arenas are.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._device = runtime.device
        self._options = runtime.options
        self._tell = runtime.tell
        self._pause = Deadline()
        self._deadline: Deadline | None = None
        self._draft: tuple[Plan, Arena] | None = None  # of the last plan

    def begin_pause(self) -> None:
        """The program waits from now on, for all that comes before its next step."""
        self._pause, self._deadline = Deadline(), None

    def find_deadline(self, problem: Problem) -> Deadline:
        """When the program is to go on: one for all that is done in a pause."""
        if self._deadline is None:
            seconds = self._options.planner_options.get('time_budget')
            if seconds is None:
                needed = self._device.offsets.needed
                least = LEAST_SECONDS_NEEDED if needed else LEAST_SECONDS
                seconds = max(PLAIN_ITERATIONS * problem.in_core_seconds, least)
            self._deadline = self._pause.within(seconds)
        return self._deadline

    @count_time
    def make_plan(
        self,
        guide: Guide,
        problem: Problem,
        planner: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Plan:
        """A plan for the limit, with an arena that fits if the limit needs one.

        Args:
            guide: Whose plan it becomes.
            problem: Of its iterations.
            planner: Its name; None: the one wished for, with its options.
            options: Of that planner.

        Raises:
            InfeasibleError: If there is no plan, with or without an arena.
        """
        if planner is None:
            planner = self._options.planner
            options = self._options.planner_options
        chosen, given = planner, options or {}
        deadline = self.find_deadline(problem)
        room_bytes = self.room_bytes(guide)
        problem = find_planner(chosen).fit(problem, room_bytes)

        def make_plan_for(limit_bytes: int) -> Plan:
            timely = _timely(problem, chosen, given, deadline)
            plan = make_plan(problem, limit_bytes, chosen, **timely)
            told = {name: given.get(name) for name in timely}  # not what was left
            return dataclasses.replace(plan, options={**plan.options, **told})

        if not self._needs_arena(guide):
            return self._leave_to_graph(guide, problem, make_plan_for(room_bytes))
        spare_bytes = self._spare_bytes(guide)
        plan, arena, fits = plan_with_arena(
            problem,
            make_plan_for,
            lambda logs: self.lay_out(logs, deadline, room_bytes - spare_bytes),
            room_bytes,
            spare_bytes,
        )
        if not fits:
            guide.arena.reject(NONE_FITS)
            self._tell(f'no arena: {NONE_FITS}')
        elif plan.memory_limit_bytes < room_bytes:
            self._tell(
                f'planned for {format_bytes(plan.memory_limit_bytes)}, so that the '
                f'arena fits'
            )
        if plan.memory_limit_bytes < room_bytes:
            bound = lower_bound(problem, room_bytes).seconds
            plan = dataclasses.replace(plan, lower_bound_seconds=bound)
        self._draft = None if arena is None else (plan, arena)
        if self._draft is not None and not fits and self._device.offsets.drafts:
            return plan  # with a draft that nearly fits
        return self._leave_to_graph(guide, problem, plan)

    def take_draft(self, plan: Plan) -> Arena | None:
        """The arena that a plan's trace tells, if it was laid out."""
        draft, self._draft = self._draft, None
        return draft[1] if draft is not None and draft[0] is plan else None

    def take(self, guide: Guide, problem: Problem, plan: Plan) -> Plan | None:
        """The plan that another rank has made, if it fits here; else None.

        Args:
            guide: Whose plan it would become.
            problem: Of its iterations here.
            plan: For the same iterations there.
        """
        room_bytes = self.room_bytes(guide)
        problem = fitted(problem, room_bytes)
        if plan.parts != problem.parts:
            return None
        try:
            check_plan(
                problem.profile, plan, room_bytes, self._options.host_limit_bytes
            )
        except PlanError:
            return None
        return plan if self.arena_fits(guide, problem, plan) else None

    def _leave_to_graph(self, guide: Guide, problem: Problem, plan: Plan) -> Plan:
        """With the drops that the next iteration needs, and without needless ones.

        As far as the arena allows it.
        """
        dropped = drop_after_use(problem, plan, self.room_bytes(guide))
        if dropped is not plan and self.arena_fits(guide, problem, dropped):
            return dropped
        for room in ROOMS:
            left = defer_drops(problem, plan, room, self._largest_bytes)
            if left is plan or self.arena_fits(guide, problem, left):
                return left
        return plan

    @property
    def _largest_bytes(self) -> int:
        """Of maps that are left to the graph: a look delays what a GPU does next."""
        return sys.maxsize if self._device.clock.asynchronous else LARGEST_BYTES

    def room_bytes(self, guide: Guide) -> int:
        """What the limit leaves for a guide's plans."""
        return self._options.limit_bytes - guide.foreign.nbytes

    def _spare_bytes(self, guide: Guide) -> int:
        """What plans leave of it, so that their arena has memory."""
        return guide.arena.spare_bytes + self._device.offsets.spare_bytes

    def _needs_arena(self, guide: Guide) -> bool:
        """Whether plans are made so that their arena fits."""
        wanted = self._options.arena and guide.arena.wanted
        return wanted and self._device.offsets.needed

    def arena_fits(self, guide: Guide, problem: Problem, plan: Plan) -> bool:
        """Whether a plan needs no arena, or one that fits as far as its trace tells."""
        if not self._needs_arena(guide):
            return True
        room_bytes = self.room_bytes(guide) - self._spare_bytes(guide)
        logs = logs_of(planned_trace(problem.profile, plan))
        arena = self.lay_out(logs, self.find_deadline(problem), room_bytes)
        if arena.footprint_bytes > room_bytes:
            return False
        self._draft = plan, arena
        return True

    def lay_out(
        self,
        logs: Logs,
        deadline: Deadline,
        enough_bytes: int = 0,
    ) -> Arena:
        """Offsets for what two iterations have allocated.

        Args:
            logs: Of the iterations, or of a plan's trace.
            deadline: The search ends with it.
            enough_bytes: An arena that needs no more is good enough.
        """
        device = self._device
        return lay_out(
            logs,
            device.offsets.block_bytes,
            device.offsets.alignment_bytes,
            device.offsets.moves_in,
            enough_bytes,
            deadline,
        )


def _timely(
    problem: Problem, planner: str, given: dict[str, Any], deadline: Deadline
) -> dict[str, Any]:
    """The options of a planner, so that it takes no more time than is left."""
    if 'time_budget' not in options_of(planner) or not deadline.is_set:
        return given
    seconds = max(deadline.left_seconds, LEAST_BUDGET)
    if given.get('time_budget') is not None:
        return {**given, 'time_budget': min(seconds, given['time_budget'])}
    if planner != DEFAULT:  # its own default is what it needs
        return given
    # With a time alone it would use all of it.
    steps = given.get('steps')
    steps = count_steps(problem) if steps is None else steps
    return {**given, 'steps': steps, 'time_budget': seconds}
