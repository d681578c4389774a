"""Kept maps that die with the graph: the same times, and a peak that is not higher."""

from __future__ import annotations

import dataclasses

import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.repairs import defer_drops, drop_after_use
from chainer_hybridmem.planning.simulation import make_problem, simulate

ANY = 1 << 40


def dying(profile: Profile) -> Profile:
    """The same iteration; its graph dies before the update."""
    end = profile.operations[-1].first_event
    return dataclasses.replace(profile, graph_end_event=end)


@pytest.mark.matrix
@pytest.mark.parametrize('seed', range(20))
@pytest.mark.parametrize('share', [0.0, 0.3, 0.7, 1.0])
def test_times_stay_and_the_peak_is_not_higher(seed, share):
    problem = make_problem(dying(toys.random_graph(seed)))
    least = least_memory(problem)[0]
    limit = int(least + share * (problem.in_core_peak_bytes - least))
    plan = make_plan(problem, limit, 'pooch')
    left = defer_drops(problem, plan, largest_bytes=ANY)
    assert max(check_plan(problem.profile, left)) <= max(
        check_plan(problem.profile, plan)
    )
    before, after = simulate(problem, plan), simulate(problem, left)
    assert after.total_seconds == before.total_seconds
    for old, new in zip(plan.maps, left.maps, strict=True):
        assert new == old or (
            new == dataclasses.replace(old, drop_before=-1)
            and new.action is Action.KEEP
        )


def test_some_drops_are_left_out_and_large_maps_keep_theirs():
    problem = make_problem(dying(toys.random_graph(3)))
    plan = make_plan(problem, problem.in_core_peak_bytes - 1, 'pooch')
    assert defer_drops(problem, plan) == plan  # all of them are large
    left = defer_drops(problem, plan, largest_bytes=ANY)
    assert sum(m.drop_before < 0 for m in left.maps) > sum(
        m.drop_before < 0 for m in plan.maps
    )
    assert defer_drops(problem, plan, room=0.0, largest_bytes=ANY) == plan


def test_a_graph_that_outlives_the_iteration_gets_its_drops():
    problem = make_problem(toys.random_graph(3))
    plan = make_plan(problem, problem.in_core_peak_bytes - 1, 'pooch')
    assert defer_drops(problem, plan) is plan


@pytest.mark.parametrize('seed', range(6))
def test_what_outlives_the_iteration_is_dropped_where_the_next_one_has_no_room(seed):
    profile = toys.random_graph(seed)
    problem = make_problem(profile)
    limit = problem.in_core_peak_bytes
    plan = make_plan(problem, limit, 'pooch')
    kept_bytes = sum(profile.storages[m.storage].nbytes for m in plan.maps)
    assert drop_after_use(problem, plan, limit + kept_bytes) is plan
    dropped = drop_after_use(problem, plan, limit + kept_bytes - 1)
    for before, after in zip(plan.maps, dropped.maps, strict=True):
        assert (before.action, before.drop_before) == (Action.KEEP, -1)
        last = profile.storages[after.storage].backward_uses[-1]
        assert after == dataclasses.replace(before, drop_before=last + 1)
    assert dropped.predicted_peak_bytes == max(check_plan(profile, dropped)) <= limit
    times = simulate(problem, plan).total_seconds, simulate(problem, dropped)
    assert times[1].total_seconds == times[0]
    dies = make_problem(dying(profile))
    plan = make_plan(dies, dies.in_core_peak_bytes, 'pooch')
    assert drop_after_use(dies, plan, 0) is plan
