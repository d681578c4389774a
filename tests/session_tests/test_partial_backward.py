"""Iterations whose backward ends early, among others that begin in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import faulty

ITERATIONS = 12


def train(run: faulty.Run, partial: Collection[int]) -> None:
    """Some iterations train the last layers alone, with ``chainer.grad``."""
    head = [*run.model.d.params(), *run.model.e.params()]
    for i in range(ITERATIONS):
        loss = run.model(run.pictures[i], run.labels[i])
        run.model.cleargrads()
        if i in partial:
            for parameter, grad in zip(head, chainer.grad([loss], head), strict=True):
                parameter.grad_var = grad
            del grad
        else:
            loss.backward()
        del loss
        run.optimizer.update()


@pytest.mark.parametrize('partial', [(1,), (2,), (1, 3), (2, 3), (0, 2)], ids=str)
def test_maps_that_leave_late_are_not_held(partial):
    """What is recorded follows the guide of the short ones, and then its own.

    By then it has what the other guide puts away earlier. Nobody else holds that.
    """
    run = faulty.Run()
    session = chainer_hybridmem.optimize(
        run.model, faulty.LIMIT, planner='superneurons'
    )
    with session:
        train(run, partial)
    assert session.statistics()['guided_iterations'] >= 3
    assert session.statistics()['guided_peak_bytes'] <= faulty.LIMIT
    plain = faulty.Run()
    train(plain, partial)
    for name, array in plain.learnt().items():
        np.testing.assert_array_equal(run.learnt()[name], array)


class Scaled(chainer.Chain):
    """What comes before the first layer has a backward, which seldom runs."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.a, self.b = L.Linear(400, 300), L.Linear(300, 300)
            self.c = L.Linear(300, 10)

    def forward(self, x, t):
        h = F.tanh(F.reshape(x, (len(x), -1)))
        h = F.tanh(self.b(F.sigmoid(self.a(h))))
        return F.softmax_cross_entropy(self.c(h), t)


def train_pushed(order: str, **options: object) -> list[float]:
    """Losses; in the iterations marked ``g`` each batch is pushed by its gradient."""
    np.random.seed(0)
    model = Scaled()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    losses = []
    with contextlib.ExitStack() as stack:
        if options:
            stack.enter_context(chainer_hybridmem.optimize(model, **options))
        for kind in order:
            x = np.random.rand(200, 20, 20).astype('f')
            t = np.random.randint(0, 10, 200).astype('i')
            if kind == 'g':
                pushed = chainer.Variable(x)
                model.cleargrads()
                loss = model(pushed, t)
                loss.backward()
                del loss
                x = x + 0.1 * pushed.grad
                del pushed
            model.cleargrads()
            loss = model(x, t)
            loss.backward()
            losses.append(float(loss.array))
            del loss
            optimizer.update()
    return losses


@pytest.mark.matrix
@pytest.mark.parametrize(
    'options',
    [
        {'planner': 'hybrid', 'memory_limit': '3.3MB'},
        {'planner': 'hybrid', 'memory_limit': '3.6MB', 'host_limit': '300KB'},
        {'planner': 'swap-all', 'memory_limit': '3.3MB'},
        {'planner': 'superneurons', 'memory_limit': '3.6MB'},
    ],
    ids=str,
)
@pytest.mark.parametrize('order', ['nnnnnnnngngngg', 'ggnnnnnngggnnn', 'gggggggg'])
def test_a_gradient_of_the_input_may_be_asked_for_at_any_time(order, options):
    """Plans of other iterations drop what only that gradient needs."""
    plain = train_pushed(order)
    assert train_pushed(order, **options) == plain
