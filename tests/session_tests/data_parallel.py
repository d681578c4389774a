"""What ranks train that know of each other but their sums: see test_ranks.py."""

from __future__ import annotations

import hashlib
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from support import networks

from chainer_hybridmem.planning.records.plan import Action

ITERATIONS = 8


class Net(chainer.Chain):
    """Normalised over the batches of all processes."""

    def __init__(self, communicator):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = chainermn.links.MultiNodeBatchNormalization(8, communicator)
            self.second = L.Convolution2D(8, 8, 1)
            self.last = L.Linear(None, 10)

    def forward(self, x, t):
        h = F.relu(self.norm(self.first(x)))
        h = F.tanh(self.second(h))
        h = F.max_pooling_2d(F.sigmoid(h) * F.softplus(h) + F.elu(h), 2)
        return F.softmax_cross_entropy(self.last(F.dropout(h, 0.2)), t)


def train(communicator, **options):
    """Returns a hash of the outcome, and the session."""
    np.random.seed(communicator.rank)
    model = Net(communicator)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01), communicator
    ).setup(model)
    with networks.session_for(model, options) as session:
        data = networks.batches(ITERATIONS * communicator.size, size=16)
        losses = [
            networks.iterate(model, optimizer, *batch)
            for batch in data[communicator.rank :: communicator.size]
        ]
    digest = hashlib.sha256()
    for name, value in sorted(networks.outcome(model, losses).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value))
    parameters = hashlib.sha256()
    for _, parameter in sorted(model.namedparams()):
        parameters.update(np.ascontiguousarray(parameter.array))
    return (digest.hexdigest(), parameters.hexdigest()), session


def train_apart(communicator: Any) -> dict[str, object]:
    """Trains plain, with a session that keeps everything, and in less than it needs."""
    plain, _ = train(communicator)
    kept, session = train(communicator, memory_limit='1GiB', planner='in-core')
    in_core = session.statistics()['in_core_peak_bytes']
    # Every process has a planner of its own: they need not agree.
    planner = ('hybrid', 'swap-all')[communicator.rank % 2]
    limit = in_core * 7 // 10  # it needs more with functions in parts
    small, session = train(communicator, memory_limit=limit, planner=planner)
    moved = session.plan.count(Action.SWAP) + session.plan.count(Action.RECOMPUTE)
    return {
        'plain': plain,
        'kept': kept,
        'small': small,
        'in_core_peak_bytes': in_core,
        'limit_bytes': limit,
        'peak_bytes': session.statistics()['peak_bytes'],
        'guided_iterations': session.statistics()['guided_iterations'],
        'moved': moved,
    }
