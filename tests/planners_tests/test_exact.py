"""The exact planner against brute force over assignments, and its bound."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from typing import Any

import numpy as np
import pytest
from scipy import optimize
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners import PLANNERS, make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.search.bound import (
    WholeRelaxation,
    bound_of_parts,
    lower_bound,
    tighten,
)
from chainer_hybridmem.planning.search.candidates import Search, least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB
RIVALS: dict[str, dict[str, Any]] = {name: {} for name in PLANNERS if name != 'exact'}
RIVALS['autoswap-bo'] = {'evaluations': 10}  # the last two by regression
module = importlib.import_module('chainer_hybridmem.planning.planners.exact')


def profiles() -> dict[str, Profile]:
    named = {
        'chain': toys.chain(5),
        'slow link': toys.chain(6, bandwidth=3.0 * MIB),
        'uneven link': dataclasses.replace(
            toys.chain(5, nbytes=[5 * MIB, 20 * MIB, 10 * MIB, 1 * MIB, 10 * MIB]),
            link=Link(0.01, 4.0 * MIB, 15.0 * MIB),
        ),
        'residual': toys.graph(
            [[], [0], [1], [0, 2], [3], [4], [3, 5], [6]],
            seconds=[1.0, 0.1, 0.1, 0.2, 1.0, 0.1, 0.2, 2.0],
            transient=[False, True, False, False, True, False, False, False],
            bandwidth=4.0 * MIB,
        ),
    }
    named.update({f'graph {s}': toys.random_graph(s, 6) for s in range(4)})
    named.update({f'network {s}': toys.random_network(s, 5) for s in range(8)})
    return {name: p for name, p in named.items() if 1 <= len(make_problem(p).maps) <= 7}


PROFILES = profiles()
every_profile = pytest.mark.parametrize('name', list(PROFILES))


def limits(problem: Problem) -> list[int]:
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes - 1
    spread = {least + (most - least) * i // 3 for i in range(4)}
    return sorted(limit for limit in spread if limit >= least)


def brute_force(problem: Problem, limit: int) -> float:
    """Fastest of all assignments, with and without a barrier before backward."""
    choices = [range(3 if able else 2) for able in problem.recomputable]
    return min(
        search.evaluate(np.array(action, np.int64)).seconds
        for search in (Search(problem, limit, barrier=b) for b in (False, True))
        for action in itertools.product(*choices)
    )


@every_profile
def test_it_is_the_best_assignment(name: str) -> None:
    problem = make_problem(PROFILES[name])
    for limit in limits(problem)[::2]:
        plan = make_plan(problem, limit, 'exact')
        assert plan.options['proved']
        best = brute_force(problem, limit)
        assert plan.predicted_seconds == pytest.approx(best, rel=1e-5)


@every_profile
def test_it_lies_between_the_bound_and_every_other_planner(name: str) -> None:
    problem = make_problem(PROFILES[name])
    for limit in limits(problem)[:: several(2, all_of_them=1)]:
        plan = make_plan(problem, limit, 'exact')
        weaker = lower_bound(problem, limit).seconds
        assert weaker <= plan.lower_bound_seconds <= plan.predicted_seconds
        assert plan.options['gap'] == pytest.approx(plan.gap, abs=1e-12)
        for rival, options in RIVALS.items():
            try:
                other = make_plan(problem, limit, rival, **options)
            except InfeasibleError:
                continue
            assert plan.predicted_seconds <= other.predicted_seconds * (1 + 1e-9)


def test_the_tree_proves_more_than_the_fractions() -> None:
    """Half a map at a time is what the linear program does at this limit."""
    problem = make_problem(toys.chain(6))
    limit = least_memory(problem)[0]
    plan = make_plan(problem, limit, 'exact')
    assert lower_bound(problem, limit).seconds * 1.02 < plan.lower_bound_seconds


@pytest.mark.parametrize('bandwidth', [0.5, 1, 2, 4])
def test_whole_decisions_by_part_close_a_chain_beside_a_link(bandwidth: float) -> None:
    """What is copied or made again in one part is so one after the other."""
    problem = make_problem(toys.chain(8, bandwidth=bandwidth * toys.MIB))
    limit, _ = least_memory(problem)
    seconds = make_plan(problem, limit, 'hybrid').predicted_seconds
    whole = WholeRelaxation(problem, limit)
    whole.divide(tighten(whole.relaxation).prices)
    floor = whole.solve(seconds, 20.0).floor
    assert bound_of_parts(problem, limit) < floor <= seconds <= floor * (1 + 1e-5)


def test_the_solver_knows_a_point_whatever_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else SciPy keeps to itself what it has proven when its time is over."""
    results, milp = [], optimize.milp

    def solve(*args: Any, **options: Any) -> Any:
        results.append(milp(*args, **options))
        return results[-1]

    monkeypatch.setattr(optimize, 'milp', solve)
    problem = make_problem(toys.chain(6))
    whole = WholeRelaxation(problem, least_memory(problem)[0])
    too_fast = tighten(whole.relaxation).seconds * 0.99
    answer = whole.solve(too_fast, 20.0)
    assert results[0].x is not None
    assert answer.x is None
    assert answer.floor == pytest.approx(too_fast, rel=1e-5)


def test_whole_maps_prove_what_bytes_do_not() -> None:
    """One of three large maps has to leave, and no link is fast enough for it."""
    profile = library.load_profile('shipped:alexnet-b1920-v100-estimated')
    problem = make_problem(share_links(profile, 2))
    plan = make_plan(problem, '16GB', 'exact')
    assert lower_bound(problem, 16 * 10**9).seconds * 1.01 < plan.lower_bound_seconds
    assert plan.options['proved']
    assert plan.gap < 1e-5


@every_profile
def test_without_enumeration_it_says_what_it_knows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One assignment after the other is forbidden until time is up."""
    monkeypatch.setattr(module, 'ENUMERATED', 0)
    problem = make_problem(PROFILES[name])
    limit = limits(problem)[0]
    plan = make_plan(problem, limit, 'exact', time_budget=0.5)
    best = brute_force(problem, limit)
    assert plan.lower_bound_seconds <= best
    assert plan.predicted_seconds >= best * (1 - 1e-9)
    if plan.options['proved']:
        assert plan.predicted_seconds == pytest.approx(best, rel=1e-5)


def refuse(*args: object, **kwargs: object) -> optimize.OptimizeResult:
    """A model error, with the status of a problem without a solution."""
    return optimize.OptimizeResult(
        status=2, message='(HiGHS Status 2: Model error)', x=None, mip_dual_bound=None
    )


def give_up(*args: object, **kwargs: object) -> None:
    """A solver at its own limits."""
    raise ValueError('vector::reserve')


@pytest.mark.parametrize('milp', [refuse, give_up])
def test_a_solver_without_an_answer_proves_nothing(
    milp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize, 'milp', milp)
    monkeypatch.setattr(module, 'ENUMERATED', 0)
    problem = make_problem(toys.chain(6))
    limit = least_memory(problem)[0]
    plan = make_plan(problem, limit, 'exact')
    assert not plan.options['proved']
    assert plan.lower_bound_seconds == bound_of_parts(problem, limit)


def test_what_no_wait_allows_is_bounded_by_the_longest_wait() -> None:
    """Nothing is known of plans that take longer than the model has waits for."""
    problem = make_problem(toys.chain(6))
    whole = WholeRelaxation(problem, least_memory(problem)[0] // 2)
    answer = whole.solve(np.inf, 5.0)
    while answer.x is not None and whole.cut(answer.x):
        answer = whole.solve(np.inf, 5.0)
    model = whole.relaxation.model
    assert answer.x is None
    assert answer.floor <= model.base_seconds + model.longest


def test_it_finds_what_annealing_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(toys.random_graph(1))
    limit = least_memory(problem)[0] * 11 // 10
    best = make_plan(problem, limit, 'exact').predicted_seconds
    swap_all = PLANNERS['swap-all']
    assert swap_all(problem, limit).predicted_seconds > best * 1.01
    monkeypatch.setattr(module, '_incumbent', swap_all)
    plan = make_plan(problem, limit, 'exact')
    assert plan.predicted_seconds == pytest.approx(best, rel=1e-5)
    assert plan.options['proved']


def test_it_keeps_to_its_time() -> None:
    """And says that it has not finished."""
    problem = make_problem(toys.random_graph(5, 60))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = (3 * least + most) // 4
    make_plan(problem, limit, 'hybrid')  # compiles
    started = time.process_time()  # of this process, not of others beside it
    plan = make_plan(problem, limit, 'exact', time_budget=1e-3)
    assert time.process_time() - started < 10  # 1.7 on a quiet machine
    assert not plan.options['proved']
    assert plan.lower_bound_seconds <= plan.predicted_seconds


@pytest.mark.parametrize('time_budget', [0, -1, float('nan')])
def test_a_time_budget_that_is_none(time_budget: float) -> None:
    with pytest.raises(OptionError, match='time_budget is in seconds'):
        make_plan(toys.chain(2), '1GiB', 'exact', time_budget=time_budget)
