"""Plans for several processes on one link."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys
from support.matrices import several

from chainer_hybridmem.errors import InfeasibleError, PlanError
from chainer_hybridmem.forecasting.rank_plans import plan_ranks, retime
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate

FEW = {'steps': 300}  # so that the annealing often ends at something bad


def shared(profile, *numbers: int) -> dict[int, Problem]:
    return {n: make_problem(share_links(profile, n)) for n in numbers}


@settings(max_examples=several(15, all_of_them=60), deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_more_bandwidth_is_never_slower(seed: int, share: float) -> None:
    problems = shared(toys.random_network(seed, 12), 1, 2, 3, 4, 8)
    least, most = least_memory(problems[1])[0], problems[1].in_core_peak_bytes
    limit = int(least + share * max(most - least, 0))
    try:
        plans = plan_ranks(problems, limit, seeds=1, **FEW)
    except InfeasibleError:
        return
    seconds = [plans.best[n].predicted_seconds for n in problems]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(seconds))
    for n, problem in problems.items():
        best = plans.best[n]
        assert best.predicted_seconds <= plans.made[n].predicted_seconds
        assert best.predicted_seconds >= best.lower_bound_seconds * (1 - 1e-9)
        assert simulate(problem, best).total_seconds == best.predicted_seconds
        check_plan(problem.profile, best)


@settings(max_examples=several(15, all_of_them=60), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 8))
def test_no_plan_is_slower_on_a_faster_link(seed: int, n: int) -> None:
    """What the table of ranks rests on; where copies disturb nothing."""
    problems = shared(toys.random_network(seed, 12), 1, n)
    limit = (least_memory(problems[1])[0] + problems[1].in_core_peak_bytes) // 2
    try:
        plan = make_plan(problems[n], limit, 'superneurons')
    except InfeasibleError:
        return
    faster = retime(problems[1], plan)
    assert faster.predicted_seconds <= plan.predicted_seconds * (1 + 1e-9)
    assert faster.predicted_peak_bytes == plan.predicted_peak_bytes


def test_it_is_the_same_again() -> None:
    problems = shared(toys.random_network(3, 12), 1, 4)
    limit = (least_memory(problems[1])[0] + problems[1].in_core_peak_bytes) // 2
    first, second = (plan_ranks(problems, limit).best for _ in range(2))
    assert {n: p.maps for n, p in first.items()} == {
        n: p.maps for n, p in second.items()
    }


def test_a_plan_that_was_made_for_another_number_says_so() -> None:
    problems = shared(toys.chain(8), 1, 2)
    plan = make_plan(problems[2], 60 * toys.MIB)
    told: list[str] = []
    plans = plan_ranks(problems, 60 * toys.MIB, tell=told.append)
    assert plans.made[2].maps == plan.maps
    assert told[:2] == [f'planning with hybrid for {n} on the link' for n in (2, 1)]
    for n, best in plans.best.items():
        made_for = best.options.get('made_for_ranks', n)
        assert made_for in problems


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError):
        plan_ranks(shared(toys.chain(), 1, 2), 1)


def test_a_plan_of_another_profile() -> None:
    plan = make_plan(toys.chain(4), 60 * toys.MIB)
    with pytest.raises(PlanError, match='was made for profile'):
        retime(make_problem(toys.chain(5)), plan)


def test_times_of_another_problem() -> None:
    problem = make_problem(toys.chain(8))
    plan = make_plan(problem, 60 * toys.MIB)
    slow = make_problem(share_links(problem.profile, 8))
    there = retime(slow, plan)
    assert there.maps == plan.maps
    assert there.predicted_seconds > plan.predicted_seconds
    assert there.lower_bound_seconds >= plan.lower_bound_seconds
    back = retime(problem, there)
    assert dataclasses.replace(back, lower_bound_seconds=0) == dataclasses.replace(
        plan, lower_bound_seconds=0
    )
