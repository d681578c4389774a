"""Layers whose graph is unusual: forgotten, skipped, detached, held."""

from __future__ import annotations

from typing import Any

import chainer.functions as F
import chainer.links as L

from .forms import like
from .layer import Layer, kind


@kind('picture', twice=False, links=lambda: {
    'one': L.Convolution2D(None, 3, 3, pad=1),
    'two': L.Convolution2D(3, 3, 3, pad=1)})  # fmt: skip
def forgotten(at: Layer, x: Any) -> Any:
    return F.forget(lambda h: F.tanh(at.two(F.relu(at.one(h)))), x)


@kind('picture', draw=lambda r: {'survival': r.choice((0.5, 0.8))},
      links=lambda survival: {
          'inside': L.Convolution2D(None, 4, 3, pad=1)})  # fmt: skip
def sometimes(at: Layer, x: Any, survival: float) -> Any:
    """Stochastic depth: another graph in another iteration."""
    if at.chance.random() > survival and at.inside.W.array is not None:
        return x
    return x + like(x, F.relu(at.inside(x)))


@kind(draw=lambda r: {'deep': r.random() < 0.2})
def detached(at: Layer, x: Any, deep: bool) -> Any:
    """Half of the value comes without a gradient, or all that was before."""
    beside = F.tanh(x) * 0.5
    if deep:
        beside.unchain_backward()
    else:
        beside.unchain()
    return x * 0.5 + beside


@kind()
def held(at: Layer, x: Any) -> Any:
    """The program keeps the variable and reads it after backward."""
    y = F.tanh(x)
    at.state['held'] = y
    return y * 0.7
