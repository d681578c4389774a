"""Lifetimes of blobs against loads computed by hand, and layouts that are run."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import networks, recordings
from support.timelines import operation_loads

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.extras.inference_recorder import InferenceRecorder
from chainer_hybridmem.forecasting.estimation import lower_to_cudnn
from chainer_hybridmem.planning import layouts
from chainer_hybridmem.planning.layouts import Lifetimes, forward_trace
from chainer_hybridmem.planning.layouts import forward as forward_module
from chainer_hybridmem.planning.records.profile import SlotKind

X = np.random.RandomState(0).rand(4, 2048).astype(np.float32)
UNIT = X.nbytes
RUN, LAST_USE, IN_PLACE = Lifetimes


class Net(chainer.Chain):
    """Calls a function on its input."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(chainer.as_variable(x))


def record(compute):
    return hybridmem.record_inference(Net(compute), X.copy())


def loads(profile, lifetimes, blobs_only=True):
    """In units of the input, operation by operation."""
    trace = forward_trace(profile, lifetimes, blobs_only)
    return [round(load / UNIT, 2) for load in operation_loads(trace)]


def total(profile, in_place=False):
    return layouts.blob_bytes(profile, in_place) / UNIT


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_union_find(pairs):
    sets, naive = forward_module.DisjointSets(10), [{i} for i in range(10)]
    for left, right in pairs:
        sets.union(left, right)
        both = naive[left] | naive[right]
        for item in both:
            naive[item] = both
    for i in range(10):
        assert {j for j in range(10) if sets.find(j) == sets.find(i)} == naive[i]


# -- loads by hand -----------------------------------------------------------------


def concat_and_split(x):
    h = F.relu(x)
    left, right = F.split_axis(h, 2, axis=1)  # views of h
    left_again = F.sigmoid(left)
    right_again = F.tanh(right)
    return F.relu(F.concat((left_again, right_again)))


def test_parts_of_a_split_keep_it_alive():
    profile = record(concat_and_split)
    labels = [op.label for op in profile.operations]
    assert labels == ['ReLU', 'SplitAxis', 'Sigmoid', 'Tanh', 'Concat', 'ReLU']
    assert total(profile) == 5  # x, h, two halves, concat, relu
    assert loads(profile, LAST_USE) == [2, 1, 1.5, 2, 2, 2]
    # x, h and the halves are held by locals; the sum by nobody but relu.
    assert loads(profile, RUN) == [2, 2, 2.5, 3, 4, 5]
    # Halves are smaller than what they come from; only the last relu fits.
    assert loads(profile, IN_PLACE) == [2, 1, 1.5, 2, 2, 1]


def recursive_sharing(x):
    h = x * 2
    h = F.reshape(h, (2, 2, 2048))
    h = F.transpose(h, (2, 0, 1))
    h = h[:, :, ::-1]
    h = F.expand_dims(h, 0)
    y = F.concat((h, h), axis=0)
    return F.sum(y, axis=0)


def test_views_of_views_are_one_blob():
    profile = record(recursive_sharing)
    assert total(profile) == 1 + 1 + 2 + 1
    expected = [2, 1, 1, 1, 1, 3, 3]
    assert loads(profile, LAST_USE) == expected
    assert loads(profile, RUN) == [2, 2, 2, 2, 2, 4, 5]


def windows(x):
    h = x * 2
    h = F.as_strided(h, (4, 1024), (2048, 2), 0)
    return F.tanh(h)


def test_memory_whose_owner_numpy_does_not_name():
    """as_strided makes an array whose base is no array."""
    profile = record(windows)
    assert total(profile) == 2.5
    assert loads(profile, LAST_USE) == [2, 1, 1.5]


def test_functions_that_are_not_there():
    """Dropout at test time returns its input, and so does identity."""

    def compute(x):
        h = F.dropout(x * 2, 0.5)
        h = F.identity(h)
        return F.tanh(F.dropout(h, 0.3))

    profile = record(compute)
    labels = [op.label for op in profile.operations]
    assert labels == ['MulConstant', 'Identity', 'Tanh']
    assert total(profile) == 3
    assert loads(profile, LAST_USE) == [2, 1, 2]


class Doubled(chainer.FunctionNode):
    """Writes over its input."""

    def forward(self, inputs):
        inputs[0][...] *= 2
        return inputs


def test_a_function_that_returns_what_it_was_given():
    def compute(x):
        (h,) = Doubled().apply((x * 1,))
        (h,) = Doubled().apply((h,))
        return F.tanh(h)

    profile = record(compute)
    assert total(profile) == 3
    assert loads(profile, LAST_USE) == [2, 1, 1, 2]


def chain_in_place(x):
    h = x * 2
    h = F.tanh(h)
    h = F.sigmoid(h)
    h = F.reshape(h, (8, 1024))
    h = F.relu(h)
    return F.concat((h, h))


def test_chains_that_write_over_their_input_are_one_blob(monkeypatch):
    profile = record(chain_in_place)
    assert total(profile) == 7
    assert loads(profile, LAST_USE) == [2, 2, 2, 1, 2, 3]
    assert total(profile, in_place=True) == 4  # x, the chain, its double
    assert loads(profile, IN_PLACE) == [2, 1, 1, 1, 1, 3]
    # Without union-find there is no chain.
    monkeypatch.setattr(forward_module.DisjointSets, 'union', lambda *sets: None)
    assert loads(profile, IN_PLACE) == loads(profile, LAST_USE)


def test_what_is_needed_later_is_not_written_over():
    def residual(x):
        h = x * 2
        return h + F.relu(h)

    profile = record(residual)
    assert loads(profile, IN_PLACE) == loads(profile, LAST_USE) == [2, 2, 3]


def test_what_is_returned_stays():
    def both(x):
        h = x * 2
        y = F.relu(h)
        z = F.tanh(y)
        return h, F.sum(z)

    profile = record(both)
    assert loads(profile, LAST_USE) == [2, 2, 3, 2]
    assert loads(profile, IN_PLACE) == [2, 2, 2, 2]


def test_normalisation_at_test_time():
    class Normal(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.bn = L.BatchNormalization(2048)

        def forward(self, x):
            return F.sum(F.relu(self.bn(chainer.as_variable(x) * 2)))

    profile = hybridmem.record_inference(Normal(), X.copy())
    assert [op.label for op in profile.operations][1] == 'FixedBatchNormalization'
    assert layouts.parameter_bytes(profile) == 4 * 2048 * 4
    assert loads(profile, LAST_USE) == [2, 2, 2, 1]
    assert loads(profile, IN_PLACE) == [2, 1, 1, 1]


def test_what_is_read_between_functions():
    """Reading by hand is not seen, but what is made of it is."""

    def by_hand(x):
        h = x * 2
        y = F.tanh(h)
        y = F.sigmoid(y)
        other = h.array + 1
        return F.relu(y), other

    profile = record(by_hand)
    assert loads(profile, LAST_USE) == [2, 3, 4, 2]  # x and h are there for `other`
    assert loads(profile, LAST_USE, blobs_only=False) == [2, 3, 5, 3]


def test_a_batch_that_is_read_by_hand_first():
    profile = record(lambda x: F.tanh(F.relu(x.array * 2)))
    assert [op.label for op in profile.operations] == ['ReLU', 'Tanh']
    assert loads(profile, LAST_USE, blobs_only=False) == [3, 2]


def test_a_profile_of_training_is_refused():
    profile = recordings.recorded(networks.Everything, 4)
    with pytest.raises(OptionError, match='record_inference'):
        forward_trace(profile, RUN)


@pytest.mark.parametrize('lifetimes', ['run', 'foo', None])
def test_lifetimes_that_are_none(lifetimes):
    net = Net(lambda x: F.relu(x))
    profile = hybridmem.record_inference(net, X)
    with pytest.raises(OptionError, match='member of layouts.Lifetimes'):
        forward_trace(profile, lifetimes)


# -- real networks -----------------------------------------------------------------


@pytest.fixture(scope='module')
def everything():
    """A network with everything in it, its batch and its profile."""
    np.random.seed(0)
    model = networks.Everything()
    (batch,) = networks.batches(1)
    return model, batch, hybridmem.record_inference(model, *batch)


@pytest.mark.parametrize('lowered', [False, True])
def test_less_is_alive_with_every_step(everything, lowered):
    profile = lower_to_cudnn(everything[2]) if lowered else everything[2]
    for blobs_only in (False, True):
        run, last, over = (
            operation_loads(forward_trace(profile, lifetimes, blobs_only))
            for lifetimes in Lifetimes
        )
        assert all(a >= b >= c for a, b, c in zip(run, last, over, strict=True))
    assert layouts.blob_bytes(profile, in_place=True) < layouts.blob_bytes(profile)


def test_lowering_changes_workspaces_only(everything):
    profile = everything[2]
    lowered = lower_to_cudnn(profile, workspace_bytes=0)
    assert layouts.blob_bytes(lowered) == layouts.blob_bytes(profile)
    for lifetimes in Lifetimes:
        assert operation_loads(
            forward_trace(lowered, lifetimes, True)
        ) == operation_loads(forward_trace(profile, lifetimes, True))


class Arena(chainer.FunctionHook):
    """Runs a network with every blob where a layout says."""

    name = 'arena'

    def __init__(self, profile, lifetimes):
        trace = forward_trace(profile, lifetimes, blobs_only=True)
        layout = layouts.exact(trace, 64)
        layouts.check_layout(trace, layout)
        self.arena = np.full(layout.footprint_bytes, 0xFF, np.uint8)  # NaN
        sets = forward_module._Forward(profile, lifetimes).sets
        offsets = dict(zip(trace.names, layout.offsets, strict=True))
        self.where = {  # by operation and output
            (slot.operation, slot.key): offsets[f's{sets.find(storage.id)}']
            for storage in profile.storages
            for slot in storage.slots
            if slot.kind is SlotKind.OUTPUT and slot.operation == storage.producer
        }
        self.k = -1

    def forward_preprocess(self, function, in_data):
        self.k += 1
        compute = function.forward

        def placed(inputs):
            outputs = compute(inputs)
            return tuple(self.place(array, i) for i, array in enumerate(outputs))

        function.forward = placed

    def place(self, array, index):
        """A copy in the arena; views are where what they view is."""
        offset = self.where.get((self.k, index))
        if offset is None:
            return array
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        address, start = (a.__array_interface__['data'][0] for a in (array, root))
        offset += address - start
        copy = np.ndarray(array.shape, array.dtype, self.arena, offset, array.strides)
        copy[...] = array
        return copy


@pytest.mark.parametrize('lifetimes', [LAST_USE, IN_PLACE])
@pytest.mark.parametrize(
    'compute', [concat_and_split, recursive_sharing, chain_in_place]
)
def test_what_shares_memory_is_not_overwritten_too_early(compute, lifetimes):
    profile = record(compute)
    with chainer.no_backprop_mode():
        expected = compute(chainer.Variable(X.copy())).array
        with Arena(profile, lifetimes):
            y = compute(chainer.Variable(X.copy()))
    np.testing.assert_array_equal(y.array, expected)


def test_without_aliases_a_layout_would_be_wrong(monkeypatch):
    """Every view by itself: what a split has cut up dies with the split."""
    identify = InferenceRecorder._identify

    def naive(self, array):
        return identify(self, array) if array.base is None else 0

    monkeypatch.setattr(InferenceRecorder, '_identify', naive)
    profile = record(concat_and_split)
    assert loads(profile, LAST_USE) == [2, 1, 0.5, 1, 2, 2]
    x = chainer.Variable(X.copy())
    with chainer.no_backprop_mode():
        expected = concat_and_split(x).array
        with Arena(profile, LAST_USE):
            assert not np.array_equal(concat_and_split(x).array, expected)


@pytest.mark.parametrize('lifetimes', [LAST_USE, IN_PLACE])
def test_a_network_in_an_arena(everything, lifetimes):
    model, batch, profile = everything
    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        expected = model(*batch).array
        with Arena(profile, lifetimes) as arena:
            np.testing.assert_array_equal(model(*batch).array, expected)
    assert arena.k + 1 == len(profile.operations)
    assert len(arena.arena) < layouts.blob_bytes(profile) / 2


def test_blobs_that_die_too_early_are_noticed(everything, monkeypatch):
    """The check above would see it."""
    profile = everything[2]
    monkeypatch.setattr(forward_module._Forward, '_free', early)
    model, batch = everything[:2]
    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        expected = model(*batch).array
        with Arena(profile, LAST_USE), np.errstate(all='ignore'):
            assert not np.array_equal(model(*batch).array, expected)


def early(self, storage):
    """Frees after the first use."""
    first = min((*storage.forward_uses, len(self.profile.operations) - 1)) + 1
    if storage.producer < 0 or first >= len(self.profile.operations):
        return forward_module._STAYS
    return self.profile.operations[first].first_event, forward_module._BEFORE
