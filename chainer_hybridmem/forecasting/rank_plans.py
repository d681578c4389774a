"""Plans for the processes of a node that share one link to host memory.

Annealing is random: now and then it finds a better plan for a slow link than for a fast
one. So plans are made for every number of processes, and each of them is a candidate
for all: it is timed again on the link as that number has it, and the fastest is taken.
Where copies cost neither compute nor each other anything, no plan is slower on a faster
link. Then the seconds taken never grow with the bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.planners.make import make_plan
from chainer_hybridmem.planning.planners.registry import DEFAULT, options_of
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation import Problem, simulate
from chainer_hybridmem.planning.simulation.problem import with_parts

SEEDS = 3
MORE = {'steps': 400_000}  # of planners that draw, where they plan again
NEAR = 0.01  # of the bound: a plan that close is not searched for again


class RankPlans(NamedTuple):
    """Plans by the number of processes on the link.

    Attributes:
        made (dict): As the planner makes them, each for its number alone; those that
            it finds none for are missing.
        best (dict): The fastest of all plans that were made, for each number. Where it
            was made for another, ``options['made_for_ranks']`` says for which.
    """

    made: dict[int, Plan]
    best: dict[int, Plan]


def retime(problem: Problem, plan: Plan) -> Plan:
    """A plan with its actions and positions, and the times of another problem.

    Memory follows from positions, so it fits the limit that it was made for.

    Args:
        problem: The same operations and maps with other times or another link.
        plan: Made for any link.

    Raises:
        PlanError: If the plan is for another profile.
    """
    there = with_parts(problem, plan.parts)
    return dataclasses.replace(
        plan,
        predicted_seconds=simulate(there, plan).total_seconds,
        in_core_seconds=problem.in_core_seconds,
        lower_bound_seconds=lower_bound(there, plan.memory_limit_bytes).seconds,
    )


def plan_ranks(
    problems: Mapping[int, Problem],
    limit_bytes: int,
    planner: str = DEFAULT,
    seeds: int = SEEDS,
    tell: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> RankPlans:
    """The best plan for each number of processes.

    Args:
        problems: One process, by the number that share its link. They differ in times
            and links only.
        limit_bytes: Memory limit of each process.
        planner: Name of the planner.
        seeds: How often planners that draw plan for a number, at most. Again only
            while the best plan is more than 1 % above its bound, and while the last
            time has found a better one.
        tell: Is told what is planned next.
        options: Of the planner.

    Returns:
        RankPlans: The same in every process, if the planner is without a time budget.

    Raises:
        InfeasibleError: If no plan fits for any number.
        OptionError: As :func:`make_plan` does.
        UnknownNameError: If there is no such planner.
    """
    made: dict[int, Plan] = {}
    best: dict[int, Plan] = {}
    stuck: set[int] = set()
    refusal: InfeasibleError | None = None
    drawn = {'seed', 'steps'} <= set(options_of(planner)) and 'seed' not in options
    for seed in range(seeds if drawn else 1):
        # The most processes first: what is found for them is good for fewer, too.
        for n in sorted(problems, reverse=True):
            if n in best and seed and (best[n].gap <= NEAR or n in stuck):
                continue
            before = best.get(n)
            tell(
                f'planning with {planner} for {n} on the link' + ', again' * bool(seed)
            )
            own = {**MORE, 'seed': seed, **options} if seed else options
            try:
                plan = make_plan(problems[n], limit_bytes, planner, **own)
            except InfeasibleError as error:
                refusal = refusal or error
                continue
            made.setdefault(n, plan)
            for other, problem in problems.items():
                there = plan if other == n else _carried(problem, plan, n)
                best[other] = _faster(best.get(other), there, other == n)
            if seed and before is best[n]:
                stuck.add(n)
    if not best and refusal is not None:
        raise refusal
    return RankPlans(made, best)


def _carried(problem: Problem, plan: Plan, ranks: int) -> Plan:
    options = {**plan.options, 'made_for_ranks': ranks}
    return dataclasses.replace(retime(problem, plan), options=options)


def _faster(old: Plan | None, new: Plan, own: bool) -> Plan:
    """The faster one; where they are equal the one made for this number."""
    if old is None or new.predicted_seconds < old.predicted_seconds:
        return new
    first = own and 'made_for_ranks' in old.options
    return new if first and new.predicted_seconds == old.predicted_seconds else old
