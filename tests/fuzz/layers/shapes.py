"""Views, slices and other shapes; empty arrays and scalars."""

from __future__ import annotations

from typing import Any

import chainer.functions as F
import numpy as np

from .layer import Layer, kind

_SHAPES = {
    'transposed': lambda x: F.transpose(x, (0, 2, 3, 1)),
    'swapped': lambda x: F.swapaxes(x, 2, 3),
    'rolled': lambda x: F.rollaxis(x, 3, 1),
    'cropped': lambda x: x[:, :, 1:, :-1] if min(x.shape[2:]) > 2 else x[:, ::-1],
    'strided': lambda x: x[:, :, ::2, ::-1],
    'flipped': lambda x: F.flip(x, 2),
    'padded': lambda x: F.pad(x, ((0, 0), (0, 0), (1, 0), (0, 1)), 'constant'),
    'picked': lambda x: x[:, np.arange(x.shape[1])[::-1]],
    'space': lambda x: x if any(s % 2 for s in x.shape[2:]) else F.space2depth(x, 2),
    'mean': lambda x: F.mean(x, axis=(2, 3)),
    'moved': lambda x: F.moveaxis(x, 1, 3),
    'repeated': lambda x: F.repeat(x, 2, axis=1),
    'as_strided': lambda x: F.flatten(x).reshape(x.shape[0], -1, 1, 1),
    'columns': lambda x: F.squeeze(F.expand_dims(F.tanh(x).T, 0), 0).T,
    'none': lambda x: F.concat((x[:, :0], x, x[:, :0])),
}  # fmt: skip


@kind('picture', draw=lambda r: {'name': r.choice(list(_SHAPES))})
def shape(at: Layer, x: Any, name: str) -> Any:
    return _SHAPES[name](x)


@kind('vector', draw=lambda r: {'parts': r.randint(2, 4), 'lost': r.randint(0, 3)})
def split(at: Layer, x: Any, parts: int, lost: int) -> Any:
    """Several outputs, one of which is never read."""
    width = max(x.shape[1] // parts, 1)
    ends = [width * i for i in range(1, parts) if width * i < x.shape[1]]
    if not ends:
        return F.sigmoid(x)
    pieces = list(F.split_axis(x, ends, axis=1))
    del pieces[lost % len(pieces)]
    return F.concat([F.tanh(piece) for piece in pieces], axis=1)


@kind('vector')
def separated(at: Layer, x: Any) -> Any:
    columns = F.separate(x[:, :3], axis=1)
    return F.concat((F.stack([F.sin(c) for c in columns], axis=1), x), axis=1)


@kind('vector')
def cumulated(at: Layer, x: Any) -> Any:
    return F.cumsum(x, axis=1) * 0.1


@kind('any')
def nothing_at_all(at: Layer, x: Any) -> Any:
    """Arrays without elements."""
    empty = F.reshape(x, (x.shape[0], -1))[:, :0] if x.size else x
    return x * 1.25 + F.broadcast_to(F.sum(F.tanh(empty)), x.shape)


@kind('any')
def scalar(at: Layer, x: Any) -> Any:
    """Arrays without axes."""
    one = F.tanh(F.sum(x)) * 0.1
    return x * F.broadcast_to(one, x.shape)


@kind(draw=lambda r: {'dtype': r.choice(('float16', 'float32', 'float64'))})
def cast(at: Layer, x: Any, dtype: str) -> Any:
    return F.cast(F.tanh(F.cast(x, dtype)), x.dtype)


@kind('vector')
def einsum(at: Layer, x: Any) -> Any:
    gram = F.einsum('ij,ik->jk', x[:, :6], x[:, :6])
    return F.concat((F.matmul(x[:, :6], gram) * 0.1, x), axis=1)
