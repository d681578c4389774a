"""Plans for operations that can run by several algorithms.

Of an operation's algorithms, faster ones take more workspace.

A workspace is memory like a map that is kept: what one operation takes for speed, maps
must leave for. Both are decided together, as in MONeT (Shah et al., "Memory
optimization for deep networks", 2021), here by search around any planner:

1. Plans with the fastest algorithms whose workspace is no larger than a cap, for a few
   caps.
2. From the best of them, again and again as long as that is faster: the algorithms
   whose seconds and workspace cost least together, at the price that the bound puts on
   a byte at each operation; and the fastest algorithms that fit into the room which the
   plan leaves at each operation.

The bound is that of a problem in which every operation runs in the time of its fastest
algorithm and with the workspace of its smallest: every plan with any algorithms, as
slow as it is, is one of that problem with longer waits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation.fitting import least_loads
from chainer_hybridmem.planning.simulation.problem import Problem

MOST_CAPS = 6
MOST_REFINEMENTS = 4


Choice = dict[int, int]
_Fitting = dict[int, list[int]]


class AlgorithmChoice(Protocol):
    """How an operation can run."""

    @property
    def seconds(self) -> float:
        """How long it takes."""

    @property
    def workspace_bytes(self) -> int:
        """What it needs only while it runs."""


class Chosen(NamedTuple):
    """What has been found best.

    Attributes:
        problem (Problem): With the chosen algorithms.
        plan (Plan): For it.
        choice (dict): By operation, the place of the chosen one among its algorithms.
        tried (int): Choices that have been planned.
        small_seconds (float): Per iteration with the smallest workspaces.
    """

    problem: Problem
    plan: Plan
    choice: Choice
    tried: int = 0
    small_seconds: float = 0.0


def choose_algorithms(
    algorithms: Mapping[int, tuple[AlgorithmChoice, ...]],
    make_problem: Callable[[Choice], Problem],
    make_plan: Callable[[Problem], Plan],
    limit_bytes: int,
) -> Chosen:
    """The algorithms and the plan that are fastest together, of those tried.

    Args:
        algorithms: By operation; each faster than those before it, with more workspace.
        make_problem: What is to be planned if operations run by these algorithms.
        make_plan: Its plan under the limit.
        limit_bytes: Memory limit.

    Raises:
        InfeasibleError: If nothing fits with the smallest workspaces.
    """
    search = _Search(algorithms, make_problem, make_plan)
    smallest = dict.fromkeys(algorithms, 0)
    best = small = search.plan(smallest)
    levels = [
        make_problem({k: min(level, len(found) - 1) for k, found in algorithms.items()})
        for level in range(max(map(len, algorithms.values()), default=0))
    ]
    # Which algorithms fit at all, whatever the plan.
    fitting = search.fitting([least_loads(problem) for problem in levels], limit_bytes)
    for cap in _caps(algorithms):
        best = search.better(best, search.fastest(fitting, cap))
    for _ in range(MOST_REFINEMENTS):
        before = best
        prices = lower_bound(best.problem, limit_bytes).prices
        best = search.better(best, search.cheapest(fitting, prices))
        loads = [loads_of(problem, best.plan) for problem in levels]
        beside = search.fitting(loads, limit_bytes)
        best = search.better(best, search.fastest(beside))
        if best is before:
            break
    seconds = small.plan.predicted_seconds
    return best._replace(tried=len(search.tried), small_seconds=seconds)


class _Search:
    def __init__(
        self,
        algorithms: Mapping[int, tuple[AlgorithmChoice, ...]],
        make_problem: Callable[[Choice], Problem],
        make_plan: Callable[[Problem], Plan],
    ) -> None:
        self.algorithms = algorithms
        self.make_problem = make_problem
        self.make_plan = make_plan
        self.tried: list[Choice] = []

    def fitting(self, loads: list[list[int]], limit_bytes: int) -> _Fitting:
        """Places of the algorithms with which an operation's load is within the limit.

        Args:
            loads: Of every operation, with the first algorithms, the second ones, ...
            limit_bytes: Memory limit.
        """
        return {
            k: [i for i in range(len(algorithms)) if loads[i][k] <= limit_bytes] or [0]
            for k, algorithms in self.algorithms.items()
        }

    def fastest(self, fitting: _Fitting, cap_bytes: float = math.inf) -> Choice:
        """The last algorithm of each operation that fits and is not above a cap."""
        return {
            k: max(
                (i for i in fitting[k] if algorithms[i].workspace_bytes <= cap_bytes),
                default=0,
            )
            for k, algorithms in self.algorithms.items()
        }

    def cheapest(self, fitting: _Fitting, prices: np.ndarray) -> Choice:
        """What costs each operation least, its workspace at its price included.

        Args:
            fitting: See :meth:`fitting`.
            prices: (n,) seconds per byte.
        """
        return {
            k: min(
                fitting[k], key=functools.partial(_cost, algorithms, float(prices[k]))
            )
            for k, algorithms in self.algorithms.items()
        }

    def plan(self, choice: Choice) -> Chosen:
        self.tried.append(choice)
        problem = self.make_problem(choice)
        return Chosen(problem, self.make_plan(problem), choice)

    def better(self, best: Chosen, choice: Choice) -> Chosen:
        """The faster one of the best so far and another choice's plan."""
        if choice in self.tried:
            return best
        try:
            found = self.plan(choice)
        except InfeasibleError:
            return best
        faster = found.plan.predicted_seconds < best.plan.predicted_seconds
        return found if faster else best


def _caps(algorithms: Mapping[int, tuple[AlgorithmChoice, ...]]) -> list[int]:
    sizes = sorted(
        {
            algorithm.workspace_bytes
            for found in algorithms.values()
            for algorithm in found
        }
    )
    count = min(MOST_CAPS, len(sizes))
    return [sizes[(i + 1) * len(sizes) // count - 1] for i in range(count)]


def _cost(algorithms: tuple[AlgorithmChoice, ...], price: float, place: int) -> float:
    return algorithms[place].seconds + price * algorithms[place].workspace_bytes


def loads_of(problem: Problem, plan: Plan) -> list[int]:
    """Load of every operation if a plan for other algorithms is followed, in bytes."""
    fingerprint = problem.profile.fingerprint()
    return check_plan(
        problem.profile, dataclasses.replace(plan, profile_fingerprint=fingerprint)
    )
