"""Fingerprints of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from chainer_hybridmem.training.devices import bits
from chainer_hybridmem.training.devices.bits import fingerprint

ARRAY = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)
LAYOUTS = {
    'contiguous': lambda a: a,
    'transposed': lambda a: a.transpose(2, 0, 1),
    'with gaps': lambda a: a[:, 1:3, ::2],
    'backwards': lambda a: a[::-1, :, ::-1],
    'broadcast': lambda a: np.broadcast_to(a[:, :1], (6, 9, 4)),
    'scalar': lambda a: a[0, 0, 1],
    'empty': lambda a: a[:, :0],
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('checked_bytes', [2**24, 64, 8])
def test_it_does_not_depend_on_the_size_of_the_pieces(
    layout, checked_bytes, monkeypatch
):
    array = np.asarray(LAYOUTS[layout](ARRAY))
    expected = fingerprint(array)
    monkeypatch.setattr(bits, 'CHECKED_BYTES', checked_bytes)
    assert fingerprint(array) == expected


@pytest.mark.parametrize('layout', sorted(LAYOUTS.keys() - {'empty'}))
def test_every_bit_counts(layout):
    base = ARRAY.copy()
    array = np.asarray(LAYOUTS[layout](base))
    expected = fingerprint(array)
    raw = base.view(np.uint32)
    seen = LAYOUTS[layout](np.arange(ARRAY.size).reshape(ARRAY.shape))
    for element in np.unique(seen):
        raw.reshape(-1)[element] ^= 1 << 31 - element % 32
        changed = np.asarray(LAYOUTS[layout](base))
        assert fingerprint(changed) != expected
        raw.reshape(-1)[element] ^= 1 << 31 - element % 32
    assert fingerprint(array) == expected


def test_what_lies_between_does_not_count():
    base = ARRAY.copy()
    expected = fingerprint(base[:, 1:3])
    base[:, 0] = -1
    assert fingerprint(base[:, 1:3]) == expected
