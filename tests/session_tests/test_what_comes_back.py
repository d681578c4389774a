"""Maps that leave at a moment, or come back in a way, that no plan provides for."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import SlotKind
from chainer_hybridmem.training.session.session import active_session


@hybridmem.recomputable
class Twice(chainer.FunctionNode):
    """Two outputs; the one that nobody uses is retained."""

    def forward(self, inputs):
        self.retain_outputs((1,))
        return inputs[0] * 2, inputs[0] * 3

    def backward(self, indexes, grads):
        (other,) = self.get_retained_outputs()
        return (grads[0] * 2 + 0 * other,)


class Pooling(chainer.Chain):
    """Indexes that only their function has, and an output nobody has."""

    size: int | None = 8 * 12 * 12

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.last = L.Linear(self.size, 256)

    def forward(self, x, t, scaled):
        h = F.max_pooling_2d(F.tanh(self.first(x)), 2)
        h, _ = Twice().apply((h,))
        # The last function reads what the one before has left.
        loss = F.mean_squared_error(F.tanh(self.last(h)), np.eye(256, dtype='f')[t])
        return 2 * loss if scaled else loss


def evict_everything():
    """As if memory were short now."""
    session = active_session()
    if session is not None:
        session._loop.reclaim(2**30)


def train(scaled, model=Pooling, between=lambda: None, **options):
    """One iteration for each; another number of functions where it is scaled.

    All read the same buffer, and nobody lets go of the last loss.
    """
    np.random.seed(0)
    model, losses = model(), []
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    data = networks.batches(len(scaled))
    buffer = np.empty_like(data[0][0])
    with networks.session_for(model, options) as session:
        for (x, t), other in zip(data, scaled, strict=True):
            buffer[...] = x
            loss = model(buffer, t, other)
            model.cleargrads()
            between()
            loss.backward()
            losses.append(float(loss.array))
            optimizer.update()
        del loss
    return networks.outcome(model, losses), session


def test_what_only_a_function_keeps_is_made_again_after_a_deviation(hostile):
    scaled = [False] * 5 + [True]
    expected, _ = train(scaled)
    actual, session = train(
        scaled, memory_limit='64MiB', planner='manual', actions={'*': 'recompute'}
    )
    networks.assert_same(expected, actual)
    assert session.deviations == 1
    storages = session.profile.storages
    kinds = [
        {slot.kind for slot in storages[entry.storage].slots}
        for entry in session.plan.maps
        if entry.action is Action.RECOMPUTE
    ]
    assert {SlotKind.ATTRIBUTE} in kinds


class Lazy(Pooling):
    """Its last parameters are made by its first forward."""

    size = None


@pytest.mark.matrix
@pytest.mark.parametrize('planner', ['in-core', 'hybrid'])
@pytest.mark.parametrize('model', [Pooling, Lazy])
def test_what_leaves_before_the_next_hook_comes_back(planner, model, hostile):
    """Inputs of the last function, a buffer with new contents, a lazy parameter."""
    expected, _ = train([False] * 6, model)
    actual, session = train(
        [False] * 6, model, evict_everything, memory_limit='64MiB', planner=planner
    )
    networks.assert_same(expected, actual)
    assert sum(entry['evictions'] for entry in networks.entries_of(session)) > 0


@pytest.mark.parametrize('backprop', [True, False])
def test_a_function_that_is_applied_once_more_has_its_mask(backprop):
    x = networks.batches(1)[0][0]
    with hybridmem.optimize(Pooling(), memory_limit='64MiB') as session:
        dropout = F.noise.dropout.Dropout(0.5)
        (first,) = dropout.apply((x,))
        kept = F.relu(first)  # at its hook the maps of dropout get known
        session._loop.reclaim(2**30)
        assert 'mask' not in vars(dropout)
        with chainer.using_config('enable_backprop', backprop):
            (second,) = dropout.apply((x,))
    assert kept.array.any()
    np.testing.assert_array_equal(first.array, second.array)
