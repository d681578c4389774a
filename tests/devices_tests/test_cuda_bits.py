"""Fingerprints and comparisons where the arrays are: on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
from devices_tests.test_fingerprint import ARRAY, LAYOUTS

from chainer_hybridmem.training.devices import bits, cuda_bits

pytestmark = pytest.mark.gpu
EVERY = {**LAYOUTS, 'not at a word': lambda a: a.reshape(-1)[1:-1]}
EVERY['with gaps, not at a word'] = lambda a: a[:, 1:3, 1:2]


def views(layout, base):
    import cupy

    if layout == 'broadcast':
        return cupy.broadcast_to(base[:, :1], (6, 9, 4))
    return EVERY[layout](base)


@pytest.mark.parametrize('layout', EVERY)
def test_fingerprints_do_not_depend_on_pieces(layout, monkeypatch):
    import cupy

    array = views(layout, cupy.array(ARRAY))
    expected = bits.fingerprint(array)
    monkeypatch.setattr(cuda_bits, 'PIECE_BYTES', 64)
    assert bits.fingerprint(array) == expected
    assert bits.fingerprint(array.copy(order='K')) == expected


@pytest.mark.parametrize('layout', sorted(EVERY.keys() - {'empty'}))
def test_every_bit_counts(layout):
    import cupy

    base = cupy.array(ARRAY)
    other = views(layout, base.copy())
    expected = bits.fingerprint(views(layout, base))
    seen = views(layout, cupy.arange(ARRAY.size).reshape(ARRAY.shape)).get()
    raw = base.view('u4').reshape(-1)
    for element in np.unique(seen)[:: 1 + seen.size // 8]:
        raw[int(element)] ^= np.uint32(1 << 31 - element % 32)
        assert bits.fingerprint(views(layout, base)) != expected
        assert not bits.same_bits(views(layout, base), other, 1 << 24)
        raw[int(element)] ^= np.uint32(1 << 31 - element % 32)
    assert bits.fingerprint(views(layout, base)) == expected
    assert bits.same_bits(views(layout, base), other, 1 << 24)


def test_elements_that_change_places():
    import cupy

    array = cupy.arange(1000, dtype='f')
    assert bits.fingerprint(array) != bits.fingerprint(array[::-1].copy())


def test_nothing_is_copied_and_no_gpu_memory_is_taken():
    import os

    import cupy

    if 'EMU_LIBRARY' not in os.environ:
        pytest.skip('only the emulator counts what is copied')
    from cuda_emulator import control

    def refuse(nbytes):
        raise AssertionError(f'{nbytes} bytes of GPU memory')

    array = cupy.ones((1 << 20,), 'f')
    other = array.copy()
    before = control.synchronous_bytes()
    with cupy.cuda.using_allocator(refuse):
        bits.fingerprint(array)
        bits.same_bits(array, other, 1 << 24)
    assert control.synchronous_bytes() == before
