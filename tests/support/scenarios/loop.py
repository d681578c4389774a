"""The usual loop: seed, set up, learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from .classifier import Classifier


def start(
    model: chainer.Link, optimizer: chainer.Optimizer | None = None
) -> chainer.Optimizer:
    """An optimizer for a model whose parameters exist."""
    optimizer = optimizer or chainer.optimizers.MomentumSGD(0.02)
    optimizer.setup(model)
    return optimizer


def seeded(seed: int = 0) -> np.random.RandomState:
    """Seeds NumPy; returns a generator of its own for the data."""
    np.random.seed(seed)
    return np.random.RandomState(seed + 1)


def begin(
    make: Callable[[], Any] = Classifier, optimizer: chainer.Optimizer | None = None
) -> tuple[np.random.RandomState, Any, chainer.Optimizer]:
    """A generator for the data, a model made after seeding, and its optimizer."""
    rng = seeded()
    model = make()
    return rng, model, start(model, optimizer)


def learn(model: chainer.Link, optimizer: chainer.Optimizer, loss: Any) -> None:
    """Everything after forward; the caller holds the loss and drops it."""
    model.cleargrads()
    loss.backward()
    optimizer.update()


def step(model: Any, optimizer: Any, *arguments: Any) -> Any:
    """A usual iteration; the caller gets the loss and so keeps it alive."""
    loss = model(*arguments)
    learn(model, optimizer, loss)
    return loss
