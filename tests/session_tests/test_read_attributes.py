"""Programs that read what a function keeps: indexes of a pooling, masks."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.session.session import active_session


class Unpooling(chainer.Chain):
    """An upsampling that takes the indexes of a pooling, as Chainer documents it."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.inner = L.Convolution2D(8, 8, 3, pad=1)
            self.last = L.Linear(8 * 24 * 24, 10)

    def forward(self, x, t):
        pooling = MaxPoolingND(2, 2, 2)
        (h,) = pooling.apply((F.tanh(self.first(x)),))
        h = F.tanh(self.inner(F.tanh(self.inner(h))))
        h = F.upsampling_2d(h, pooling.indexes, 2, 2, outsize=(24, 24))
        return F.softmax_cross_entropy(self.last(h), t)


def evict_everything():
    """As if memory were short now."""
    session = active_session()
    if session is not None:
        session._loop.reclaim(2**30)


def train(network=Unpooling, backwards=1, **options):
    """Six iterations; a session if there are options."""
    np.random.seed(0)
    model, losses, session = network(), [], None
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)

    def loop():
        for x, t in networks.batches(6):
            loss = model(x, t)
            model.cleargrads()
            loss.backward()
            for _ in range(1, backwards):
                evict_everything()
                loss.backward()
            losses.append(float(loss.array))
            del loss
            optimizer.update()

    if options:
        with hybridmem.optimize(model, **options) as session:
            loop()
    else:
        loop()
    return networks.outcome(model, losses), session


@pytest.mark.parametrize('action', ['swap', 'recompute'])
def test_indexes_of_a_pooling_are_there_for_an_upsampling(action, hostile):
    expected, _ = train()
    actual, session = train(
        memory_limit='64MiB', planner='manual', actions={'*': action}
    )
    networks.assert_same(expected, actual)
    assert session.statistics()['guided_iterations'] > 0


@pytest.mark.parametrize('after_backward', [False, True])
def test_a_mask_that_is_away_is_there_for_who_asks(after_backward, hostile):
    x = networks.batches(1)[0][0]
    with hybridmem.optimize(Unpooling(), memory_limit='64MiB'):
        dropout = F.noise.dropout.Dropout(0.5)
        (y,) = dropout.apply((chainer.Variable(x),))
        loss = F.sum(y)
        if after_backward:
            loss.backward()
        evict_everything()
        assert 'mask' not in vars(dropout)
        np.testing.assert_array_equal(dropout.mask * x, y.array)
        assert hasattr(dropout, 'mask') and not hasattr(dropout, 'another')


class Pair(chainer.FunctionNode):
    """It keeps two arrays in a list."""

    def forward(self, inputs):
        (x,) = inputs
        self.pair = [x * 2, x * 3]
        return (x * 6,)

    def backward(self, indexes, grads):
        return (grads[0] * self.pair[0] * self.pair[1],)


def test_arrays_of_a_list_come_back_together_or_do_not_fit():
    """None leaves again for the next one; a first iteration ends beyond its limit."""
    x = np.ones(100_000, np.float32)
    optimized = hybridmem.optimize(Unpooling(), memory_limit='64MiB')
    with pytest.raises(MemoryError, match='do not fit'), optimized as session:
        function = Pair()
        (y,) = function.apply((chainer.Variable(x),))
        evict_everything()
        memory = session.device.memory
        free_bytes = memory.limit_bytes - memory.used_bytes
        taken = np.empty(free_bytes - x.nbytes * 3 // 2, np.uint8)
        assert [array[0] for array in function.pair] == [2, 3]
    assert y.array[0] == 6 and taken.size


@pytest.mark.parametrize('planner', ['checkpoint-speed', 'hybrid'])
def test_a_mask_is_there_after_every_backward(planner):
    """Nobody can draw it again: a plan that drops it after its use keeps a copy."""
    dropout = F.noise.dropout.Dropout
    np.random.seed(0)
    model = L.Convolution2D(3, 8, 3, pad=1)
    with hybridmem.optimize(model, '64MiB', planner=planner) as session:
        for x, _ in networks.batches(8):
            function = dropout(0.5)
            (y,) = function.apply((model(chainer.Variable(x)),))
            kept = y.array != 0
            F.sum(F.tanh(y)).backward()
            np.testing.assert_array_equal(function.mask[kept], 2)
            assert not function.mask[~kept].any()
    assert session.statistics()['guided_iterations'] > 0


@hybridmem.recomputable
class Gate(chainer.FunctionNode):
    """Its class has a default for what forward keeps."""

    gate = None

    def forward(self, inputs):
        self.gate = (inputs[0] > 0).astype(inputs[0].dtype)
        return (inputs[0] * self.gate,)

    def backward(self, indexes, grads):
        return (grads[0] * self.gate,)


class Reading(networks.Ends):
    """Reads it while it is away."""

    def forward(self, x, t):
        gate = Gate()
        (h,) = gate.apply((F.tanh(self.conv(x)),))
        y = F.tanh(F.tanh(h))
        factor = 1.0 if gate.gate is None else float(gate.gate.mean())
        entropy = F.loss.softmax_cross_entropy.SoftmaxCrossEntropy()
        (loss,) = entropy.apply((self.last(y), t))
        F.tanh(y)
        return loss * factor if entropy.y is None else loss * factor * 2


@pytest.mark.parametrize('planner', ['swap-all', 'checkpoint-speed', 'hybrid'])
def test_a_default_of_the_class_does_not_hide_what_is_away(planner, hostile):
    expected, _ = train(Reading, 1)
    actual, session = train(Reading, 1, memory_limit='64MiB', planner=planner)
    networks.assert_same(expected, actual)
    assert session.statistics()['guided_iterations'] > 0
    assert Gate.gate is None and Gate().gate is None


@hybridmem.recomputable
class Factor(chainer.FunctionNode):
    """Its backward gives its attribute another array, of another size."""

    def forward(self, inputs):
        (x,) = inputs
        self.factor = x[:1] * 0 + 3
        return (x * self.factor,)

    def backward(self, indexes, grads):
        if self.factor.shape[0] == 1:
            self.factor = np.tile(self.factor, (grads[0].shape[0], *[1] * 3))
        self.factor = self.factor * 2
        return (grads[0] * self.factor,)


class Scaled(networks.Ends):
    """Its loss may be used twice."""

    def forward(self, x, t):
        (h,) = Factor().apply((F.tanh(self.conv(x)),))
        return F.softmax_cross_entropy(self.last(F.tanh(h)), t)


@pytest.mark.matrix
@pytest.mark.parametrize('backwards', [1, 2])
@pytest.mark.parametrize('action', ['swap', 'recompute'])
def test_an_attribute_that_backward_replaces(action, backwards, hostile):
    expected, _ = train(Scaled, backwards)
    actual, session = train(
        Scaled,
        backwards,
        memory_limit='64MiB',
        planner='manual',
        actions={'*': action},
    )
    networks.assert_same(expected, actual)
    assert session.statistics()['guided_iterations'] > 0


def test_a_function_without_the_attribute_says_so():
    with pytest.raises(AttributeError, match='another'):
        _ = F.noise.dropout.Dropout(0.5).another
    assert graph.function_name(F.noise.dropout.Dropout(0.5)) == 'Dropout'
