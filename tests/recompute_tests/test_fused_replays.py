"""A pass makes the bits, the layout and the attributes of whole forwards."""

from __future__ import annotations

import warnings
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.recompute import fused_replays

TYPES = [np.float16, np.float32, np.float64]
LAYOUTS = ['channels first', 'channels last', 'every other', 'reversed']


ALIVE: list[chainer.Variable] = []


@pytest.fixture(autouse=True)
def _forget():
    yield
    ALIVE.clear()


def held(x: Any) -> chainer.Variable:
    """A variable that stays, as what a plan keeps or brings back does."""
    ALIVE.append(chainer.as_variable(x))
    return ALIVE[-1]


def array(shape: tuple[int, ...], dtype: Any, layout: str = 'channels first') -> Any:
    """Random numbers of both signs, zeros among them."""
    rng = np.random.RandomState(sum(shape))
    wide = (*shape[:-1], 2 * shape[-1])
    values = (rng.randn(*wide) * (rng.rand(*wide) > 0.1)).astype(dtype)
    if layout == 'every other':
        return values[..., ::2]
    values = np.ascontiguousarray(values[..., : shape[-1]])
    if layout == 'reversed':
        return values[::-1]
    if layout == 'channels last' and len(shape) > 2:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)
    return values


def normalise(x: Any, axis: Any = None, parameters: Any = None) -> Any:
    """Batch normalization with random parameters and running statistics."""
    x = held(x)
    if axis is None:
        shape = x.shape[1:2]
    else:
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
    dtype = parameters or x.dtype
    gamma, beta = array(shape, dtype), array(shape, dtype) - dtype_of(dtype)(0.5)
    mean, var = np.zeros(shape, dtype), np.ones(shape, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        y = F.batch_normalization(
            x,
            held(gamma),
            held(beta),
            running_mean=mean,
            running_var=var,
            axis=axis,
        )
    y.creator_node.statistics = (mean, var)
    return y


def dtype_of(dtype: Any) -> Any:
    return np.dtype(dtype).type


def covered(y: Any, number: int) -> tuple[Any, ...]:
    """The candidate of the output's function that covers so many functions."""
    found = [
        c for c in fused_replays.find_candidates(y.creator_node) if len(c) == number
    ]
    return found[0]


def assert_same_again(functions: Any, expected: Any) -> None:
    (again,), _ = fused_replays.run(functions, graph.node_array)
    assert again.dtype == expected.dtype
    assert again.strides == expected.strides
    assert again.tobytes() == expected.tobytes()


@pytest.mark.matrix
@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('shape', [(4, 5), (3, 7, 6, 5), (2, 3, 4, 5, 6), (1, 9, 8, 8)])
def test_batch_normalization(shape, layout, dtype):
    y = normalise(array(shape, dtype, layout))
    assert_same_again(covered(y, 1), y.array)


@pytest.mark.parametrize('axis', [(0,), (0, 2), (1, 2), (0, 1, 2), (0, 3), (3,)])
def test_batch_normalization_over_other_axes(axis):
    y = normalise(array((3, 4, 5, 6), np.float32), axis)
    assert_same_again(covered(y, 1), y.array)


@pytest.mark.parametrize('axis', [(0,), (0, 2), (1, 2), (0, 1, 2), (0, 3), (3,)])
def test_other_axes_in_another_memory_order(axis):
    """NumPy may choose another layout here; a profile then sees the difference."""
    y = normalise(array((3, 4, 5, 6), np.float32, 'channels last'), axis)
    (again,), _ = fused_replays.run(covered(y, 1), graph.node_array)
    assert again.tobytes() == y.array.tobytes()


def test_batch_normalization_with_wider_parameters():
    y = normalise(array((3, 4, 5, 6), np.float16), parameters=np.float32)
    assert_same_again(covered(y, 1), y.array)


def test_batch_normalization_of_infinity_and_nan():
    x = array((3, 4, 5, 6), np.float32)
    x[0, 0], x[1, 1] = np.inf, np.nan
    with np.errstate(invalid='ignore'):
        y = F.relu(normalise(x))
        (again,), _ = fused_replays.run(covered(y, 2), graph.node_array)
    np.testing.assert_array_equal(again, y.array)


def test_statistics_do_not_move():
    y = normalise(array((4, 3, 5, 5), np.float32))
    function = y.creator_node
    before = [s.tobytes() for s in (*function.statistics, function.mean, function.var)]
    fused_replays.run((function,), graph.node_array)
    after = [s.tobytes() for s in (*function.statistics, function.mean, function.var)]
    assert before == after


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_chains(layout, dtype):
    shape = (3, 8, 6, 5)
    x, other = array(shape, dtype, layout), held(array(shape, dtype, layout) * 2)
    one, two = normalise(x), normalise(other)
    chains = {
        2: [F.relu(one), one + other, other + one],
        3: [F.relu(one + other), F.relu(other + one), one + two],
        4: [F.relu(one + two)],
    }
    for number, outputs in chains.items():
        for y in outputs:
            assert_same_again(covered(y, number), y.array)


def test_an_output_added_to_itself():
    one = normalise(array((3, 8, 6, 5), np.float32))
    y = F.relu(one + one)
    assert_same_again(covered(y, 3), y.array)


def test_relu_of_negative_zero():
    """Only a beta of -0 gives it; ReLU makes +0 of it."""
    x = np.zeros((2, 4, 3, 3), np.float32)
    minus = np.full(4, -0.0, np.float32)
    y = F.relu(F.batch_normalization(held(x), held(minus), held(minus)))
    assert_same_again(covered(y, 2), y.array)


def test_operands_that_broadcast_or_differ_in_layout():
    """Whatever comes out, nothing wrong is called right."""
    shape = (3, 8, 6, 5)
    one = normalise(array(shape, np.float32))
    for other in (
        array(shape, np.float32, 'channels last'),
        array((3, 8, 6, 1), np.float32),
    ):
        y = one + held(other)
        (again,), _ = fused_replays.run(covered(y, 2), graph.node_array)
        np.testing.assert_array_equal(again, y.array)


@pytest.mark.matrix
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('cover_all', [False, True])
@pytest.mark.parametrize(
    'window, stride, pad',
    [(2, 2, 0), (3, 2, 0), (3, 1, 1), (3, 2, 1), ((2, 3), (3, 1), (0, 2)), (5, 4, 4)],
)
def test_max_pooling(window, stride, pad, cover_all, layout, dtype):
    x = array((2, 5, 11, 9), dtype, layout)
    x[0, 0, :4, :4] = np.nan
    x[0, 1, :4, :4] = -np.inf
    x[1, 2] = np.float32(1)
    y = F.max_pooling_2d(held(x), window, stride, pad, cover_all=cover_all)
    function = y.creator_node
    (again,), made = fused_replays.run((function,), graph.node_array)
    for left, right in ((again, y.array), (made.indexes, function.indexes)):
        assert left.dtype == right.dtype
        assert left.strides == right.strides
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize('channels', [63, 64, 65, 130])
@pytest.mark.parametrize('layout', LAYOUTS[:2])
def test_max_pooling_of_many_channels(channels, layout):
    """They are taken in parts; the last one need not be full."""
    x = array((2, channels, 7, 6), np.float32, layout)
    y = F.max_pooling_2d(held(x), 3, 2)
    assert_same_again((y.creator_node,), y.array)


def test_max_pooling_of_both_zeros():
    rng = np.random.RandomState(0)
    zeros = np.where(rng.rand(2, 3, 20, 20) > 0.5, 0.0, -0.0).astype(np.float32)
    y = F.max_pooling_2d(held(zeros), 3, 1, 1)
    assert_same_again((y.creator_node,), y.array)


def test_what_has_no_pass():
    x = held(array((2, 3, 4, 4), np.float32))
    assert fused_replays.find_candidates(F.relu(x).creator_node) == []
    assert fused_replays.find_candidates(F.sigmoid(x).creator_node) == []
    assert fused_replays.find_candidates((x + x).creator_node) == []
    pooled = F.max_pooling_2d(held(x.array.astype(np.float16)), 2)
    with pytest.raises(fused_replays.NoFusedReplayError):
        fused_replays.run((pooled.creator_node,), graph.node_array)
    pooled = F.max_pooling_nd(held(array((2, 3, 8), np.float32)), 2)
    with pytest.raises(fused_replays.NoFusedReplayError):
        fused_replays.run((pooled.creator_node,), graph.node_array)


def test_outside_inputs():
    x, r = (held(array((2, 3, 4, 4), np.float32)) for _ in range(2))
    y = F.relu(normalise(x) + r)
    nodes = fused_replays.find_inputs(covered(y, 3))
    assert nodes[0] is x.node
    assert nodes[-1] is r.node
    assert len(nodes) == 4  # and gamma and beta
