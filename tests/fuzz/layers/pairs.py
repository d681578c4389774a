"""Layers of two variables."""

from __future__ import annotations

from typing import Any

import chainer.functions as F

from .forms import bring, like
from .layer import Layer, kind

_PAIRS = {
    'add': lambda x, y: x + y,
    'subtract': lambda x, y: x - y,
    'multiply': lambda x, y: x * y,
    'maximum': F.maximum,
    'minimum': F.minimum,
    'where': lambda x, y: F.where(x.array > 0, x, y),
    'difference': F.squared_difference,
    'concat': lambda x, y: F.concat((x, y, x), axis=x.ndim - 1),
    'stack': lambda x, y: F.sum(F.stack((x, y, x)), axis=0),
    'in_place': lambda x, y: _plus_equals(x, y),
    'three': lambda x, y: F.add(x, y, x),
    'gate': lambda x, y: F.sigmoid(x) * y,
}


def _plus_equals(x: Any, y: Any) -> Any:
    x += y
    x *= 0.5
    return x


@kind(inputs=2, draw=lambda r: {'name': r.choice(list(_PAIRS))})
def pair(at: Layer, x: Any, y: Any, name: str) -> Any:
    if x.ndim < 2:
        x = bring(x, 'vector')
    return _PAIRS[name](x, like(x, y))


@kind('vector', inputs=2)
def products(at: Layer, x: Any, y: Any) -> Any:
    return F.matmul(F.matmul(x, like(x, y), transb=True), x) * 0.05
