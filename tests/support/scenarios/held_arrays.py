"""Arrays and Variables that the program holds, and writes into."""

from __future__ import annotations

from typing import Any

import chainer.functions as F

from .classifier import Classifier, Trunk, pictures
from .loop import begin, learn, step
from .registry import scenario
from .running import Run


@scenario(deviations=2)
def queue_of_features(run: Run) -> None:
    """Features of the last iterations are used in the next one (as in MoCo)."""
    rng, model, optimizer = begin()
    with run.training(model):
        queue: list[Any] = []
        for _ in range(11):
            x, t = pictures(rng)
            h = model.trunk(x)
            features = F.max_pooling_2d(h, 2)
            loss = F.softmax_cross_entropy(model.head(F.mean(features, (2, 3))), t)
            for old in queue:
                loss += 0.1 * F.mean_squared_error(features, old)
            learn(model, optimizer, loss)
            queue = [*queue, features.array][-2:]
            run.record(model, loss=loss)


@scenario(deviations=2)
def queue_of_variables(run: Run) -> None:
    """The same with Variables, whose graph lives on until they are let go."""
    rng, model, optimizer = begin()
    with run.training(model):
        old = None
        for _ in range(11):
            x, t = pictures(rng)
            h = model.trunk(x)
            loss = model.loss(h, t)
            if old is not None:
                loss += 0.1 * F.mean_squared_error(h, old.array)
            learn(model, optimizer, loss)
            old = h
            run.record(model, loss=loss, old=old)


@scenario(signatures=2, deviations=2, share=0.7, evictions=True)
def gradients_through_two_iterations(run: Run) -> None:
    """Every second backward goes on through the graph of the iteration before."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.3)))
    with run.training(model):
        old = None
        for i in range(20):
            x, t = pictures(rng)
            h = model.trunk(x)
            loss = model.loss(h, t)
            if i % 2:
                loss += F.mean_squared_error(h, old)
            learn(model, optimizer, loss)
            old = h if i % 2 == 0 else None
            run.record(model, loss=loss)


@scenario()
def changed_after_backward(run: Run) -> None:
    """A held array is modified after backward, before the next iteration."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.relu(model.trunk(x))
            loss = model.loss(h, t)
            learn(model, optimizer, loss)
            h.array[...] = -1
            run.record(model, loss=loss, h=h)


@scenario()
def changed_before_backward(run: Run) -> None:
    """A held array is modified between forward and backward."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            g = F.tanh(h)
            loss = F.softmax_cross_entropy(model.head(F.mean(g, axis=(2, 3))), t)
            h.array[...] *= 0.5
            learn(model, optimizer, loss)
            run.record(model, loss=loss, h=h)


@scenario()
def held_array_changed(run: Run) -> None:
    """The same where only the array is held and not its Variable."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            held = h.array
            h = F.tanh(h)
            loss = model.loss(h, t)
            held *= 0.5
            learn(model, optimizer, loss)
            run.record(model, loss=loss, held=held)


@scenario(share=0.9, evictions=True)
def growing_replay_buffer(run: Run) -> None:
    """NumPy arrays of the user's own, more and more of them."""
    rng, model, optimizer = begin()
    buffer = []
    with run.training(model):
        for _ in range(11):
            x, t = pictures(rng)
            buffer.append(x.copy())
            old = buffer[rng.randint(len(buffer))]
            loss = step(model, optimizer, (x + old) / 2, t)
            run.record(model, loss=loss)
