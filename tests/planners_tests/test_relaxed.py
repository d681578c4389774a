"""Relaxed plans cost nothing, need less, and move as far as the margin lets them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan
from chainer_hybridmem.planning.search import relaxed as relaxed_module
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.relaxed import WIDER, relaxed
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate

MIB = toys.MIB
PLANNERS = ('swap-all', 'superneurons', 'hybrid')


def plans(problem: Problem, planner: str) -> list[Plan]:
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    result = []
    for limit in (least, (least + most) // 2, most - 1):
        try:
            result.append(make_plan(problem, limit, planner))
        except InfeasibleError:
            continue
    return result


@pytest.mark.parametrize('planner', PLANNERS)
@pytest.mark.parametrize('shares', [(1.0, 1.0, 1.0), (0.7, 0.8, 0.6)])
@pytest.mark.parametrize('seed', range(7))
def test_costs_nothing_and_needs_less(seed, shares, planner):
    make = toys.random_graph if seed % 3 else toys.random_network
    problem = make_problem(toys.with_shares(make(seed, 12), *shares))
    for plan in plans(problem, planner):
        before = simulate(problem, plan)
        for margin in (0.0, 0.5, 3.0):
            result = relaxed(problem, plan, margin)
            after = simulate(problem, result)  # checks the plan, too
            assert after.total_seconds <= before.total_seconds * (1 + 1e-9)
            assert result.predicted_seconds <= plan.predicted_seconds
            assert result.predicted_seconds == pytest.approx(after.total_seconds)
            loads = np.array(after.load_bytes), np.array(before.load_bytes)
            assert np.all(loads[0] <= loads[1])
            assert result.predicted_peak_bytes == max(after.load_bytes)
            assert result.replays == plan.replays
            for new, old in zip(result.maps, plan.maps, strict=True):
                assert new.action is old.action
                assert new.release_before <= old.release_before
                assert new.swap_in_before >= old.swap_in_before


@pytest.mark.parametrize('slower', [1, 2, 100])
def test_wider_margins_where_it_would_be_slower(slower, monkeypatch):
    problem = make_problem(toys.chain(12, bandwidth=15.0 * MIB))
    plan = make_plan(problem, problem.in_core_peak_bytes, 'swap-all')
    wider = [relaxed(problem, plan, 0.5 + more).maps for more in (0.0, *WIDER)]
    assert wider[0] != wider[1] != wider[2]
    real, calls = relaxed_module.run_lanes, []

    def seconds(problem, work):
        calls.append(real(problem, work))
        return calls[-1] + (1 < len(calls) <= slower + 1)

    monkeypatch.setattr(relaxed_module, 'run_lanes', seconds)
    found = relaxed(problem, plan, 0.5)
    assert found.maps == (plan.maps if slower == 100 else wider[slower])


def test_a_slow_host_is_no_excuse():
    """Copies begin late because of the host; positions move all the same."""
    profile = toys.chain(10, bandwidth=20.0 * MIB)
    operations = tuple(
        dataclasses.replace(op, host_seconds=1.6) for op in profile.operations
    )
    link = dataclasses.replace(profile.link, issue_seconds=0.4)
    profile = dataclasses.replace(profile, operations=operations, link=link)
    problem = make_problem(profile)
    for plan in plans(problem, 'swap-all'):
        before, after = (
            simulate(problem, plan),
            simulate(problem, relaxed(problem, plan)),
        )
        assert after.total_seconds <= before.total_seconds * (1 + 1e-9)
        assert sum(after.load_bytes) < sum(before.load_bytes)


@pytest.mark.parametrize('bandwidth', [40.0 * MIB, 2.0 * MIB])
def test_much_of_the_load_goes(bandwidth):
    """All memory is used though maps could be away for long, or must wait anyway."""
    problem = make_problem(toys.chain(12, bandwidth=bandwidth))
    plan = make_plan(problem, problem.in_core_peak_bytes, 'swap-all')
    before, after = simulate(problem, plan), simulate(problem, relaxed(problem, plan))
    assert sum(after.load_bytes) < 0.6 * sum(before.load_bytes)
    assert after.total_seconds == pytest.approx(before.total_seconds)


def one_swap(plan: Plan, storage: int) -> Plan:
    """Everything kept but one map, which is released and comes back at operation 6."""
    maps = tuple(
        dataclasses.replace(entry, release_before=6, swap_in_before=6)
        if entry.storage == storage
        else MapPlan(entry.storage, Action.KEEP, drop_before=entry.drop_before)
        for entry in plan.maps
    )
    return dataclasses.replace(plan, maps=maps)


# Forward: one second per operation; backward begins at 6 s with operation 6, and takes
# two seconds per operation. Map 1 is complete after 3 s, and read by operation 9.
@pytest.mark.parametrize(
    'copy_seconds, margin, release, swap_in',
    [
        (1.0, 0.0, 4, 8),  # out from 3 to 4; in from 10 (operation 8) to 12
        (2.0, 0.0, 5, 8),  # exactly when operation 9 begins
        (2.1, 0.0, 6, 7),
        (2.0, 0.5, 6, 7),  # three seconds each way: from 9, before which is 8
        (1.0, 1.0, 5, 8),
        (1.0, 3.0, 6, 7),  # at 7 nothing begins
    ],
)
def test_positions_by_hand(copy_seconds, margin, release, swap_in):
    profile = toys.chain(6, bandwidth=10.0 * MIB / copy_seconds)
    problem = make_problem(profile)
    plan = one_swap(make_plan(problem, 2**40, 'swap-all'), 1)
    entry = next(e for e in relaxed(problem, plan, margin).maps if e.storage == 1)
    assert (entry.release_before, entry.swap_in_before) == (release, swap_in)


@pytest.mark.parametrize('margin', [-0.1, float('nan'), 'wide'])
def test_a_margin_that_is_none(margin):
    problem = make_problem(toys.chain())
    with pytest.raises(OptionError, match='margin'):
        relaxed(problem, make_plan(problem, 2**40, 'hybrid'), margin)
