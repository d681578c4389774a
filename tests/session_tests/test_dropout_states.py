"""Dropout and recurrent layers whose masks cuDNN draws."""

from __future__ import annotations

import gc
import weakref

import pytest
from support import networks
from support.marks import needs_cudnn

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.backends import cuda

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.recompute import drawing

ITERATIONS = 10
pytestmark = needs_cudnn


def ones():
    import cupy

    return cupy.ones((4, 1000), np.float32)


def drop(ratio=0.5):
    return F.dropout(ones(), ratio).array.get().tobytes()


def test_a_seed_reaches_the_masks():
    drawing.seed_gpu(3)
    first = [drop() for _ in range(2)]
    drawing.seed_gpu(3)
    assert [drop() for _ in range(2)] == first
    drawing.seed_gpu(4)
    assert drop() not in first


def test_a_mask_is_drawn_in_forward_only():
    x = chainer.Variable(ones())
    before = drawing.position(gpu=True)
    y = F.dropout(x)
    drawn = drawing.position(gpu=True)
    assert drawn != before
    y.grad = ones()
    y.backward()
    y.creator.forward_gpu((ones(),))  # with the mask that it has
    assert drawing.position(gpu=True) == drawn


def test_what_is_drawn_aside_is_taken_back():
    drawing.seed_gpu(3)
    expected = [drop() for _ in range(2)]
    drawing.seed_gpu(3)
    first = drop()
    with drawing.set_aside() as drawn:
        assert not drawn()
        drop(0.1)
        assert drawn()
        drop(0.1)
    with drawing.set_aside() as drawn:
        assert not drawn()
    assert [first, drop()] == expected


def recurrent(ratio):
    link = L.NStepLSTM(2, 6, 6, ratio)
    link.to_device('@cupy:0')
    return link


def run_recurrent(link):
    import cupy

    rng = np.random.RandomState(1)
    xs = [cupy.asarray(rng.rand(n, 6).astype(np.float32)) for n in (4, 3)]
    return link(None, None, xs)[2][0]


@pytest.mark.parametrize('ratio, draws', [(0, False), (0.5, True)])
def test_recurrent_functions_draw_where_they_drop(ratio, draws):
    link = recurrent(ratio)
    run_recurrent(link)
    before = drawing.position(gpu=True)
    run_recurrent(link)
    assert (drawing.position(gpu=True) != before) is draws


class Again(chainer.FunctionHook):
    """Runs the recurrent function again, at once or when it is told to."""

    name = 'again'

    def forward_postprocess(self, function, in_data):
        if function.label == 'NStepLSTM':
            self.before, self.inputs = graph.pristine(function), in_data
            self.first = self.run()

    def run(self):
        return self.before.copied().forward(self.inputs)[-1].get().tobytes()


def test_a_replay_finds_the_ratio_of_its_forward():
    hook = Again()
    with hook:
        run_recurrent(recurrent(0))
    drop(0.7)  # its ratio is in the descriptor now
    with drawing.set_aside() as drawn:
        assert hook.run() == hook.first
        assert not drawn()
    assert cuda.get_cudnn_dropout_states().generator.ratio == 0.7


class Dropping(networks.Ends):
    """Masks between convolutions, and between the layers of a recurrent network."""

    def __init__(self, ratio=0.4):
        super().__init__()
        with self.init_scope():
            self.middle = L.Convolution2D(8, 8, 3, pad=1)
            self.lstm = L.NStepLSTM(2, 24, 24, ratio)

    def forward(self, x, t):
        h = F.dropout(F.sigmoid(self.conv(x)), 0.2)
        h = F.dropout(F.sigmoid(self.middle(h)), 0.6)
        rows = F.average(h, axis=1)
        h = F.stack(self.lstm(None, None, list(F.separate(rows)))[2])
        return F.softmax_cross_entropy(self.last(F.tanh(h)), t)


class WithoutRatio(Dropping):
    """The recurrent network drops nothing: it can be run again."""

    def __init__(self):
        super().__init__(0)


@pytest.fixture(scope='module', params=[Dropping, WithoutRatio])
def dropping(request, data):
    """A network, what plain Chainer gives, and the bytes that it needs."""
    expected = networks.train_on_gpu(request.param, data)[0]
    result, session = networks.train_on_gpu(
        request.param, data, memory_limit='1GB', planner='in-core'
    )
    networks.assert_same(expected, result)
    return request.param, expected, session.statistics()['in_core_peak_bytes']


@pytest.mark.parametrize(
    'planner', ['checkpoint-speed', 'checkpoint-sqrt', 'swap-all', 'hybrid']
)
def test_training_with_masks(planner, dropping, data):
    network, expected, peak_bytes = dropping
    limit = '1GB' if planner == 'checkpoint-speed' else int(peak_bytes * 0.92)
    result, session = networks.train_on_gpu(
        network, data, memory_limit=limit, planner=planner
    )
    networks.assert_same(expected, result)
    if planner == 'checkpoint-speed':
        assert session.plan.replays


@pytest.mark.parametrize('pooling', [F.max_pooling_2d, F.average_pooling_2d])
def test_a_pooling_function_dies_with_its_graph(pooling):
    """Without the repair of `compat`, its helper would hold it."""
    import cupy

    gc.collect()
    gc.disable()
    try:
        y = pooling(chainer.Variable(cupy.ones((2, 3, 8, 8), np.float32)), 2)
        function = y.creator
        reference = weakref.ref(function)
        del y, function
        assert reference() is None
    finally:
        gc.enable()
