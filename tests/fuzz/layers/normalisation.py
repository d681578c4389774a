"""Normalisation over the batch, features or groups."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from .layer import Layer, kind


def _normalised(at: Layer, x: Any, **options: Any) -> Any:
    return at.make_once(lambda: L.BatchNormalization(x.shape[1], **options))(x)


@kind(draw=lambda r: {'decay': r.choice((0.9, 0.5)), 'scaled': r.random() < 0.8})
def batch_normalization(at: Layer, x: Any, decay: float, scaled: bool) -> Any:
    if x.ndim < 2 or not x.size:
        return x * 1
    return _normalised(at, x, decay=decay, use_gamma=scaled, use_beta=scaled)


@kind('picture')
def normalised_relu(at: Layer, x: Any) -> Any:
    return F.relu(_normalised(at, x))


@kind('picture', draw=lambda r: {'both': r.random() < 0.5}, links=lambda both: {
    'first': L.Convolution2D(None, 4, 3, pad=1), 'one': L.BatchNormalization(4),
    'second': L.Convolution2D(4, 4, 3, pad=1), 'two': L.BatchNormalization(4),
    'third': L.Convolution2D(None, 4, 1), 'side': L.BatchNormalization(4),
})  # fmt: skip
def residual(at: Layer, x: Any, both: bool) -> Any:
    """A block as in ResNet, with a projection beside it."""
    h = at.two(at.second(F.relu(at.one(at.first(x)))))
    beside = at.third(x)
    return F.relu(h + (at.side(beside) if both else beside))


@kind('vector', links=lambda: {'norm': L.LayerNormalization()})
def layer_normalization(at: Layer, x: Any) -> Any:
    return at.norm(x) if x.shape[1] > 1 else F.tanh(x)


@kind('picture', twice=False, draw=lambda r: {'groups': r.choice((1, 2))},
      links=lambda groups: {'norm': L.GroupNormalization(groups)})  # fmt: skip
def group_normalization(at: Layer, x: Any, groups: int) -> Any:
    return at.norm(F.concat((x, x)) if x.shape[1] % groups else x)


@kind('picture', twice=False)
def batch_renormalization(at: Layer, x: Any) -> Any:
    return at.make_once(lambda: L.BatchRenormalization(x.shape[1]))(x)


@kind('picture', twice=False, draw=lambda r: {'n': r.choice((3, 5))})
def local_response(at: Layer, x: Any, n: int) -> Any:
    return F.local_response_normalization(x, n)


@kind('vector')
def normalize(at: Layer, x: Any) -> Any:
    return F.normalize(x + 0.01)


@kind('picture')
def fixed_normalization(at: Layer, x: Any) -> Any:
    """Fine-tuning with the statistics as they are."""
    _normalised(at, F.tanh(x))
    with chainer.using_config('train', False):
        return _normalised(at, x)
