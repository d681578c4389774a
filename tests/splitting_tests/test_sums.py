"""Sums of gradients in the place of one of them."""

from __future__ import annotations

import dataclasses
import warnings

from support import networks  # imports chainer_hybridmem before chainer

# isort: split
import chainer
import numpy as np
import pytest

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.forecasting.recording_session import record_step
from chainer_hybridmem.planning.records.plan import Part
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.records.splits import (
    IN_PLACE,
    in_parts,
    is_about,
    part_of,
)
from chainer_hybridmem.training.splitting.splitter import SUM, add_in_place

RNG = np.random.RandomState(0)


def dense(n=3):
    return RNG.rand(n, 4, 6, 5).astype('f')


def channels_last(n=3):
    return RNG.rand(n, 6, 5, 4).astype('f').transpose(0, 3, 1, 2)


def padded(n=3):
    """As a convolution with padding leaves the gradient of its input."""
    return RNG.rand(n, 4, 9, 8).astype('f')[:, :, 1:7, 2:7]


def last_part(n=3):
    """As of what shares one array with the gradients of others, which are gone."""
    return RNG.rand(n + 2, 4, 6, 5).astype('f')[2:]


LAYOUTS = dense, channels_last, padded, last_part


@pytest.mark.parametrize('first', LAYOUTS)
@pytest.mark.parametrize('second', LAYOUTS)
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


@pytest.mark.parametrize('sign', [1, -1])
def test_a_sum_in_the_second_place_has_the_sign_of_the_first_nan(sign):
    nan = np.copysign(np.float32('nan'), sign)
    first, second = np.full(24, nan), np.full(24, -nan)
    gradients = [chainer.Variable(first), chainer.Variable(second)]
    expected = chainer.functions.add(*gradients).array
    memory = _memory(second)
    del second
    assert add_in_place(gradients)  # the test holds the first one
    assert gradients[0].array.tobytes('A') == expected.tobytes('A')
    assert _memory(gradients[0].array) == memory


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


def test_a_sum_takes_the_place_of_no_gradient_that_cannot_be_written():
    """Such as that of a sum over an axis of length one: NumPy's views of it."""

    def view():
        return chainer.Variable(np.broadcast_to(np.ones((3, 1), 'f'), (3, 1)))

    assert not add_in_place([view(), view()])
    gradients = [view(), chainer.Variable(np.ones((3, 1), 'f'))]
    written = gradients[1].array.ctypes.data
    assert add_in_place(gradients)
    assert gradients[0].array.ctypes.data == written


def test_other_shapes_and_numbers_of_gradients_are_left_alone():
    assert not add_in_place([chainer.Variable(dense()) for _ in range(3)])
    assert not add_in_place([chainer.Variable(dense(1)), chainer.Variable(dense(3))])
    one = np.float32(1)
    assert not add_in_place([chainer.Variable(np.array(one)) for _ in range(2)])
    mixed = [chainer.Variable(dense()), chainer.Variable(dense().astype('d'))]
    assert not add_in_place(mixed)


# -- what a profile knows of it -------------------------------------------------------
class Residual(networks.Ends):
    """Two branches whose gradients are added up."""

    def forward(self, x, t):
        h = self.conv(x)
        h = chainer.functions.sigmoid(h) + chainer.functions.tanh(h)
        return chainer.functions.softmax_cross_entropy(self.last(h), t)


@pytest.fixture(scope='module')
def profile():
    np.random.seed(0)
    model = Residual()
    optimizer = chainer.optimizers.SGD().setup(model)
    x, t = networks.batches(1)[0]
    (recorded,) = record_step(
        lambda number: optimizer.update(model, x, t), model, len(x), parts=True
    )
    return recorded.profile


def sums(profile):
    return [split for split in profile.splits if split.cut == IN_PLACE]


def test_a_profile_knows_what_may_be_added_in_place(profile):
    (split,) = sums(profile)
    total, gradient = (
        profile.storages[split.first],
        profile.storages[split.temporaries[0]],
    )
    assert part_of(split) == Part(
        split.operation, split.function, SUM, IN_PLACE, 1, True
    )
    assert split.peak_bytes == 0
    assert total.nbytes == gradient.nbytes == 8 * 8 * 24 * 24 * 4
    assert gradient.freed_at == total.allocated_at + 1
    assert sums(parse_profile(serialise_profile(profile))) == [split]


def loads(profile):
    """Bytes after each event."""
    signs = np.sign(profile.events)
    sizes = [profile.storages[abs(event) - 1].nbytes for event in profile.events]
    return profile.initial_bytes + np.cumsum(signs * sizes)


def test_a_sum_in_place_needs_a_gradient_less(profile):
    (split,) = sums(profile)
    total = profile.storages[split.first]
    in_place = in_parts(profile, (part_of(split),))
    check_profile(in_place)
    less = loads(profile) - loads(in_place)
    born = total.allocated_at
    assert less[born] == 2 * total.nbytes  # a gradient is gone, the sum is not there
    assert less.sum() == less[born]
    moments = range(born - 1, born + 2)
    assert [is_about(profile, split, moment) for moment in moments] == [0, 1, 0]
    assert in_parts(in_place, (part_of(split),)) == in_place


def test_a_sum_of_which_nothing_dies_is_refused(profile):
    (split,) = sums(profile)
    other = next(s.id for s in profile.storages if s.freed_at < 0)
    broken = dataclasses.replace(split, temporaries=(other,))
    with pytest.raises(FormatError, match='is a sum that replaces it'):
        check_profile(dataclasses.replace(profile, splits=(broken,)))


def test_a_sum_where_a_gradient_lies_takes_no_other_array(monkeypatch):
    """CuPy copies an input that shares memory with the output and is not it."""
    gradients = [chainer.Variable(dense()), chainer.Variable(dense())]
    expected = (gradients[0].array + gradients[1].array).tobytes()
    given = []

    def add(first, second, out, plain=np.add):
        given.append(first is out)
        return plain(first, second, out=out)

    monkeypatch.setattr(np, 'add', add)
    assert add_in_place(gradients)
    assert given == [True]
    assert gradients[0].array.tobytes() == expected


def test_a_sum_of_what_is_broadcast_takes_no_place_and_warns_of_nothing():
    """NumPy warns where it is asked whether one may write into such an array."""
    arrays = np.broadcast_arrays(np.ones((3, 1)), np.ones((1, 4)))
    gradients = [chainer.Variable(array) for array in arrays]
    del arrays
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not add_in_place(gradients)
