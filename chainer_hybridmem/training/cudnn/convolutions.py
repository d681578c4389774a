"""Convolutions: forward, backward to the data (also a deconvolution), to the filter.

Note: [which algorithm]
    cuDNN names its algorithms for a convolution, the fastest one first: by a heuristic,
    or measured (``auto_tune``), which may differ from run to run: not where the same
    bits are asked for each time. The first one is taken that fits the workspace and, if
    asked for, gives the same bits each time. It is remembered by everything that has
    been asked: a replay runs the algorithm of its forward.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from chainer_hybridmem.training.cudnn import constants as c
from chainer_hybridmem.training.cudnn.arithmetic import choose_math, sum_kind
from chainer_hybridmem.training.cudnn.descriptors import (
    ONE,
    ZERO,
    Descriptor,
    check_arrays,
    check_axes,
    contiguous,
    filters,
    get_data_type,
    get_handle,
    images,
    ints,
    make,
    tensor,
)
from chainer_hybridmem.training.cudnn.functions import FUNCTIONS as f
from chainer_hybridmem.training.cudnn.functions import CuDNNError

_TENSOR_CORES = {'auto', 'always', 'never'}
_MOST_ALGORITHMS = 16
_most_workspace_bytes = 8 << 20


def get_max_workspace_size() -> int:
    """Bytes that one convolution may take for a while."""
    return _most_workspace_bytes


def set_max_workspace_size(size: int) -> None:
    """Sets the bytes that one convolution may take for a while.

    Raises:
        ValueError: If there are fewer than none.
    """
    if size < 0:
        raise ValueError(f'the size of a workspace is {size}; 0 bytes or more')
    global _most_workspace_bytes
    _most_workspace_bytes = size


class _Performance(ctypes.Structure):
    """``cudnnConvolution{Fwd,BwdData,BwdFilter}AlgoPerf_t``, which are alike."""

    _fields_ = (
        ('algorithm', ctypes.c_int),
        ('status', ctypes.c_int),
        ('milliseconds', ctypes.c_float),
        ('workspace_bytes', ctypes.c_size_t),
        ('determinism', ctypes.c_int),
        ('math', ctypes.c_int),
        ('reserved', ctypes.c_int * 3),
    )


class _Asked(NamedTuple):
    """Everything that an algorithm depends on; shapes as in memory.

    Attributes:
        operation: A key of ``_OPERATIONS``.
        kind: cuDNN's number of the arrays' type.
        arrays: Shapes of the two inputs and of the output.
        layouts: Of images and of filters.
    """

    operation: str
    device: int
    kind: int
    arrays: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    pad: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    layouts: tuple[int, int]
    math: int
    workspace_bytes: int
    deterministic: bool


class _Convolution(NamedTuple):
    """Says how a convolution is run."""

    function: Callable[..., None]
    inputs: tuple[Descriptor, Descriptor]
    output: Descriptor
    descriptor: Descriptor
    algorithm: int
    workspace_bytes: int


# Which of the two inputs and the output is the filter.
_OPERATIONS = {'forward': 1, 'backward data': 0, 'backward filter': 2}
_measured: dict[_Asked, tuple[int, int, int]] = {}


def convolution_forward(
    x: Any,
    W: Any,
    b: Any,
    y: Any,
    *parameters: Any,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
    **options: Any,
) -> None:
    """Writes the convolution of ``x`` and ``W``, and a bias, into ``y``.

    Args:
        x: (batch, channels, ...), or (batch, height, width, channels) if ``d_layout``
            is NHWC; of float16, float32 or float64, as all arrays.
        W: (channels of y, channels / groups, ...), or as the layout has it.
        b: (channels of y,) or None.
        parameters: Padding, stride and dilation (or None) for each axis, and groups.
        d_layout: ``CUDNN_TENSOR_...`` of images.
        options: ``auto_tune``, ``tensor_core`` and ``w_layout``, that of filters.

    Raises:
        RuntimeError: If no algorithm fits the workspace, or cuDNN refuses.
    """
    options |= {'d_layout': d_layout, 'deterministic': False}
    _run('forward', x, W, y, *parameters, **options)
    _add_bias(b, y, d_layout)


def convolution_backward_data(
    W: Any,
    x: Any,
    b: Any,
    y: Any,
    *parameters: Any,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
    **options: Any,
) -> None:
    """Writes what a convolution's output ``x`` says of its input into ``y``.

    Arguments, beside the option ``deterministic``, and errors are those of
    :func:`convolution_forward`.
    """
    _run('backward data', W, x, y, *parameters, d_layout=d_layout, **options)
    _add_bias(b, y, d_layout)


def convolution_backward_filter(
    x: Any, gy: Any, gW: Any, *parameters: Any, **options: Any
) -> None:
    """Writes the gradient of a convolution's filter into ``gW``.

    Arguments and errors are those of :func:`convolution_backward_data`.
    """
    _run('backward filter', x, gy, gW, *parameters, **options)


def is_tensor_core_available(dtype: Any) -> bool:
    """Whether the current GPU has tensor cores for a type."""
    import cupy

    return dtype.char == 'e' and int(cupy.cuda.Device().compute_capability) >= 70


def _run(
    operation: str,
    first: Any,
    second: Any,
    output: Any,
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...] | None,
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: str,
    d_layout: int = c.CUDNN_TENSOR_NCHW,
    w_layout: int = c.CUDNN_TENSOR_NCHW,
) -> None:
    import cupy

    if not output.size:
        return
    if not (first.size and second.size):  # a sum of nothing
        output.fill(0)
        return
    check_arrays(output, first, second)
    if not output.flags.c_contiguous:
        raise ValueError('a convolution writes into arrays in C order only')
    if tensor_core not in _TENSOR_CORES:
        raise ValueError(
            f'tensor_core is {tensor_core!r}; it is one of "auto", "always", "never"'
        )
    auto_tune = auto_tune and not deterministic
    first, second = _aligned(first), _aligned(second)
    code, kind = output.dtype.char, get_data_type(output.dtype)
    asked = _Asked(
        operation,
        output.data.device_id,
        kind,
        (first.shape, second.shape, output.shape),
        pad,
        stride,
        (1,) * len(pad) if dilation is None else dilation,
        groups,
        (d_layout, w_layout),
        choose_math(kind, tensor_core != 'never'),
        _most_workspace_bytes,
        deterministic,
    )
    try:
        if auto_tune and asked not in _measured:
            _measure(asked, first, second, output)
        convolution = _prepare(asked, auto_tune)
        workspace = cupy.cuda.alloc(convolution.workspace_bytes)
        arrays = zip(convolution.inputs, (first, second), strict=True)
        inputs = [value for d, array in arrays for value in (d.value, array.data.ptr)]
        convolution.function(
            get_handle(), ONE[code], *inputs, convolution.descriptor.value,
            convolution.algorithm, workspace.ptr, convolution.workspace_bytes,
            ZERO[code], convolution.output.value, output.data.ptr,
        )  # fmt: skip
    except CuDNNError as error:
        error.add_infos([_describe(asked)])
        raise


def _aligned(array: Any) -> Any:
    """Copies an array that is not in C order, or lies where algorithms refuse it."""
    array = contiguous(array)
    return array.copy() if array.data.ptr % 16 else array


def _find_function(operation: str, beginning: str = '', end: str = '') -> Any:
    words = ['convolution', *operation.split()]
    name = ''.join(word.capitalize() for word in words)
    name = f'{beginning}{name}{end}'
    return f[name[0].lower() + name[1:]]


@functools.lru_cache(4096)
def _prepare(asked: _Asked, measured: bool) -> _Convolution:
    algorithm, nbytes, math = _measured[asked] if measured else _ask_heuristic(asked)
    first, second, output = _describe_arrays(asked)
    convolution = _describe_convolution(asked)
    f['setConvolutionMathType'](convolution.value, math)
    # What was told is of an algorithm's own arithmetic.
    needed_bytes = _find_function(asked.operation, 'get', 'WorkspaceSize')(
        get_handle(), first.value, second.value, convolution.value, output.value,
        algorithm,
    )  # fmt: skip
    return _Convolution(
        _find_function(asked.operation),
        (first, second),
        output,
        convolution,
        algorithm,
        max(nbytes, needed_bytes),
    )


def _describe_arrays(asked: _Asked) -> tuple[Descriptor, Descriptor, Descriptor]:
    images_layout, filters_layout = asked.layouts
    first, second, output = (
        filters(asked.kind, shape, filters_layout)
        if position == _OPERATIONS[asked.operation]
        else images(asked.kind, shape, images_layout)
        for position, shape in enumerate(asked.arrays)
    )
    return first, second, output


def _describe_convolution(asked: _Asked) -> Descriptor:
    return _new_descriptor(
        asked.kind, asked.pad, asked.stride, asked.dilation, asked.groups, asked.math
    )


def create_convolution_descriptor(
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: Any,
    mode: int = c.CUDNN_CROSS_CORRELATION,
    dilation: tuple[int, ...] | None = None,
    use_tensor_core: bool = False,
    groups: int = 1,
) -> Descriptor:
    """Describes a convolution."""
    kind = get_data_type(dtype)
    if dilation is None:
        dilation = (1,) * len(pad)
    math = choose_math(kind, use_tensor_core)
    return _new_descriptor(kind, pad, stride, dilation, groups, math, mode)


def _new_descriptor(
    kind: int,
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    math: int,
    mode: int = c.CUDNN_CROSS_CORRELATION,
) -> Descriptor:
    check_axes(pad=pad, stride=stride, dilation=dilation)
    result = make('Convolution')
    f['setConvolutionNdDescriptor'](
        result.value, len(pad), ints(pad), ints(stride), ints(dilation), mode,
        sum_kind(kind),
    )  # fmt: skip
    f['setConvolutionGroupCount'](result.value, groups)
    f['setConvolutionMathType'](result.value, math)
    return result


def _ask_heuristic(asked: _Asked) -> tuple[int, int, int]:
    first, second, output = (d.value for d in _describe_arrays(asked))
    convolution = _describe_convolution(asked)
    found = (_Performance * _MOST_ALGORITHMS)()
    count = _find_function(asked.operation, 'get', 'Algorithm_v7')(
        get_handle(), first, second, convolution.value, output, len(found), found
    )
    return _choose(asked, found[:count])


def _measure(asked: _Asked, first: Any, second: Any, output: Any) -> None:
    import cupy

    descriptors = [d.value for d in _describe_arrays(asked)]
    convolution = _describe_convolution(asked)
    found = (_Performance * _MOST_ALGORITHMS)()
    workspace = cupy.cuda.alloc(asked.workspace_bytes)
    count = _find_function(asked.operation, 'find', 'AlgorithmEx')(
        get_handle(), descriptors[0], first.data.ptr, descriptors[1], second.data.ptr,
        convolution.value, descriptors[2], output.data.ptr, len(found), found,
        workspace.ptr, asked.workspace_bytes,
    )  # fmt: skip
    # Of two threads that measure, both take what the first one has chosen.
    _measured.setdefault(asked, _choose(asked, found[:count]))


def _choose(asked: _Asked, found: list[_Performance]) -> tuple[int, int, int]:
    """Algorithm, bytes of its workspace and arithmetic; see [which algorithm]."""
    working = [
        one
        for one in found
        if one.status == c.CUDNN_STATUS_SUCCESS
        and (one.determinism == c.CUDNN_DETERMINISTIC or not asked.deterministic)
    ]
    exact = asked.math == c.CUDNN_FMA_MATH  # float32 must not become TF32
    if exact:
        working.sort(key=lambda one: one.math != asked.math)
    for one in working:
        if one.workspace_bytes <= asked.workspace_bytes:
            math = asked.math if exact else one.math
            return one.algorithm, one.workspace_bytes, math
    if not working:
        kind = 'deterministic algorithm' if asked.deterministic else 'algorithm'
        raise RuntimeError(f'cuDNN has no {kind} for this: {_describe(asked)}')
    least_bytes = min(one.workspace_bytes for one in working)
    raise RuntimeError(
        f'no algorithm of cuDNN does with {asked.workspace_bytes} bytes of workspace; '
        f'chainer.backends.cuda.set_max_workspace_size({least_bytes}) allows the '
        f'smallest: {_describe(asked)}'
    )


def _describe(asked: _Asked) -> str:
    first, second, output = asked.arrays
    return (
        f'convolution {asked.operation} of {first} and {second} to {output}, pad '
        f'{asked.pad}, stride {asked.stride}, dilation {asked.dilation}, '
        f'groups {asked.groups}, layouts {asked.layouts}'
    )


def _add_bias(b: Any, y: Any, layout: int) -> None:
    if b is None or not y.size:
        return
    code, kind = y.dtype.char, get_data_type(y.dtype)
    b = contiguous(b)
    shape = (1, b.size, *(1 for _ in y.shape[2:]))
    f['addTensor'](
        get_handle(), ONE[code], tensor(kind, shape).value, b.data.ptr, ONE[code],
        images(kind, y.shape, layout).value, y.data.ptr,
    )  # fmt: skip
