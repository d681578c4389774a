"""Activations, softmax and pooling."""

from __future__ import annotations

import math
from typing import Any

from chainer_hybridmem.training.cudnn import constants as c
from chainer_hybridmem.training.cudnn.descriptors import (
    ONE,
    ZERO,
    Descriptor,
    activation,
    check_arrays,
    check_shapes,
    contiguous,
    flattened,
    get_data_type,
    get_handle,
    pooling,
    tensor,
)
from chainer_hybridmem.training.cudnn.functions import FUNCTIONS as f


def activation_forward(x: Any, mode: int, coef: float = 0.0) -> Any:
    """An array like ``x`` with an activation of each element.

    Args:
        mode: ``CUDNN_ACTIVATION_...``.
        coef: Where a clipped ReLU ends.
    """
    x = contiguous(x)
    y = _like(x)
    if x.size:
        code, flat = x.dtype.char, flattened(x).value
        f['activationForward'](
            get_handle(), activation(mode, coef).value,
            ONE[code], flat, x.data.ptr, ZERO[code], flat, y.data.ptr,
        )  # fmt: skip
    return y


def activation_backward(x: Any, y: Any, gy: Any, mode: int, coef: float = 0.0) -> Any:
    """The gradient of an activation's input, an array like ``x``."""
    check_shapes(x, y, gy)
    x, y, gy = contiguous(x), contiguous(y), contiguous(gy)
    gx = _like(x)
    if x.size:
        code, flat = x.dtype.char, flattened(x).value
        f['activationBackward'](
            get_handle(), activation(mode, coef).value,
            ONE[code], flat, y.data.ptr, flat, gy.data.ptr, flat, x.data.ptr,
            ZERO[code], flat, gx.data.ptr,
        )  # fmt: skip
    return gx


def softmax_forward(x: Any, axis: int, algorithm: int) -> Any:
    """An array like ``x`` with the softmax along an axis.

    Args:
        algorithm: ``CUDNN_SOFTMAX_...``; one of them gives its logarithm.
    """
    x = contiguous(x)
    y = _like(x)
    if x.size:
        code, rows = x.dtype.char, _rows(x, axis).value
        f['softmaxForward'](
            get_handle(), algorithm, c.CUDNN_SOFTMAX_MODE_CHANNEL,
            ONE[code], rows, x.data.ptr, ZERO[code], rows, y.data.ptr,
        )  # fmt: skip
    return y


def softmax_backward(y: Any, gy: Any, axis: int, algorithm: int) -> Any:
    """The gradient of a softmax's input, an array like ``y``."""
    check_shapes(y, gy)
    y, gy = contiguous(y), contiguous(gy)
    gx = _like(y)
    if y.size:
        code, rows = y.dtype.char, _rows(y, axis).value
        f['softmaxBackward'](
            get_handle(), algorithm, c.CUDNN_SOFTMAX_MODE_CHANNEL,
            ONE[code], rows, y.data.ptr, rows, gy.data.ptr,
            ZERO[code], rows, gx.data.ptr,
        )  # fmt: skip
    return gx


def pooling_forward(
    x: Any,
    y: Any,
    ksize: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    mode: int,
) -> Any:
    """Writes the pooled ``x`` into ``y``, and returns it.

    Args:
        mode: ``CUDNN_POOLING_...``.

    Raises:
        ValueError: If ``y`` is not in C order.
    """
    if not y.flags.c_contiguous:
        raise ValueError('pooling_forward writes into arrays in C order only')
    check_arrays(y, x)
    if y.size:
        x = contiguous(x)
        code, kind = x.dtype.char, get_data_type(x.dtype)
        f['poolingForward'](
            get_handle(), pooling(mode, ksize, stride, pad).value,
            ONE[code], tensor(kind, x.shape).value, x.data.ptr,
            ZERO[code], tensor(kind, y.shape).value, y.data.ptr,
        )  # fmt: skip
    return y


def pooling_backward(
    x: Any,
    y: Any,
    gy: Any,
    ksize: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    mode: int,
) -> Any:
    """The gradient of a pooling's input, an array like ``x``."""
    check_shapes(y, gy)
    check_arrays(y, x)
    x, y, gy = contiguous(x), contiguous(y), contiguous(gy)
    gx = _like(x)
    if y.size:
        code, kind = x.dtype.char, get_data_type(x.dtype)
        outputs, inputs = tensor(kind, y.shape).value, tensor(kind, x.shape).value
        f['poolingBackward'](
            get_handle(), pooling(mode, ksize, stride, pad).value,
            ONE[code], outputs, y.data.ptr, outputs, gy.data.ptr, inputs, x.data.ptr,
            ZERO[code], inputs, gx.data.ptr,
        )  # fmt: skip
    else:
        gx.fill(0)
    return gx


def _like(array: Any) -> Any:
    import cupy

    return cupy.ndarray(array.shape, array.dtype)


def _rows(array: Any, axis: int) -> Descriptor:
    """With the axis in the place of channels."""
    shape = array.shape
    axis %= len(shape)
    sizes = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    return tensor(get_data_type(array.dtype), (*sizes, 1))
