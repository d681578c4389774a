"""Makes the plans of a session's guides, and other ones as more becomes known.

A plan is made from a profile, again from the times of the first guided iterations, and
again if its arena does not fit or if the program has taken more memory meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.errors import InfeasibleError, OptionError, in_flags
from chainer_hybridmem.planning.planners import DEFAULT
from chainer_hybridmem.planning.planners.make import price_rules
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.rules import RuleCost
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation import Problem, simulate
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.planning.machine_plans import MachinePlans
from chainer_hybridmem.training.session.planning.plan_maker import (
    NONE_FITS,
    PlanMaker,
)
from chainer_hybridmem.training.session.setting.link_measurement import LinkMeasurement
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.planning_time import (
    count_time,
    outside_limit,
)
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.training.session.setting.session_thread import warn_user
from chainer_hybridmem.units import (
    format_bound,
    format_bytes,
    format_count,
    format_seconds,
)


class RulePrices:
    """Searches them once for each plan.

    Args:
        options (Options): What is wanted.
        maker (PlanMaker): Knows what the limit leaves.
    """

    def __init__(self, options: Options, maker: PlanMaker) -> None:
        self._options = options
        self._maker = maker
        self._found: tuple[Plan | None, tuple[RuleCost, ...]] = (None, ())

    def find(self, guide: Guide | None) -> tuple[RuleCost, ...]:
        """What each rule costs that a guide's plan obeys."""
        if guide is None or guide.plan is None or guide.problem is None:
            return ()
        plan, costs = self._found
        if plan is not guide.plan:
            costs = outside_limit(self._search, guide, guide.problem, guide.plan)
            self._found = (guide.plan, costs)
        return costs

    def _search(
        self, guide: Guide, problem: Problem, plan: Plan
    ) -> tuple[RuleCost, ...]:
        options, room_bytes = self._options, self._maker.room_bytes(guide)
        own = options.planner_options
        try:
            return price_rules(problem, room_bytes, options.planner, **own)
        except (InfeasibleError, OptionError):  # a plan of former times or planners
            seconds = plan.predicted_seconds
            return price_rules(problem, room_bytes, options.planner, seconds, **own)


class HostShare:
    """Under a host limit, one signature has all host memory while it runs.

    Args:
        runtime (Runtime): Its executor uses host copies.
        guidebook (GuideBook): Its guides have host copies.
        links (LinkMeasurement): Need host memory to be measured.
        planning (Planning): Knows what a plan needs.
    """

    def __init__(
        self,
        runtime: Runtime,
        guidebook: GuideBook,
        links: LinkMeasurement,
        planning: Planning,
    ) -> None:
        self._limit_bytes = runtime.options.host_limit_bytes
        self._executor = runtime.executor
        self._guidebook = guidebook
        self._links = links
        self._planning = planning
        self._user: Guide | None = None  # whose copies the host holds

    def give_to(self, guide: Guide | None) -> None:
        """An iteration begins that follows this guide."""
        if self._limit_bytes is None:
            return
        if self._limit_bytes > 0:
            self._links.measure_once()  # while there is room
        if guide is self._user:
            return
        self._executor.settle()
        for other in self._guidebook:
            if other is not guide:
                other.forget_copies()
        self._user = guide
        if guide is not None:
            self._planning.reserve(guide)


LONG_SECONDS = 3.0  # that a program waits without being told why
SPARE_SHARE = 400  # of the limit, kept free once an arena has not fitted
LEAST_GAIN = 0.005  # of the time, for which a plan is changed under way


class Planning:
    """Makes and changes the plans of one session.

    Args:
        runtime (Runtime): Lets go of a plan before another one is followed.
        observe (callable): Takes every problem before it is planned.
        keep (callable): Takes every guide whose plan is another one.

    Attributes:
        maker (PlanMaker): Makes each of them.
        node (MachinePlans): Shares them with other ranks.
        rule_prices (RulePrices): What rules cost.
        exceeds_limit (callable): Whether iterations exceed the limit, to find out what
            does.
    """

    def __init__(
        self,
        runtime: Runtime,
        observe: Callable[[Problem], None],
        keep: Callable[[Guide], None],
    ) -> None:
        self._device = runtime.device
        self._executor = runtime.executor
        self._options = runtime.options
        self._rules = runtime.rules
        self._splitter = runtime.splitter
        self._tell = runtime.tell
        self._observe = observe
        self._keep = keep
        self.maker = PlanMaker(runtime)
        self.node = MachinePlans(runtime, self.maker)
        self.rule_prices = RulePrices(runtime.options, self.maker)
        self.exceeds_limit: Callable[[], bool] = lambda: False
        self._parts_help = True  # as far as is known

    @count_time
    def plan(self, guide: Guide) -> None:
        """The first plan of a guide that has been profiled."""
        options = self._options
        problem = guide.make_problem(options, self._rules.choose)
        self._observe(problem)
        self._tell_wait(problem)
        try:
            with guide.planning_anew():
                plan = self.node.decide(
                    'plan', guide, problem, lambda: self.maker.make_plan(guide, problem)
                )
        except InfeasibleError as error:
            of_host = error.limit_bytes != options.limit_bytes
            if self.exceeds_limit() and not of_host:  # whose error tells more
                guide.give_up()
                return
            if not of_host and self._may_fit_in_parts(guide):
                self._tell('no plan fits with functions so: profiled again, in parts')
                guide.profile_again(in_parts=True)
                return
            seen = (
                f'That is what plans need: without one, iterations like this have '
                f'trained inside the limit of {options.limit_bytes} bytes'
            )
            if options.planner != DEFAULT:  # this one was asked for
                advice = f'{seen}, and go on so with planner={DEFAULT!r}.'
                self._tell(advice)
                if sys.version_info >= (3, 11):
                    error.add_note(in_flags(advice))
                raise
            guide.give_up()
            message = f'{error} {seen}, and go on without a plan, in passive mode.'
            self._tell(message)
            warn_user(message)
            return
        self.follow(guide, problem, plan)

    def _may_fit_in_parts(self, guide: Guide) -> bool:
        """Whether another recording may tell of functions that fit in parts.

        Iterations without a plan run in parts what does not fit as a whole, but need
        less than a plan does, which holds all that an operation reads throughout.
        """
        self._parts_help = self._parts_help and not guide.tries_parts
        return self._parts_help and bool(self._splitter.kinds)

    def _tell_wait(self, problem: Problem) -> None:
        """Says that the program may wait for a plan, if that is long."""
        seconds = self.maker.find_deadline(problem).left_seconds
        if LONG_SECONDS < seconds < math.inf:
            self._tell(f'planning, for about {format_seconds(seconds)} at most')

    @count_time
    def replan(self, guide: Guide, planner: str, options: dict[str, Any]) -> Plan:
        """A plan that the program has asked for.

        Args:
            guide: Has a problem.
            planner: Name of the planner.
            options: Of that planner.

        Raises:
            InfeasibleError: If the planner finds none; the old plan stays.
        """
        problem = guide.problem
        assert problem is not None
        self.maker.begin_pause()
        with guide.planning_anew():
            plan = self.node.decide(
                f'replan {planner} {sorted(options.items())}',
                guide,
                problem,
                lambda: self.maker.make_plan(guide, problem, planner, options),
            )
        self._options.plan_with(planner, options)
        self.follow(guide, problem, plan)
        return plan

    def follow_node(self, guide: Guide) -> None:
        """Takes over what has become of the plan of the node, if anything has.

        After every guided iteration, before another plan is made in it.
        """
        problem = guide.problem
        assert problem is not None
        plan = self.node.end_iteration(guide, problem)
        if plan is not None:
            self._tell('the plan of the node has changed')
            self.follow(guide, problem, plan)

    # -- times ----------------------------------------------------------------
    @count_time
    def retime(self, guide: Guide) -> None:
        """A plan from the times of guided iterations, if it is better for them.

        Another rank's plan is predicted anew only: that rank times it, too.
        """
        old = guide.plan
        assert old is not None
        problem = guide.make_timed_problem()
        seconds = simulate(problem, old).total_seconds
        plan = None
        if not guide.pace.timed_again and not self.node.is_followed(guide):
            plan = self._find_faster(guide, problem, seconds)
        if plan is None:
            plan = dataclasses.replace(
                old,
                predicted_seconds=seconds,
                in_core_seconds=problem.in_core_seconds,
                lower_bound_seconds=self._lower_bound_seconds(guide, problem),
            )
        else:
            guide.pace.change_timed_plan()
            self.node.announce(guide, problem, plan)
        self.follow(guide, problem, plan, old)

    def _find_faster(
        self, guide: Guide, problem: Problem, seconds: float
    ) -> Plan | None:
        """The planner's plan for new times if it is clearly better than the old one.

        Or if it has an arena that fits, where no plan had one. If the bound for these
        times leaves nothing to gain, none is made.
        """
        bound_seconds = self._lower_bound_seconds(guide, problem)
        if guide.arena.wanted and seconds <= bound_seconds * (1 + LEAST_GAIN):
            return None
        before = guide.arena.reconsider(NONE_FITS)
        try:
            plan = self.maker.make_plan(guide, problem)
        except InfeasibleError:  # it was replanned with another planner
            plan = None
        if plan is not None:
            gained = seconds > plan.predicted_seconds * (1 + LEAST_GAIN)
            was_wanted, _ = before
            if gained or (guide.arena.wanted and not was_wanted):
                return plan
        guide.arena.restore(before)  # the plan that changed it is not followed
        return None

    def _lower_bound_seconds(self, guide: Guide, problem: Problem) -> float:
        return lower_bound(problem, self.maker.room_bytes(guide)).seconds

    # -- memory ---------------------------------------------------------------
    @count_time
    def make_room(self, guide: Guide, held_bytes: int, older_waits: bool) -> None:
        """Other plans because iterations evict again and again.

        The program holds more than when it was profiled: the plan leaves room for that,
        and for twice of what has been added since the last time. If that is not why,
        the iteration is profiled once more. Where older graphs wait for their backward,
        their maps come and go between those of the plan, whatever it was made from:
        another profile would be in vain.

        Args:
            guide: Whose plan does not fit any more.
            held_bytes: What the program holds beyond its profile.
            older_waits: Whether an older graph has a backward still to come.
        """
        foreign = guide.foreign
        if foreign.is_refused(held_bytes):
            return
        problem, former_bytes = guide.problem, foreign.nbytes
        assert problem is not None
        if held_bytes <= former_bytes:
            if not (guide.profiled_again or older_waits):
                self._tell('more memory is used than recorded: profiled again')
                self._executor.settle()
                guide.profile_again()
            return
        for reserve_bytes in (2 * (held_bytes - former_bytes), 0):
            if held_bytes + reserve_bytes >= self._options.limit_bytes:
                continue
            foreign.nbytes = held_bytes + reserve_bytes
            try:
                with guide.planning_anew():
                    plan = self._change(guide, problem)
            except InfeasibleError:
                continue
            self._tell(
                f'{format_bytes(held_bytes)} more are held than in the profile: '
                f'planned again with {format_bytes(foreign.nbytes)} left free'
            )
            guide.pace.forget_times()
            self.follow(guide, problem, plan)
            return
        foreign.refuse(held_bytes, former_bytes)
        self._tell(
            f'{format_bytes(held_bytes)} more are held than in the profile: no plan '
            f'fits beside them, iterations go on evicting'
        )

    @count_time
    def lay_out(self, guide: Guide) -> None:
        """Offsets for a plan's iterations; another plan if they exceed the limit."""
        problem = guide.problem
        assert problem is not None
        deadline = self.maker.find_deadline(problem)
        arena = self.maker.lay_out(guide.arena.take_logs(), deadline)
        limit_bytes = self._options.limit_bytes
        excess = arena.footprint_bytes - limit_bytes
        if excess <= 0 or not self._device.offsets.needed:
            guide.arena.lay_out(arena)
            self._tell(
                f'arena: {format_count(arena.placed, "allocation")} placed in '
                f'{format_bytes(arena.slab_bytes)}, '
                f'{arena.layout.competitive_ratio:.3f} of their peak load; '
                f'{format_bytes(arena.side_bytes)} beside it; found in '
                f'{format_seconds(guide.spent.tell())}'
            )
            return
        self._tell(f'arena: {format_bytes(excess)} more than the limit')
        self._leave_for_arena(guide, excess)

    @count_time
    def find_place(self, guide: Guide) -> None:
        """Another plan because what the pool keeps leaves no memory for the arena."""
        missing = guide.arena.missing_bytes
        self._tell(f'arena: {format_bytes(missing)} too few beside what the pool keeps')
        self._leave_for_arena(guide, missing)

    def _leave_for_arena(self, guide: Guide, missing_bytes: int) -> None:
        problem = guide.problem
        assert problem is not None
        guide.arena.exceed(missing_bytes + self._options.limit_bytes // SPARE_SHARE)
        guide.pace.forget_times()
        self.follow(guide, problem, self._change(guide, problem))

    def _change(self, guide: Guide, problem: Problem) -> Plan:
        """Another plan because of memory, which the node may need as well."""
        return self.node.change(
            guide, problem, lambda: self.maker.make_plan(guide, problem)
        )

    def reserve(self, guide: Guide) -> None:
        """Takes the host memory that the guide's plan needs."""
        host_bytes = guide.find_host_bytes()
        if host_bytes is not None:
            self._device.copies.reserve(*host_bytes)

    # -- the next iteration ---------------------------------------------------
    @count_time
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
        had_arena = guide.arena.offsets is not None
        guide.follow(problem, plan)
        draft = self.maker.take_draft(plan)
        if self._device.offsets.drafts and guide.arena.laid_out is None:
            guide.arena.draft = draft or guide.arena.draft
        if had_arena and guide.arena.offsets is None:
            # Its last iteration is over: what it keeps is outside of it.
            self._device.offsets.release()
        self.reserve(guide)
        self._keep(guide)
        took = format_seconds(guide.spent.tell())
        bound = format_bound(plan.lower_bound_seconds, plan.gap)
        predicted = f'predicted {format_seconds(plan.predicted_seconds)} per iteration'
        if old is not None and (plan.maps, plan.sources) == (old.maps, old.sources):
            self._tell(
                f'timed: the same plan, found in {took}; {predicted}, bound {bound}'
            )
            return
        self._tell(
            f'planned in {took} ({format_count(plan.simulations, "simulation")}): '
            f'{plan.count(Action.KEEP)} keep, {plan.count(Action.SWAP)} swap, '
            f'{plan.count(Action.RECOMPUTE)} recompute; {predicted}, bound {bound}, '
            f'peak {format_bytes(plan.predicted_peak_bytes)}'
        )
