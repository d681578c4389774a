"""Layers whose graph is unusual: forgotten, skipped, detached, held."""

from __future__ import annotations

from typing import Any

import chainer
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


@kind(draw=lambda r: {
    'deep': r.random() < 0.2, 'retained': r.random() < 0.5,
    'split': r.choice(((), (), (3, 7), (4, 5, 8), (0, 1, 2, 5)))})  # fmt: skip
def detached(
    at: Layer, x: Any, deep: bool, retained: bool = True, split: tuple[int, ...] = ()
) -> Any:
    """Half of the value comes without a gradient, or all that was before.

    Or in some iterations (``split``) from another array than a function has made.
    """
    if split:
        at.state['calls'] = at.state.get('calls', -1) + 1
        made = read = F.tanh(x) if retained else x * 0.5 + 0.1
        if at.state['calls'] in split:
            read = chainer.Variable(made.array * made.dtype.type(0.5))
        return F.sin(read) * 0.5 + made * 0.5
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
