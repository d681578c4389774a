"""The measured policy: candidates, FreeTime, MSPS with updates, in-triggers.

In the running example layer i makes map i in 1 s at i; its backward takes 2 s at
11 - i and reads maps i and i - 1. Backward begins at 6 s; every copy takes 1 s.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.lab.planners.capuchin import (
    RecomputeCosts,
    SwapWaits,
    Usage,
    choices,
    free_seconds,
    in_core_usage,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import RECOMPUTE, SWAP, least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB


def example(limit: int, **options: float) -> tuple[Problem, Usage]:
    problem = make_problem(toys.chain(**options))  # type: ignore[arg-type]
    return problem, in_core_usage(problem, limit)


def costs_of(profile: Profile) -> RecomputeCosts:
    problem = make_problem(profile)
    return RecomputeCosts(problem.arrays, problem.recomputable)


def test_peak_usage_and_what_is_missing() -> None:
    """Maps go with their last use: the load falls in backward, unlike Chainer's."""
    problem, usage = example(60 * MIB)
    assert problem.in_core_peak_bytes == 85 * MIB
    assert np.flatnonzero(usage.peak).tolist() == [5, 6, 7, 8]
    assert usage.missing_bytes == 15 * MIB
    assert usage.start.tolist() == [*range(6), 6, 8, 10, 12, 14, 16, 18]
    # After the last operation of the peak before each, from backward on.
    assert usage.after_peak.tolist() == [6] * 7 + [7, 8, 9, 9, 9, 9]


def test_free_time() -> None:
    """Map i: back at 14 - 2 i seconds, less a copy; away from i + 2, and a copy."""
    problem, usage = example(60 * MIB)
    assert free_seconds(problem, usage).tolist() == [10, 7, 4, 1, -2, -2]


def test_what_fits_after_the_last_use_is_left_alone() -> None:
    plan = make_plan(toys.chain(), 80 * MIB, 'capuchin')
    assert plan.count(Action.KEEP) == 6
    assert plan.predicted_seconds == pytest.approx(plan.in_core_seconds)


def test_the_longest_free_time_is_swapped_first_and_no_more_than_needed() -> None:
    """Five MiB are missing: one map of ten is enough."""
    problem, usage = example(70 * MIB)
    assert list(choices(problem, usage))[:2] == [(0, SWAP), (1, SWAP)]
    plan = make_plan(problem, 70 * MIB, 'capuchin')
    assert [m.action for m in plan.maps] == [Action.SWAP] + [Action.KEEP] * 5
    assert plan.predicted_seconds == pytest.approx(plan.in_core_seconds)


def test_only_who_lives_during_the_peak_is_a_candidate() -> None:
    """The peak is in operation 6, when map 5 has been made; a branch is over then."""
    parents = [[], [0], [], [2], [1, 3]]
    profile = toys.graph(parents, nbytes=[10 * MIB] * 4 + [40 * MIB])
    problem = make_problem(profile)
    usage = in_core_usage(problem, 130 * MIB)
    peak = set(np.flatnonzero(usage.peak).tolist())
    chosen = {m for m, _ in choices(problem, usage)}
    a = problem.arrays
    for m in range(len(problem.maps)):
        lives = set(range(a.producer[m], a.last_use[m] + 1))
        assert (m in chosen) is bool(lives & peak)


def test_a_copy_that_could_begin_in_the_peak_only_is_exposed() -> None:
    """Map 2 is needed at 8, inside the peak; map 0 at 10, an operation after it."""
    problem, usage = example(60 * MIB)
    waits = SwapWaits(problem, usage)
    assert [waits.exposed(m) for m in range(3)] == [0, 1, 1]


def test_copies_share_the_link() -> None:
    """Copies take 4 s; alone, those of map 0 and those of map 1 are hidden.

    Together, map 1 has left at 10 s instead of 7, is back at 14 instead of 12, and
    map 0 at 18 instead of 14, when 2 s have been waited for already.
    """
    problem, usage = example(75 * MIB, bandwidth=2.5 * MIB)
    usage = usage._replace(after_peak=np.full(13, 7))
    waits = SwapWaits(problem, usage)
    assert waits.exposed(1) == waits.exposed(0) == 0
    waits.swap(1)
    assert waits.exposed(0) == 4


def test_recompute_times_grow_as_sources_go() -> None:
    """A chain of 1, 2, 4 and 8 s: what is gone is made again for those behind it."""
    costs = costs_of(toys.chain(4, seconds=[1.0, 2.0, 4.0, 8.0]))
    assert [costs.seconds(m) for m in range(4)] == [1, 2, 4, 8]
    costs.recompute(1)
    assert [costs.seconds(m) for m in (0, 2, 3)] == [1 + 1, 4 + 2, 8]
    costs.recompute(2)
    # Map 0 is made again with 1 and with 2; map 3 needs 2 and so 1.
    assert [costs.seconds(m) for m in (0, 3)] == [1 + 1 + 1, 8 + 4 + 2]


def test_chains_pass_through_what_forward_drops() -> None:
    profile = toys.graph(
        [[], [0], [1], [2]],
        seconds=[1.0, 2.0, 4.0, 8.0],
        transient=[False, True, False, False],
    )
    costs = costs_of(profile)  # of maps 0, 2 and 3
    assert [costs.seconds(m) for m in range(3)] == [1, 4 + 2, 8]


def test_what_cannot_be_recomputed_has_no_price() -> None:
    problem = make_problem(toys.chain(3))
    costs = RecomputeCosts(problem.arrays, np.array([True, False, True]))
    assert costs.seconds(1) == math.inf


def test_the_next_choice_knows_of_the_one_before() -> None:
    """On a link too slow for any copy the cheapest recompute per byte comes first.

    Maps 1, 0 and 4 take 1 s each, map 2 takes 1.2 s and map 3 takes 1.5 s. Once 1 is
    recomputed, 0 would be made again with it: 4 comes first. By the first prices it
    would not.
    """
    parents: list[list[int]] = [[], [0], [1], [0, 2], [3]]
    seconds = [1.0, 1.0, 1.2, 1.5, 1.0]
    profile = toys.graph(parents, seconds=seconds, bandwidth=0.5 * MIB)
    problem = make_problem(profile)
    usage = in_core_usage(problem, 60 * MIB)
    free = free_seconds(problem, usage)
    once = sorted(range(5), key=lambda m: (seconds[m], -free[m], m))
    assert once == [1, 0, 4, 2, 3]
    assert list(choices(problem, usage)) == [(m, RECOMPUTE) for m in (1, 4, 0, 2, 3)]


@pytest.mark.parametrize('seed', range(12))
def test_triggers_lie_outside_of_peak_usage(seed: int) -> None:
    """Without feedback; where the back access is inside, the copy begins with it."""
    make = toys.random_graph if seed % 2 else toys.random_network
    problem = make_problem(make(seed, 10))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    for limit in (least, (least + most) // 2, most - 1):
        usage = in_core_usage(problem, limit)
        plan = make_plan(problem, limit, 'capuchin', rehearsals=0)
        for entry in plan.maps:
            if entry.action is Action.SWAP:
                waiting = slice(entry.swap_in_before, entry.needed_before)
                assert not usage.peak[waiting].any()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), nodes=st.integers(1, 12), share=st.floats(0.0, 0.999)
)
def test_it_fits_wherever_swap_all_does(seed: int, nodes: int, share: float) -> None:
    make = toys.random_graph if seed % 2 else toys.random_network
    problem = make_problem(make(seed, nodes))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    limit = int(least + (most - least) * share)
    plan = make_plan(problem, limit, 'capuchin')
    assert max(check_plan(problem.profile, plan, limit)) == plan.predicted_peak_bytes
    first = make_plan(problem, limit, 'capuchin', rehearsals=0)
    assert plan.predicted_seconds <= first.predicted_seconds


@pytest.mark.parametrize('value', [-1, 0.5, 'many', None])
def test_rehearsals_that_are_none(value: object) -> None:
    with pytest.raises(OptionError, match='rehearsals'):
        make_plan(toys.chain(2), '1GiB', 'capuchin', rehearsals=value)
