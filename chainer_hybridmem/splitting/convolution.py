"""Convolutions with one copy of their windows instead of two, bit for bit.

Chainer lays out all windows of the input and then copies them into the order that the
matrix product wants. Here they are laid out in that order at once, a sample at a time:
the product is the same call with the same operands. Two dimensions or any number of
them differ in who lays out the windows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
from chainer.functions.connection import convolution_nd
from chainer.utils import conv, conv_nd

from chainer_hybridmem.devices.protocol import Array

_ND = convolution_nd.ConvolutionND, convolution_nd.ConvolutionNDGradW


def _lay_out(function: Any, x: Array, ksize: tuple[int, ...]) -> Array:
    """Chainer's layout of windows: (sample, channel, place in window, window)."""
    if isinstance(function, _ND):
        return conv_nd.im2col_nd(
            x,
            ksize,
            function.stride,
            function.pad,
            cover_all=function.cover_all,
            dilate=function.dilate,
        )
    return conv.im2col(
        x,
        *ksize,
        function.sy,
        function.sx,
        function.ph,
        function.pw,
        cover_all=function.cover_all,
        dy=function.dy,
        dx=function.dx,
    )


def columns(function: Any, x: Array, ksize: tuple[int, ...]) -> Array:
    """Windows as Chainer lays them out, in memory as a matrix of one row per window."""
    result: Any = None
    n = len(ksize)
    for sample in range(len(x)):
        part = slice(sample, sample + 1)
        windows = _lay_out(function, x[part], ksize)
        if result is None:
            xp: Any = chainer.backend.get_array_module(x)
            outer, inner = windows.shape[n + 2 :], windows.shape[1 : n + 2]
            rows = xp.empty((len(x), *outer, *inner), windows.dtype)
            result = rows.transpose(0, *range(n + 1, 2 * n + 2), *range(1, n + 1))
        result[part] = windows
        del windows
    return result


def convolution(
    function: Any, inputs: tuple[Array, ...], mark: Callable[[], None]
) -> tuple[Array]:
    """``forward`` of a convolution without groups.

    Args:
        function: The function.
        inputs: Its arrays.
        mark: Called where windows are laid out and the product begins.
    """
    function.retain_inputs((0, 1))
    x, w = inputs[:2]
    xp: Any = chainer.backend.get_array_module(x)
    ksize = w.shape[2:]
    windows = columns(function, x, ksize)
    mark()
    axes = tuple(range(1, len(ksize) + 2))
    y = xp.tensordot(windows, w, (axes, axes)).astype(x.dtype, copy=False)
    if len(inputs) == 3:
        y += inputs[2]
    return (xp.rollaxis(y, len(ksize) + 1, 1),)


def weight_gradient(
    function: Any, inputs: tuple[Array, ...], mark: Callable[[], None]
) -> tuple[Array]:
    """``forward`` of the gradient of its weights; ``mark`` as above."""
    function.retain_inputs((0, 1))
    x, gy = inputs
    xp: Any = chainer.backend.get_array_module(x)
    is_nd = isinstance(function, _ND)
    ksize = tuple(function.ksize) if is_nd else (function.kh, function.kw)
    n = len(ksize)
    windows = columns(function, x, ksize)
    mark()
    if not (gy.flags.c_contiguous or gy.flags.f_contiguous) and 1 in gy.shape:
        gy = xp.ascontiguousarray(gy)
    axes = (0, *range(2, n + 2)), (0, *range(n + 2, 2 * n + 2))
    gw = xp.tensordot(gy, windows, axes)
    return (gw.astype(function.W_dtype, copy=False),)
