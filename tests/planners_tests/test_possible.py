"""What no plan can do with a map under a limit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.matrices import several

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.bound import lower_bound, model
from chainer_hybridmem.planning.search.bound.possible import Possible, find_possible
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    PASSED,
    RECOMPUTE,
    SWAP,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.testing.networks import random_network

LIMITS = (1.0, 1.001, 1.01, 1.05)  # of the least memory


def possible_in(problem, limit_bytes):
    return find_possible(problem, limit_bytes, model.find_fixed(problem))


@pytest.mark.parametrize('seed', range(several(60, all_of_them=600)))
def test_what_fits_is_possible(seed):
    rng = random.Random(seed)
    problem = make_problem(random_network(seed, rng.randint(2, 16)))
    limit_bytes = int(least_memory(problem)[0] * rng.choice(LIMITS))
    possible = possible_in(problem, limit_bytes)
    search = Search(problem, limit_bytes, barrier=False)
    for _ in range(100):
        most = rng.choice([SWAP, PASSED])
        drawn = [rng.randint(KEEP, most) for _ in problem.maps]
        found = search.evaluate(np.array(drawn, np.int64))
        if found.fits:
            assert possible.keep[found.action == KEEP].all()
            assert possible.recompute[found.action >= RECOMPUTE].all()


def test_an_operation_beside_which_nothing_fits():
    """ResNet-50 in the least memory: what comes after a wide convolution's backward.

    Its workspace leaves no room for a block's output, and no replay of the stem fits
    before the next blocks need theirs. Just above, one does.
    """
    name = 'shipped:resnet50-b8-host'
    problem = make_problem(hybridmem.load_profile(name))
    least_bytes = least_memory(problem)[0]
    possible = possible_in(problem, least_bytes)
    not_made = np.flatnonzero(problem.recomputable & ~possible.recompute)
    assert len(not_made) == 2 and not possible.keep[not_made].any()
    above = possible_in(problem, int(1.02 * least_bytes))
    assert above.recompute[not_made].all()
    plan = make_plan(problem, least_bytes, 'hybrid', steps=2000)
    swapped = {m.storage for m in plan.maps if m.action is Action.SWAP}
    assert {problem.maps[m].id for m in not_made} <= swapped


def test_the_bound_is_higher_for_it(monkeypatch):
    name = 'shipped:resnet50-b8-host'
    problems = [make_problem(hybridmem.load_profile(name)) for _ in range(2)]
    least_bytes = least_memory(problems[0])[0]
    higher = lower_bound(problems[0], least_bytes).seconds

    def everything(problem, limit_bytes, fixed):
        return Possible(np.ones(len(problem.maps), bool), problem.recomputable)

    monkeypatch.setattr(model, 'find_possible', everything)
    assert higher > 1.1 * lower_bound(problems[1], least_bytes).seconds


def test_where_nothing_fits_nothing_is_concluded():
    problem = make_problem(hybridmem.load_profile('shipped:alexnet-b32-host'))
    possible = possible_in(problem, least_memory(problem)[0] // 2)
    assert possible.keep.all()
    assert (possible.recompute == problem.recomputable).all()
