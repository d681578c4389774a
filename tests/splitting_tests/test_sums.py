"""Sums of gradients in the place of one of them."""

from __future__ import annotations

from support import networks  # imports chainer_hybridmem before chainer

# isort: split
import chainer
import numpy as np
import pytest

from chainer_hybridmem.training.splitting.splitter import add_in_place

del networks
RNG = np.random.RandomState(0)


def dense(n=3):
    return RNG.rand(n, 4, 6, 5).astype('f')


def channels_last(n=3):
    return RNG.rand(n, 6, 5, 4).astype('f').transpose(0, 3, 1, 2)


def padded(n=3):
    """As a convolution with padding leaves the gradient of its input."""
    return RNG.rand(n, 4, 9, 8).astype('f')[:, :, 1:7, 2:7]


@pytest.mark.parametrize('first', [dense, channels_last, padded])
@pytest.mark.parametrize('second', [dense, channels_last, padded])
@pytest.mark.parametrize('n', [1, 3])
def test_the_sum_has_the_bits_and_the_layout_of_a_new_one(first, second, n):
    gradients = [chainer.Variable(first(n)), chainer.Variable(second(n))]
    memories = [_memory(variable.array) for variable in gradients]
    expected = chainer.functions.add(*gradients).array
    assert add_in_place(gradients)
    (total,) = gradients
    assert total.array.tobytes('A') == expected.tobytes('A')
    assert total.array.strides[1:] == expected.strides[1:]
    assert _memory(total.array) in memories


def _memory(array):
    owner = array if array.base is None else array.base
    return owner.__array_interface__['data'][0]


@pytest.mark.parametrize(
    'hold',
    [
        lambda variables: list(variables),
        lambda variables: [variable.array for variable in variables],
        lambda variables: [variable.array[0] for variable in variables],
        lambda variables: [variable.array.base for variable in variables],
    ],
)
def test_what_others_hold_is_left_alone(hold):
    gradients = [chainer.Variable(padded()), chainer.Variable(padded())]
    held = hold(gradients)
    before = [variable.array.copy() for variable in gradients]
    assert not add_in_place(gradients)
    assert len(gradients) == 2 and held
    for variable, array in zip(gradients, before, strict=True):
        assert variable.array.tobytes() == array.tobytes()
    del held, variable
    assert add_in_place(gradients)


def test_one_gradient_twice_is_left_alone():
    variable = chainer.Variable(dense())
    gradients = [variable, variable]
    del variable
    assert not add_in_place(gradients)
    array = dense()
    gradients = [chainer.Variable(array), chainer.Variable(array)]
    del array
    assert not add_in_place(gradients)


def test_what_is_broadcast_is_left_alone():
    def broadcast():
        row = RNG.rand(200).astype('f')
        return chainer.Variable(np.broadcast_to(row[:1], (4, 6)))

    assert not add_in_place([broadcast(), broadcast()])


def test_other_shapes_and_numbers_of_gradients_are_left_alone():
    assert not add_in_place([chainer.Variable(dense()) for _ in range(3)])
    assert not add_in_place([chainer.Variable(dense(1)), chainer.Variable(dense(3))])
    one = np.float32(1)
    assert not add_in_place([chainer.Variable(np.array(one)) for _ in range(2)])
    mixed = [chainer.Variable(dense()), chainer.Variable(dense().astype('d'))]
    assert not add_in_place(mixed)
