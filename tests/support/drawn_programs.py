"""Drawn programs whose steps have several passes, optimizers and forms."""

from __future__ import annotations

import random
from typing import Any

import chainer_hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

SHAPES = [
    'plain',
    'accumulated',
    'critic',
    'single samples',
    'two losses',
    'alternating',
]
OPTIMIZERS = ['SGD', 'MomentumSGD', 'Adam', 'RMSprop', 'AdaGrad']
STEPS = 7


class Net(chainer.Chain):
    """A few convolutions and dense layers of drawn widths."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        channels = rng.choice([4, 8, 12])
        self.wide = rng.choice([32, 128, 256])
        with self.init_scope():
            self.convolutions = chainer.ChainList(
                *[
                    L.Convolution2D(3 if k == 0 else channels, channels, 3, pad=1)
                    for k in range(rng.randint(2, 6))
                ]
            )
            self.dense = L.Linear(None, self.wide)
            self.last = L.Linear(self.wide, 10)
        self.normal = rng.random() < 0.3
        self.dropout = rng.random() < 0.3
        if self.normal:
            with self.init_scope():
                self.norm = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        h = x
        for k, convolution in enumerate(self.convolutions):
            h = F.relu(convolution(h))
            if k == 0 and self.normal:
                h = self.norm(h)
        h = F.tanh(self.dense(F.average_pooling_2d(h, 2)))
        return self.last(F.dropout(h, 0.3) if self.dropout else h)


class Program:
    """One drawn program; each seed is another one.

    Args:
        seed: Draws it.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.shape = SHAPES[seed % len(SHAPES)]
        self.passes = rng.randint(2, 6)
        self.batch = rng.choice([2, 6, 12])
        self.share = rng.uniform(0.15, 0.8)
        self.planner = rng.choice([None, None, None, 'hybrid', 'swap-all'])
        np.random.seed(seed)
        self.random = np.random.RandomState(seed)
        self.one = Net(rng)
        self.two = Net(rng) if self.shape in ('critic', 'two losses') else None
        parts = [self.one] if self.two is None else [self.one, self.two]
        self.model = chainer.ChainList(*parts)
        self.optimizers = [
            getattr(chainer.optimizers, rng.choice(OPTIMIZERS))().setup(part)
            for part in parts
        ]
        self.keeps = rng.random() < 0.3  # the last loss
        self.losses: list[float] = []
        self.kept: Any = None

    def draw(self, size: int | None = None) -> tuple[Any, Any]:
        size = size or self.batch
        x = self.random.rand(size, 3, 16, 16).astype('f')
        return x, self.random.randint(0, 10, size).astype('i')

    def learn(self, net: Net, size: int | None = None) -> Any:
        x, t = self.draw(size)
        loss = F.softmax_cross_entropy(net(x), t)
        loss.backward()
        self.losses.append(float(loss.array))
        return loss

    def step(self) -> None:
        """From one update to the next."""
        loss = getattr(self, self.shape.replace(' ', '_'))()
        self.kept = loss if self.keeps else None

    def plain(self) -> Any:
        self.model.cleargrads()
        loss = self.learn(self.one)
        self.optimizers[0].update()
        return loss

    def accumulated(self) -> Any:
        self.model.cleargrads()
        for _ in range(self.passes):
            loss = self.learn(self.one)
        self.optimizers[0].update()
        return loss

    def single_samples(self) -> Any:
        """The gradient of each sample is added up by hand, as for privacy."""
        sums = None
        for _ in range(self.passes):
            self.model.cleargrads()
            loss = self.learn(self.one, 1)
            found = [parameter.grad for parameter in self.one.params()]
            sums = (
                found
                if sums is None
                else [a + b for a, b in zip(sums, found, strict=True)]
            )
        for parameter, gradient in zip(self.one.params(), sums, strict=True):
            parameter.grad = gradient
        self.optimizers[0].update()
        return loss

    def critic(self) -> Any:
        for _ in range(self.passes):
            self.two.cleargrads()
            loss = self.learn(self.two)
            self.optimizers[1].update()
        self.one.cleargrads()
        loss = self.learn(self.one)
        self.optimizers[0].update()
        return loss

    def two_losses(self) -> Any:
        self.model.cleargrads()
        first = self.learn(self.one)
        loss = self.learn(self.two)
        self.optimizers[0].update()
        self.optimizers[1].update()
        del first
        return loss

    def alternating(self) -> Any:
        """Steps of two sizes in turns, as of two tasks."""
        self.model.cleargrads()
        loss = self.learn(self.one, self.batch + 2 * (len(self.losses) % 2))
        self.optimizers[0].update()
        return loss


def train(seed: int, limit: int, planner: str | None = None) -> tuple[Any, list[float]]:
    """Trains a program inside a limit; its session and its losses."""
    program = Program(seed)
    options = {} if planner is None else {'planner': planner}
    with chainer_hybridmem.optimize(program.model, limit, **options) as session:
        for _ in range(STEPS):
            program.step()
    return session, program.losses
