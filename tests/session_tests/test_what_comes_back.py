"""Maps that leave at a moment, or come back in a way, that no plan provides for."""

from __future__ import annotations

import networks
import numpy as np
import pytest

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.plan import Action
from chainer_hybridmem.profile import SlotKind


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

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.last = L.Linear(8 * 12 * 12, 10)

    def forward(self, x, t, scaled):
        h = F.max_pooling_2d(F.tanh(self.first(x)), 2)
        h, _ = Twice().apply((h,))
        loss = F.softmax_cross_entropy(self.last(h), t)
        return 2 * loss if scaled else loss


def train(scaled, between=lambda: None, **options):
    """One iteration for each; another number of functions where it is scaled."""
    np.random.seed(0)
    model, losses, session = Pooling(), [], None
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)

    def loop():
        data = networks.batches(len(scaled))
        for (x, t), other in zip(data, scaled, strict=True):
            loss = model(x, t, other)
            model.cleargrads()
            between()
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


@pytest.mark.parametrize('planner', ['in-core', 'hybrid'])
def test_what_leaves_before_the_next_hook_comes_back(planner, hostile):
    """Between a function and the next hook its inputs may be evicted."""
    expected, _ = train([False] * 6)

    def between():
        session = hybridmem.session.active_session()
        session._executor.reclaim(2**30)

    actual, session = train(
        [False] * 6, between, memory_limit='64MiB', planner=planner
    )
    networks.assert_same(expected, actual)
    assert sum(entry['evictions'] for entry in session._history.entries) > 0
