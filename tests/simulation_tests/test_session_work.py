"""The session's own work in a plan's time, and in no time of plain Chainer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import FormatError, InfeasibleError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import MoveCost, Profile
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation import make_problem, simulate

NOTHING = MoveCost()


def with_work(
    profile: Profile, session: float, cost: MoveCost = NOTHING, host: float = 0.0
) -> Profile:
    """The profile with seconds of the session at each operation, and of moves."""
    operations = tuple(
        dataclasses.replace(op, session_seconds=session, host_seconds=host)
        for op in profile.operations
    )
    return dataclasses.replace(profile, operations=operations, move_cost=cost)


def test_a_plan_that_moves_nothing_takes_what_hooks_take():
    profile = with_work(toys.chain(), 0.5)
    plan = make_plan(profile, '1GB', 'in-core')
    count = len(profile.operations)
    assert plan.in_core_seconds == pytest.approx(profile.compute_seconds)
    assert plan.predicted_seconds == pytest.approx(plan.in_core_seconds + 0.5 * count)
    assert simulate(profile, plan).total_seconds == pytest.approx(
        plan.predicted_seconds
    )


def test_each_swap_takes_its_move_where_issuing_is_computing():
    plain = toys.chain()
    limit = make_problem(plain).in_core_peak_bytes * 2 // 3
    cost = MoveCost(0.25, 2.0**-24)
    before = make_plan(plain, limit, 'swap-all')
    plan = make_plan(with_work(plain, 0.0, cost), limit, 'swap-all')
    moved = [
        plain.storages[entry.storage].nbytes
        for entry in plan.maps
        if entry.action is Action.SWAP
    ]
    assert len(moved) > 1
    more = sum(map(cost.of_copied, moved))
    # Copies may hide behind it, and never behind less.
    assert plan.predicted_seconds >= plain.compute_seconds + more
    assert plan.predicted_seconds <= before.predicted_seconds + more + 1e-9


@pytest.mark.parametrize(('session', 'waits'), [(0.25, False), (5.0, True)])
def test_a_device_waits_for_the_sessions_work_only_if_it_is_too_slow(session, waits):
    """The program's thread is a lane of its own."""
    profile = with_work(toys.chain(), session, host=0.25)
    plan = make_plan(profile, '1GB', 'in-core')
    late = plan.predicted_seconds > plan.in_core_seconds * 1.05
    assert late == waits
    assert plan.in_core_seconds < profile.compute_seconds + 1.0


def test_a_planner_that_knows_what_moves_cost_moves_few_large_maps():
    """Many small ones make as much room, and cost more."""
    sizes = [toys.MIB * size for size in (1, 1, 2, 1, 1, 8, 1, 1, 8, 1, 8, 1)]
    plain = toys.chain(len(sizes), nbytes=sizes, bandwidth=4.0 * toys.MIB)
    plain = dataclasses.replace(plain, recipes=())
    dear = make_problem(with_work(plain, 0.0, MoveCost(seconds_per_map=1.0)))
    limit = int(dear.in_core_peak_bytes * 0.7)
    known = make_plan(dear, limit, 'hybrid', seed=0)
    ignorant = make_plan(plain, limit, 'hybrid', seed=0)
    assert known.count(Action.SWAP) < ignorant.count(Action.SWAP)
    assert known.predicted_seconds < simulate(dear, ignorant).total_seconds


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    session=st.sampled_from([0.0, 0.3]),
    per_map=st.sampled_from([0.0, 0.2, 3.0]),
    host=st.sampled_from([0.0, 0.1]),
)
def test_no_plan_is_faster_than_the_bound(seed, session, per_map, host):
    cost = MoveCost(per_map, 1e-8)
    profile = with_work(toys.random_graph(seed), session, cost, host)
    problem = make_problem(profile)
    for share in (0.7, 0.9, 1.0):
        limit = int(problem.in_core_peak_bytes * share)
        try:
            plan = make_plan(problem, limit, 'swap-opt')
        except InfeasibleError:
            continue
        bound = lower_bound(problem, limit).seconds
        assert bound <= plan.predicted_seconds * (1 + 1e-9)
        assert bound >= problem.still_seconds * (1 - 1e-9)
        timeline = simulate(problem, plan)
        assert timeline.total_seconds == pytest.approx(plan.predicted_seconds)


def test_a_file_keeps_it():
    profile = with_work(toys.chain(), 0.5, MoveCost(0.25, 1e-9))
    assert parse_profile(serialise_profile(profile)) == profile


@pytest.mark.parametrize('value', ['-1.0', '"much"', 'NaN'])
def test_a_file_with_a_cost_that_cannot_be_is_refused(value):
    text = serialise_profile(toys.chain())
    broken = text.replace('"seconds_per_map": 0.0', f'"seconds_per_map": {value}')
    assert broken != text
    with pytest.raises(FormatError, match='seconds_per_map'):
        parse_profile(broken)
