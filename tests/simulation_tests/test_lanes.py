"""The host that issues work, and copies that disturb each other and compute."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.planning.simulation.lanes import time_lanes
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.timeline import (
    positions_from_plan,
    undisturbed_seconds,
)

MIB = toys.MIB
BOTH_WAYS = [40, 43, 141, 262]  # seeds whose plans copy both ways at once
shares = st.sampled_from([0.3, 0.5, 0.9, 1.0])


def with_host(profile: Profile, *seconds: float, issue: float = 0.0) -> Profile:
    """The profile with host seconds, the last one for all operations that follow."""
    rest = seconds[-1:] * (len(profile.operations) - len(seconds))
    operations = tuple(
        dataclasses.replace(op, host_seconds=host)
        for op, host in zip(profile.operations, (*seconds, *rest), strict=True)
    )
    link = dataclasses.replace(profile.link, issue_seconds=issue)
    return dataclasses.replace(profile, operations=operations, link=link)


def in_core(profile: Profile) -> Timeline:
    return simulate(profile, make_plan(profile, '1GB', 'in-core'))


def lane(timeline: Timeline, kind: str) -> list[tuple[float, float]]:
    return [
        (round(i.start_seconds, 9), round(i.end_seconds, 9))
        for i in timeline.intervals
        if i.kind == kind
    ]


# -- the host ------------------------------------------------------------------
def test_a_host_that_runs_ahead_costs_nothing() -> None:
    """Issuing takes less than computing, operation by operation."""
    slow = with_host(toys.chain(), 0.05)
    assert in_core(slow).total_seconds == pytest.approx(6 + 12 + 0.1)
    assert in_core(slow).host_stall_seconds == 0


def test_compute_waits_for_a_slow_host_until_it_has_caught_up() -> None:
    """F0 .. F5 of 1 s each are issued in 1.5 s each, the rest at once.

    ::

        s        0     1.5    3     4.5   6     7.5   9
        host     F0----F1----F2----F3----F4----F5----|
        compute  F0--..F1--..F2--..F3--..F4--..F5--..B5 and on without waiting
    """
    profile = with_host(toys.chain(), *[1.5] * 6, 0.0)
    timeline = in_core(profile)
    assert lane(timeline, 'forward') == [(1.5 * k, 1.5 * k + 1) for k in range(6)]
    assert timeline.total_seconds == pytest.approx(9 + 12 + 0.1)
    assert timeline.host_stall_seconds == pytest.approx(3.0)
    assert lane(timeline, 'stall') == [(1.5 * k + 1, 1.5 * k + 1.5) for k in range(6)]
    assert make_problem(profile).in_core_seconds == pytest.approx(21.1)


def test_an_iteration_ends_when_the_host_has_issued_it() -> None:
    """Only the update takes the host long: 18 s of compute, issued until 20 s."""
    profile = with_host(toys.chain(), *[0.0] * 12, 20.0)
    timeline = in_core(profile)
    assert timeline.total_seconds == pytest.approx(20.0)
    assert timeline.host_stall_seconds == pytest.approx(20 - 18.1)


def test_the_host_issues_copies_and_replays_too() -> None:
    """Nothing takes the device any time: what is left is what the host needs."""
    profile = with_host(toys.chain(bandwidth=1e9 * MIB), 1.5, issue=0.25)
    instant = dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, device_seconds=0.0) for op in profile.operations
        ),
        recipes=tuple(dataclasses.replace(r, seconds=0.0) for r in profile.recipes),
    )
    search = Search(make_problem(instant), 100 * MIB)
    copies = search.evaluate(search.fill(SWAP)).seconds
    assert copies == pytest.approx(13 * 1.5 + 12 * 0.25)
    replays = search.evaluate(np.array([SWAP] + [RECOMPUTE] * 5)).seconds
    assert replays == pytest.approx((13 + 5) * 1.5 + 2 * 0.25)


# -- contention ----------------------------------------------------------------
def test_compute_is_slower_beside_a_copy() -> None:
    """Copies out of 1 s beside operations of 1 s: each loses a half meanwhile.

    Map 0 leaves beside F1 and map 1 beside F2 ...: F1 does 0.5 s of its work in the
    first second, and the other half alone.
    """
    profile = toys.with_shares(toys.chain(), 0.5, 1.0, 1.0)
    timeline = simulate(profile, make_plan(profile, 45 * MIB, 'swap-all'))
    forward = lane(timeline, 'forward')
    # The copy of map 0 may start when F1 has read it.
    assert forward[:3] == [(0, 1), (1, 2), (2, 3.5)]
    assert lane(timeline, 'swap-out')[0] == (2, 3)


def disturbed_case(
    seed: int, out: float, back: float, duplex: float, actions: int = 3
) -> tuple[Problem, Plan]:
    """A random network, and a plan of random actions for it."""
    profile = toys.with_shares(toys.random_network(seed), out, back, duplex)
    problem = make_problem(profile)
    rng = np.random.default_rng(seed)
    action = rng.integers(0, actions, len(problem.maps))
    action[(action == RECOMPUTE) & ~problem.recomputable] = SWAP
    peak = Search(problem, 2**50, barrier=False).evaluate(action).peak_bytes
    for _ in range(3):  # in less memory, copies wait for each other
        smaller = Search(problem, peak - peak // 10, barrier=False).evaluate(action)
        if not smaller.fits:
            break
        peak = smaller.peak_bytes
    search = Search(problem, peak, barrier=False)
    return problem, search.finish('test', search.evaluate(action))


@given(st.integers(0, 10**6), shares, shares, shares)
def test_contention_only_costs_time_and_the_bound_holds(
    seed: int, out: float, back: float, duplex: float
) -> None:
    problem, plan = disturbed_case(seed, out, back, duplex)
    free = toys.with_shares(problem.profile, 1.0, 1.0, 1.0)
    seconds = simulate(problem, plan).total_seconds
    assert seconds >= simulate(free, plan).total_seconds * (1 - 1e-12)
    bound = lower_bound(problem, plan.predicted_peak_bytes).seconds
    assert bound <= seconds * (1 + 1e-9)


@pytest.mark.parametrize('seed', BOTH_WAYS)
def test_both_directions_copy_at_once(seed: int) -> None:
    check_rates(seed, 0.5, 0.9, 0.5, actions=2, both=True)


@given(st.integers(0, 10**6), shares, shares, shares)
def test_copies_keep_their_rates(
    seed: int, out: float, back: float, duplex: float
) -> None:
    check_rates(seed, out, back, duplex)


def check_rates(
    seed: int,
    out: float,
    back: float,
    duplex: float,
    actions: int = 3,
    both: bool = False,
) -> None:
    """Interval by interval, against what is under way beside it."""
    problem, plan = disturbed_case(seed, out, back, duplex, actions)
    timeline = simulate(problem, plan)
    spans: dict[str, list[tuple[float, float, Interval]]] = {}
    for i in timeline.intervals:
        spans.setdefault(i.lane, []).append((i.start_seconds, i.end_seconds, i))
    outs, ins = spans.get('d2h', []), spans.get('h2d', [])
    shared = sum(overlap(start, end, ins) for start, end, _ in outs)
    assert shared > 0 or not both
    sizes = {s.id: s.nbytes for s in problem.maps}
    link = problem.profile.link
    for lanes, others, alone in (
        (outs, ins, link.d2h_seconds),
        (ins, outs, link.h2d_seconds),
    ):
        for start, end, interval in lanes:
            done = end - start - overlap(start, end, others) * (1 - duplex)
            assert done == pytest.approx(alone(sizes[interval.storage]), abs=1e-9)
    work = positions_from_plan(problem, plan)
    time_lanes(problem.arrays, problem.swap_out_seconds, problem.swap_in_seconds, work)
    for k, seconds in enumerate(problem.arrays.seconds):
        start, end = float(work.start[k]), float(work.stop[k])
        by_out, by_in = overlap(start, end, outs), overlap(start, end, ins)
        by_both = sum(overlap(max(start, a), min(end, b), ins) for a, b, _ in outs)
        lost = (by_out - by_both) * (1 - out) + (by_in - by_both) * (1 - back)
        lost += by_both * (1 - out * back)
        expected = seconds + work.replay_seconds[k]
        assert end - start - lost == pytest.approx(expected, abs=1e-9)


def overlap(
    start: float, end: float, spans: list[tuple[float, float, Interval]]
) -> float:
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b, _ in spans)


@given(st.integers(0, 10**6), shares, shares, shares)
def test_times_beside_copies_tell_those_without(
    seed: int, out: float, back: float, duplex: float
) -> None:
    """Measure (by simulation) under a plan, take its copies' cost out again."""
    problem, plan = disturbed_case(seed, out, back, duplex, actions=2)
    work = positions_from_plan(problem, plan)
    time_lanes(problem.arrays, problem.swap_out_seconds, problem.swap_in_seconds, work)
    profile = problem.profile
    measured = dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, device_seconds=float(seconds))
            for op, seconds in zip(
                profile.operations, work.stop - work.start, strict=True
            )
        ),
    )
    found = undisturbed_seconds(make_problem(measured), plan)
    true = [op.device_seconds for op in profile.operations]
    assert found == pytest.approx(true, rel=1e-6, abs=1e-9)
