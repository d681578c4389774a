"""Processes that begin one after the other, against the reference of tests/support."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks, toys
from support.drawn_plans import drawn_case

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.search.bound import bound_of_ranks, lower_bound
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.planning.simulation.staggered import (
    find_spans,
    stagger,
    staggered_seconds,
    synchronous_seconds,
)

shares = st.sampled_from([0.3, 0.5, 0.9, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), shares, shares, shares)
def test_the_reference_says_the_same(
    seed: int, n: int, out: float, back: float, duplex: float
) -> None:
    problem, plan = drawn_case(seed, out, back, duplex)
    rng = random.Random(seed)
    spread = rng.choice([0.0, 0.5, 1.0]) * plan.predicted_seconds
    offsets = tuple(rng.random() * spread for _ in range(n))
    expected = ranks.steady_seconds(problem, plan, offsets, 6)
    found = staggered_seconds(problem, plan, offsets, 6)
    assert found == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_without_offsets_it_is_lockstep(seed: int, n: int) -> None:
    problem, plan = drawn_case(seed, 0.9, 0.9, 0.9)
    shared = make_problem(share_links(problem.profile, n))
    seconds = simulate(shared, plan).total_seconds
    assert staggered_seconds(shared, plan, (0.0,) * n) == pytest.approx(seconds)
    best = stagger(problem, plan, n)
    assert best.seconds <= seconds * (1 + 1e-9)
    assert len(best.offsets) == n and min(best.offsets) == 0


def test_one_copies_out_while_the_other_copies_in() -> None:
    """Copies of 1 s beside layers of 1 s: half an iteration apart, few of them wait."""
    problem = make_problem(toys.chain(8))
    plan = make_plan(problem, 45 * toys.MIB, 'swap-all')
    shared = make_problem(share_links(problem.profile, 2))
    alone, lockstep = plan.predicted_seconds, simulate(shared, plan).total_seconds
    best = stagger(problem, plan, 2)
    assert lockstep > 1.2 * alone
    assert alone <= best.seconds < alone + 0.25 * (lockstep - alone)
    assert best.offsets[1] > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_who_begins_later_ends_later(seed: int, n: int) -> None:
    """In synchronous training all wait for the last one."""
    problem, plan = drawn_case(seed, 1.0, 1.0, 1.0)
    alone = ranks.seconds_of(problem, plan, 1)
    delta = 0.1 * alone
    together = ranks.seconds_of(problem, plan, n, delta)
    assert together >= alone + (n - 1) * delta - 1e-9
    offsets = tuple(r * delta for r in range(n))
    assert synchronous_seconds(problem, plan, offsets) == pytest.approx(together)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), shares, shares, shares)
def test_no_start_is_better_than_the_bound(
    seed: int, n: int, out: float, back: float, duplex: float
) -> None:
    problem, plan = drawn_case(seed, out, back, duplex)
    rng = random.Random(seed)
    # Spans do not tell when the host has issued the last of them.
    operations = [
        dataclasses.replace(op, host_seconds=0.0) for op in problem.profile.operations
    ]
    profile = dataclasses.replace(
        problem.profile,
        operations=tuple(operations),
        link=dataclasses.replace(problem.profile.link, issue_seconds=0.0),
    )
    problem = make_problem(profile)
    least = bound_of_ranks(problem, plan.memory_limit_bytes, n)
    assert least >= lower_bound(problem, plan.memory_limit_bytes).seconds
    assert n > 1 or least == lower_bound(problem, plan.memory_limit_bytes).seconds
    for spread in (0.0, 0.3, 0.6):
        offsets = tuple(
            rng.random() * spread * plan.predicted_seconds for _ in range(n)
        )
        assert synchronous_seconds(problem, plan, offsets) >= least * (1 - 1e-9)
        spans = find_spans(problem, plan, offsets, 4)
        assert max(span.end for span in spans) >= 4 * least * (1 - 1e-9)


def test_the_bound_knows_what_the_link_carries() -> None:
    """Whatever the start, eight processes cannot swap what one can."""
    problem = make_problem(dataclasses.replace(toys.chain(8), recipes=()))
    limit = 45 * toys.MIB
    bounds = [bound_of_ranks(problem, limit, n) for n in (1, 2, 4, 8)]
    assert bounds == sorted(bounds)
    assert bounds[3] > 1.3 * bounds[0]
    shared = make_problem(share_links(problem.profile, 4))
    assert bound_of_ranks(shared, limit, 8) == pytest.approx(bounds[3])
    plan = make_plan(shared, limit, 'hybrid')
    seconds = stagger(shared, plan, 8).seconds
    assert bounds[3] <= seconds < 1.3 * bounds[3]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_spans_are_what_runs(seed: int, n: int) -> None:
    """In lockstep on the shared link, every process runs what the simulator says."""
    problem, plan = drawn_case(seed, 0.9, 0.9, 0.9)
    expected = simulate(make_problem(share_links(problem.profile, n)), plan)
    spans = find_spans(problem, plan, (0.0,) * n, 1)
    for rank in range(n):
        for lane in ('compute', 'd2h', 'h2d'):
            found = [s for s in spans if (s.rank, s.lane) == (rank, lane)]
            busy = sum(span.end - span.begin for span in found)
            events = [
                event
                for event in expected.intervals
                if event.lane == lane and event.kind != 'stall'
            ]
            wanted = sum(event.end_seconds - event.start_seconds for event in events)
            assert busy == pytest.approx(wanted, rel=1e-9, abs=1e-12)
            ends = [event.end_seconds for event in events]
            if found:
                last = max(span.end for span in found)
                assert last == pytest.approx(max(ends), rel=1e-9)
