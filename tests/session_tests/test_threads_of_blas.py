"""Products whose bits depend on the number of threads that BLAS has."""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl
from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem import blas

ITERATIONS = 6


def bits_by_threads():
    random = np.random.RandomState(0)
    a, b = (random.randn(*shape).astype('f') for shape in ((64, 3000), (3000, 64)))
    found = set()
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads, 'blas'):
            found.add(a.dot(b).tobytes())
    return found


pytestmark = pytest.mark.skipif(
    len(bits_by_threads()) < 2, reason='BLAS gives the same bits with two threads'
)


class Wide(chainer.Chain):
    """Long sums, which threads share."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.down = chainer.ChainList(*[L.Linear(3000, 64) for _ in range(2)])
            self.up = chainer.ChainList(*[L.Linear(64, 3000) for _ in range(2)])
            self.last = L.Linear(3000, 10)

    def forward(self, x, t):
        h = x
        for down, up in zip(self.down, self.up, strict=True):
            h = F.tanh(up(F.tanh(down(h))))
        return F.softmax_cross_entropy(self.last(h), t)


def train(forward, backward, **options):
    np.random.seed(0)
    model, random, losses = Wide(), np.random.RandomState(1), []
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    with networks.session_for(model, options) as session:
        for _ in range(ITERATIONS):
            batch = random.randn(64, 3000).astype('f'), random.randint(0, 10, 64)
            with threadpoolctl.threadpool_limits(forward, 'blas'):
                loss = model(batch[0], batch[1].astype('i'))
            model.cleargrads()
            with threadpoolctl.threadpool_limits(backward, 'blas'):
                loss.backward()
                assert blas.count_threads() == (backward,) * len(blas.count_threads())
            losses.append(float(loss.array))
            del loss
            optimizer.update()
    return networks.outcome(model, losses), session


@pytest.mark.parametrize('forward, backward', [(1, 2), (2, 1)])
def test_a_replay_has_as_many_threads_as_its_forward(forward, backward):
    expected, _ = train(forward, backward)
    result, session = train(
        forward, backward, memory_limit='1GB', planner='checkpoint-speed'
    )
    networks.assert_same(expected, result)
    assert session.statistics()['recompute'] > 0
    assert session.statistics()['guided_iterations'] > 1
