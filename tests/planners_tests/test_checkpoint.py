"""Checkpointing by rules: where the cuts are, and what is expensive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.lab.planners.checkpoint import is_expensive
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB
PLENTY = 2**50


def kept(plan: Plan) -> list[int]:
    """Storages of the maps that stay."""
    return [m.storage for m in plan.maps if m.action is Action.KEEP]


def recomputable(problem: Problem) -> set[int]:
    """Storages of the maps that can be made again."""
    return {problem.maps[m].id for m in np.flatnonzero(problem.recomputable)}


def sqrt(profile: Profile, **options: Any) -> Plan:
    return make_plan(profile, PLENTY, 'checkpoint-sqrt', **options)


@pytest.mark.parametrize(
    ('layers', 'segments', 'cuts'),
    [(9, 3, [2, 5]), (16, 4, [3, 7, 11]), (16, 2, [7]), (10, 3, [3, 7]), (9, 1, [])],
)
def test_a_chain_is_cut_evenly(layers: int, segments: int, cuts: list[int]) -> None:
    plan = sqrt(toys.chain(layers), segments=segments)
    assert kept(plan) == cuts
    assert plan.count(Action.RECOMPUTE) == layers - len(cuts)
    assert plan.options == {'segments': segments}


@pytest.mark.parametrize('layers', [9, 16, 25, 36])
def test_the_search_finds_about_the_square_root(layers: int) -> None:
    """No number of even segments needs less, and the time is one forward more."""
    profile = toys.chain(layers)
    found = sqrt(profile)
    assert abs(found.options['segments'] - layers**0.5) <= 1
    for segments in range(1, layers):
        plan = sqrt(profile, segments=segments)
        assert found.predicted_peak_bytes <= plan.predicted_peak_bytes
    again = layers - len(kept(found))
    assert found.predicted_seconds == pytest.approx(found.in_core_seconds + again)


def test_of_cuts_near_by_the_one_that_fewest_bytes_cross() -> None:
    """Within the branches two maps cross, behind each addition only one does."""
    profile = toys.graph([[], [0], [1], [0, 2], [3], [4], [3, 5], [6], [7]])
    assert kept(sqrt(profile, segments=2)) == [3]
    assert kept(sqrt(profile, segments=3)) == [3, 7]


def test_all_that_crosses_a_cut_is_kept() -> None:
    """Everything reads the first map."""
    profile = toys.graph([[], [0], [0, 1], [0, 2], [0, 3], [0, 4]])
    assert kept(sqrt(profile, segments=2)) == [0, 2]


def test_no_cut_where_a_transient_crosses() -> None:
    """Convolution, normalization that forward drops, activation."""
    parents = [[i - 1] if i else [] for i in range(9)]
    profile = toys.graph(parents, transient=[i % 3 == 1 for i in range(9)])
    for segments in range(1, 9):
        plan = sqrt(profile, segments=segments)
        assert set(kept(plan)) <= {0, 2, 3, 5, 6}
        assert plan.options['segments'] <= 6
    assert kept(sqrt(profile, segments=6)) == [0, 2, 3, 5, 6]


def test_what_cannot_be_recomputed_stays() -> None:
    nodes = [toys.Node(((i - 1, 0),) if i else (), mask=MIB) for i in range(4)]
    problem = make_problem(toys.network(nodes))
    masks = sorted({s.id for s in problem.maps} - recomputable(problem))
    assert len(masks) == 4
    assert kept(make_plan(problem, PLENTY, 'checkpoint-sqrt', segments=1)) == masks
    assert kept(make_plan(problem, PLENTY, 'checkpoint-speed')) == masks


@given(st.integers(0, 10_000), st.integers(1, 9))
@example(4911, 2)  # a budget that is rounded up to all there is
@settings(max_examples=60, deadline=None)
def test_segments_of_any_network(seed: int, segments: int) -> None:
    """No more than asked for; one alone recomputes all that can be."""
    problem = make_problem(toys.random_network(seed, 9))
    plan = make_plan(problem, PLENTY, 'checkpoint-sqrt', segments=segments)
    assert plan.options['segments'] <= segments
    able = recomputable(problem)
    recomputed = {m.storage for m in plan.maps if m.action is Action.RECOMPUTE}
    assert recomputed <= able
    if plan.options['segments'] == 1:
        assert recomputed == able


def test_if_the_least_memory_does_not_fit_another_segmentation_may() -> None:
    """Fewer maps kept, more replays: below the peak of segments made once."""
    problem = make_problem(toys.chain(16))
    best = make_plan(problem, PLENTY, 'checkpoint-sqrt')
    limit = best.predicted_peak_bytes - 20 * MIB
    tight = make_plan(problem, limit, 'checkpoint-sqrt')
    assert tight.predicted_peak_bytes <= limit
    assert tight.predicted_seconds > best.predicted_seconds


@pytest.mark.parametrize('planner', ['checkpoint-sqrt', 'checkpoint-speed'])
def test_replays_may_need_more_than_swapping(planner: str) -> None:
    """Their workspaces come on top of what backward needs."""
    problem = make_problem(toys.chain(10, workspace=15 * MIB))
    least, _ = least_memory(problem)
    with pytest.raises(InfeasibleError, match=f"'{planner}' does not fit") as caught:
        make_plan(problem, least, planner)
    assert caught.value.requested_bytes > least


@pytest.mark.parametrize('segments', [0, -1, 1.5, 'many', True])
def test_segments_that_are_none(segments: Any) -> None:
    with pytest.raises(OptionError, match='segments'):
        sqrt(toys.chain(), segments=segments)


@pytest.mark.parametrize(
    ('function', 'expected'),
    [
        ('Convolution2DFunction', True),
        ('DeconvolutionND', True),
        ('LinearFunction', True),
        ('BilinearFunction', True),
        ('MatMul', True),
        ('TensorDot', True),
        ('NStepLSTM', True),
        ('LinearInterpolate', False),
        ('BatchNormalization', False),
        ('ReLU', False),
        ('LSTM', False),
    ],
)
def test_what_counts_as_expensive(function: str, expected: bool) -> None:
    assert is_expensive(function) is expected


@pytest.mark.parametrize(
    ('function', 'action'), [('LinearFunction', KEEP), ('ReLU', RECOMPUTE)]
)
def test_speed_keeps_what_is_expensive(function: str, action: int) -> None:
    problem = make_problem(toys.chain(function=function))
    plan = make_plan(problem, PLENTY, 'checkpoint-speed')
    expected = Search(problem, PLENTY).evaluate(np.full(6, action, np.int64))
    assert plan.predicted_seconds == expected.seconds
    assert len(kept(plan)) == (6 if action == KEEP else 0)
