"""Comparing GPU memory without waiting for the GPU."""

from __future__ import annotations

import os

import pytest

from chainer_hybridmem.training.devices.cuda import late_checks
from chainer_hybridmem.training.devices.cuda.late_checks import LateChecks

pytestmark = pytest.mark.gpu


@pytest.fixture
def checks():
    import cupy

    return LateChecks(cupy.cuda)


def ramp(*shape, dtype='f'):
    import cupy

    size = 1
    for length in shape:
        size *= length
    return cupy.arange(size, dtype=dtype).reshape(shape)


def compare(checks, left, right, what='other ones'):
    checks.expect_same(checks.digest(left), checks.digest(right), what)


@pytest.mark.parametrize('shape', [(1,), (3, 5), (100, 1000), (7, 10_001)])
@pytest.mark.parametrize('dtype', ['b', 'e', 'd'])
def test_the_same_bits_pass_and_one_other_bit_does_not(checks, shape, dtype):
    array = ramp(*shape, dtype=dtype)
    other = array.copy()
    compare(checks, array, other, 'the same')
    other.view('u1').reshape(-1)[-1] ^= 1
    compare(checks, array, other)
    checks.end_iteration(5)
    assert checks.differences(wait=True) == [(5, 'other ones')]


def test_elements_that_change_places_are_found(checks):
    array = ramp(64)
    other = array.copy()
    other[[3, 40]] = array[[40, 3]]
    compare(checks, array, other)
    checks.end_iteration(1)
    assert checks.differences(wait=True) == [(1, 'other ones')]


def test_what_counts_is_the_memory_when_the_digest_was_issued(checks):
    array = ramp(5000)
    before = checks.digest(array)
    array += 1
    array -= 1
    checks.expect_same(before, checks.digest(array), 'other ones')
    array += 1
    checks.end_iteration(1)
    assert checks.differences(wait=True) == []


def test_axes_in_another_order_are_compared_and_gaps_are_not(checks):
    array = ramp(30, 40).T
    compare(checks, array, array.copy('K'))
    compare(checks, array, array + 1)
    assert checks.digest(array[:, ::2]) is None
    assert checks.digest(array[:0]) is None
    checks.end_iteration(1)
    assert checks.differences(wait=True) == [(1, 'other ones')]


def test_each_iteration_has_its_own(checks):
    array = ramp(8)
    for iteration in range(1, 5):
        compare(checks, array, array + (iteration == 3))
        checks.end_iteration(iteration)
    checks.end_iteration(5)  # in which nothing is compared
    assert checks.differences(wait=True) == [(3, 'other ones')]
    assert checks.differences(wait=True) == []


def test_a_digest_of_an_earlier_iteration_counts_after_its_words_are_used_again(checks):
    array, other = ramp(8), ramp(8) + 1
    kept, wrong = checks.digest(array), checks.digest(other)
    checks.end_iteration(1)
    assert checks.differences(wait=True) == []
    for _ in range(2):  # into the same words
        checks.digest(array * 3)
    checks.expect_same(kept, checks.digest(array), 'the same')
    checks.expect_same(wrong, checks.digest(array), 'other ones')
    checks.end_iteration(2)
    assert checks.differences(wait=True) == [(2, 'other ones')]


def test_pinned_memory_is_used_again(checks, monkeypatch):
    array = ramp(1 << 18)
    monkeypatch.setattr(late_checks, 'CHUNK_WORDS', 200)
    for iteration in range(4):
        for _ in range(200 // 64 // 2 + 1):  # more than a chunk
            compare(checks, array, array)
        checks.end_iteration(iteration)
        assert checks.differences(wait=True) == []
        assert len(checks._free) == 2


def test_nothing_is_waited_for():
    import cupy

    if 'EMU_LIBRARY' not in os.environ:
        pytest.skip('needs the emulator, which counts who waits')
    from cuda_emulator import control

    checks = LateChecks(cupy.cuda)
    array = ramp(5000)
    compare(checks, array, array)
    before = control.counters()['synchronize']
    control.schedule('lazy')
    try:
        compare(checks, array, array + 1)
        checks.end_iteration(1)
        assert checks.differences() == []
        assert control.counters()['synchronize'] == before
    finally:
        control.schedule('random', 0)
    assert checks.differences(wait=True) == [(1, 'other ones')]
