"""Convolutions with one copy of their windows instead of two, bit for bit.

Chainer lays out all windows of the input and then copies them into the order that the
matrix product wants. Here they are laid out in that order at once, a sample at a time:
the product is the same call with the same operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer.utils import conv

from chainer_hybridmem.devices.protocol import Array


def columns(function: Any, x: Array, kh: int, kw: int) -> Array:
    """Windows as of ``im2col``, in memory as a matrix of one row per window."""
    result: Any = None
    for sample in range(len(x)):
        part = slice(sample, sample + 1)
        windows = conv.im2col(
            x[part],
            kh,
            kw,
            function.sy,
            function.sx,
            function.ph,
            function.pw,
            cover_all=function.cover_all,
            dy=function.dy,
            dx=function.dx,
        )
        if result is None:
            xp: Any = chainer.backend.get_array_module(x)
            _, c, kh, kw, oh, ow = windows.shape
            rows = xp.empty((len(x), oh, ow, c, kh, kw), windows.dtype)
            result = rows.transpose(0, 3, 4, 5, 1, 2)
        result[part] = windows
        del windows
    return result


def convolution(
    function: Any, inputs: tuple[Array, ...], mark: Callable[[], None]
) -> tuple[Array]:
    """``Convolution2DFunction.forward`` without groups.

    Args:
        function: The function.
        inputs: Its arrays.
        mark: Called where windows are laid out and the product begins.
    """
    function.retain_inputs((0, 1))
    x, w = inputs[:2]
    xp: Any = chainer.backend.get_array_module(x)
    windows = columns(function, x, w.shape[2], w.shape[3])
    mark()
    y = xp.tensordot(windows, w, ((1, 2, 3), (1, 2, 3))).astype(x.dtype, copy=False)
    if len(inputs) == 3:
        y += inputs[2]
    return (xp.rollaxis(y, 3, 1),)


def weight_gradient(
    function: Any, inputs: tuple[Array, ...], mark: Callable[[], None]
) -> tuple[Array]:
    """``Convolution2DGradW.forward`` without groups; ``mark`` as above."""
    function.retain_inputs((0, 1))
    x, gy = inputs
    xp: Any = chainer.backend.get_array_module(x)
    windows = columns(function, x, function.kh, function.kw)
    mark()
    if not (gy.flags.c_contiguous or gy.flags.f_contiguous) and 1 in gy.shape:
        gy = xp.ascontiguousarray(gy)
    gw = xp.tensordot(gy, windows, ((0, 2, 3), (0, 4, 5)))
    return (gw.astype(function.W_dtype, copy=False),)
