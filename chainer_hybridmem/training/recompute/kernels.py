"""Compiled loops over host memory: one walk, one output, the bits of NumPy.

Every loop does per element what Chainer's NumPy code does with one temporary
array after the other, in the same order and with the same roundings: no
fused multiply-add, no reassociation.

========  ================================  =====
symbol    meaning                           shape
========  ================================  =====
x, r      inputs                            (o, c, i)
m, s      mean, inverse standard deviation  (c,)
g, b      gamma, beta                       (c,)
floor     0 for ReLU, -inf for none         ()
y         output                            (o, c, i)
========  ================================  =====

o, c and i are the axes outside, of and inside the channels in memory order;
convolutions on the host leave the channels innermost, then i is left out.

Note: [signed zeros and NaN]
    ``numpy.maximum`` gives its second argument if both are zero, and NaN if
    either is. ReLU's second argument is +0; the running maximum of a pooling
    window is the first. ``numpy.argmax`` gives the first of equals and the
    first NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled


class NoFusedReplayError(Exception):
    """These functions have no fused replay for these arrays."""


COMPILED_TYPES = (np.dtype(np.float32), np.dtype(np.float64))


@compiled()
def normalise_rows(
    x: Any, m: Any, s: Any, g: Any, b: Any, floor: Any, y: Any
) -> None:  # fmt: skip
    """``max((x - m) * s * g + b, floor)``, channels innermost."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            v = (x[o, c] - m[c]) * s[c] * g[c] + b[c]
            y[o, c] = floor if v <= floor else v


@compiled()
def normalise_planes(
    x: Any, m: Any, s: Any, g: Any, b: Any, floor: Any, y: Any
) -> None:  # fmt: skip
    """``max((x - m) * s * g + b, floor)``, channels in the middle."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            mean, scale, gamma, beta = m[c], s[c], g[c], b[c]
            for i in range(x.shape[2]):
                v = (x[o, c, i] - mean) * scale * gamma + beta
                y[o, c, i] = floor if v <= floor else v


@compiled()
def normalise_add_rows(
    x: Any, m: Any, s: Any, g: Any, b: Any, r: Any, floor: Any, y: Any
) -> None:  # fmt: skip
    """``max((x - m) * s * g + b + r, floor)``, channels innermost."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            v = ((x[o, c] - m[c]) * s[c] * g[c] + b[c]) + r[o, c]
            y[o, c] = floor if v <= floor else v


@compiled()
def normalise_add_planes(
    x: Any, m: Any, s: Any, g: Any, b: Any, r: Any, floor: Any, y: Any
) -> None:  # fmt: skip
    """``max((x - m) * s * g + b + r, floor)``, channels in the middle."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            mean, scale, gamma, beta = m[c], s[c], g[c], b[c]
            for i in range(x.shape[2]):
                v = ((x[o, c, i] - mean) * scale * gamma + beta) + r[o, c, i]
                y[o, c, i] = floor if v <= floor else v


@compiled()
def normalise_both_rows(
    x: Any, m: Any, s: Any, g: Any, b: Any,
    x2: Any, m2: Any, s2: Any, g2: Any, b2: Any, floor: Any, y: Any,
) -> None:  # fmt: skip
    """The floored sum of two normalised arrays, channels innermost."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            left = (x[o, c] - m[c]) * s[c] * g[c] + b[c]
            right = (x2[o, c] - m2[c]) * s2[c] * g2[c] + b2[c]
            v = left + right
            y[o, c] = floor if v <= floor else v


@compiled()
def normalise_both_planes(
    x: Any, m: Any, s: Any, g: Any, b: Any,
    x2: Any, m2: Any, s2: Any, g2: Any, b2: Any, floor: Any, y: Any,
) -> None:  # fmt: skip
    """The floored sum of two normalised arrays, channels in the middle."""
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            for i in range(x.shape[2]):
                left = (x[o, c, i] - m[c]) * s[c] * g[c] + b[c]
                right = (x2[o, c, i] - m2[c]) * s2[c] * g2[c] + b2[c]
                v = left + right
                y[o, c, i] = floor if v <= floor else v


@compiled()
def max_pooling_rows(
    x: Any, kh: int, kw: int, sy: int, sx: int, ph: int, pw: int,
    best: Any, at: Any, y: Any, indexes: Any,
) -> None:  # fmt: skip
    """Maximum and its place in the window, channels innermost.

    See [signed zeros and NaN].

    Args:
        x: (n, h, w, c).
        kh, kw: Window.
        sy, sx: Stride.
        ph, pw: Padding.
        best, at: (ow, c), work space for values and int32 places.
        y, indexes: (n, c, oh, ow), results.
    """
    height, width, channels = x.shape[1], x.shape[2], x.shape[3]
    for n in range(x.shape[0]):
        for oy in range(y.shape[2]):
            y0 = oy * sy - ph
            for ox in range(y.shape[3]):
                x0 = ox * sx - pw
                for c in range(channels):
                    best[ox, c] = -np.inf
                    at[ox, c] = 0
                for ky in range(max(0, -y0), min(kh, height - y0)):
                    for kx in range(max(0, -x0), min(kw, width - x0)):
                        place = np.int32(ky * kw + kx)
                        for c in range(channels):
                            v, old = x[n, y0 + ky, x0 + kx, c], best[ox, c]
                            nan = old != old
                            at[ox, c] = at[ox, c] if v <= old or nan else place
                            best[ox, c] = old if v < old or nan else v
            for c in range(channels):
                for ox in range(y.shape[3]):
                    y[n, c, oy, ox] = best[ox, c]
                    indexes[n, c, oy, ox] = at[ox, c]


@compiled()
def max_pooling_planes(
    x: Any, kh: int, kw: int, sy: int, sx: int, ph: int, pw: int,
    part: Any, best: Any, at: Any, y: Any, indexes: Any,
) -> None:  # fmt: skip
    """Like :func:`max_pooling_rows` for any other layout.

    Some channels of one picture at a time are turned to be innermost: then the
    loop over them does the same for each, without branches.

    Args:
        x: (n, c, h, w).
        part: (h, w, d), work space for d channels, filled with numbers.
        best, at: (ow, d), work space.
    """
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    depth = part.shape[2]
    for n in range(x.shape[0]):
        for c0 in range(0, channels, depth):
            used = min(depth, channels - c0)
            for iy in range(height):
                for c in range(used):
                    for ix in range(width):
                        part[iy, ix, c] = x[n, c0 + c, iy, ix]
            for oy in range(y.shape[2]):
                y0 = oy * sy - ph
                for ox in range(y.shape[3]):
                    x0 = ox * sx - pw
                    for c in range(depth):
                        best[ox, c] = -np.inf
                        at[ox, c] = 0
                    for ky in range(max(0, -y0), min(kh, height - y0)):
                        for kx in range(max(0, -x0), min(kw, width - x0)):
                            place = np.int32(ky * kw + kx)
                            for c in range(depth):
                                v, old = part[y0 + ky, x0 + kx, c], best[ox, c]
                                nan = old != old
                                at[ox, c] = at[ox, c] if v <= old or nan else place
                                best[ox, c] = old if v < old or nan else v
                for c in range(used):
                    for ox in range(y.shape[3]):
                        y[n, c0 + c, oy, ox] = best[ox, c]
                        indexes[n, c0 + c, oy, ox] = at[ox, c]
