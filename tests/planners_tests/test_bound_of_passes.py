"""Maps that are made again and again: chains with a closed optimum, and brute force."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from support.schedules import Node, fastest, least, profile_of
from support.toys import MIB

from chainer_hybridmem.lab.contest import chains
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.search.bound import (
    bound_of_schedules,
    find_passes,
    lower_bound,
    schedules,
)
from chainer_hybridmem.planning.search.bound.reversal import (
    graph_of_plans,
    graph_of_schedules,
    seconds_of_passes,
)
from chainer_hybridmem.planning.search.candidates import PASSED, Search
from chainer_hybridmem.planning.simulation import make_problem


def drawn_nodes(seed: int) -> list[Node]:
    """Forward with skips, ends and small products; most maps are read in reverse."""
    rng = random.Random(f'passes {seed}')
    b0, skips = rng.choice([3, 4, 4, 5]), rng.choice([0, 0, 0.1, 0.2, 0.4])
    sizes = rng.choice([[2], [1, 2, 3, 4, 5, 6], [1, 1, 8, 9]])
    seconds = rng.choice([[1.0], [1.0, 1.0, 3.0, 0.2]])
    nodes = []
    for k in range(2 * b0):
        reads = {k - 1} if k else set()
        if b0 <= k and rng.random() < 0.9:
            reads.add(2 * b0 - 1 - k)
        if 0 < k < b0 and rng.random() < 0.2:
            reads = rng.choice([set(), {max(k - 2, 0)}])
        reads |= {v for v in range(k - 1) if rng.random() < skips}
        size = rng.choice(sizes) * MIB
        nodes.append(Node(rng.choice(seconds), size, tuple(sorted(reads))))
    return nodes


@pytest.mark.parametrize('first', range(0, 30, 6))
def test_no_schedule_makes_less_again(first: int) -> None:
    """And the passes of many small graphs are those of the fastest schedule."""
    proven = short = 0
    for seed in range(first, first + 6):
        nodes = drawn_nodes(seed)
        problem = make_problem(profile_of(nodes))
        for limit in range(least(nodes) - MIB, problem.in_core_peak_bytes, 2 * MIB):
            best = fastest(nodes, limit)
            passes = seconds_of_passes(graph_of_schedules(problem.profile, limit))
            seconds = problem.compute_seconds + passes
            assert seconds <= best * (1 + 1e-9)
            if problem.compute_seconds * (1 + 1e-9) < best < math.inf:
                short += 1
                proven += seconds >= best * (1 - 1e-9)
    assert 3 * proven > short > 0


@pytest.mark.parametrize('slots', range(1, 6))
def test_the_optimum_of_chains_is_that_of_every_schedule(slots: int) -> None:
    """The formula is what brute force finds."""
    for steps in range(slots, 7):
        chain = chains.Chain(steps, slots)
        nodes = [Node(1.0, MIB, (v - 1,) if v else ()) for v in range(2 * steps)]
        for v in range(steps + 1, 2 * steps):
            nodes[v] = nodes[v]._replace(reads=(2 * steps - 1 - v, v - 1))
        seconds = fastest(nodes, chains.limit_of(chain))
        expected = chains.fastest_seconds(chain) / chains.STEP_SECONDS
        assert seconds == pytest.approx(expected)


@pytest.mark.parametrize('seed', range(12))
def test_the_bound_of_a_chain_is_its_optimum(seed: int) -> None:
    """For plans and for schedules, whatever its length and its slots."""
    chain = chains.draw_chain(seed)
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    problem = make_problem(chains.make_profile(chain))
    for graph in (
        graph_of_schedules(problem.profile, limit),
        graph_of_plans(problem, limit),
    ):
        seconds = problem.compute_seconds + seconds_of_passes(graph)
        assert seconds == pytest.approx(optimum, rel=1e-12)


@pytest.mark.parametrize('seed', range(12))
def test_a_plan_reverses_a_chain_with_fewest_runs(seed: int) -> None:
    """What is made again stays of the pass in which the optimum has it stay."""
    chain = chains.draw_chain(seed)
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    problem = make_problem(chains.make_profile(chain))
    found = Search(problem, limit).evaluate(find_passes(problem, limit))
    assert found.seconds == pytest.approx(optimum, rel=1e-12)


def test_hybrid_reverses_a_chain_with_fewest_runs() -> None:
    """It asks for passes where nothing is swapped, and knows that it is through."""
    chain = chains.Chain(steps=90, slots=3)
    profile, limit = chains.make_profile(chain), chains.limit_of(chain)
    assert find_passes(make_problem(profile), limit).max() > PASSED
    plan = make_plan(profile, limit, 'hybrid', steps=2000)
    assert plan.predicted_seconds == pytest.approx(chains.fastest_seconds(chain))
    assert plan.gap < 1e-8


def test_bounds_know_of_passes() -> None:
    """Whoever asks for a bound gets that of passes if it is higher."""
    chain = chains.Chain(steps=20, slots=3)
    problem = make_problem(chains.make_profile(chain))
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    for seconds in (
        bound_of_schedules(problem, limit),
        lower_bound(problem, limit).seconds,
    ):
        assert optimum * (1 - 1e-8) <= seconds <= optimum


def test_runs_count_once_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward in parts proves more than backward at once, without passes."""
    chain = chains.Chain(steps=12, slots=2)
    problem = make_problem(chains.make_profile(chain))
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    monkeypatch.setattr(schedules, 'seconds_of_passes', lambda graph: 0.0)
    proven = {}
    for rounds in (1, 3):
        monkeypatch.setattr(schedules, 'SHARES', (1.0,) * rounds)
        proven[rounds] = bound_of_schedules(problem, limit, 2 * optimum, 60.0)
    assert proven[1] * 1.01 < proven[3] <= optimum


@pytest.mark.parametrize('steps_per_copy', [1, 4, 10, 25, 50])
def test_a_map_that_is_copied_makes_no_passes(steps_per_copy: int) -> None:
    """Copies that take less time than the passes are plans; the bound is below them."""
    chain = chains.Chain(steps=20, slots=2)
    rate = chains.MAP_BYTES / (steps_per_copy * chains.STEP_SECONDS)
    profile = chains.make_profile(chain)
    profile = dataclasses.replace(profile, link=Link(0.0, rate, rate))
    limit, optimum = chains.limit_of(chain), chains.fastest_seconds(chain)
    plan = make_plan(profile, limit, 'hybrid', steps=2000)
    proven = lower_bound(make_problem(profile), limit).seconds
    assert proven <= plan.predicted_seconds
    assert plan.predicted_seconds < optimum or steps_per_copy > 4
    assert (proven > optimum * (1 - 1e-8)) == (steps_per_copy == 50)


def test_nothing_fits() -> None:
    """Then passes take for ever, and bounds stay finite."""
    chain = chains.Chain(steps=20, slots=3)
    problem = make_problem(chains.make_profile(chain))
    limit = chains.limit_of(chain._replace(slots=0))
    assert seconds_of_passes(graph_of_schedules(problem.profile, limit)) == math.inf
    assert math.isfinite(bound_of_schedules(problem, limit))
    assert math.isfinite(lower_bound(problem, limit).seconds)
