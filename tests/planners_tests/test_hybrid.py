"""The default planner: never slower than others, nor with more memory."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from typing import Any

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.search.candidates import (
    Search,
    count_assignments,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem

hybrid = importlib.import_module('chainer_hybridmem.planning.planners.hybrid')
STEPS = 4000
SEEDS = range(20, 44)
SLOW_SEEDS = (22, 35)  # where rivals take all the time that they want
QUICK = {'autoswap-bo': {'evaluations': 10}}  # the last two by regression


def random_problem(seed: int) -> Problem:
    make = toys.random_graph if seed % 2 else toys.random_network
    return make_problem(make(seed, 4 + seed % 13))


def ladder(problem: Problem, rungs: int) -> list[int]:
    """Limits from the least possible to what in-core training needs."""
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    spread = {least + (most - least) * i // rungs for i in range(rungs + 1)}
    return sorted(limit for limit in spread if limit >= least)


@pytest.mark.matrix(first=0, every=2)
@pytest.mark.parametrize('seed', SEEDS)
def test_no_other_planner_is_faster(seed: int) -> None:
    problem = random_problem(seed)
    for limit in ladder(problem, 4):
        plan = make_plan(problem, limit, 'hybrid', steps=STEPS)
        goal = plan.lower_bound_seconds * (1 + plan.options.get('tolerance', 0))
        for name in PLANNERS:
            if name == 'exact':  # it starts from this one
                continue
            options = {} if seed in SLOW_SEEDS else QUICK.get(name, {})
            try:
                other = make_plan(problem, limit, name, **options)
            except InfeasibleError:
                continue
            most = max(other.predicted_seconds, goal)
            assert plan.predicted_seconds <= most * (1 + 1e-9), name


@pytest.mark.matrix(first=1, every=2)
@pytest.mark.parametrize('seed', SEEDS)
def test_more_memory_is_never_slower(seed: int) -> None:
    """But for the tolerance, at which the search stops."""
    problem = random_problem(seed)
    plans = [
        make_plan(problem, limit, 'hybrid', steps=STEPS)
        for limit in ladder(problem, 12)
    ]
    for less, more in itertools.pairwise(plans):
        goal = more.lower_bound_seconds * (1 + 1e-3)
        most = max(less.predicted_seconds, goal)
        assert more.predicted_seconds <= most * (1 + 1e-9)


@pytest.mark.parametrize('seed', SEEDS[:8])
def test_the_way_of_large_networks_plans_as_validly(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start and evenly spread changes, on small ones; twice the same plan."""
    monkeypatch.setattr(hybrid, 'MANY_MAPS', 1)
    monkeypatch.setattr(hybrid, 'SPREAD_MAPS', 1)
    problem = random_problem(seed)
    for limit in ladder(problem, 3):
        plans = [
            make_plan(problem, limit, 'hybrid', steps=STEPS, seed=3) for _ in range(2)
        ]
        assert plans[0].maps == plans[1].maps
        assert plans[0].predicted_seconds >= plans[0].lower_bound_seconds * (1 - 1e-9)
        out = make_plan(problem, limit, 'swap-all').predicted_seconds
        assert plans[0].predicted_seconds <= out * (1 + 1e-9)


@pytest.mark.parametrize('seed', range(12))
def test_a_few_maps_have_every_assignment_tried(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is no slower than what annealing finds, after far fewer simulations."""
    problem = make_problem(toys.random_network(seed, 5))
    assert count_assignments(problem) <= hybrid.FEW_ASSIGNMENTS
    limit = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
    plan = make_plan(problem, limit)
    search = Search(problem, limit, barrier=False)
    assert plan.predicted_seconds <= search.find_fastest().seconds
    monkeypatch.setattr(hybrid, 'FEW_ASSIGNMENTS', 0)
    annealed = make_plan(problem, limit)
    assert plan.predicted_seconds <= annealed.predicted_seconds
    assert plan.simulations < hybrid.FEW_ASSIGNMENTS + 1000


def test_it_stops_at_the_tolerance() -> None:
    problem = make_problem(toys.chain(30))
    limit = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
    loose = make_plan(problem, limit, 'hybrid', tolerance=10.0)
    assert loose.gap <= 10.0
    assert loose.simulations < make_plan(problem, limit, 'hybrid').simulations + 1


def test_another_seed_may_plan_differently_but_as_validly() -> None:
    problem = make_problem(toys.random_graph(7, 40))
    limit = least_memory(problem)[0] * 5 // 4
    for seed in range(3):
        plan = make_plan(problem, limit, 'hybrid', seed=seed, steps=STEPS)
        assert plan.options['seed'] == seed
        assert plan.predicted_peak_bytes <= limit


@pytest.mark.parametrize('seed', [0, 3, 6])
def test_a_plan_without_copies_is_proven_to_be_the_fastest(seed: int) -> None:
    """Where memory is short by a quarter of what can be saved."""
    problem = make_problem(toys.random_graph(seed, 40), rules={'*': 'no swap'})
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    plan = make_plan(problem, most - (most - least) // 4, 'hybrid', steps=STEPS)
    assert plan.overhead > 0
    assert plan.gap < 1e-5


def test_without_steps_it_still_plans() -> None:
    problem = make_problem(toys.chain(12))
    limit = least_memory(problem)[0]
    plan = make_plan(problem, limit, 'hybrid', steps=0)
    rival = make_plan(problem, limit, 'swap-all')
    assert plan.predicted_seconds <= rival.predicted_seconds


def test_a_time_budget_is_kept() -> None:
    """Much less than the steps would take."""
    problem = make_problem(toys.random_graph(3, 120))
    limit = (least_memory(problem)[0] * 3 + problem.in_core_peak_bytes) // 4
    make_plan(problem, limit, 'hybrid', steps=10)  # compiles; finds the bound
    started = time.process_time()  # of this process, not of others beside it
    plan = make_plan(
        problem, limit, 'hybrid', steps=10**8, tolerance=0.0, time_budget=1.0
    )
    assert time.process_time() - started < 6  # the budget is one
    assert plan.predicted_peak_bytes <= limit


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'steps': -1}, 'steps must not be negative; -1 was given'),
        ({'time_budget': 0}, 'time_budget is in seconds and must be positive; 0 was'),
        ({'time_budget': float('nan')}, 'time_budget is in seconds'),
        ({'tolerance': -0.1}, 'tolerance must not be negative; -0.1 was given'),
        ({'tolerance': float('nan')}, 'tolerance must not be negative'),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_plan(toys.chain(3), '1GiB', 'hybrid', **options)


def test_operations_that_take_no_time() -> None:
    """Where the clock is too coarse, or nothing is computed."""
    profile = toys.random_network(3, 10)
    operations = tuple(
        dataclasses.replace(op, device_seconds=0.0, host_seconds=0.0)
        for op in profile.operations
    )
    problem = make_problem(dataclasses.replace(profile, operations=operations))
    for limit in ladder(problem, 3):
        plan = make_plan(problem, limit, 'hybrid', steps=STEPS)
        assert plan.predicted_seconds >= plan.lower_bound_seconds >= 0
