"""Functions that backward calls read the same feature maps once more."""

from __future__ import annotations

import pytest
from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.training.session.session import active_session


class Critic(chainer.Chain):
    """What a gradient penalty is taken of."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.middle = L.Convolution2D(8, 8, 3, pad=1)
            self.last = L.Linear(8 * 6 * 6, 1)

    def forward(self, x):
        h = F.leaky_relu(self.first(x))
        h = F.tanh(self.middle(h))
        h = F.max_pooling_2d(F.sigmoid(h), 2)
        return self.last(h)


def train(way, count=9, evict=False, **options):
    """Trains with a penalty on the gradient, with a session if there are options.

    Where everything is evicted, that is done between the two backward passes.
    """
    np.random.seed(0)
    critic, losses = Critic(), []
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(critic)
    with networks.session_for(critic, options) as session:
        for x, _ in networks.batches(count, size=16, insize=12):
            x = chainer.Variable(x)
            y = critic(x)
            if way == 'grad':
                (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
            else:
                F.sum(y).backward(enable_double_backprop=True)
                gx = x.grad_var
            if evict:
                active_session()._loop.reclaim(2**30)
            loss = F.mean((F.sqrt(F.sum(gx**2, axis=(1, 2, 3))) - 1) ** 2) + F.mean(y)
            critic.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
            del x, y, gx, loss
    return networks.outcome(critic, losses), session


@pytest.mark.parametrize('way', ['grad', 'backward'])
@pytest.mark.parametrize(
    'options',
    [
        {'planner': 'swap-all'},
        {'planner': 'hybrid'},
        {'planner': 'manual', 'actions': {'*': 'recompute'}},
    ],
    ids=lambda options: options['planner'],
)
def test_a_gradient_penalty_trains_as_without_us(way, options, hostile):
    expected, _ = train(way)
    actual, session = train(way, memory_limit='64MiB', **options)
    networks.assert_same(expected, actual)
    assert session.statistics()['guided_iterations'] > 0


@pytest.mark.parametrize('way', ['grad', 'backward'])
def test_what_leaves_between_the_two_backward_passes_comes_back(way, hostile):
    """Also what the second one reads of functions of the first forward pass."""
    expected, _ = train(way, count=6)
    actual, _ = train(way, 6, True, memory_limit='64MiB', planner='in-core')
    networks.assert_same(expected, actual)


@pytest.mark.parametrize('way', ['grad', 'backward'])
def test_a_gradient_penalty_inside_less_than_it_needs(way, hostile):
    expected, _ = train(way)
    _, session = train(way, memory_limit='64MiB', planner='in-core')
    limit = session.statistics()['peak_bytes'] * 4 // 5
    actual, session = train(way, memory_limit=limit)
    networks.assert_same(expected, actual)
    statistics = session.statistics()
    assert statistics['peak_bytes'] <= limit
    assert sum(entry['evictions'] for entry in networks.entries_of(session)) > 0
