"""Networks whose layers or graphs change while they train."""

from __future__ import annotations

from typing import Any

import chainer.functions as F
import chainer.links as L
import numpy as np

from .classifier import Block, Classifier, Trunk, pictures
from .loop import begin, learn, seeded, start, step
from .registry import scenario
from .running import Run


class Deep(Trunk):
    """Blocks that are skipped by chance."""

    rng: np.random.RandomState

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            if self.rng.rand() < 0.5:
                h = block(h)
        return h


@scenario(signatures=3, deviations=10, evictions=True)
def stochastic_depth(run: Run) -> None:
    """Blocks are left out by chance."""
    rng = seeded()
    trunk = Deep(blocks=2)
    trunk.rng = np.random.RandomState(5)
    model = Classifier(trunk)
    optimizer = start(model)
    with run.training(model):
        for _ in range(48):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def frozen_then_thawed(run: Run) -> None:
    """``disable_update`` and a trunk without a graph; later all of it is trained."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(20):
            x, t = pictures(rng)
            if i == 0:
                model.trunk.disable_update()
            if i == 8:
                model.trunk.enable_update()
            h = model.trunk(x)
            if i < 8:
                h.unchain_backward()
            h = F.mean(F.max_pooling_2d(h, 2), axis=(2, 3))
            loss = F.softmax_cross_entropy(model.head(h), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario()
def update_disabled(run: Run) -> None:
    """Some layers are not updated at first; the graph stays the same."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(13):
            if i == 0:
                model.trunk.first.disable_update()
            if i == 8:
                model.trunk.first.enable_update()
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def growing_network(run: Run) -> None:
    """A block is added in the middle of training."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(blocks=1)))
    with run.training(model):
        for i in range(20):
            if i == 8:
                block = Block(8)
                model.trunk.blocks.add_link(block)
                for parameter in block.params():
                    parameter.update_rule = optimizer.create_update_rule()
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def lazy_in_a_later_iteration(run: Run) -> None:
    """A layer without parameters yet is used from the tenth iteration on."""
    rng = seeded()
    model = Classifier()
    model.add_link('extra', L.Convolution2D(None, 8, 3, pad=1))
    optimizer = start(model)
    with run.training(model):
        for i in range(20):
            x, t = pictures(rng)
            h = model.trunk(x)
            if i >= 8:
                h = F.relu(model.extra(h))
            h = F.mean(F.max_pooling_2d(h, 2), axis=(2, 3))
            loss = F.softmax_cross_entropy(model.head(h), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario(signatures=2)
def unchained_in_the_middle(run: Run) -> None:
    """The features of the first blocks are cut off."""
    rng = seeded()
    model = Classifier(Trunk(blocks=1))
    model.add_link('second', Trunk(blocks=2))
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = model.trunk(x)
            first = model.loss(h, t)
            model.cleargrads()
            first.backward()
            h.unchain_backward()
            second = F.mean(model.second(h) ** 2)
            second.backward()
            optimizer.update()
            run.record(model, first=first, second=second)


class Forgetful(Trunk):
    """Blocks inside ``F.forget``."""

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            h = F.forget(block, h)
        return h


@scenario(share=0.9, evictions=True)
def forgotten_blocks(run: Run) -> None:
    """``F.forget`` in the model: forwards in backward, hooks and all."""
    rng, model, optimizer = begin(lambda: Classifier(Forgetful()))
    with run.training(model):
        for _ in range(10):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)
