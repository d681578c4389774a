"""Makes the plans of a session's guides, and other ones as more becomes known.

A plan is made from a profile, again from the times of the first guided iterations,
again if its arena does not fit or if the program has taken more memory meanwhile;
swap-ins that are late move earlier, and a search in the background may find better.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.execution import Executor
from chainer_hybridmem.planners import DEFAULT, find_planner, make_plan
from chainer_hybridmem.pools import planned_trace
from chainer_hybridmem.pools.arena import Arena, IterationLog, lay_out, logs_of
from chainer_hybridmem.recording.lateness import Lateness
from chainer_hybridmem.records.plan import Action, Plan, Tier
from chainer_hybridmem.search.bound import lower_bound
from chainer_hybridmem.search.feedback import (
    moved_earlier,
    noticeable,
    with_measured_link,
)
from chainer_hybridmem.search.improvement import Improvement
from chainer_hybridmem.session.arena_planning import MOST_SLOWDOWN, plan_with_arena
from chainer_hybridmem.session.guide import Guide
from chainer_hybridmem.session.options import Options
from chainer_hybridmem.simulation import Problem, simulate
from chainer_hybridmem.simulation.fitting import fitted
from chainer_hybridmem.units import format_bound, format_bytes, format_seconds

Rest = ParamSpec('Rest')
Result = TypeVar('Result')

FEEDBACK_SHARES = (1.0, 0.5, 0.25, 0.125)  # of the time that a swap-in was late
SPARE_SHARE = 400  # of the limit, kept free once an arena has not fitted
LEAST_GAIN = 0.005  # of the time, for which a plan is changed under way
TOO_SLOW = f'none fits the limit for {MOST_SLOWDOWN:.0%} more time'


def _counted(
    method: Callable[Concatenate[Planning, Guide, Rest], Result],
) -> Callable[Concatenate[Planning, Guide, Rest], Result]:
    """Decorates what works for a guide: its time is told as planning time."""

    @functools.wraps(method)
    def counted(
        self: Planning, guide: Guide, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> Result:
        with guide.spent.counted():
            return method(self, guide, *args, **kwargs)

    return counted


class Planning:
    """Makes and changes the plans of one session.

    Args:
        device (Device): Where arenas are.
        executor (Executor): Must let go of a plan before another one is followed.
        options (Options): What is wanted; its planner may change between iterations.
        tell (callable): Takes a line of progress.
        observe (callable): Takes every problem before it is planned.
        keep (callable): Takes every guide whose plan is another one.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        options: Options,
        tell: Callable[[str], None],
        observe: Callable[[Problem], None],
        keep: Callable[[Guide], None],
    ) -> None:
        self.options = options
        self._device = device
        self._executor = executor
        self._tell = tell
        self._observe = observe
        self._keep = keep
        self.improvements: list[Improvement] = []

    @_counted
    def plan(self, guide: Guide) -> None:
        """The first plan of a guide that has been profiled."""
        options = self.options
        problem = guide.make_problem(
            options.cross_iteration, options.host_limit_bytes, options.splitting
        )
        self._observe(problem)
        guide.begin_placing()
        try:
            plan = self.make_plan(guide, problem)
        except InfeasibleError as error:
            if self.options.planner != DEFAULT:  # this one was asked for
                raise
            guide.give_up()
            message = f'{error} Such iterations go on without a plan, in passive mode.'
            self._tell(message)
            warnings.warn(f'hybridmem: {message}', stacklevel=2)
            return
        self.follow(guide, problem, plan)

    @_counted
    def retime(self, guide: Guide) -> None:
        """A plan from the times of guided iterations, if it is better for them."""
        old = guide.plan
        assert old is not None
        problem = guide.make_timed_problem()
        seconds = simulate(problem, old).total_seconds
        plan = None if guide.timed_again else self._faster(guide, problem, seconds)
        if plan is None:
            plan = dataclasses.replace(
                old,
                predicted_seconds=seconds,
                in_core_seconds=problem.in_core_seconds,
                lower_bound_seconds=lower_bound(problem, self._room(guide)).seconds,
            )
        else:  # its own times tell more
            guide.timed_again = True
            guide.timings.clear()
        self.follow(guide, problem, plan, old)

    def _faster(self, guide: Guide, problem: Problem, seconds: float) -> Plan | None:
        """The planner's plan for new times if it is clearly better than the old one.

        Or if only times have spoken against an arena, and these do not.
        """
        wanted, refusal = before = guide.wants_arena, guide.refusal
        guide.wants_arena = wanted or refusal == TOO_SLOW
        try:
            plan = self.make_plan(guide, problem)
        except InfeasibleError:  # it was replanned with another planner
            plan = None
        if plan is not None:
            gained = seconds > plan.predicted_seconds * (1 + LEAST_GAIN)
            if gained or (guide.wants_arena and not wanted):
                return plan
        guide.wants_arena, guide.refusal = before  # not of a plan nobody follows
        return None

    @_counted
    def adopt(self, guide: Guide) -> None:
        """Takes over a plan found meanwhile, or begins to look for one.

        One is taken over only now and then: see :attr:`.Guide.may_change`.
        """
        problem, plan = guide.problem, guide.plan
        assert problem is not None and plan is not None
        current = next((i for i in self.improvements if i.problem is problem), None)
        if current is not None:
            better = current.better(plan) if guide.may_change else None
            if better is not None:
                guide.count_change()
                guide.spent.add(better.planning_seconds - plan.planning_seconds)
                if self._arena_fits(guide, problem, better):
                    self.follow(guide, problem, better)
        elif find_planner(self.options.planner).improvable and not any(
            other.running for other in self.improvements
        ):
            found = Improvement(problem, plan.memory_limit_bytes, plan)
            self.improvements.append(found)
            found.start()

    def stop_improving(self) -> None:
        """Ends the searches in the background."""
        for improvement in self.improvements:
            improvement.close()
        self.improvements.clear()

    def _stop_improving(self, problem: Problem | None) -> None:
        """Ends the search for a problem that nobody has any more: others may begin."""
        for improvement in [i for i in self.improvements if i.problem is problem]:
            improvement.close()
            self.improvements.remove(improvement)

    @_counted
    def make_room(self, guide: Guide, foreign_bytes: int) -> None:
        """Other plans because iterations evict again and again.

        The program holds more than when it was profiled: the plan leaves room for that,
        and for twice of what has been added since the last time. If that is not why,
        the iteration is profiled once more.

        Args:
            guide: Whose plan does not fit any more.
            foreign_bytes: What the program holds beyond its profile.
        """
        guide.evicting = 0
        if guide.refused_bytes is not None and foreign_bytes >= guide.refused_bytes:
            return
        problem, former_bytes = guide.problem, guide.foreign_bytes
        assert problem is not None
        if foreign_bytes <= former_bytes:
            if not guide.profiled_again:
                self._tell('more memory is used than recorded: profiled again')
                self._executor.settle()
                guide.profile_again()
            return
        options = self.options
        for reserve_bytes in (2 * (foreign_bytes - former_bytes), 0):
            if foreign_bytes + reserve_bytes >= options.limit_bytes:
                continue
            guide.foreign_bytes = foreign_bytes + reserve_bytes
            guide.begin_placing()
            try:
                plan = self.make_plan(guide, problem)
            except InfeasibleError:
                continue
            self._tell(
                f'{format_bytes(foreign_bytes)} more are held than in the profile: '
                f'planned again with {format_bytes(guide.foreign_bytes)} left free'
            )
            guide.timings.clear()
            self.follow(guide, problem, plan)
            return
        guide.foreign_bytes, guide.refused_bytes = former_bytes, foreign_bytes
        self._tell(
            f'{format_bytes(foreign_bytes)} more are held than in the profile: no plan '
            f'fits beside them, iterations go on evicting'
        )

    def _room(self, guide: Guide) -> int:
        return self.options.limit_bytes - guide.foreign_bytes

    # -- feedback -------------------------------------------------------------
    @_counted
    def move_late(self, guide: Guide, lateness: Lateness) -> None:
        """Swap-ins that are late again and again begin earlier from now on.

        Only now and then, like :meth:`adopt`.
        """
        problem, plan = guide.problem, guide.plan
        assert problem is not None and plan is not None
        late = guide.feedback.take(noticeable(problem, lateness.late_seconds()))
        if not late or not guide.may_change:
            return
        problem = with_measured_link(
            problem,
            plan,
            lateness.copy_seconds('swap-out'),
            lateness.copy_seconds('swap-in'),
        )
        moved = self._moved_earlier(guide, problem, plan, late)
        if moved is plan:
            guide.feedback.settle(late)
            return
        self._tell(f'{len(late)} swap-ins were late: they begin earlier')
        guide.count_change()
        bound = lower_bound(problem, self._room(guide)).seconds
        self.follow(
            guide, problem, dataclasses.replace(moved, lower_bound_seconds=bound)
        )

    def _moved_earlier(
        self, guide: Guide, problem: Problem, plan: Plan, late: dict[int, float]
    ) -> Plan:
        """The plan with triggers as much earlier as the arena lets them be."""
        for share in FEEDBACK_SHARES:
            part = {storage: share * seconds for storage, seconds in late.items()}
            moved = moved_earlier(problem, plan, part)
            if moved is plan or self._arena_fits(guide, problem, moved):
                return moved
        return plan

    # -- arena ----------------------------------------------------------------
    def _arena_fits(self, guide: Guide, problem: Problem, plan: Plan) -> bool:
        """Whether a plan needs no arena, or one that fits as far as its trace tells."""
        if not (self.options.arena and guide.wants_arena):
            return True
        room_bytes = self._room(guide) - guide.spare_bytes
        logs = logs_of(planned_trace(problem.profile, plan))
        return self._arena_of(logs, room_bytes).footprint_bytes <= room_bytes

    @_counted
    def lay_out(self, guide: Guide) -> None:
        """Places for a plan's iterations; another plan if they exceed the limit."""
        arena = self._arena_of((guide.logs[0], guide.logs[1]))
        guide.logs.clear()
        excess = arena.footprint_bytes - self.options.limit_bytes
        if excess <= 0:
            guide.arena = arena
            self._tell(
                f'arena: {arena.placed} allocations placed in '
                f'{format_bytes(arena.slab_bytes)}, '
                f'{arena.layout.competitive_ratio:.3f} of their peak load; '
                f'{format_bytes(arena.side_bytes)} beside it; found in '
                f'{format_seconds(guide.spent.tell())}'
            )
            return
        problem = guide.problem
        assert problem is not None
        self._tell(f'arena: {format_bytes(excess)} more than the limit')
        if guide.spare_bytes:  # once more, not twice
            guide.refuse_arena('its allocations have exceeded the limit twice')
        guide.spare_bytes += excess + self.options.limit_bytes // SPARE_SHARE
        guide.timings.clear()
        plan = self.make_plan(guide, problem)
        self.follow(guide, problem, plan)

    def _arena_of(
        self, logs: tuple[IterationLog, IterationLog], enough_bytes: int = 0
    ) -> Arena:
        device = self._device
        return lay_out(
            logs,
            device.block_bytes,
            device.alignment_bytes,
            device.moves_in,
            enough_bytes,
        )

    @_counted
    def make_plan(
        self,
        guide: Guide,
        problem: Problem,
        planner: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Plan:
        """A plan for the limit, with an arena if there is one that fits.

        Args:
            guide: Whose plan it becomes.
            problem: Of its iterations.
            planner: Its name; None: the one wished for, with its options.
            options: Of that planner.

        Raises:
            InfeasibleError: If there is no plan, with or without an arena.
        """
        if planner is None:
            planner = self.options.planner
            options = self.options.planner_options
        chosen, given = planner, options or {}
        room_bytes = self._room(guide)
        problem = fitted(problem, room_bytes)

        def make_plan_for(limit_bytes: int) -> Plan:
            return make_plan(problem, limit_bytes, chosen, **given)

        if not (self.options.arena and guide.wants_arena):
            return make_plan_for(room_bytes)
        plan, fits = plan_with_arena(
            problem,
            make_plan_for,
            lambda logs: self._arena_of(logs, room_bytes - guide.spare_bytes),
            room_bytes,
            guide.spare_bytes,
            optional=self._device.moves_in,
        )
        if not fits:
            guide.wants_arena, guide.refusal = False, TOO_SLOW
            self._tell(f'no arena: {TOO_SLOW}')
        elif plan.memory_limit_bytes < room_bytes:
            self._tell(
                f'planned for {format_bytes(plan.memory_limit_bytes)}, so that the '
                f'arena fits'
            )
        if plan.memory_limit_bytes < room_bytes:
            bound = lower_bound(problem, room_bytes).seconds
            plan = dataclasses.replace(plan, lower_bound_seconds=bound)
        return plan

    def reserve(self, guide: Guide) -> None:
        """Takes the host memory that the guide's plan needs."""
        if guide.plan is not None and guide.problem is not None:
            profile = guide.problem.profile
            ram, disk = (guide.plan.tier_bytes(profile, tier) for tier in Tier)
            self._device.reserve(ram, disk)

    @_counted
    def follow(
        self, guide: Guide, problem: Problem, plan: Plan, old: Plan | None = None
    ) -> None:
        """From the next iteration on a guide has this plan.

        Args:
            guide: Between two iterations.
            problem: What has been planned.
            plan: For it.
            old: What it has followed so far, if that was for other times.
        """
        self._executor.settle()
        if guide.problem is not problem:
            self._stop_improving(guide.problem)
        had_places = guide.arena is not None
        guide.follow(problem, plan)
        if had_places and guide.arena is None:
            # Its last iteration is over: what it keeps is outside of it.
            self._device.release_places()
        self.reserve(guide)
        self._keep(guide)
        took = format_seconds(guide.spent.tell())
        if old is not None and plan.maps == old.maps:
            self._tell(
                f'timed: the same plan, found in {took}; predicted '
                f'{format_seconds(plan.predicted_seconds)} per iteration, bound '
                f'{format_bound(plan.lower_bound_seconds, plan.gap)}'
            )
            return
        self._tell(
            f'planned in {took} '
            f'({plan.simulations} simulations): {plan.count(Action.KEEP)} keep, '
            f'{plan.count(Action.SWAP)} swap, {plan.count(Action.RECOMPUTE)} '
            f'recompute; predicted {format_seconds(plan.predicted_seconds)} per '
            f'iteration, bound {format_bound(plan.lower_bound_seconds, plan.gap)}, '
            f'peak {format_bytes(plan.predicted_peak_bytes)}'
        )
