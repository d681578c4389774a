"""What leaves for nothing stays."""

import numpy as np
import pytest

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.search.repairs import undo_useless_moves
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.testing import networks


def half_way(problem, share):
    least = least_memory(problem)[0]
    return int(least + share * (problem.in_core_peak_bytes - least))


@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('share', [0.1, 0.5, 0.9])
def test_nothing_is_slower_and_less_leaves(seed, share):
    problem = make_problem(networks.random_network(seed, nodes=20))
    search = Search(problem, half_way(problem, share), barrier=False)
    start = search.evaluate(search.fill(SWAP))
    kept = undo_useless_moves(search, start)
    assert kept.fits and kept.seconds <= start.seconds
    assert not np.any((kept.action != KEEP) & (start.action == KEEP))
    fewer = np.count_nonzero(kept.action != KEEP) < np.count_nonzero(
        start.action != KEEP
    )
    assert fewer or share < 0.9


def test_rules_are_obeyed():
    profile = networks.random_network(3, nodes=20)
    problem = make_problem(profile, rules={'*': 'no keep'})
    search = Search(problem, problem.in_core_peak_bytes, barrier=False)
    start = search.evaluate(search.fill(SWAP))
    assert (undo_useless_moves(search, start).action == start.action).all()


def test_recomputes_that_hide_nothing_end_too():
    problem = make_problem(networks.random_network(5, nodes=20))
    search = Search(problem, problem.in_core_peak_bytes, barrier=False)
    start = search.evaluate(search.fill(RECOMPUTE))
    assert (start.action == RECOMPUTE).any()
    assert (undo_useless_moves(search, start).action == KEEP).all()


def test_a_plan_near_what_plain_chainer_needs_copies_little():
    problem = make_problem(networks.random_network(9, nodes=300))
    limit = half_way(problem, 0.95)
    plan = make_plan(problem, limit, 'hybrid')
    assert plan.gap <= 1e-4
    assert plan.predicted_peak_bytes <= limit
    assert simulate(problem, plan).total_seconds == plan.predicted_seconds
    assert plan.count(Action.SWAP) < 0.2 * len(plan.maps)
