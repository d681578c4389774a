"""What talks to other processes."""

from __future__ import annotations

import types

from support import networks

import chainer_hybridmem  # before chainer

# isort: split
import chainer
import chainer.functions as F

from chainer_hybridmem.planning.records.plan import Action


@chainer_hybridmem.recomputable
class Exchange(chainer.Function):
    """Stands for a function that talks to other processes; counts how often."""

    calls = 0

    def __init__(self) -> None:
        kind = types.new_class('Communicator')
        kind.__module__ = 'chainermn.communicators.naive_communicator'
        self.comm = kind()

    def forward(self, inputs):
        Exchange.calls += 1
        return (inputs[0] * 2,)

    def backward(self, inputs, grads):
        return (grads[0] * 2,)


class Exchanging(networks.Everything):
    def forward(self, x, t):
        h = F.tanh(Exchange()(F.relu(self.first(x))))
        return F.softmax_cross_entropy(self.last(F.reshape(h, (len(x), -1))), t)


def test_what_talks_to_others_is_never_run_again():
    """Not even to see whether it could be: the others would not answer."""
    data = networks.batches(6, size=2)
    Exchange.calls = 0
    _, session = networks.train(
        Exchanging,
        data,
        memory_limit='64MiB',
        planner='manual',
        actions={'*': 'swap', '*ReLU': 'recompute'},
    )
    assert session.statistics()['guided_iterations'] > 0
    assert session.plan.count(Action.RECOMPUTE) > 0
    assert Exchange.calls == len(data)
