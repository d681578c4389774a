"""Sessions of a part of the model, links and parameters used twice."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from .classifier import Trunk, pictures
from .loop import begin, seeded, start, step
from .registry import scenario
from .running import Run


@scenario()
def part_of_the_model(run: Run) -> None:
    """The session is told of the trunk only; the head has its own optimizer."""
    rng = seeded()
    trunk, head = Trunk(), L.Linear(8 * 8 * 8, 60)
    optimizers = start(trunk), start(head, chainer.optimizers.Adam())
    with run.training(trunk):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.max_pooling_2d(trunk(x), 2)
            loss = F.softmax_cross_entropy(head(h), t)
            trunk.cleargrads()
            head.cleargrads()
            loss.backward()
            for optimizer in optimizers:
                optimizer.update()
            run.record(trunk, head, loss=loss)


class Siamese(chainer.Chain):
    """One trunk for two inputs, and one parameter in two links."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.trunk = Trunk()
            self.encode = L.Linear(8 * 16, 64)
            self.decode = L.Linear(64, 64)
            self.again = L.Linear(64, 64)
        self.again.W = self.decode.W

    def forward(self, a: Any, b: Any) -> Any:
        def features(x: Any) -> Any:
            h = F.relu(self.encode(F.average_pooling_2d(self.trunk(x), 4)))
            return self.again(F.relu(self.decode(h)))

        return F.mean((features(a) - features(b)) ** 2)


@scenario()
def shared_parameters(run: Run) -> None:
    """The same link twice in a forward, and two links with one parameter."""
    rng, model, optimizer = begin(Siamese, chainer.optimizers.SGD(0.1))
    with run.training(model):
        for _ in range(10):
            a, b = pictures(rng)[0], pictures(rng)[0]
            run.record(model, loss=step(model, optimizer, a, b))
