"""``hybridmem estimate --algorithms``: how convolutions run, decided with the plan."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from chainer_hybridmem.estimation import Estimator
    from chainer_hybridmem.estimation.algorithms import Algorithm, Algorithms
    from chainer_hybridmem.records.profile import Profile
    from chainer_hybridmem.simulation import Problem

SECONDS = 'small_workspace_seconds', 'iteration_seconds', 'lower_bound_seconds'


class Decided(NamedTuple):
    """What is planned further, and what to tell of it.

    Attributes:
        problem (Problem): With the chosen algorithms.
        figures (dict): Plain values; None for seconds if nothing fits.
    """

    problem: Problem
    figures: dict[str, Any]


def decide(
    estimator: Estimator,
    batchsize: int,
    make_problem: Callable[[Profile], Problem],
    choose_limit: Callable[[Problem], int],
    planner: str,
) -> Decided:
    """Chooses the algorithm of every convolution together with the plan.

    Args:
        estimator: Knows the algorithms.
        batchsize: Examples in the batch.
        make_problem: What is to be planned of a profile.
        choose_limit: Memory limit in bytes.
        planner: Its name.

    Raises:
        OptionError: If the device leaves no choice.
    """
    from chainer_hybridmem.planners import make_plan
    from chainer_hybridmem.planners.ways import choose_ways
    from chainer_hybridmem.search.bound import lower_bound

    algorithms = estimator.algorithms(batchsize)

    def problem_of(choice: dict[int, int]) -> Problem:
        chosen = {k: algorithms[k][place] for k, place in choice.items()}
        return make_problem(estimator.profile(batchsize, chosen))

    choice = dict.fromkeys(algorithms, 0)
    problem = problem_of(choice)
    limit_bytes = choose_limit(problem)
    seconds: dict[str, float | None] = dict.fromkeys(SECONDS)
    try:
        found = choose_ways(
            algorithms,
            problem_of,
            lambda problem: make_plan(problem, limit_bytes, planner),
            limit_bytes,
        )
    except InfeasibleError:
        pass  # the table says why
    else:
        problem, choice = found.problem, found.choice
        everything = make_problem(estimator.profile(batchsize, _ideal(algorithms)))
        bound = lower_bound(everything, limit_bytes).seconds
        told = found.small_seconds, found.plan.predicted_seconds, bound
        seconds = dict(zip(SECONDS, told, strict=True))
    chosen = [algorithms[k][place] for k, place in choice.items()]
    smallest = [ways[0].workspace_bytes for ways in algorithms.values()]
    return Decided(
        problem,
        {
            'operations': dict(collections.Counter(way.name for way in chosen)),
            'workspace_bytes': max((w.workspace_bytes for w in chosen), default=0),
            'small_workspace_bytes': max(smallest, default=0),
            **seconds,
        },
    )


def _ideal(algorithms: Algorithms) -> dict[int, Algorithm]:
    """As fast as the fastest and as small as the smallest: no choice is better."""
    return {
        k: ways[-1]._replace(workspace_bytes=ways[0].workspace_bytes)
        for k, ways in algorithms.items()
    }


def describe(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for people."""
    counts = sorted(figures['operations'].items(), key=lambda item: -item[1])
    largest = format_bytes(figures['workspace_bytes'])
    rows = [
        ('algorithms', ', '.join(f'{count} {name}' for name, count in counts)),
        ('workspaces', f'up to {largest}'),
    ]
    chosen, small = figures['iteration_seconds'], figures['small_workspace_seconds']
    if chosen is not None:
        bound = figures['lower_bound_seconds']
        rows[1] = (
            'workspaces',
            f'up to {largest}: {format_seconds(chosen)} / iteration; with '
            f'{format_bytes(figures["small_workspace_bytes"])} '
            f'{format_seconds(small)} ({small / chosen - 1:+.1%})',
        )
        gap = f'{chosen / bound - 1:.1%}' if bound else '0.0%'
        rows.append(('any algorithms', f'bound {format_seconds(bound)}, gap {gap}'))
    return rows
