"""Functions that draw random numbers in some iterations only."""

from __future__ import annotations

import networks
import numpy as np
import pytest

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.recompute import drawing

ITERATIONS = 10
LATE = 6


@hybridmem.recomputable
class Noise(chainer.FunctionNode):
    """Multiplies by noise, or by two."""

    def __init__(self, draws):
        self.draws = draws

    def forward(self, inputs):
        (x,) = inputs
        self.retain_outputs((0,))
        if self.draws:
            return (x * np.random.rand(*x.shape).astype(x.dtype),)
        return (x * x.dtype.type(2),)

    def backward(self, indexes, gradients):
        (y,) = self.get_retained_outputs()
        return (gradients[0] * F.sigmoid(y),)


class Sampling(networks.Ends):
    """Its function draws from the seventh iteration on."""

    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        (h,) = Noise(self.calls > LATE).apply((h,))
        return F.softmax_cross_entropy(self.last(F.tanh(h)), t)


@pytest.mark.parametrize('planner', ['checkpoint-speed', 'checkpoint-sqrt', 'hybrid'])
def test_what_draws_only_later_is_not_made_again(planner, data):
    expected = networks.train(Sampling, data)[0]
    seen = []
    result, session = networks.train(
        Sampling,
        data,
        memory_limit='1GB' if planner == 'checkpoint-speed' else 1_500_000,
        planner=planner,
        after=lambda session, i: seen.append(session.plan),
    )
    networks.assert_same(expected, result)
    if planner == 'checkpoint-speed':
        noise = {
            operation.index
            for operation in session.profile.operations
            if operation.label.endswith('Noise')
        }
        assert any(replay.operation in noise for replay in seen[LATE - 1].replays)


class GivenMask(networks.Ends):
    """Its dropout is given a mask at first, and draws one later on."""

    def forward(self, x, t):
        self.calls += 1
        h = F.sigmoid(self.conv(x))
        given = np.full(h.shape, 2, np.float32) if self.calls <= LATE else None
        h = F.tanh(F.sigmoid(F.dropout(h, mask=given)))
        return F.softmax_cross_entropy(self.last(h), t)


@pytest.mark.parametrize(
    'planner', ['checkpoint-speed', 'checkpoint-sqrt', 'superneurons', 'hybrid']
)
def test_a_mask_that_is_given_makes_another_signature(planner, data, tmp_path):
    expected = networks.train(GivenMask, data)[0]
    options = {'memory_limit': '1GB', 'planner': planner, 'cache_dir': tmp_path}
    for _ in range(2):
        result, _ = networks.train(GivenMask, data, **options)
        networks.assert_same(expected, result)


@pytest.mark.parametrize(
    'draw',
    [
        lambda: np.random.rand(1),
        lambda: np.random.rand(312),  # as many words as the generator has
        lambda: np.random.randn(2),
        lambda: np.random.permutation(5),
        lambda: np.random.randint(3),
    ],
)
def test_a_draw_is_seen(draw):
    before = drawing.position()
    assert drawing.position() == before
    draw()
    assert drawing.position() != before
