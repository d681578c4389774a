"""Layouts: no overlap, SmartPool's rules, and optimal where brute force says so."""

from __future__ import annotations

import dataclasses
import itertools

import problems
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toys

from chainer_hybridmem.errors import OptionError, PlanError
from chainer_hybridmem.planning.layouts import (
    Trace,
    check_layout,
    exact,
    from_lifetimes,
    in_core_trace,
    planned_trace,
    smartpool,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search.deadline import Deadline


def brute_force(trace: Trace) -> int:
    """The smallest footprint: some order reaches it, each buffer as low as it goes."""
    lower, upper = trace.lifetimes()
    sizes = trace.sizes
    best = sum(sizes)
    for order in itertools.permutations(i for i in range(len(sizes)) if sizes[i]):
        placed: list[tuple[int, int]] = []
        for i in order:
            meeting = sorted(
                (offset, offset + sizes[j])
                for j, offset in placed
                if lower[i] < upper[j] and lower[j] < upper[i]
            )
            offset = 0
            for start, end in meeting:
                if start - offset >= sizes[i]:
                    break
                offset = max(offset, end)
            placed.append((i, offset))
        best = min(best, max((o + sizes[i] for i, o in placed), default=0))
    return best


@settings(deadline=None, max_examples=150)
@given(problems.lifetimes(6))
def test_exact_is_as_good_as_brute_force(trace):
    layout = exact(trace)
    check_layout(trace, layout)
    assert layout.footprint_bytes == brute_force(trace)
    assert layout.optimal and layout.bound_bytes >= trace.peak_load_bytes


@settings(deadline=None, max_examples=150)
@given(problems.traces())
def test_any_trace_has_layouts_without_overlap(trace):
    for alignment in (1, 64):
        layouts = [
            smartpool(trace, alignment),
            smartpool(trace, alignment, first_fit=True),
            exact(trace, alignment),
        ]
        for layout in layouts:
            check_layout(trace, layout)
            assert layout.footprint_bytes >= layout.bound_bytes
            assert layout.bound_bytes >= layout.peak_load_bytes
            assert all(offset % alignment == 0 for offset in layout.offsets)
        assert layouts[2].footprint_bytes <= layouts[0].footprint_bytes
        assert layouts[2].footprint_bytes <= layouts[1].footprint_bytes


def test_largest_first_into_the_smallest_or_the_lowest_hole():
    # The last one may lie in [0, 40), or in [70, 95) between the second and fourth.
    trace = from_lifetimes(
        sizes=[40, 30, 25, 22, 20],
        lower=[0, 0, 0, 0, 5],
        upper=[1, 9, 1, 9, 6],
    )
    assert smartpool(trace).offsets == (0, 40, 70, 95, 70)
    assert smartpool(trace, first_fit=True).offsets == (0, 40, 70, 95, 0)


def test_one_large_buffer_shares_with_several_small_ones():
    trace = from_lifetimes([30, 10, 10, 10], [0, 5, 5, 5], [5, 9, 9, 9])
    layout = smartpool(trace)
    assert layout.footprint_bytes == 30
    assert sorted(layout.offsets) == [0, 0, 10, 20]


def test_a_carried_buffer_keeps_its_place():
    # 0 is freed as 1 in the next iteration; 2 lives in between.
    trace = Trace((8, 8, 8, 4), (-2, 3, 4, -3, 1, -4), (), ((0, 1),))
    layout = exact(trace)
    check_layout(trace, layout)
    assert layout.offsets[0] == layout.offsets[1]
    torn = dataclasses.replace(layout, offsets=(8, 0, 0, 16), footprint_bytes=24)
    with pytest.raises(PlanError, match='next iteration'):
        check_layout(trace, torn)


def test_the_checker_sees_an_overlap():
    trace = from_lifetimes([8, 8], [0, 0], [2, 2])
    layout = smartpool(trace)
    with pytest.raises(PlanError, match='overlaps'):
        check_layout(trace, dataclasses.replace(layout, offsets=(0, 7)))
    with pytest.raises(PlanError, match='lies from'):
        check_layout(trace, dataclasses.replace(layout, offsets=(0, 9)))


@pytest.mark.parametrize('seed', range(8))
def test_training_schedules_are_laid_out_optimally(seed):
    profile = toys.random_network(seed, 30)
    traces = [in_core_trace(profile)]
    for planner in ('swap-all', 'superneurons'):
        traces.append(planned_trace(profile, make_plan(profile, '10GB', planner)))
    for trace in traces:
        layout = exact(trace, 512)
        check_layout(trace, layout)
        assert layout.optimal, layout.gap


@pytest.mark.parametrize('seed', range(5))
def test_the_search_does_not_lose_to_smartpool(seed):
    trace = problems.random_trace(seed)
    layout = exact(trace)
    check_layout(trace, layout)
    assert layout.footprint_bytes <= smartpool(trace).footprint_bytes
    assert layout == exact(trace)  # the same once more


def test_a_search_ends_with_its_deadline():
    trace = problems.random_trace(0, 200)
    over = exact(trace, deadline=Deadline(0))
    check_layout(trace, over)
    assert over.footprint_bytes <= smartpool(trace).footprint_bytes
    assert not over.optimal and over.bound_bytes == trace.peak_load_bytes


def test_nothing_to_lay_out():
    layout = exact(Trace((), ()))
    assert layout.footprint_bytes == 0 and layout.optimal
    assert layout.competitive_ratio == 1 and layout.gap == 0
    assert exact(from_lifetimes([0], [0], [1])).footprint_bytes == 0


@pytest.mark.parametrize('alignment', [0, -8, 3, 2**31])
def test_an_alignment_that_is_none(alignment):
    with pytest.raises(OptionError, match='power of two'):
        smartpool(Trace((1,), (1,)), alignment)


@settings(deadline=None, max_examples=150)
@given(problems.traces(30), st.integers(1, 6), st.integers(0, 12), st.integers(1, 4))
def test_very_many_buffers_have_layouts_without_overlap(trace, large, settled, part):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('chainer_hybridmem.planning.layouts.offline.MOST_BLOCKS', 0)
        patch.setattr('chainer_hybridmem.planning.layouts.offline.MOST_LARGE', large)
        patch.setattr(
            'chainer_hybridmem.planning.layouts.offline.MOST_SETTLED', large + settled
        )
        patch.setattr('chainer_hybridmem.planning.layouts.offline.BRIEF_PART', part)
        found = exact(trace, 8)
    check_layout(trace, found)
    assert found.bound_bytes <= exact(trace, 8).footprint_bytes
    assert found.footprint_bytes <= smartpool(trace, 8).footprint_bytes


def test_brief_buffers_fill_the_holes_of_large_ones(monkeypatch):
    """Ten large ones one after the other, in whose time many small ones come and go."""
    sizes, lower, upper = [], [], []
    for k in range(10):
        sizes += [1000, *[10] * 200]
        lower += [400 * k, *range(400 * k, 400 * k + 200)]
        upper += [400 * k + 390, *range(400 * k + 5, 400 * k + 205)]
    trace = from_lifetimes(sizes, lower, upper)
    monkeypatch.setattr('chainer_hybridmem.planning.layouts.offline.MOST_BLOCKS', 100)
    monkeypatch.setattr('chainer_hybridmem.planning.layouts.offline.MOST_LARGE', 10)
    found = exact(trace)
    check_layout(trace, found)
    assert found.found_by.endswith(', filled')
    assert found.optimal


@settings(deadline=None, max_examples=100)
@given(problems.traces(20), st.floats(0.9, 1.3))
def test_a_search_ends_at_what_is_enough(trace, share):
    best = exact(trace, 8)
    enough = int(best.footprint_bytes * share)
    found = exact(trace, 8, enough_bytes=enough)
    check_layout(trace, found)
    if best.footprint_bytes <= enough:
        assert found.footprint_bytes <= enough
    else:
        assert found == best
