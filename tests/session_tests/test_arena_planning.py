"""Plans whose arena fits, and what is followed where none does."""

from __future__ import annotations

import types

import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planners import make_plan
from chainer_hybridmem.pools import lay_out
from chainer_hybridmem.search.candidates import least_memory
from chainer_hybridmem.session.planning.arena_planning import plan_with_arena
from chainer_hybridmem.simulation import make_problem


def place(logs):
    return lay_out(logs, lambda nbytes: nbytes, 1)


class Wasteful:
    """Lays out like :func:`place` and needs so many bytes more."""

    def __init__(self, waste):
        self.waste = waste

    def __call__(self, logs):
        nbytes = place(logs).footprint_bytes + self.waste
        return types.SimpleNamespace(footprint_bytes=nbytes)


def setting(seed):
    problem = make_problem(toys.random_network(seed))
    least = least_memory(problem)[0]
    limit = (least + problem.in_core_peak_bytes) // 2
    limits = []

    def make_plan_for(limit_bytes):
        limits.append(limit_bytes)
        return make_plan(problem, limit_bytes, 'swap-opt')

    return problem, make_plan_for, limit, limits


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.parametrize('optional', [False, True])
def test_whatever_fits_fits(seed, optional):
    problem, make_plan_for, limit, limits = setting(seed)
    plan, fits = plan_with_arena(problem, make_plan_for, place, limit, 0, optional)
    assert limits[0] == limit
    assert plan.predicted_peak_bytes <= limit
    if optional and not fits:
        assert plan.maps == make_plan(problem, limit, 'swap-opt').maps
    if len(limits) > 1:
        assert max(limits[1:]) < limit


def test_a_plan_that_is_made_for_less():
    problem, make_plan_for, limit, limits = setting(1)
    wasteful = Wasteful((limit - least_memory(problem)[0]) // 4)
    plan, fits = plan_with_arena(problem, make_plan_for, wasteful, limit, 0, False)
    assert fits and len(limits) > 1
    assert plan.predicted_peak_bytes + wasteful.waste <= limit


def test_where_none_fits():
    problem, make_plan_for, limit, _ = setting(1)
    wasteful = Wasteful(limit)
    plan, fits = plan_with_arena(problem, make_plan_for, wasteful, limit, 0, True)
    assert not fits
    assert plan.maps == make_plan(problem, limit, 'swap-opt').maps
    plan, fits = plan_with_arena(problem, make_plan_for, wasteful, limit, 0, False)
    assert not fits and plan.memory_limit_bytes <= limit


def test_a_spare_for_which_there_is_no_plan():
    problem, make_plan_for, limit, _ = setting(1)
    arguments = problem, make_plan_for, place
    spare = limit - least_memory(problem)[0] + 1
    plan, fits = plan_with_arena(*arguments, limit, spare, optional=False)
    assert not fits and plan.memory_limit_bytes == limit
    with pytest.raises(InfeasibleError):
        plan_with_arena(*arguments, least_memory(problem)[0] - 1, 0, optional=True)
