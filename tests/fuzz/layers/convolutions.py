"""Convolutions and what is like them."""

from __future__ import annotations

import random
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from .forms import fits_window
from .layer import Layer, Options, kind


def _convolved(rng: random.Random) -> Options:
    return {
        'out': 2 * rng.randint(1, 4),
        'ksize': rng.choice((1, 2, 3)),
        'stride': rng.choice((1, 1, 1, 2)),
        'pad': rng.choice((0, 1, 1)),
        'dilate': rng.choice((1, 1, 1, 2)),
        'groups': rng.choice((1, 1, 1, 2)),
        'nobias': rng.random() < 0.3,
    }


@kind('picture', draw=_convolved, links=lambda **o: {'even': L.Convolution2D(
    None, o['out'], o['ksize'], o['stride'], o['pad'], nobias=o['nobias'],
    dilate=o['dilate'], groups=o['groups'])})  # fmt: skip
def convolution(at: Layer, x: Any, **o: Any) -> Any:
    if x.shape[1] % o['groups']:
        x = F.concat((x, x[:, :1]))
    reach = (o['ksize'] - 1) * o['dilate'] + 1
    return at.even(x) if min(x.shape[2:]) + 2 * o['pad'] >= reach else F.tanh(x)


@kind('picture', twice=False, draw=lambda r: {'multiplier': r.randint(1, 2)})
def depthwise(at: Layer, x: Any, multiplier: int) -> Any:
    return at.make_once(lambda: L.DepthwiseConvolution2D(
        x.shape[1], multiplier, 3, pad=1))(x)  # fmt: skip


@kind('picture', draw=lambda r: {'out': r.randint(1, 5), 'stride': r.choice((1, 2))},
      links=lambda out, stride: {'up': L.Deconvolution2D(None, out, 2, stride)},
      twice=False)  # fmt: skip
def deconvolution(at: Layer, x: Any, out: int, stride: int) -> Any:
    if not x.requires_grad:  # Chainer's backward fails for the weights alone
        x = chainer.Variable(x.array)
    return at.up(x)


@kind('picture', links=lambda: {'same': L.Convolution2D(None, 4, 3, pad=1)})
def shared_convolution(at: Layer, x: Any) -> Any:
    """One link twice: its gradients add up."""
    if x.shape[1] != 4:
        x = F.concat((x,) * (-(-4 // x.shape[1])))[:, :4]
    return at.same(F.relu(at.same(x)))


@kind('picture', draw=lambda r: {'ksize': r.choice((2, 3))})
def windows(at: Layer, x: Any, ksize: int) -> Any:
    if not fits_window(x, ksize):
        return F.sigmoid(x)
    return F.im2col(x, ksize, stride=2)
