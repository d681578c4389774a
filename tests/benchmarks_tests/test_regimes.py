"""What Chainer's own tests are run under: maps leave, and gradients stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.upstream import regimes

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.training.recording import trials


def gradients(x: np.ndarray) -> list[np.ndarray]:
    np.random.seed(0)
    layer = L.Linear(x.shape[1], 8)
    layer.to_device(chainer.backend.get_device_from_array(x))
    y = F.tanh(F.sigmoid(layer(F.relu(x))))
    layer.cleargrads()
    F.sum(y**2).backward()
    # What backward begins with has no operation behind it.
    y = F.tanh(F.sigmoid(layer(F.relu(x))))
    y.grad = y.array + 1
    y.backward()
    return [layer.W.grad.copy(), layer.b.grad.copy()]


@pytest.mark.parametrize('kind', ['host', pytest.param('cuda', marks=pytest.mark.gpu)])
@pytest.mark.parametrize('name', regimes.REGIMES)
def test_maps_leave_and_gradients_stay(name, kind, monkeypatch):
    monkeypatch.setattr(trials, 'TIMED_RUNS', 1)  # as open_device() sets it
    x = np.random.RandomState(1).rand(16, 32).astype(np.float32)
    if kind == 'cuda':
        x = chainer.get_device('@cupy:0').send(x)
    expected = gradients(x)
    device = regimes.open_device(kind)
    try:
        regimes.install(device)
        with regimes.Regime(device, name, 'seed') as regime:
            found = gradients(x)
        counts = regime.counts
    finally:
        device.memory.uninstall()
        device.close()
    for one, other in zip(expected, found, strict=True):
        assert (one == other).all()
    assert counts['swap'] + counts['recompute'] + counts['evict'] > 0
    assert counts['verified'] > 0
    if name == 'recompute':
        assert counts['recompute'] > 0 and counts['replays'] > 0, counts
