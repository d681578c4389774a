"""Algorithms of operations decided together with the plan."""

import dataclasses
import itertools
import random
from typing import NamedTuple

import pytest
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.forecasting.algorithm_choices import choose_algorithms
from chainer_hybridmem.forecasting.estimation.structure import (
    assemble,
    events_by_operation,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Category, Storage
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

STEPS = 3000
OPERATIONS = 4  # that have several algorithms


class Timed(NamedTuple):
    seconds: float
    workspace_bytes: int


def with_algorithms(profile, algorithms):
    """The profile with operations that take so long and need so much."""
    storages, groups = list(profile.storages), events_by_operation(profile)
    for k, algorithm in algorithms.items():
        if algorithm.workspace_bytes == 0:
            continue
        storages.append(
            Storage(
                id=len(storages),
                nbytes=algorithm.workspace_bytes,
                category=Category.WORKSPACE,
                label='workspace',
                producer=k,
                allocated_at=-1,
                freed_at=-1,
            )
        )
        groups[k] = [*groups[k], len(storages), -len(storages)]
    profile = assemble(
        profile, groups, storages, list(profile.recipes), profile.initial_bytes
    )
    operations = list(profile.operations)
    for k, algorithm in algorithms.items():
        operations[k] = dataclasses.replace(
            operations[k], device_seconds=algorithm.seconds
        )
    return dataclasses.replace(profile, operations=tuple(operations))


class Drawn:
    """A drawn graph of which some operations have several algorithms."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.profile = toys.random_graph(seed, 6)
        operations = [op for op in self.profile.operations if op.device_seconds > 0]
        self.algorithms = {}
        for op in draw.sample(operations, OPERATIONS):
            algorithms, seconds, nbytes = [], op.device_seconds, 0
            for _ in range(draw.randint(2, 3)):
                algorithms.append(Timed(seconds, nbytes))
                seconds *= draw.uniform(0.3, 0.95)
                nbytes += draw.randint(1, 12) * max(
                    1, make_problem(self.profile).in_core_peak_bytes // 40
                )
            self.algorithms[op.index] = tuple(algorithms)
        smallest = self.problem(dict.fromkeys(self.algorithms, 0))
        least = least_memory(smallest)[0]
        share = draw.uniform(0.05, 0.9)
        self.limit = int(least + share * (smallest.in_core_peak_bytes - least))

    def problem(self, choice):
        return make_problem(
            with_algorithms(
                self.profile, {k: self.algorithms[k][i] for k, i in choice.items()}
            )
        )

    def plan(self, problem):
        return make_plan(problem, self.limit, 'hybrid', steps=STEPS)

    def every_plan(self):
        for places in itertools.product(
            *(range(len(w)) for w in self.algorithms.values())
        ):
            try:
                yield self.plan(
                    self.problem(dict(zip(self.algorithms, places, strict=True)))
                )
            except InfeasibleError:
                continue

    @property
    def bound_seconds(self):
        best = {
            k: Timed(w[-1].seconds, w[0].workspace_bytes)
            for k, w in self.algorithms.items()
        }
        problem = make_problem(with_algorithms(self.profile, best))
        return lower_bound(problem, self.limit).seconds


@pytest.mark.parametrize('seed', range(12))
def test_between_the_bound_and_the_smallest_workspaces(seed):
    drawn = Drawn(seed)
    found = choose_algorithms(drawn.algorithms, drawn.problem, drawn.plan, drawn.limit)
    every = sorted(plan.predicted_seconds for plan in drawn.every_plan())
    chosen = found.plan.predicted_seconds
    assert found.plan == dataclasses.replace(
        drawn.plan(drawn.problem(found.choice)),
        planning_seconds=found.plan.planning_seconds,
    )
    assert found.plan.predicted_peak_bytes <= drawn.limit
    assert chosen <= found.small_seconds
    assert drawn.bound_seconds <= every[0] * (1 + 1e-9)
    assert every[0] * (1 - 1e-9) <= chosen


def test_near_the_best_of_all_choices():
    """A few caps and refinements against every choice there is."""
    ratios = []
    for seed in range(several(10, all_of_them=40)):
        drawn = Drawn(seed)
        found = choose_algorithms(
            drawn.algorithms, drawn.problem, drawn.plan, drawn.limit
        )
        best = min(plan.predicted_seconds for plan in drawn.every_plan())
        ratios.append(found.plan.predicted_seconds / best)
        assert found.tried < 12
    assert sum(ratio > 1 + 1e-9 for ratio in ratios) <= 2 * len(ratios) // 40
    assert max(ratios) < 1.02


def test_nothing_fits_with_the_smallest():
    drawn = Drawn(1)
    drawn.limit = 1
    with pytest.raises(InfeasibleError):
        choose_algorithms(drawn.algorithms, drawn.problem, drawn.plan, drawn.limit)


def test_without_ways_the_plan_is_the_planners():
    drawn = Drawn(2)
    problem = make_problem(drawn.profile)
    limit = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
    found = choose_algorithms(
        {},
        lambda choice: problem,
        lambda problem: make_plan(problem, limit, 'pooch'),
        limit,
    )
    assert found.tried == 1 and found.choice == {}
    assert found.small_seconds == found.plan.predicted_seconds
