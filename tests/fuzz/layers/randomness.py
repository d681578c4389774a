"""Layers that draw random numbers."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from .forms import like
from .layer import Layer, kind


@kind(draw=lambda r: {'ratio': r.choice((0.0, 0.2, 0.5))})
def dropout(at: Layer, x: Any, ratio: float) -> Any:
    return F.dropout(x, ratio)


@kind(inputs=2)
def zoneout(at: Layer, x: Any, y: Any) -> Any:
    return F.zoneout(x, like(x, y), 0.4)


@kind(twice=False)
def random_relu(at: Layer, x: Any) -> Any:
    return F.rrelu(x)


@kind()
def noise(at: Layer, x: Any) -> Any:
    return F.gaussian(x, F.tanh(x)) if chainer.config.train else x


@kind('vector', twice=False)
def gumbel(at: Layer, x: Any) -> Any:
    return F.gumbel_softmax(x, tau=0.7)


@kind('vector', twice=False, links=lambda: {'dense': L.Linear(None, 9),
                               'drop': L.SimplifiedDropconnect(9, 6)})  # fmt: skip
def dropconnect(at: Layer, x: Any) -> Any:
    return at.drop(at.dense(x))
