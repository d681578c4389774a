"""Pooling, unpooling and resizing."""

from __future__ import annotations

from typing import Any

import chainer.functions as F
import numpy as np

from .forms import fits_window
from .layer import Layer, kind


@kind('picture', draw=lambda r: {'ksize': r.choice((2, 3)), 'stride': r.choice((1, 2)),
                                 'pad': r.choice((0, 1)),
                                 'cover_all': r.random() < 0.5})  # fmt: skip
def max_pooling(at: Layer, x: Any, **o: Any) -> Any:
    return F.max_pooling_2d(x, **o) if fits_window(x, 3) else x * 1.5


@kind('picture', draw=lambda r: {'pad': r.choice((0, 1))})
def average_pooling(at: Layer, x: Any, pad: int) -> Any:
    return F.average_pooling_2d(x, 2, 2, pad) if fits_window(x, 2) else F.tanh(x)


@kind('picture', twice=False)
def pooled_and_back(at: Layer, x: Any) -> Any:
    """Pooling with its indexes returned, and the way back through them."""
    if not fits_window(x, 2):
        return F.tanh(x)
    y, indexes = F.max_pooling_2d(x, 2, cover_all=False, return_indices=True)
    return F.upsampling_2d(F.tanh(y), indexes, 2, outsize=x.shape[2:], cover_all=False)


@kind('picture')
def unpooling(at: Layer, x: Any) -> Any:
    return F.unpooling_2d(x, 2, cover_all=False) if max(x.shape[2:]) < 5 else F.elu(x)


@kind('picture', twice=False)
def pyramid(at: Layer, x: Any) -> Any:
    return F.spatial_pyramid_pooling_2d(x, 2, 'max') if fits_window(x, 3) else F.relu(x)


@kind('picture')
def resized(at: Layer, x: Any) -> Any:
    return F.resize_images(x, (4, 5)) if x.dtype == np.float32 else F.tanh(x)
