"""What a search says fits, lies without overlap; and it finds what only just fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainer_hybridmem.planning.layouts import canonical, ejection
from chainer_hybridmem.planning.layouts.placement import Blocks
from chainer_hybridmem.planning.search.deadline import Deadline

TIMES = np.arange(62)


def eject(size, spans, capacity, order=None, work=100_000, seed=0):
    n = len(size)
    pointer = np.zeros(n + 1, np.int64)
    others = np.zeros(
        canonical.conflicts(spans, pointer, np.zeros(0, np.int32)), np.int32
    )
    canonical.conflicts(spans, pointer, others)
    order = np.arange(n) if order is None else order
    offset, failures = np.zeros(n, np.int64), np.ones(n, np.int64)
    fits = ejection.eject(
        order, size, pointer, others, capacity, work, seed, failures, offset
    )
    return fits, offset, failures


def meet(a, b):
    return any(
        a[i] < b[j + 1] and b[j] < a[i + 1] for i in (0, 2) for j in (0, 2)
    )  # fmt: skip


def cut(rng, moments, capacity, pieces):
    """A full rectangle of moments and bytes, cut into blocks at random."""
    blocks = [(0, moments, 0, capacity)]
    while len(blocks) < pieces:
        a, b, low, high = blocks.pop(rng.integers(len(blocks)))
        if rng.random() < 0.5 and b - a > 1:
            at = rng.integers(a + 1, b)
            blocks += [(a, at, low, high), (at, b, low, high)]
        elif high - low > 1:
            at = rng.integers(low + 1, high)
            blocks += [(a, b, low, at), (a, b, at, high)]
        else:
            blocks.append((a, b, low, high))
    size = np.array([high - low for _, _, low, high in blocks], np.int64)
    spans = np.array([[a, b, 0, 0] for a, b, _, _ in blocks], np.int64)
    return size, spans


@pytest.mark.parametrize('seed', range(8))
def test_a_rectangle_without_a_hole_is_put_together_again(seed):
    size, spans = cut(np.random.default_rng(seed), 40, 1000, 14)
    found = [eject(size, spans, 1000, seed=s) for s in range(20)]
    assert any(fits for fits, _, _ in found)
    assert not any(eject(size, spans, 999, seed=s)[0] for s in range(3))


def search(size, spans, capacity, pairs=1_000_000):
    blocks = Blocks(
        size, spans, 60, tuple((i,) for i in range(len(size))), 0, (), 0, 1, TIMES
    )
    return canonical.Canonical(blocks, Deadline()).fit(capacity, pairs)


@pytest.mark.parametrize('seed', range(8))
@pytest.mark.parametrize('carried', [False, True])
def test_a_full_rectangle_fits_and_nothing_less(seed, carried, monkeypatch):
    monkeypatch.setattr(canonical, 'ROOM', 1 + seed % 2 * 7)  # parts, or hardly any
    monkeypatch.setattr(canonical, 'PAIRS_AT_ONCE', 200)
    size, spans = cut(np.random.default_rng(seed), 40, 1000, 14)
    if carried:  # the iteration begins in the middle of it
        a, b = spans[:, 0] + 15, spans[:, 1] + 15
        later, both = a >= 40, (a < 40) & (b > 40)
        spans[:, 0], spans[:, 1] = a - 40 * later, np.minimum(b - 40 * later, 40)
        spans[both, 3] = b[both] - 40
    status, offset = search(size, spans, 1000, 10_000_000)
    assert status == canonical.FITS
    check_apart(size, spans, offset, 1000)
    assert search(size, spans, 999, 10_000_000)[0] == canonical.CANNOT
    assert search(size, spans, 1000, 14 * 3)[0] == canonical.OPEN


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.9, 1.5))
def test_what_fits_does_not_overlap(seed, pieces, share):
    rng = np.random.default_rng(seed)
    size, spans = cut(rng, 60, 3000, pieces)
    carried = rng.random(pieces) < 0.3
    spans[carried, 3] = np.minimum(rng.integers(1, 20, pieces), spans[:, 0])[carried]
    capacity = int(3000 * share)
    fits, offset, failures = eject(size, spans, capacity, rng.permutation(pieces))
    assert np.all(failures >= 1)
    status, other = search(size, spans, capacity)
    if status == canonical.FITS:
        check_apart(size, spans, other, capacity)
    if fits:
        assert status != canonical.CANNOT
        check_apart(size, spans, offset, capacity)


def check_apart(size, spans, offset, capacity):
    pieces = len(size)
    assert np.all(offset >= 0) and np.all(offset + size <= capacity)
    for i in range(pieces):
        for j in range(i):
            apart = offset[i] + size[i] <= offset[j] or offset[j] + size[j] <= offset[i]
            assert apart or not meet(spans[i], spans[j])


def test_the_smallest_hole_is_taken():
    # Held apart by blocks of 10: holes of 30, 20 and 40 bytes; the new block has 20.
    size = np.array([30, 10, 20, 10, 40, 20], np.int64)
    lives = [(0, 1), (0, 9), (0, 1), (0, 9), (0, 1), (1, 9)]
    spans = np.array([[a, b, 0, 0] for a, b in lives], np.int64)
    for seed in range(5):
        fits, offset, _ = eject(size, spans, 110, seed=seed)
        where = dict(zip(offset[:5].tolist(), size[:5].tolist(), strict=True))
        assert fits and where[offset[5]] == 20
