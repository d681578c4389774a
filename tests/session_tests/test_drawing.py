"""Functions that draw random numbers in some iterations only."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.training.recompute import drawing

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
            xp = chainer.backend.get_array_module(x)
            return (x * xp.random.rand(*x.shape).astype(x.dtype),)
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    'draw',
    [
        lambda random: random.rand(1),
        lambda random: random.randn(3),
        lambda random: random.gamma(2.0, size=3),
        lambda random: random.randint(3, size=3),
        lambda random: random.shuffle(cupy_range(4)),
        lambda random: random.seed(1),
    ],
)
def test_a_draw_from_cupy_is_seen(draw):
    import cupy

    cupy.random.seed(0)
    before = drawing.position(gpu=True)
    assert drawing.position(gpu=True) == before
    draw(cupy.random)
    assert drawing.position(gpu=True) != before


def cupy_range(size):
    import cupy

    return cupy.arange(size)


@pytest.mark.gpu
def test_a_spare_generator_takes_the_draws():
    import cupy

    cupy.random.seed(3)
    expected = [cupy.random.rand(4).tolist() for _ in range(2)]
    cupy.random.seed(3)
    first = cupy.random.rand(4).tolist()
    with drawing.set_aside() as drawn:
        assert not drawn()
        cupy.random.rand(5)
        assert drawn()
    with drawing.set_aside() as drawn:
        assert not drawn()
    assert [first, cupy.random.rand(4).tolist()] == expected


@pytest.mark.gpu
@pytest.mark.parametrize('planner', ['checkpoint-speed', 'checkpoint-sqrt', 'hybrid'])
def test_what_draws_from_cupy_only_later_is_not_made_again(planner, data):
    expected = networks.train_on_gpu(Sampling, data)[0]
    limit = '1GB' if planner == 'checkpoint-speed' else 1_600_000
    result, _ = networks.train_on_gpu(
        Sampling, data, memory_limit=limit, planner=planner
    )
    networks.assert_same(expected, result)
