"""What the rules of a session cost its plans."""

from __future__ import annotations

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planners.make import price_rules
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.records.rules import RuleCost
from chainer_hybridmem.session.guides.guide import Guide
from chainer_hybridmem.session.planning.plan_maker import PlanMaker
from chainer_hybridmem.session.setting.options import Options
from chainer_hybridmem.session.setting.uncounted import call_uncounted
from chainer_hybridmem.simulation import Problem


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
            costs = call_uncounted(self._search, guide, guide.problem, guide.plan)
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
