"""Max pooling in one walk over its input."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from chainer.utils.conv import get_conv_outsize

from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.recompute import kernels
from chainer_hybridmem.recompute.kernels import COMPILED_TYPES
from chainer_hybridmem.recompute.no_fused_replay import NoFusedReplayError

POOLED_CHANNELS = 64  # turned to be innermost at a time


def pool(function: Any, x: Array) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    """Maxima of windows and their indexes.

    Args:
        function: ``MaxPoolingND``.
        x: Its input, (n, c, h, w).

    Returns:
        Output arrays, and an object with the attribute ``indexes``.

    Raises:
        NoFusedReplayError: If there is no loop for such an input.
    """
    host = isinstance(x, np.ndarray) and x.dtype in COMPILED_TYPES
    if not host or function.ndim != 2:
        raise NoFusedReplayError('only two dimensions on the host have one')
    (kh, kw), (sy, sx), (ph, pw) = function.ksize, function.stride, function.pad
    n, channels, height, width = x.shape
    oh = get_conv_outsize(height, kh, sy, ph, function.cover_all)
    ow = get_conv_outsize(width, kw, sx, pw, function.cover_all)
    y = np.empty((n, channels, oh, ow), x.dtype)
    indexes = np.empty(y.shape, np.intp)
    window = (kh, kw, sy, sx, ph, pw)
    rows = x.transpose(0, 2, 3, 1)
    depth = channels if rows.flags.c_contiguous else min(channels, POOLED_CHANNELS)
    best = np.empty((ow, depth), x.dtype)
    at = np.empty(best.shape, np.int32)
    if rows.flags.c_contiguous:
        kernels.max_pooling_rows(rows, *window, best, at, y, indexes)
    else:
        part = np.zeros((height, width, depth), x.dtype)
        kernels.max_pooling_planes(x, *window, part, best, at, y, indexes)
    return (y,), types.SimpleNamespace(indexes=indexes)
