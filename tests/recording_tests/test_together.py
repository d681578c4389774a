"""Small arrays that are counted together leave every load as it was."""

from __future__ import annotations

import dataclasses
import random

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import networks, toys
from support.timelines import operation_loads

from chainer_hybridmem.planning.layouts import in_core_trace, planned_trace
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Category, Profile, Storage
from chainer_hybridmem.planning.records.profile_file import check_profile
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.recording import profile_builder
from chainer_hybridmem.training.recording.profile_builder import (
    count_together,
    find_small,
)

many = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 2**32)


def with_events(profile: Profile, events: list[int], sizes: list[int]) -> Profile:
    """The profile with other events, and storages of these sizes at the end."""
    n = len(profile.storages)
    storages = list(profile.storages)
    for i, nbytes in enumerate(sizes):
        storages.append(Storage(n + i, nbytes, Category.WORKSPACE, 'small', -1, -1, -1))
    malloc = {e - 1: p for p, e in enumerate(events) if e > 0}
    free = {-e - 1: p for p, e in enumerate(events) if e < 0}
    firsts = [op.first_event for op in profile.operations]
    return dataclasses.replace(
        profile,
        events=tuple(events),
        storages=tuple(
            dataclasses.replace(
                s,
                allocated_at=malloc.get(s.id, -1),
                freed_at=free.get(s.id, -1),
                producer=s.producer
                if s.id < n
                else int(np.searchsorted(firsts, malloc.get(s.id, -1), 'right')) - 1,
            )
            for s in storages
        ),
    )


def at(profile: Profile, moved: np.ndarray) -> Profile:
    """The profile whose events from each position on are elsewhere."""
    return dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, first_event=int(moved[op.first_event]))
            for op in profile.operations
        ),
        graph_end_event=int(moved[profile.graph_end_event]),
    )


def sprinkled(profile: Profile, rng: random.Random, count: int) -> Profile:
    """The profile with small storages of drawn lifetimes, some open at an end."""
    n, end = len(profile.storages), len(profile.events)
    at_position: list[list[int]] = [[] for _ in range(end + 1)]
    sizes, before = [], 0
    for i in range(count):
        sizes.append(rng.randint(1, 5000))
        born, length = rng.randint(0, end), rng.choice([0, 0, 0, 1, 3, end])
        first, last = n + i + 1, -(n + i + 1)
        if rng.random() < 0.9:
            at_position[born].append(first)
        else:
            before += sizes[-1]
        if born + length <= end:
            at_position[born + length].append(last)
    events: list[int] = []
    moved = np.zeros(end + 1, np.int64)
    for position in range(end + 1):
        early = rng.randint(0, len(at_position[position])) if position else 0
        events += at_position[position][:early]
        moved[position] = len(events)
        events += at_position[position][early:]
        events += profile.events[position : position + 1]
    profile = dataclasses.replace(
        at(profile, moved), initial_bytes=profile.initial_bytes + before
    )
    return with_events(profile, events, sizes)


def compressed(full: Profile, bare: Profile) -> Profile:
    """``full`` with all but the storages of ``bare`` counted together."""
    n = len(bare.storages)
    nbytes = np.array([s.nbytes for s in full.storages], np.int64)
    cuts = [full.graph_end_event, *(op.first_event for op in full.operations)]
    found = count_together(
        np.array(full.events, np.int64),
        nbytes,
        np.arange(len(nbytes)) >= n,
        np.array(cuts),
    )
    shift = len(nbytes) - n  # the small ones' numbers are not used any more
    events = [
        e if abs(e) <= n else e - shift if e > 0 else e + shift for e in found.events
    ]
    profile = dataclasses.replace(
        at(full, found.moved), storages=full.storages[:n], events=()
    )
    return with_events(profile, events, found.sizes)


@many
@given(seeds, st.integers(0, 200))
def test_every_load_is_what_it_was_under_any_plan(seed: int, count: int) -> None:
    rng = random.Random(seed)
    make = toys.random_graph if seed % 2 else toys.random_network
    bare = make(seed, rng.randint(1, 9))
    if seed % 3 == 1:
        bare = toys.with_persistent(bare, seed)
    full = sprinkled(bare, rng, count)
    few = compressed(full, bare)
    check_profile(full)
    check_profile(few)
    assert few.fingerprint() == full.fingerprint()
    one, other = make_problem(full, seed % 5 > 0), make_problem(few, seed % 5 > 0)
    assert one.in_core_peak_bytes == other.in_core_peak_bytes
    assert (one.arrays.fixed_start == other.arrays.fixed_start).all()
    assert (one.arrays.fixed_peak == other.arrays.fixed_peak).all()
    for name in ('in-core', 'vdnn-all', 'swap-all'):
        plan = make_plan(one, 2**50, name)
        assert check_plan(full, plan) == check_plan(few, plan)
        assert operation_loads(planned_trace(full, plan)) == operation_loads(
            planned_trace(few, plan)
        )
    traces = [in_core_trace(profile) for profile in (full, few)]
    assert traces[0].peak_load_bytes == traces[1].peak_load_bytes


def test_many_that_come_and_go_are_one_malloc_and_one_free() -> None:
    nbytes = np.array([10, 1000, 30, 20], np.int64)
    small = np.array([True, False, True, True])
    events = np.array([1, 3, -3, 4, 2, -4, -1, -2], np.int64)
    found = count_together(events, nbytes, small, np.array([0]))
    # 40 bytes at most and 30 left before the large one, 30 less after it
    assert found.sizes == [40, 30]
    assert found.events == [5, -5, 6, 2, -6, -2]
    assert found.moved.tolist() == [0, 3, 3, 3, 3, 4, 5, 5, 6]


def test_what_is_freed_a_part_at_a_time_is_several() -> None:
    nbytes = np.array([10, 20, 1000], np.int64)
    small = np.array([True, True, False])
    events = np.array([1, 2, 3, -1, -3, -2], np.int64)
    found = count_together(events, nbytes, small, np.array([0]))
    assert sorted(found.sizes) == [10, 20]
    assert [e > 0 for e in found.events] == [True, True, True, False, False, False]


def test_none_are_counted_together_unless_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_builder, 'MOST_APART', 6)
    monkeypatch.setattr(profile_builder, 'LARGEST_APART', 2)
    nbytes = np.array([5, 9, 1, 7, 3, 8, 2, 100], np.int64)
    named = np.arange(8) == 2
    small = find_small(nbytes, named)
    assert nbytes[small].tolist() == [5, 7, 3, 8, 2]
    named[0] = True
    assert not find_small(nbytes, named).any()


def record(small: bool, monkeypatch: pytest.MonkeyPatch) -> Profile:
    with monkeypatch.context() as patch:
        patch.setattr(profile_builder, 'MOST_APART', 0 if small else 10**9)
        patch.setattr(profile_builder, 'LARGEST_APART', 3)
        np.random.seed(0)
        model = networks.Everything()
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        with hybridmem.optimize(
            model, '1TB', planner='swap-all', arena=False
        ) as session:
            for batch in networks.batches(4):
                networks.iterate(model, optimizer, *batch)
            assert session.profile is not None
            return session.profile


def test_a_recording_has_the_same_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    full, few = (record(small, monkeypatch) for small in (False, True))
    assert len(few.events) < len(full.events)
    one, other = make_problem(full), make_problem(few)
    assert [s.nbytes for s in one.maps] == [s.nbytes for s in other.maps]
    assert (one.arrays.fixed_start == other.arrays.fixed_start).all()
    assert (one.arrays.fixed_peak == other.arrays.fixed_peak).all()
    assert one.in_core_peak_bytes == other.in_core_peak_bytes
    assert (one.recomputable == other.recomputable).all()
    for name in ('label', 'workspace_bytes', 'forward', 'phase'):
        assert [getattr(op, name) for op in full.operations] == [
            getattr(op, name) for op in few.operations
        ]
