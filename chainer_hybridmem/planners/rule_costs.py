"""What each rule costs: the time of a plan with all rules, and without that one."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planners.make import make_plan
from chainer_hybridmem.records.rules import Rule, RuleCost
from chainer_hybridmem.simulation.obedience import named
from chainer_hybridmem.simulation.problem import Problem, with_rules


def price_rules(
    problem: Problem,
    memory_limit: int | str,
    planner: str,
    seconds: float | None = None,
    **options: Any,
) -> tuple[RuleCost, ...]:
    """What each rule of a problem costs, by one more search for each.

    Args:
        problem: Under its rules.
        memory_limit: As for :func:`.make_plan`.
        planner: Name of the planner.
        seconds: What its plan with all rules takes; None: this is searched, too.
        options: Of the planner.

    Raises:
        InfeasibleError: If there is no plan with all rules.
        OptionError: If the planner cannot obey them.
    """
    if not problem.rules:
        return ()
    if seconds is None:
        seconds = make_plan(problem, memory_limit, planner, **options).predicted_seconds
    return tuple(
        _price(problem, rule, memory_limit, planner, seconds, options)
        for rule in problem.rules
    )


def _price(
    problem: Problem,
    rule: Rule,
    memory_limit: int | str,
    planner: str,
    seconds: float,
    options: dict[str, Any],
) -> RuleCost:
    which = named(rule, problem.maps)
    without = with_rules(problem, tuple(r for r in problem.rules if r is not rule))
    cost = None
    try:
        plan = make_plan(without, memory_limit, planner, **options)
        cost = seconds - plan.predicted_seconds
    except (InfeasibleError, OptionError):  # the search is no worse for a rule more
        pass
    return RuleCost(
        pattern=rule.pattern,
        says=rule.says,
        maps=int(which.sum()),
        nbytes=int(problem.arrays.size[np.flatnonzero(which)].sum()),
        seconds=cost,
        share=cost / seconds if cost and seconds else 0.0,
    )
