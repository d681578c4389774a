"""Forward passes without backward, in the arena that was laid out for them."""

from __future__ import annotations

import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.extras import inference_session
from chainer_hybridmem.training.devices.host import numpy_memory

DEVICES = ['@numpy', pytest.param('@cupy:0', marks=pytest.mark.gpu)]
PICTURES = np.random.RandomState(0).rand(12, 3, 32, 32).astype(np.float32)


class Branches(chainer.Chain):
    """Arrays of many sizes and lifetimes, and a view that is returned."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 16, 3, pad=1)
            self.block = networks.Block(16)
            self.wide = L.Convolution2D(16, 48, 5, pad=2)
            self.narrow = L.Convolution2D(16, 8, 1)
            self.last = L.Linear(None, 10)

    def forward(self, x, power=1):
        h = F.relu(self.first(x))
        left = self.wide(self.block(h))
        right = F.dropout(self.narrow(F.max_pooling_2d(h, 3, 1, 1)))
        h = F.average_pooling_2d(F.concat((left, right)), 4)
        for _ in range(power):
            h = F.sigmoid(h) * h
        y = self.last(h)
        return F.reshape(y, (-1, 5))


def make(device, network=Branches):
    np.random.seed(0)
    model = network()
    train, backprop = without_backward()
    with train, backprop:
        model(PICTURES[:2])
    model.to_device(device)
    return model


def without_backward():
    return chainer.using_config('train', False), chainer.no_backprop_mode()


def run(model, batches, **arguments):
    """What it returns for each batch, as bytes; the last two results stay alive."""
    results, alive = [], []
    device = chainer.get_device(model.device)
    for pictures in batches:
        train, backprop = without_backward()
        with train, backprop:
            alive = [*alive[-1:], model(device.send(pictures), **arguments).array]
        results.append(chainer.get_device('@numpy').send(alive[-1]).tobytes())
    return results


@pytest.mark.parametrize('device', DEVICES)
def test_passes_lie_where_the_layout_says(device):
    batches = [PICTURES[i : i + 8] for i in range(5)] * 2
    expected = run(make(device), batches)
    model = make(device)
    with hybridmem.optimize_inference(model, '64MiB') as session:
        assert run(model, batches) == expected
        figures = session.statistics()
    assert figures['passes'] == 10 and figures['placed_passes'] == 7
    assert figures['missed'] == 0 and figures['placed'] > 7 * 10
    layout_bytes = figures['arena_bytes'] + figures['side_bytes']
    assert figures['peak_bytes'] <= layout_bytes
    assert figures['footprint_bytes'] <= 1.01 * layout_bytes  # beside it in a pool
    assert not numpy_memory.installed()
    assert run(model, batches[:1]) == expected[:1]  # plain Chainer goes on


@pytest.mark.parametrize('device', DEVICES)
def test_kinds_of_passes_have_layouts_of_their_own(device):
    batches = [PICTURES[:n] for n in (8, 3, 8, 8, 3, 3, 12, 8, 3)]
    expected = run(make(device), batches)
    model = make(device)
    with hybridmem.optimize_inference(model, '64MiB') as session:
        assert run(model, batches) == expected
        assert session.statistics()['kinds'] == 3
        assert session.statistics()['placed_passes'] == 2


def test_passes_of_a_kind_that_is_given_up_have_been_run(monkeypatch):
    monkeypatch.setattr(inference_session, 'MOST_KINDS', 1)
    model = make('@numpy')
    with hybridmem.optimize_inference(model, '64MiB') as session:
        run(model, [PICTURES[:n] for n in (2, 2, 2, 2, 3)])
        figures = session.statistics()
    assert (figures['passes'], figures['placed_passes'], figures['kinds']) == (5, 1, 1)


def test_passes_with_other_values_are_other_kinds():
    model = make('@numpy')
    expected = [run(model, [PICTURES] * 5, power=n) for n in (1, 3)]
    with hybridmem.optimize_inference(model, '64MiB') as session:
        assert [run(model, [PICTURES] * 5, power=n) for n in (1, 3)] == expected
        assert session.statistics()['kinds'] == 2
        assert session.statistics()['missed'] == 0


class Restless(Branches):
    """Allocates more in some passes than in those that were logged."""

    calls = 0

    def forward(self, x, power=1):
        self.calls += 1
        return super().forward(x, power + 2 * (self.calls > 6))


def test_a_pass_that_goes_on_differently_is_right():
    expected = run(make('@numpy', Restless), [PICTURES] * 9)
    model = make('@numpy', Restless)
    with hybridmem.optimize_inference(model, '64MiB') as session:
        assert run(model, [PICTURES] * 9) == expected
        assert session.statistics()['missed'] > 0


def test_an_error_in_a_pass_ends_only_that_pass():
    model = make('@numpy')
    expected = run(model, [PICTURES] * 6)
    with hybridmem.optimize_inference(model, '64MiB') as session:
        for i in range(6):
            if i in (1, 2, 4):
                with pytest.raises(TypeError):
                    run(model, [PICTURES], power='three')
            assert run(model, [PICTURES]) == expected[:1]
        assert session.statistics()['placed_passes'] == 3


def test_training_passes_are_left_alone():
    model = make('@numpy')
    with hybridmem.optimize_inference(model, '64MiB') as session:
        loss = F.sum(model(PICTURES[:4]))
        model.cleargrads()
        loss.backward()
        assert session.statistics()['passes'] == 0
    assert model.first.W.grad is not None


def test_a_limit_below_the_layout_is_told():
    model = make('@numpy')
    with pytest.raises(MemoryError):
        with hybridmem.optimize_inference(model, '1MiB'):
            run(model, [PICTURES] * 4)
    assert not numpy_memory.installed()
    assert run(model, [PICTURES])


def test_a_layout_above_the_limit_is_not_followed(monkeypatch):
    model = make('@numpy')
    expected = run(model, [PICTURES] * 6)
    with hybridmem.optimize_inference(model, '64MiB') as session:
        monkeypatch.setattr(session, '_limit_bytes', 1)
        assert run(model, [PICTURES] * 6) == expected
        figures = session.statistics()
    assert figures['too_large'] == 1 and figures['placed_passes'] == 0


@pytest.mark.parametrize('model, limit', [(3, '1GiB'), (L.Linear(2), 'much')])
def test_bad_arguments(model, limit):
    with pytest.raises(hybridmem.OptionError):
        hybridmem.optimize_inference(model, limit)


def test_a_session_is_entered_once():
    session = hybridmem.optimize_inference(make('@numpy'), '64MiB')
    with session:
        with pytest.raises(hybridmem.SessionError, match='already'):
            hybridmem.optimize_inference(make('@numpy'), '64MiB').__enter__()
        for _ in range(2):
            with pytest.raises(hybridmem.SessionError, match='entered already'):
                session.__enter__()
        with pytest.raises(MemoryError):
            np.zeros(80 * 2**20, np.uint8)
    with pytest.raises(hybridmem.SessionError, match='again'):
        session.__enter__()


def test_a_session_that_was_refused_can_be_entered_later():
    session = hybridmem.optimize_inference(L.Linear(8, 8), '1MiB')
    with hybridmem.profile_memory():
        with pytest.raises(hybridmem.SessionError, match='already counts'):
            session.__enter__()
    with session:
        assert numpy_memory.installed()
    assert not numpy_memory.installed()
    with pytest.raises(hybridmem.SessionError, match='cannot be entered again'):
        session.__enter__()
