"""One kernel on a GPU makes the bits of local response normalization."""

from __future__ import annotations

import pytest
from support import networks

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.recompute import fused_replays

SHAPES = [(3, 7, 6, 5), (2, 3), (1, 1, 4), (2, 40, 3, 3)]
ITERATIONS = 8


def draw(shape, dtype):
    """Of both signs and many sizes, with zeros, infinity and NaN among them."""
    rng = np.random.RandomState(4)
    values = rng.randn(*shape) * 10.0 ** rng.randint(-3, 3, shape)
    values[rng.rand(*shape) > 0.9] = -0.0
    if values.size > 100:
        values.flat[50], values.flat[90] = np.inf, np.nan
    return values.astype(dtype)


def check(x, **options):
    y = F.local_response_normalization(chainer.Variable(x), **options)
    function = y.creator_node
    (candidate,) = fused_replays.find_candidates(function)
    (again,), made = fused_replays.run(candidate, lambda _: x)
    for expected, array in (
        (y.array, again),
        (function.scale, made.scale),
        (function.y, made.y),
    ):
        assert array.dtype == expected.dtype and array.strides == expected.strides
        assert array.get().tobytes() == expected.get().tobytes()
    assert made.y is again


@pytest.mark.matrix
@pytest.mark.gpu
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('n', [5, 1, 4, 9])
@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_bits(dtype, n, shape):
    import cupy

    check(cupy.asarray(draw(shape, dtype)), n=n)


@pytest.mark.gpu
def test_bits_in_other_layouts():
    import cupy

    x = cupy.asarray(draw((3, 7, 6, 5), np.float32))
    last = cupy.ascontiguousarray(cupy.moveaxis(x, 1, -1))
    check(cupy.moveaxis(last, -1, 1), k=1, alpha=0.3, beta=0.5)
    check(cupy.asfortranarray(x))
    check(cupy.repeat(x, 2, axis=3)[..., ::2])


@pytest.mark.gpu
def test_training_with_it(data):
    expected = networks.train_on_gpu(networks.Everything, data)[0]
    result, session = networks.train_on_gpu(
        networks.Everything, data, memory_limit='1GB', planner='checkpoint-speed'
    )
    networks.assert_same(expected, result)
    replayed = {replay.operation for replay in session.plan.replays}
    recipes = [
        recipe
        for recipe in session.profile.recipes
        if recipe.covers == (recipe.operation,)
        and session.profile.operations[recipe.operation].function
        == 'LocalResponseNormalization'
    ]
    assert recipes and all(recipe.exact for recipe in recipes)
    assert {recipe.operation for recipe in recipes} <= replayed


def test_the_host_has_none():
    x = draw((2, 7, 4, 4), np.float32)
    y = F.local_response_normalization(chainer.Variable(x))
    (candidate,) = fused_replays.find_candidates(y.creator_node)
    with pytest.raises(fused_replays.NoFusedReplayError, match='on a GPU'):
        fused_replays.run(candidate, graph.node_array)
