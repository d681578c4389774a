"""Batches of varying sizes, evaluation between them, a refilled input buffer."""

from __future__ import annotations

import chainer
import numpy as np

from .classifier import Classifier, Trunk, pictures
from .loop import begin, step
from .registry import scenario
from .running import Run


@scenario(signatures=2)
def last_small_batch(run: Run) -> None:
    """Epochs of four batches, of which the last one is smaller."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(6):
            for n in (8, 8, 8, 5):
                loss = step(model, optimizer, *pictures(rng, n))
                run.record(model, loss=loss)


@scenario(signatures=1)
def evaluation_without_graph(run: Run) -> None:
    """Evaluation in test mode, now and then."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(14):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)
            if i % 4 == 3:
                with chainer.using_config('train', False), chainer.no_backprop_mode():
                    for n in (8, 3):
                        run.record(model, loss=model(*pictures(rng, n)))


@scenario(deviations=8)
def evaluation_with_graph(run: Run) -> None:
    """Evaluation in test mode whose graph no backward follows."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(27):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)
            if i % 5 == 4:
                with chainer.using_config('train', False):
                    loss = model(*pictures(rng))
                    run.record(model, loss=loss)
                    del loss


@scenario(signatures=3, evictions=True)
def multi_scale(run: Run) -> None:
    """Every iteration has one of three sizes of pictures."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(25):
            insize = rng.choice((12, 16, 20))
            loss = step(model, optimizer, *pictures(rng, insize=insize))
            run.record(model, loss=loss)


@scenario(share=0.5)
def refilled_input_buffer(run: Run) -> None:
    """One input array for all batches; the old loss lives during the next forward."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        x, t = np.zeros((8, 3, 16, 16), np.float32), np.zeros(8, np.int32)
        for _ in range(10):
            x[...], t[...] = pictures(rng)
            loss = step(model, optimizer, x, t)
            run.record(model, loss=loss)
