"""Handles and descriptors.

Note: [descriptors are kept]
    A descriptor says what an array or an operation is like, and is only read once it is
    set. Those of arrays, convolutions and so on are kept by what they say: a function
    that comes again makes none.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from chainer_hybridmem.training.cudnn import constants as c
from chainer_hybridmem.training.cudnn.functions import FUNCTIONS as f

_KEPT = 4096
_LARGEST = 2**31 - 1
_TYPES = {'f': c.CUDNN_DATA_FLOAT, 'd': c.CUDNN_DATA_DOUBLE, 'e': c.CUDNN_DATA_HALF}
_ONES = {'f': ctypes.c_float(1), 'd': ctypes.c_double(1)}
_ZEROS = {'f': ctypes.c_float(0), 'd': ctypes.c_double(0)}
# By type of the arrays: addresses of factors, whose type is float for float16.
ONE = {code: ctypes.addressof(_ONES[code.replace('e', 'f')]) for code in _TYPES}
ZERO = {code: ctypes.addressof(_ZEROS[code.replace('e', 'f')]) for code in _TYPES}


class Descriptor:
    """Something of cuDNN's, destroyed with this; not by a forked child.

    Args:
        descriptor (int): Its address.
        destroyer: Destroys it.
    """

    __slots__ = ('__weakref__', '_process', 'destroy', 'value')

    def __init__(
        self, descriptor: int, destroyer: Callable[[int], None] | None
    ) -> None:
        self.value = descriptor
        self.destroy = destroyer
        self._process = os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        value, self.value = self.value, 0
        if not value or self.destroy is None or is_finalizing():
            return
        # A fork drops what is of other threads, and CUDA has no place in the child.
        if self._process == os.getpid():
            self.destroy(value)


class _Handles(threading.local):
    """Keeps a handle for each GPU, of one thread: two must not use one at a time."""

    def __init__(self) -> None:
        self.of_device: dict[int, Descriptor] = {}


_handles = _Handles()


def get_handle() -> int:
    """The handle of this thread on the current GPU."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    handle = _handles.of_device.get(device)
    if handle is None:
        handle = _handles.of_device[device] = Descriptor(f['create'](), f['destroy'])
    return handle.value


def reset_handles() -> None:
    """Destroys the handles of this thread."""
    _handles.of_device.clear()


def get_data_type(dtype: Any) -> int:
    """cuDNN's number for a type.

    Raises:
        TypeError: If it is not float16, float32 or float64.
    """
    try:
        return _TYPES[dtype.char]
    except KeyError:
        raise TypeError(f'Dtype {dtype} is not supported in cuDNN') from None


def contiguous(array: Any) -> Any:
    """The array in C order; of one without dimensions, itself."""
    if array.flags.c_contiguous:
        return array
    import cupy

    return cupy.ascontiguousarray(array)


def check_arrays(first: Any, *others: Any) -> None:
    """Refuses arrays that a function of cuDNN would read as what they are not.

    Raises:
        ValueError: If their types differ, or they do not lie on one GPU.
    """
    place = first.dtype, getattr(first.data, 'device_id', None)
    for array in others:
        other = array.dtype, getattr(array.data, 'device_id', None)
        if other != place or other[1] is None:
            raise ValueError(
                f'cuDNN takes arrays of one type on one GPU, not {first.dtype} '
                f'{first.shape} on {place[1]} and {array.dtype} {array.shape} on '
                f'{other[1]}'
            )


def check_shapes(first: Any, *others: Any) -> None:
    """Refuses arrays that are not alike.

    Raises:
        ValueError: If types, GPUs or shapes differ.
    """
    check_arrays(first, *others)
    shape = first.shape
    for array in others:
        if array.shape != shape:
            shapes = ', '.join(str(each.shape) for each in (first, *others))
            raise ValueError(f'cuDNN takes arrays of one shape here, not {shapes}')


def check_axes(**given: Sequence[int]) -> None:
    """Refuses padding, strides and so on of different numbers of axes.

    Raises:
        ValueError: With all of them.
    """
    if len({len(values) for values in given.values()}) > 1:
        told = ', '.join(f'{name} {tuple(values)}' for name, values in given.items())
        raise ValueError(f'these are for different numbers of axes: {told}')


def make(name: str) -> Descriptor:
    """A new descriptor that says nothing yet."""
    create, destroy = f[f'create{name}Descriptor'], f[f'destroy{name}Descriptor']
    return Descriptor(create(), destroy)


def ints(values: Sequence[int]) -> Any:
    """An array of C ints.

    Raises:
        OverflowError: If one is too large, which ctypes would cut.
    """
    if max(values, default=0) > _LARGEST:
        raise OverflowError(
            f'cuDNN takes sizes and strides up to {_LARGEST:,}, and here are '
            f'{tuple(values)}: use smaller batches'
        )
    return (ctypes.c_int * len(values))(*values)


@functools.lru_cache(_KEPT)
def tensor(kind: int, shape: tuple[int, ...]) -> Descriptor:
    """Describes an array in C order; cuDNN takes no fewer than three dimensions."""
    shape += (1,) * (3 - len(shape))
    return _new_tensor(
        kind, shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    )


def flattened(array: Any) -> Descriptor:
    """Describes elements of which only the batch matters, not the place in it."""
    batch = array.shape[0] if array.ndim else 1
    return tensor(get_data_type(array.dtype), (batch, array.size // batch, 1, 1))


@functools.lru_cache(_KEPT)
def images(kind: int, shape: tuple[int, ...], layout: int) -> Descriptor:
    """Describes a batch of images or volumes; NHWC is the order in memory."""
    if len(shape) != 4 or layout == c.CUDNN_TENSOR_NCHW:
        return tensor(kind, shape)
    _, height, width, channels = shape
    strides = (height * width * channels, 1, width * channels, channels)
    return _new_tensor(kind, _channels_first(shape), strides)


def _new_tensor(kind: int, shape: Sequence[int], strides: Sequence[int]) -> Descriptor:
    result = make('Tensor')
    f['setTensorNdDescriptor'](
        result.value, kind, len(shape), ints(shape), ints(strides)
    )
    return result


@functools.lru_cache(_KEPT)
def filters(kind: int, shape: tuple[int, ...], layout: int) -> Descriptor:
    """Describes the weights of a convolution."""
    result = make('Filter')
    if len(shape) == 4 and layout == c.CUDNN_TENSOR_NHWC:
        shape = _channels_first(shape)
    f['setFilterNdDescriptor'](result.value, kind, layout, len(shape), ints(shape))
    return result


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Puts the shape of something NHWC into the order NCHW."""
    return (shape[0], shape[3], shape[1], shape[2])


@functools.lru_cache(_KEPT)
def pooling(
    mode: int, ksize: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...]
) -> Descriptor:
    """Describes a pooling."""
    check_axes(ksize=ksize, stride=stride, pad=pad)
    result = make('Pooling')
    f['setPoolingNdDescriptor'](
        result.value, mode, c.CUDNN_NOT_PROPAGATE_NAN, len(ksize), ints(ksize),
        ints(pad), ints(stride),
    )  # fmt: skip
    return result


@functools.lru_cache(_KEPT)
def activation(mode: int, coefficient: float) -> Descriptor:
    """Describes an activation."""
    result = make('Activation')
    f['setActivationDescriptor'](
        result.value, mode, c.CUDNN_NOT_PROPAGATE_NAN, coefficient
    )
    return result


# -- by CuPy's names -----------------------------------------------------------------
def create_tensor_descriptor(arr: Any, format: int = c.CUDNN_TENSOR_NCHW) -> Descriptor:
    """Describes an array in C order."""
    _check_array(arr)
    return images(get_data_type(arr.dtype), arr.shape, format)


def create_tensor_nd_descriptor(arr: Any) -> Descriptor:
    """Describes an array in C order; an empty one by NULL."""
    if arr.size == 0:
        return Descriptor(0, None)
    _check_array(arr)
    return tensor(get_data_type(arr.dtype), arr.shape)


def create_uninitialized_tensor_descriptor() -> Descriptor:
    """One that says nothing yet."""
    return make('Tensor')


def create_filter_descriptor(arr: Any, format: int = c.CUDNN_TENSOR_NCHW) -> Descriptor:
    """Describes the weights of a convolution."""
    _check_array(arr)
    return filters(get_data_type(arr.dtype), arr.shape, format)


def create_pooling_descriptor(
    ksize: Sequence[int], stride: Sequence[int], pad: Sequence[int], mode: int
) -> Descriptor:
    """Describes a pooling."""
    return pooling(mode, tuple(ksize), tuple(stride), tuple(pad))


def create_activation_descriptor(
    mode: int, nan_prop_mode: int = c.CUDNN_PROPAGATE_NAN, coef: float = 0.0
) -> Descriptor:
    """Describes an activation."""
    result = make('Activation')
    f['setActivationDescriptor'](result.value, mode, nan_prop_mode, coef)
    return result


def create_spatial_transformer_descriptor(
    sampler_type: int, dtype: Any, nb_dims: int, dim_A: int
) -> Descriptor:
    """Describes a spatial transformer; ``dim_A`` is the address of its dimensions."""
    result = make('SpatialTransformer')
    f['setSpatialTransformerNdDescriptor'](
        result.value, sampler_type, get_data_type(dtype), nb_dims, dim_A
    )
    return result


def _check_array(array: Any) -> None:
    if not array.size:
        raise ValueError(f'cuDNN takes no array without elements: {array.shape}')
    if not array.flags.c_contiguous:
        raise ValueError('cuDNN is given arrays in C order only: use ascontiguousarray')
