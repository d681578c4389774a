"""One forward pass without backward, recorded."""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.forecasting.estimation import SamplePair, lower_to_cudnn
from chainer_hybridmem.planning import layouts
from chainer_hybridmem.planning.records.profile import (
    Category,
    Phase,
    SlotKind,
)
from chainer_hybridmem.planning.records.profile_file import (
    check_profile,
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.training.chainer_access import owners
from chainer_hybridmem.training.devices.host import numpy_memory


def recorded(batchsize):
    np.random.seed(0)
    return hybridmem.record_inference(
        networks.Everything(), *networks.batches(1, batchsize)[0]
    )


@pytest.fixture(scope='module')
def profile():
    return recorded(4)


def test_what_is_in_it(profile):
    check_profile(profile)
    assert {op.phase for op in profile.operations} == {Phase.FORWARD}
    assert not profile.feature_maps()
    labels = [op.label for op in profile.operations]
    assert labels[0] == 'Convolution2DFunction' and 'Square' in labels
    assert 'FixedBatchNormalization' in labels and 'Dropout' not in labels
    pictures = next(s for s in profile.storages if s.category is Category.INPUT)
    assert pictures.nbytes == 4 * 3 * 24 * 24 * 4
    assert pictures.forward_uses == (0,)


def test_parameters_and_what_functions_keep(profile):
    model = networks.Everything()
    model(*networks.batches(1)[0])
    arrays = [p.array for p in model.params()]
    statistics = [
        getattr(link, name) for link in model.links() for name in link._persistent
    ]
    arrays += [a for a in statistics if isinstance(a, np.ndarray)]
    assert layouts.parameter_bytes(profile) == sum(a.nbytes for a in arrays)
    attributes = {
        slot.key
        for storage in profile.storages
        for slot in storage.slots
        if slot.kind is SlotKind.ATTRIBUTE
    }
    assert 'indexes' in attributes  # of max pooling, on the CPU only
    lowered = lower_to_cudnn(profile)
    check_profile(lowered)
    assert 'indexes' not in {s.key for x in lowered.storages for s in x.slots}


def test_any_batch_size(profile):
    """Extrapolated like an iteration of training, and as exact."""
    estimate = SamplePair.match(profile, recorded(6), (4, 6)).at(8)
    real = recorded(8)
    assert estimate.storages == real.storages
    assert estimate.events == real.events
    for lifetimes in layouts.Lifetimes:
        left, right = (layouts.forward_trace(p, lifetimes) for p in (estimate, real))
        assert left == right


def test_another_way_to_measure_the_peak(profile):
    """The pool's own counter, with gradients and without the batch."""
    np.random.seed(0)
    model, batch = networks.Everything(), networks.batches(1, 4)[0]
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        model(*batch)
        with hybridmem.profile_memory(model) as memory:
            model(*batch)
    trace = layouts.forward_trace(profile, layouts.Lifetimes.RUN)
    model_bytes = sum(array.nbytes for array in owners.model_arrays(model))
    batch_bytes = sum(array.nbytes for array in batch)
    expected = trace.peak_load_bytes - batch_bytes + model_bytes
    assert memory.summary()['peak_bytes'] == expected


@pytest.mark.gpu
def test_on_a_gpu(profile):
    np.random.seed(0)
    model = networks.Everything()
    model.to_device('@cupy:0')
    batch = [model.xp.asarray(array) for array in networks.batches(1, 4)[0]]
    on_gpu = hybridmem.record_inference(model, *batch)
    check_profile(on_gpu)
    labels = [op.label for op in profile.operations]
    assert [op.label for op in on_gpu.operations] == labels
    assert layouts.blob_bytes(on_gpu) >= layouts.blob_bytes(profile)


def test_it_can_be_saved(profile):
    assert parse_profile(serialise_profile(profile)) == profile


def test_nothing_but_memory_is_touched():
    np.random.seed(0)
    model = networks.Everything()
    batch = networks.batches(1)[0]
    model(*batch)
    before = [p.array.copy() for p in model.params()]
    state = np.random.get_state()[1].copy()
    hybridmem.record_inference(model, *batch)
    for parameter, array in zip(model.params(), before, strict=True):
        np.testing.assert_array_equal(parameter.array, array)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    assert chainer.config.train and chainer.config.enable_backprop
    assert not numpy_memory.installed()
    assert 'hybridmem-forward' not in chainer.get_function_hooks()


class Net(chainer.Chain):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, *args, **kwargs):
        return self.compute(*args, **kwargs)


class Outer(chainer.FunctionNode):
    """Calls functions inside."""

    def forward(self, inputs):
        return (F.relu(F.tanh(inputs[0])).array,)


def test_functions_inside_of_functions():
    x = np.ones((4, 1024), np.float32)
    profile = hybridmem.record_inference(
        Net(lambda x: F.sigmoid(Outer().apply((x,))[0])), x
    )
    assert [op.label for op in profile.operations] == ['Outer', 'Sigmoid']
    assert layouts.blob_bytes(profile) == 3 * x.nbytes


def test_variables_and_names():
    x = chainer.Variable(np.ones((4, 1024), np.float32))
    net = Net(lambda a, b: F.tanh(a + b))
    profile = hybridmem.record_inference(net, x, b=np.ones((4, 1024), np.float32))
    assert layouts.blob_bytes(profile) == 4 * x.array.nbytes


def test_a_batch_in_containers_and_what_the_model_has():
    x = np.ones((4, 1024), np.float32)
    constant = np.ones((1, 1024), np.float32)

    def compute(batch, more):
        h = F.tanh(F.broadcast_to(constant, (4, 1024)) + batch[0]['x'])
        return F.sum(h * more[0][0])

    profile = hybridmem.record_inference(Net(compute), [{'x': x}], more=((x * 2,),))
    inputs = [s for s in profile.storages if s.category is Category.INPUT]
    assert [s.nbytes for s in inputs] == [x.nbytes] * 2
    assert layouts.parameter_bytes(profile) == constant.nbytes


class Failing(chainer.FunctionNode):
    """Calls functions and fails."""

    def forward(self, inputs):
        with pytest.raises(ValueError, match='inner'):
            Inner().apply(inputs)
        raise ValueError('outer')


class Inner(chainer.FunctionNode):
    def forward(self, inputs):
        raise ValueError('inner')


def test_functions_that_fail_and_are_done_without():
    def compute(x):
        h = F.relu(x)
        with pytest.raises(ValueError, match='outer'):
            Failing().apply((h,))
        return F.tanh(h)

    x = np.ones((4, 1024), np.float32)
    profile = hybridmem.record_inference(Net(compute), x)
    assert [op.label for op in profile.operations] == ['ReLU', 'Tanh']
    assert layouts.blob_bytes(profile) == 3 * x.nbytes


def test_what_is_refused():
    with pytest.raises(OptionError, match=r'chainer\.Link'):
        hybridmem.record_inference(lambda x: x, 1)
    with pytest.raises(SessionError, match='no function'):
        hybridmem.record_inference(Net(lambda x: x), np.ones(3, np.float32))
    with hybridmem.profile_memory():
        with pytest.raises(SessionError, match='already counts'):
            hybridmem.record_inference(Net(F.relu), np.ones(3, np.float32))
    assert not numpy_memory.installed()


def test_a_model_that_fails():
    def fail(x):
        F.relu(x)
        raise KeyError('no')

    with pytest.raises(KeyError):
        hybridmem.record_inference(Net(fail), np.ones(3, np.float32))
    assert not numpy_memory.installed()
    assert 'hybridmem-forward' not in chainer.get_function_hooks()


def test_no_plan_is_needed(profile):
    """A planner that is given one keeps everything, for there is nothing to move."""
    plan = hybridmem.make_plan(profile, '1GB')
    assert plan.maps == () and plan.predicted_seconds == plan.in_core_seconds
