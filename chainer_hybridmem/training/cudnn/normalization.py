"""Batch normalization.

Note: [types]
    Of float16 cuDNN wants scale, shift and statistics as float32: others are converted,
    and what it writes is converted back.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

from chainer_hybridmem.training.cudnn import constants as c
from chainer_hybridmem.training.cudnn.descriptors import (
    ONE,
    ZERO,
    Descriptor,
    check_shapes,
    contiguous,
    get_data_type,
    get_handle,
    images,
    make,
    tensor,
)
from chainer_hybridmem.training.cudnn.functions import FUNCTIONS as f


class _Shapes(NamedTuple):
    """Descriptors, and what cuDNN takes beside arrays."""

    x: Descriptor
    parameters: Descriptor
    forward_bytes: int
    reserved_bytes: int
    backward_bytes: int


def batch_normalization_forward_training(*args: Any, **options: Any) -> Any:
    """As :func:`batch_normalization_forward_training_ex`, without the first result."""
    _, *results = batch_normalization_forward_training_ex(*args, **options)
    return tuple(results) if len(results) > 1 else results[0]


def batch_normalization_forward_training_ex(
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    inv_std: Any,
    eps: float,
    decay: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    debug: bool,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
) -> Any:
    """Normalizes a batch and updates the running statistics.

    Args:
        x: (batch, channels, ...) in float16, float32 or float64.
        gamma: (channels,), as all that follow.
        mean: Is written into, as ``inv_std``; both may be None.
        cudnn_mode: ``CUDNN_BATCHNORM_...``.
        debug: Whether to warn of an overflow, which waits for the GPU.

    Returns:
        What backward needs beside arrays (memory or None), the output, and, if ``mean``
        is None, the mean and the inverse of the standard deviation.

    Raises:
        ValueError: If one of ``mean`` and ``inv_std`` is None, the batch is empty, or
            parameters are not of its channels.
    """
    import cupy

    if (mean is None) != (inv_std is None):
        raise ValueError('mean and inv_std are both given, or none of them')
    _check_batch(x)
    channels = _count_channels(x, is_for_conv2d, d_layout)
    _check_sizes(channels, gamma, beta, running_mean, running_var)
    x = contiguous(x)
    shapes = _find(x, is_for_conv2d, cudnn_mode, d_layout)
    dtype = _parameter_type(x)
    means, variances = _converted(running_mean, dtype), _converted(running_var, dtype)
    y = cupy.ndarray(x.shape, x.dtype)
    saved_mean = cupy.ndarray(gamma.shape, dtype) if mean is None else mean
    saved_std = cupy.ndarray(gamma.shape, dtype) if mean is None else inv_std
    gamma, beta = _converted(gamma, dtype), _converted(beta, dtype)
    workspace, reserved = _alloc(shapes.forward_bytes), _alloc(shapes.reserved_bytes)
    handle, data = get_handle(), shapes.x.value
    f['batchNormalizationForwardTrainingEx'](
        handle, cudnn_mode, c.CUDNN_BATCHNORM_OPS_BN, ONE[x.dtype.char],
        ZERO[x.dtype.char], data, x.data.ptr, 0, 0, data, y.data.ptr,
        shapes.parameters.value, gamma.data.ptr, beta.data.ptr, 1.0 - decay,
        means.data.ptr, variances.data.ptr, eps, saved_mean.data.ptr,
        saved_std.data.ptr, 0, _address(workspace), shapes.forward_bytes,
        _address(reserved), shapes.reserved_bytes,
    )  # fmt: skip
    _warn_of_overflow(handle, cudnn_mode, debug)
    if means is not running_mean:
        running_mean[...] = means
    if variances is not running_var:
        running_var[...] = variances
    if mean is None:
        return reserved, y, saved_mean, saved_std
    return reserved, y


def batch_normalization_forward_inference(
    x: Any,
    gamma: Any,
    beta: Any,
    mean: Any,
    var: Any,
    eps: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
) -> Any:
    """Normalizes by statistics that are given; an array like ``x``."""
    import cupy

    x = contiguous(x)
    y = cupy.ndarray(x.shape, x.dtype)
    if not x.size:
        return y
    _check_sizes(_count_channels(x, is_for_conv2d, d_layout), gamma, beta, mean, var)
    shapes = _find(x, is_for_conv2d, cudnn_mode, d_layout)
    parameters = [
        _converted(array, _parameter_type(x)) for array in (gamma, beta, mean, var)
    ]
    data = shapes.x.value
    f['batchNormalizationForwardInference'](
        get_handle(), cudnn_mode, ONE[x.dtype.char], ZERO[x.dtype.char],
        data, x.data.ptr, data, y.data.ptr, shapes.parameters.value,
        *(array.data.ptr for array in parameters), eps,
    )  # fmt: skip
    return y


def batch_normalization_backward(
    x: Any,
    gamma: Any,
    gy: Any,
    mean: Any,
    inv_std: Any,
    eps: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    debug: bool,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
    *,
    reserve_space: Any = None,
) -> Any:
    """The gradients of ``x``, ``gamma`` and ``beta``.

    Args:
        reserve_space: What forward has returned first.
    """
    import cupy

    _check_batch(x)
    check_shapes(x, gy)
    _check_sizes(_count_channels(x, is_for_conv2d, d_layout), gamma, mean, inv_std)
    x, gy = contiguous(x), contiguous(gy)
    shapes = _find(x, is_for_conv2d, cudnn_mode, d_layout)
    dtype, given = _parameter_type(x), gamma.dtype
    gamma = _converted(gamma, dtype)
    mean, inv_std = _converted(mean, dtype), _converted(inv_std, dtype)
    gx = cupy.ndarray(x.shape, x.dtype)
    ggamma, gbeta = cupy.ndarray(gamma.shape, dtype), cupy.ndarray(gamma.shape, dtype)
    workspace = _alloc(shapes.backward_bytes)
    reserved_bytes = 0 if reserve_space is None else shapes.reserved_bytes
    handle, data, code = get_handle(), shapes.x.value, x.dtype.char
    f['batchNormalizationBackwardEx'](
        handle, cudnn_mode, c.CUDNN_BATCHNORM_OPS_BN, ONE[code], ZERO[code],
        ONE[code], ZERO[code], data, x.data.ptr, 0, 0, data, gy.data.ptr, 0, 0,
        data, gx.data.ptr, shapes.parameters.value, gamma.data.ptr, 0,
        ggamma.data.ptr, gbeta.data.ptr, eps, mean.data.ptr, inv_std.data.ptr, 0,
        _address(workspace), shapes.backward_bytes, _address(reserve_space),
        reserved_bytes,
    )  # fmt: skip
    _warn_of_overflow(handle, cudnn_mode, debug)
    if given != dtype:
        ggamma, gbeta = ggamma.astype(given), gbeta.astype(given)
    return gx, ggamma, gbeta


def _find(x: Any, is_for_conv2d: bool, mode: int, layout: int) -> _Shapes:
    kind = get_data_type(x.dtype)
    device = x.data.device_id
    if is_for_conv2d:
        return _describe(device, kind, x.shape, mode, layout)
    rows = _count_channels(x, is_for_conv2d, layout)
    return _describe(device, kind, (x.size // rows, rows, 1, 1), mode, 0)


def _count_channels(x: Any, is_for_conv2d: bool, layout: int) -> int:
    first = is_for_conv2d and layout == c.CUDNN_TENSOR_NCHW
    return int(x.shape[1 if first else -1])


def _check_sizes(channels: int, *parameters: Any) -> None:
    if any(array.size != channels for array in parameters):
        sizes = ', '.join(str(array.size) for array in parameters)
        raise ValueError(
            f'a batch normalization of {channels} channels is given parameters of '
            f'{sizes} numbers'
        )


@functools.lru_cache(4096)
def _describe(
    device: int, kind: int, shape: tuple[int, ...], mode: int, layout: int
) -> _Shapes:
    del device  # sizes are those of the current one
    x = images(kind, shape, layout) if len(shape) == 4 else tensor(kind, shape)
    parameters = make('Tensor')
    f['deriveBNTensorDescriptor'](parameters.value, x.value, mode)
    beginning = (get_handle(), mode, c.CUDNN_BATCHNORM_OPS_BN)
    data = x.value
    return _Shapes(
        x,
        parameters,
        f['getBatchNormalizationForwardTrainingExWorkspaceSize'](
            *beginning, data, 0, data, parameters.value, 0
        ),
        f['getBatchNormalizationTrainingExReserveSpaceSize'](*beginning, 0, data),
        f['getBatchNormalizationBackwardExWorkspaceSize'](
            *beginning, data, 0, data, 0, data, parameters.value, 0
        ),
    )


def _parameter_type(x: Any) -> str:
    return 'd' if x.dtype.char == 'd' else 'f'


def _converted(array: Any, dtype: str) -> Any:
    return contiguous(array if array.dtype.char == dtype else array.astype(dtype))


def _alloc(nbytes: int) -> Any:
    import cupy

    return cupy.cuda.alloc(nbytes) if nbytes else None


def _address(memory: Any) -> int:
    return 0 if memory is None else memory.ptr


def _check_batch(x: Any) -> None:
    if not x.size:
        raise ValueError(f'a batch of shape {x.shape} is empty: it has no statistics')


def _warn_of_overflow(handle: int, mode: int, debug: bool) -> None:
    if not debug or mode != c.CUDNN_BATCHNORM_SPATIAL_PERSISTENT:
        return
    status = f['queryRuntimeError'](handle, c.CUDNN_ERRQUERY_BLOCKING, 0)
    if status != c.CUDNN_STATUS_SUCCESS:
        warnings.warn(
            f'numbers may have overflowed in a batch normalization of cuDNN ({status})',
            stacklevel=3,
        )
