"""The search of Ito et al. against slow literal readings of the paper."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan, pooch
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB
CODES = {Action.KEEP: KEEP, Action.SWAP: SWAP, Action.RECOMPUTE: RECOMPUTE}


def cases() -> list[tuple[Problem, int]]:
    """Small problems, each with two limits below what in-core needs."""
    profiles = [toys.chain(), toys.chain(7, bandwidth=4.0 * MIB)]
    profiles += [toys.random_graph(seed, 7) for seed in range(6)]
    profiles += [toys.random_network(seed, 7) for seed in range(24)]
    found = []
    for seed, profile in enumerate(profiles):
        problem, rng = make_problem(profile), random.Random(seed)
        least, most = least_memory(problem)[0], problem.in_core_peak_bytes
        if len(problem.maps) > 1 and least < most:
            found += [(problem, rng.randint(least, most - 1)) for _ in range(2)]
    return found


CASES = cases()
every_case = pytest.mark.parametrize(('problem', 'limit'), CASES)


def actions(plan: Plan) -> list[int]:
    return [CODES[m.action] for m in plan.maps]


def leaf(search: Search, candidate: Candidate) -> list[Candidate]:
    """Section 4.4.2: trims exposed swap-outs from the output layer backwards."""
    path = [candidate]
    for m in reversed(range(len(candidate.action))):
        current = path[-1]
        if not any(current.release_stall > 0):
            break
        if current.action[m] != SWAP:
            continue
        action = current.action.copy()
        action[m] = KEEP
        trimmed = search.evaluate(action)
        if not trimmed.fits:
            break
        path.append(trimmed)
    return path


def literal_stage_one(problem: Problem, limit: int) -> tuple[float, float]:
    """Best time over all leaves, and over everything met on the way there."""
    search = Search(problem, limit)
    base = search.evaluate(search.fill(SWAP))
    exposed = [m for m in range(len(base.action)) if base.need_stall[m] > 0]
    at_leaves, anywhere = [], []
    for choice in itertools.product((KEEP, SWAP), repeat=len(exposed)):
        action = base.action.copy()
        action[exposed] = choice
        candidate = search.evaluate(action)
        if candidate.fits:
            path = leaf(search, candidate)
            at_leaves.append(path[-1].seconds)
            anywhere += [c.seconds for c in path]
    return min(at_leaves), min(anywhere)


def literal_stage_two(problem: Problem, limit: int, action: list[int]) -> list[int]:
    """Section 4.4.3, steps 1 to 6, with equation (1) written out."""
    search = Search(problem, limit)
    chosen = np.array(action, np.int64)
    undecided = {
        m for m in range(len(chosen)) if chosen[m] == SWAP and problem.recomputable[m]
    }
    while undecided:
        r = {}
        for m in sorted(undecided):
            hidden = search.evaluate(chosen, free=m).seconds
            other = chosen.copy()
            other[m] = RECOMPUTE
            recompute_overhead = search.evaluate(other).seconds - hidden
            swap_overhead = search.evaluate(chosen).seconds - hidden
            # Without a swap overhead nothing can be better than the swap.
            r[m] = recompute_overhead / swap_overhead if swap_overhead > 0 else 1.0
        undecided = {m for m in undecided if r[m] < 1}
        if undecided:
            best = min(sorted(undecided), key=lambda m: r[m])
            chosen[best] = RECOMPUTE
            undecided.remove(best)
    return chosen.tolist()


def test_the_cases_are_worth_it() -> None:
    """Both stages have something to decide in enough of them."""
    plans = [make_plan(problem, limit, 'pooch') for problem, limit in CASES]
    assert len(plans) >= 30
    assert sum(plan.count(Action.RECOMPUTE) > 0 for plan in plans) >= 8
    assert sum(plan.count(Action.KEEP) > 0 for plan in plans) >= 8


@pytest.mark.matrix(first=2, every=4)
@every_case
def test_stage_one_is_the_exhaustive_search(problem: Problem, limit: int) -> None:
    plan = make_plan(problem, limit, 'swap-opt')
    assert plan.options['tree_complete']
    leaves, anywhere = literal_stage_one(problem, limit)
    assert plan.predicted_seconds == anywhere <= leaves
    assert plan.count(Action.RECOMPUTE) == 0


@pytest.mark.matrix(first=0, every=4)
@every_case
def test_stage_two_follows_equation_1(problem: Problem, limit: int) -> None:
    start = actions(make_plan(problem, limit, 'swap-opt'))
    expected = literal_stage_two(problem, limit, start)
    assert actions(make_plan(problem, limit, 'pooch')) == expected


@pytest.mark.matrix(first=3, every=4)
@every_case
def test_each_step_is_never_slower(problem: Problem, limit: int) -> None:
    names = ('pooch', 'swap-opt', 'swap-all', 'swap-all-unscheduled')
    times = [make_plan(problem, limit, name).predicted_seconds for name in names]
    assert times == sorted(times)


@pytest.mark.matrix(first=1, every=4)
@every_case
def test_stage_two_does_not_touch_what_is_kept(problem: Problem, limit: int) -> None:
    before = actions(make_plan(problem, limit, 'swap-opt'))
    after = actions(make_plan(problem, limit, 'pooch'))
    for was, now in zip(before, after, strict=True):
        assert now == was or (was, now) == (SWAP, RECOMPUTE)


@pytest.mark.parametrize('budget', [1, 2, 3, 5, 8, 13, 50])
def test_the_node_budget_is_respected_and_reported(budget: int) -> None:
    """Whether the whole tree was searched stands in the plan's options."""
    profile = toys.chain(14, bandwidth=3.0 * MIB)
    limit = 60 * MIB
    whole = make_plan(profile, limit, 'swap-opt')
    cut = make_plan(profile, limit, 'swap-opt', node_budget=budget)
    assert whole.options == {'node_budget': 20_000, 'tree_complete': True}
    assert cut.options['node_budget'] == budget
    assert cut.simulations <= budget
    if budget < whole.simulations:
        assert not cut.options['tree_complete']
    swap_all = make_plan(profile, limit, 'swap-all')
    slowest, fastest = swap_all.predicted_seconds, whole.predicted_seconds
    assert fastest <= cut.predicted_seconds <= slowest


def test_assignments_that_come_again_change_neither_plan_nor_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = toys.chain(14, bandwidth=6.0 * MIB)
    remembered = make_plan(profile, 90 * MIB, 'swap-opt')
    monkeypatch.setattr(pooch, 'MOST_SEEN', -1)
    again = make_plan(profile, 90 * MIB, 'swap-opt')
    assert again.maps == remembered.maps
    assert again.simulations == remembered.simulations


def test_pooch_reports_an_incomplete_tree_too() -> None:
    profile = toys.chain(14, bandwidth=3.0 * MIB)
    plan = make_plan(profile, 90 * MIB, 'pooch', node_budget=3)
    assert plan.options == {'node_budget': 3, 'tree_complete': False}


def test_a_cheap_function_behind_a_slow_link_is_recomputed() -> None:
    """Every second takes 0.1 s, copies 1.7 s: section 5.1 on ResNet50's BN layers."""
    profile = toys.chain(8, seconds=[2.0, 0.1] * 4, bandwidth=6.0 * MIB)
    plan = make_plan(profile, 60 * MIB, 'pooch')
    swap_opt = make_plan(profile, 60 * MIB, 'swap-opt')
    assert plan.predicted_seconds < swap_opt.predicted_seconds
    recomputed = [m.storage for m in plan.maps if m.action is Action.RECOMPUTE]
    assert recomputed
    assert all(m % 2 == 1 for m in recomputed)


def test_slow_functions_behind_a_fast_link_are_swapped() -> None:
    """Everything is hidden: nothing to gain from a recompute (AlexNet)."""
    profile = toys.chain(8, seconds=3.0, bandwidth=100.0 * MIB)
    plan = make_plan(profile, 60 * MIB, 'pooch')
    assert plan.count(Action.RECOMPUTE) == 0
    assert plan.overhead < 0.01
