"""Functions of each element, and over the features."""

from __future__ import annotations

import random
from typing import Any

import chainer.functions as F
import chainer.links as L

from .layer import Layer, Options, kind

_PLAIN = {
    'relu': F.relu,
    'leaky_relu': F.leaky_relu,
    'elu': F.elu,
    'selu': F.selu,
    'sigmoid': F.sigmoid,
    'hard_sigmoid': F.hard_sigmoid,
    'tanh': F.tanh,
    'softplus': F.softplus,
    'clipped_relu': lambda x: F.clipped_relu(x, 0.7),
    'relu6': F.relu6,
    'crelu': F.crelu,
    'identity': F.identity,
    'sin': F.sin,
    'absolute': F.absolute,
    'square_root': lambda x: F.sqrt(x * x + 1),
    'exp': lambda x: F.exp(F.clip(x, -2.0, 1.0)),
    'log1p': lambda x: F.log1p(x * x),
    'erf': F.erf,
    'power': lambda x: (x * x + 1) ** 0.3,
    'divide': lambda x: x / (x * x + 1),
    'minus': lambda x: 0.5 - x,
    'rsqrt': lambda x: F.rsqrt(x * x + 0.5),
}

_NOT_TWICE = ('hard_sigmoid',)


def _activated(rng: random.Random) -> Options:
    return {'name': rng.choice([n for n in _PLAIN if n not in _NOT_TWICE])}


@kind(draw=_activated)
def activation(at: Layer, x: Any, name: str) -> Any:
    return _PLAIN[name](x)


@kind(twice=False)
def hard_sigmoid(at: Layer, x: Any) -> Any:
    return F.hard_sigmoid(x)


# The gradient of its gradient takes the one of its parameter for granted.
@kind('vector', links=lambda: {'swish': L.Swish(None)}, twice=False)
def swish(at: Layer, x: Any) -> Any:
    return at.swish(x)


@kind(links=lambda: {'prelu': L.PReLU()}, twice=False)  # the same
def prelu(at: Layer, x: Any) -> Any:
    return at.prelu(x)


@kind('vector')
def scaled(at: Layer, x: Any) -> Any:
    return at.make_once(lambda: L.Scale(1, x.shape[1:], bias_term=True))(x)


@kind('vector', draw=lambda r: {'name': r.choice(('softmax', 'log', 'maximum', 'sum'))})
def over_features(at: Layer, x: Any, name: str) -> Any:
    if name == 'softmax':
        return F.softmax(x)
    if name == 'log':
        return F.log_softmax(x)
    if name == 'maximum':
        return x - F.broadcast_to(F.max(x, axis=1, keepdims=True), x.shape)
    return x * F.broadcast_to(F.logsumexp(x, axis=1)[:, None], x.shape) * 0.1
