"""Arrays of other types and shapes: empty, scalar, half precision, views."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .classifier import Classifier, pictures
from .loop import begin, learn, seeded, start
from .registry import scenario
from .running import Run


@scenario()
def empty_and_scalar_arrays(run: Run) -> None:
    """Arrays without elements and without dimensions, among the others."""
    rng = seeded()
    model = Classifier()
    with model.init_scope():
        model.weight = chainer.Parameter(np.array(0.5, np.float32))
        model.nothing = chainer.Parameter(np.zeros((0, 3), np.float32))
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = model.trunk(x)
            none = F.relu(h[:, :0]) * 2
            h = F.concat((none, h * F.broadcast_to(model.weight, h.shape)))
            loss = model.loss(h, t)
            loss = F.exp(loss * model.weight) + F.sum(model.nothing**2) + F.sum(none)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


def typed(run: Run, dtype: Any) -> None:
    rng = seeded()
    with chainer.using_config('dtype', dtype):
        model = Classifier()
        optimizer = start(model)
        data = np.float16 if dtype == chainer.mixed16 else dtype
        if data == np.float16:
            optimizer.loss_scaling()
            optimizer.use_fp32_update()
        with run.training(model):
            for _ in range(10):
                x, t = pictures(rng, dtype=data)
                loss = model(x, t)
                model.cleargrads()
                loss.backward(
                    loss_scale=optimizer._loss_scale if data == np.float16 else None
                )
                optimizer.update()
                run.record(model, loss=loss)


@scenario()
def float16(run: Run) -> None:
    """Half precision."""
    typed(run, np.float16)


@scenario()
def mixed16(run: Run) -> None:
    """Half precision with parameters of single precision."""
    typed(run, chainer.mixed16)


@scenario()
def float64(run: Run) -> None:
    """Double precision."""
    typed(run, np.float64)


@scenario()
def views(run: Run) -> None:
    """Maps that are views: transposed, sliced, reversed, broadcast, strided."""
    rng = seeded()
    model = Classifier()
    model.add_link('dense', L.Linear(16, 16))
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x).transpose(0, 2, 3, 1))
            h = F.tanh(h[:, ::-1, 1:, ::2])
            h = F.sigmoid(F.swapaxes(h, 1, 3))
            h = model.dense(F.reshape(h, (-1, 16)))
            h = F.reshape(h, (8, -1, 16)) * F.broadcast_to(h[:1, :1], (8, 1, 16))
            windows = F.as_strided(
                h, (8, h.shape[1] - 2, 3, 16), (h[0].size, 16, 16, 1)
            )
            h = F.flip(F.rollaxis(F.tanh(windows), 2), 0)
            h = F.concat((F.squeeze(F.expand_dims(h, 0), 0), h), axis=1)
            loss = F.softmax_cross_entropy(model.head(F.mean(h, axis=(0, 2))[:8]), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario(share=100)
def no_feature_map(run: Run) -> None:
    """Nothing is large enough to leave."""
    rng, model, optimizer = begin(lambda: chainer.Sequential(L.Linear(4, 3)))
    with run.training(model):
        for _ in range(10):
            x = rng.rand(2, 4).astype(np.float32)
            loss = F.sum(model(x))
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
