"""Traces of plans have the checker's loads to the byte."""

from __future__ import annotations

import dataclasses

import pytest
from support import networks, recordings, toys
from support.timelines import check_trace, operation_loads

from chainer_hybridmem.errors import FormatError, InfeasibleError, PlanError
from chainer_hybridmem.planning.layouts import (
    in_core_trace,
    planned_trace,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation.in_core import in_core_peak_bytes
from chainer_hybridmem.planning.simulation.problem import make_problem

PLANNERS = ('in-core', 'swap-all', 'swap-opt', 'superneurons', 'pooch')


def plans(profile, cross_iteration=False):
    problem = make_problem(profile, cross_iteration)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    for planner in PLANNERS:
        for share in (0.0, 0.3, 0.7, 1.0):
            limit = max(1, int(least + share * (most - least)))
            try:
                yield make_plan(problem, limit, planner)
            except InfeasibleError:
                continue


@pytest.mark.parametrize('seed', range(12))
def test_loads_are_those_of_the_checker(seed):
    made = 0
    for profile in (toys.random_graph(seed), toys.random_network(seed, 12)):
        for plan in plans(profile):
            trace = planned_trace(profile, plan)
            loads = check_plan(profile, plan)
            check_trace(trace)
            assert operation_loads(trace) == loads
            assert trace.peak_load_bytes == max(loads)
            made += 1
    assert made > 4


@pytest.mark.parametrize('seed', range(6))
def test_loads_are_those_of_the_checker_with_what_crosses(seed):
    profile = toys.with_persistent(toys.random_network(seed, 8), seed)
    for plan in plans(profile, cross_iteration=True):
        assert operation_loads(planned_trace(profile, plan)) == check_plan(
            profile, plan
        )


def test_what_crosses_comes_back_to_where_it_was():
    profile = toys.with_persistent(toys.chain(6), 2)
    plan = make_plan(profile, 2**40, 'swap-all', cross_iteration=True)
    trace = planned_trace(profile, plan)
    pairs = {(trace.name(left), trace.name(taken)) for left, taken in trace.carried}
    moved = profile.persistent_storages()
    check_trace(trace)
    assert pairs == {(f'in{s.id}', f's{s.id}') for s in moved}


@pytest.mark.parametrize('seed', range(12))
def test_in_core_peak(seed):
    for profile in (toys.random_graph(seed), toys.random_network(seed, 12)):
        assert in_core_trace(profile).peak_load_bytes == in_core_peak_bytes(profile)


def test_a_recorded_network_carries_its_gradients():
    profile = recordings.recorded(networks.Everything, 4)
    for trace in (in_core_trace(profile), *map_plans(profile)):
        check_trace(trace)
        gradients = {
            s.nbytes
            for s in profile.storages
            if s.allocated_at < 0 <= s.freed_at and s.nbytes
        }
        assert {trace.sizes[left] for left, _ in trace.carried} >= gradients


def map_plans(profile):
    return [planned_trace(profile, plan) for plan in plans(profile)]


def test_a_profile_that_frees_more_than_it_has():
    profile = toys.network([toys.Node(()), toys.Node(((0, 0),))])
    broken = dataclasses.replace(profile, initial_bytes=toys.MIB)
    storage = dataclasses.replace(
        broken.storages[0], freed_at=len(broken.events), releasable_from=-1
    )
    broken = dataclasses.replace(
        broken,
        storages=(storage, *broken.storages[1:]),
        events=(*broken.events, -1),
    )
    with pytest.raises(FormatError, match='more than'):
        in_core_trace(broken)


def test_a_plan_of_another_profile():
    plan = make_plan(toys.chain(5), '1GB', 'swap-all')
    with pytest.raises(PlanError, match='made for profile'):
        planned_trace(toys.chain(6), plan)
