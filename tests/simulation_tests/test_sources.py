"""What backward never reads may stay for replays: plans, the bound and the checker."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from support import toys
from support.timelines import operation_loads

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.layouts.walk import planned_trace
from chainer_hybridmem.planning.records.plan import Plan, Source
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.problem import find_sources, with_sources

MIB = toys.MIB


def upsampled(sizes: tuple[int, int, int]) -> Problem:
    """A small map becomes a large one on the way to what backward reads.

    Nodes 1 and 3 make what only the next node reads, 2 and 4 what backward reads.
    """
    first, second, seconds = sizes
    nodes = [
        toys.Node((), (8 * MIB,), reads_inputs=False, reads_outputs=True),
        toys.Node(((0, 0),), (first * MIB,), reads_inputs=False, seconds=seconds),
        toys.Node(((1, 0),), (9 * MIB,), reads_inputs=False, reads_outputs=True),
        toys.Node(((2, 0),), (second * MIB,), reads_inputs=False, seconds=seconds),
        toys.Node(((3, 0), (1, 0)), reads_inputs=False, reads_outputs=True),
        toys.Node(((4, 0),), reads_inputs=False, reads_outputs=True, workspace=9 * MIB),
    ]
    problem = make_problem(toys.network(nodes), rules={'*': 'no swap'})
    sources = find_sources(problem)
    assert len(sources) == 2
    return with_sources(problem, sources)


SIZES = [(1, 1, 2), (1, 4, 5), (3, 2, 1), (6, 1, 3)]


def fastest(problem: Problem, limit: int) -> Plan | None:
    """Of all assignments."""
    search = Search(problem, limit, barrier=False)
    choices = [np.flatnonzero(row) for row in problem.arrays.allowed]
    found = [search.evaluate(np.array(a)) for a in itertools.product(*choices)]
    best = min(found, key=lambda c: c.seconds)
    return search.finish('test', best) if best.fits else None


@pytest.mark.parametrize('sizes', SIZES)
def test_every_plan_is_executable_and_none_is_below_the_bound(
    sizes: tuple[int, int, int],
) -> None:
    problem = upsampled(sizes)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    gained = 0
    for limit in range(least, most, (most - least) // 9 + 1):
        plan = fastest(problem, limit)
        plain = fastest(with_sources(problem, ()), limit)
        if plan is None:
            continue
        assert max(check_plan(problem.profile, plan, limit)) <= limit
        assert simulate(problem.profile, plan).total_seconds == plan.predicted_seconds
        assert parse_plan(serialise_plan(plan)) == plan
        trace = planned_trace(problem.profile, plan)
        assert operation_loads(trace) == check_plan(problem.profile, plan)
        seconds = lower_bound(problem, limit).seconds
        assert seconds <= plan.predicted_seconds * (1 + 1e-9)
        if plain is not None:
            assert plan.predicted_seconds <= plain.predicted_seconds
            gained += plan.predicted_seconds < plain.predicted_seconds
    assert gained > 0


def test_a_source_goes_after_the_last_replay_that_reads_it() -> None:
    problem = upsampled(SIZES[0])
    search = Search(problem, problem.in_core_peak_bytes)
    action = np.where(problem.recomputable, RECOMPUTE, KEEP)
    action[~problem.arrays.read] = KEEP
    plan = search.finish('test', search.evaluate(action))
    recipes = {recipe.operation: recipe for recipe in problem.profile.recipes}
    for source in plan.sources:
        readers = [
            r.before
            for r in plan.replays
            if source.storage in recipes[r.operation].inputs
        ]
        assert source.drop_before == max(readers) + 1
    action[~problem.arrays.read] = RECOMPUTE
    dropped = search.finish('test', search.evaluate(action))
    assert dropped.sources == ()
    assert len(dropped.replays) > len(plan.replays)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda p, s: [dataclasses.replace(s, drop_before=3)], 'until operation 3;'),
        (lambda p, s: [s, s], 'that no plan decides about'),
        (lambda p, s: [Source(p.maps[0].storage, 9)], 'that no plan decides about'),
        (lambda p, s: [Source(0, 9)], 'no exact replay has it'),
        (lambda p, s: [dataclasses.replace(s, drop_before=6)], 'needs storage'),
    ],
)
def test_a_plan_that_cannot_keep_its_sources_is_refused(change, words) -> None:
    problem = upsampled(SIZES[0])
    search = Search(problem, problem.in_core_peak_bytes)
    action = np.where(problem.recomputable, RECOMPUTE, KEEP)
    action[~problem.arrays.read] = KEEP
    plan = search.finish('test', search.evaluate(action))
    wrong = dataclasses.replace(plan, sources=tuple(change(plan, plan.sources[0])))
    with pytest.raises(PlanError, match=words):
        check_plan(problem.profile, wrong)
