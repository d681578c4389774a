"""Hooks, snapshots, a Trainer, other optimizers: what surrounds a model's training."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import Any

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

from .classifier import Classifier, pictures
from .loop import begin, learn, seeded, start, step
from .registry import scenario
from .running import Run


@scenario()
def learning_rate_changes(run: Run) -> None:
    """Another learning rate, weight decay added."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(13):
            if i == 6:
                optimizer.lr *= 0.1
            if i == 9:
                optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(share=0.9)
def optimizer_replaced(run: Run) -> None:
    """SGD becomes Adam, whose states appear in the middle."""
    rng, model, optimizer = begin(Classifier, chainer.optimizers.SGD(0.05))
    with run.training(model):
        for i in range(16):
            if i == 8:
                optimizer = start(model, chainer.optimizers.Adam())
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario()
def sequential_repeated(run: Run) -> None:
    """``chainer.Sequential`` with ``repeat`` and functions."""
    rng = seeded()
    unit = chainer.Sequential(
        L.Convolution2D(None, 8, 1), L.BatchNormalization(8), F.relu
    )
    model = chainer.Sequential(
        *unit.repeat(5), lambda h: F.max_pooling_2d(h, 2), F.dropout, L.Linear(None, 5)
    )
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            loss = F.softmax_cross_entropy(model(x), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


class LinkTimer(chainer.LinkHook):
    """A link hook of the user's."""

    def forward_preprocess(self, args: Any) -> None:
        self.begin = time.perf_counter()


@scenario()
def hooks_around(run: Run) -> None:
    """Chainer's own hooks, around the session, inside it and on one function."""
    rng, model, optimizer = begin()
    with chainer.function_hooks.TimerHook() as timer:
        with run.training(model):
            for i in range(12):
                hook = chainer.function_hooks.TimerHook()
                hook.name = 'inner'
                within: Any = hook if i % 2 else contextlib.nullcontext()
                with within, LinkTimer():
                    loss = step(model, optimizer, *pictures(rng))
                run.record(model, loss=loss)
    assert timer.call_history


@scenario()
def zerograds(run: Run) -> None:
    """Gradients are filled with zeros instead of being dropped, now and then."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(14):
            loss = model(*pictures(rng))
            if i >= 7 and i % 2:
                optimizer.use_cleargrads(False)
                with np.errstate(all='ignore'):
                    model.zerograds()
            else:
                model.cleargrads()
            loss.backward()
            optimizer.update()
            run.record(model, loss=loss)


@scenario()
def parameters_copied_and_loaded(run: Run) -> None:
    """``copyparams``, a copy of the model, snapshots saved and loaded."""
    rng = seeded()
    model = Classifier()
    model(*pictures(rng))
    optimizer = start(model)
    average = model.copy('copy')
    with run.training(model), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'model.npz')
        for i in range(16):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, average, loss=loss)
            if i % 6 == 2:
                chainer.serializers.save_npz(path, model)
            if i % 6 == 4:
                chainer.serializers.load_npz(path, model)
            if i % 6 == 5:
                average.copyparams(model)


@scenario()
def trainer(run: Run) -> None:
    """Trainer, updater, evaluator and snapshots with the extension's session."""
    rng, model, optimizer = begin(Classifier, chainer.optimizers.Adam())
    rows = [
        row for _ in range(4) for row in zip(*pictures(rng), strict=True)
    ]  # four batches per epoch
    with tempfile.TemporaryDirectory() as folder:
        updater = training.StandardUpdater(
            chainer.iterators.SerialIterator(rows, 8), optimizer
        )
        loop = training.Trainer(updater, (14, 'iteration'), out=folder)
        test = chainer.iterators.SerialIterator(
            rows[:12], 8, repeat=False, shuffle=False
        )
        loop.extend(extensions.Evaluator(test, Reporting(model)))
        loop.extend(extensions.snapshot(), trigger=(5, 'iteration'))
        loop.extend(extensions.LogReport(trigger=(1, 'iteration')))
        loop.extend(lambda _: run.record(model), trigger=(1, 'iteration'))
        if run.options is None:
            with run.training(model):
                loop.run()
            return
        extension = hybridmem.HybridMemory(**run.options)
        loop.extend(extension)
        loop.run()
        run.session = extension.session


class Reporting(chainer.Chain):
    """Reports the loss of a model."""

    def __init__(self, model: chainer.Link) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, t: Any) -> Any:
        chainer.report({'loss': self.model(x, t)}, self)
