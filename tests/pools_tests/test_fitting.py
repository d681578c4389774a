"""Planning goes on with lower limits until the placement fits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.layouts import (
    check_layout,
    exact,
    planned_trace,
    smartpool,
)
from chainer_hybridmem.planning.layouts.fitting import fit
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.relaxed import relaxed
from chainer_hybridmem.planning.simulation import make_problem


@dataclasses.dataclass(frozen=True)
class Bytes:
    footprint_bytes: int


def plan_of(peak_bytes: int) -> Plan:
    return Plan('toy', {}, '', peak_bytes, (), (), 1.0, peak_bytes, 1.0, 1.0)


@settings(deadline=None)
@given(
    limit=st.integers(1000, 9000),
    least=st.integers(0, 1000),
    waste=st.integers(0, 2000),
    grain=st.integers(1, 300),
    rounds=st.integers(1, 9),
)
def test_any_waste(limit, least, waste, grain, rounds):
    """Plans have peaks at multiples of a grain, and all waste as much."""
    asked: list[int] = []

    def make_placed_for(target):
        asked.append(target)
        if target < least:
            raise InfeasibleError('too little', least, target)
        peak = target // grain * grain
        return plan_of(peak), Bytes(peak + waste)

    found = fit(make_placed_for, limit, rounds)
    assert asked[0] == limit and len(asked) <= rounds
    assert all(later < earlier for earlier, later in itertools.pairwise(asked))
    assert found.fits == (found.placed.footprint_bytes <= limit)
    assert found.placed == Bytes(found.plan.predicted_peak_bytes + waste)
    assert found.planned_bytes in asked
    if limit - waste >= max(least, 1) and rounds > 1:
        assert found.fits and len(asked) <= 2
        assert found.placed.footprint_bytes > limit - grain - waste


def test_the_smallest_where_none_fits():
    needs = {100: 120, 80: 105, 75: 110}
    found = fit(lambda target: (plan_of(target), Bytes(needs[target])), 100, 3)
    assert not found.fits
    assert (found.planned_bytes, found.rounds) == (80, 3)


def test_no_plan_for_the_limit_itself():
    def make_placed_for(target):
        raise InfeasibleError('nothing', 2, target)

    with pytest.raises(InfeasibleError):
        fit(make_placed_for, 1)
    with pytest.raises(OptionError, match='rounds'):
        fit(make_placed_for, 1, 0)


@pytest.mark.parametrize('place', [exact, smartpool])
@pytest.mark.parametrize('seed', range(5))
def test_layouts_of_networks_fit(seed, place):
    profile = toys.random_network(seed, 25)
    problem = make_problem(profile)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = (2 * least + most) // 3

    def make_placed_for(target):
        plan = relaxed(problem, make_plan(problem, target, 'superneurons'))
        return plan, place(planned_trace(profile, plan), 64)

    found = fit(make_placed_for, limit, 10)
    assert found.fits
    assert max(check_plan(profile, found.plan, found.planned_bytes)) <= limit
    check_layout(planned_trace(profile, found.plan), found.placed)
