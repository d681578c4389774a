"""What Chainer's own tests are run under: maps leave, and gradients stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.upstream import regimes

# isort: split
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.recording import trials


def gradients(x: np.ndarray) -> list[np.ndarray]:
    np.random.seed(0)
    layer = L.Linear(x.shape[1], 8)
    loss = F.sum(F.tanh(layer(F.relu(x))) ** 2)
    layer.cleargrads()
    loss.backward()
    return [layer.W.grad.copy(), layer.b.grad.copy()]


@pytest.mark.parametrize('name', regimes.REGIMES)
def test_maps_leave_and_gradients_stay(name, monkeypatch):
    monkeypatch.setattr(trials, 'TIMED_RUNS', 1)  # as open_device() sets it
    x = np.random.RandomState(1).rand(16, 32).astype(np.float32)
    expected = gradients(x)
    device = regimes.open_device()
    try:
        with regimes.Regime(device, name, 'seed') as regime:
            found = gradients(x)
        counts = regime.counts
    finally:
        device.memory.uninstall()
        device.close()
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other)
    assert counts['swap'] + counts['recompute'] + counts['evict'] > 0
    assert counts['verified'] > 0
