"""The checks of drawn cells pass where all is well, and find what is not."""

import dataclasses

import numpy as np
import pytest
from support.matrices import several

from benchmarks import drawn_cells
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, timeline
from chainer_hybridmem.testing.networks import random_network


@pytest.mark.parametrize('seed', range(several(3, all_of_them=30)))
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
def test_limit_bound_and_reuse_hold(seed, planner):
    found = {promise for promise, _ in drawn_cells.violations(seed, planner)}
    assert not found & {'limit', 'bound', 'reuse'}


@pytest.fixture
def planned():
    """A problem, and a plan for it that swaps."""
    problem = make_problem(random_network(5, 12))
    limit = least_memory(problem)[0]
    return problem, make_plan(problem, limit, 'swap-all')


def test_a_load_above_the_limit_is_found(planned):
    problem, plan = planned
    (found,) = drawn_cells._kept(problem, plan.predicted_peak_bytes - 1, plan)
    assert found[0] == 'limit' and 'limit' in found[1]['why']
    other = dataclasses.replace(plan, predicted_peak_bytes=1)
    (found,) = drawn_cells._kept(problem, plan.memory_limit_bytes, other)
    assert found[1] == {'peak': plan.predicted_peak_bytes, 'predicted': 1}


@pytest.mark.parametrize(('lane', 'shift'), [('out_end', 1e3), ('in_start', -1e3)])
def test_what_comes_too_early_to_an_address_is_found(planned, monkeypatch, lane, shift):
    problem, plan = planned
    assert not list(drawn_cells._reuse(problem, plan))

    def shifted(problem, work):
        timeline.run_lanes(problem, work)
        getattr(work, lane)[np.flatnonzero(work.swap_out >= 0)[-1]] += shift

    monkeypatch.setattr(drawn_cells, 'run_lanes', shifted)
    assert {promise for promise, _ in drawn_cells._reuse(problem, plan)} == {'reuse'}


def test_a_planner_that_is_slower_than_a_trivial_answer_is_found(planned):
    problem, _ = planned
    limit = problem.in_core_peak_bytes
    plan = make_plan(problem, limit, 'swap-all')
    slower = dataclasses.replace(plan, predicted_seconds=1e6)
    found = {
        figures['answer'] for _, figures in drawn_cells._trivial(problem, limit, slower)
    }
    assert {'keep all', 'swap all'} <= found
    assert {promise for promise, _ in drawn_cells._trivial(problem, limit, None)} == {
        'trivial'
    }
