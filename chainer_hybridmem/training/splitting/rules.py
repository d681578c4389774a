"""Which functions of Chainer can run in parts, and how.

A *way* to run a function is named by what is cut:

=============  ==============================================================
``windows``    the windows of a convolution, while they are laid out; exact
``channels``   all arrays along the channels; exact
``batch``      all arrays along the batch; exact as far as the rule says
=============  ==============================================================

In Chainer 7 the backward of these functions is made of functions again, so that
everything here is about ``forward``. It must be pure but for what :func:`state` sets
aside: a way may fail for want of memory, and another one is then tried. Functions that
need nothing but their inputs and outputs (addition, ReLU) have no rule: parts would not
help.
"""

from __future__ import annotations

import contextvars
import copy
import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda, intel64
from chainer.functions.activation import leaky_relu, relu, sigmoid, tanh
from chainer.functions.connection import (
    convolution_2d,
    convolution_nd,
    deconvolution_2d,
    deconvolution_nd,
    linear,
)
from chainer.functions.noise import dropout
from chainer.functions.normalization import batch_normalization as bn
from chainer.functions.pooling import average_pooling_2d, max_pooling_nd
from chainer.utils import conv, conv_nd

from chainer_hybridmem.training.chainer_access import functions
from chainer_hybridmem.training.devices.protocol import Array

# -- convolutions with one copy of their windows instead of two ---------------
# Chainer lays out all windows of the input and then copies them into the order that
# the matrix product wants. Here they are laid out in that order at once, a sample at a
# time, or on a GPU all of them by one kernel, if they have two dimensions: thousands of
# launches take longer than what they do. The product is the same call with the same
# operands. Two dimensions or any number of them differ in who lays out windows only.
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


# An element of the rows: (sample, window down, across, channel, place down, across).
_ELEMENT = """
    ptrdiff_t rest = i;
    const ptrdiff_t across = rest % k_wide; rest /= k_wide;
    const ptrdiff_t down = rest % k_high; rest /= k_high;
    const ptrdiff_t channel = rest % channels; rest /= channels;
    const ptrdiff_t column = rest % out_wide; rest /= out_wide;
    const ptrdiff_t row = rest % out_high;
    const ptrdiff_t sample = rest / out_high;
    const ptrdiff_t y = row * step_down - pad_down + down * gap_down;
    const ptrdiff_t z = column * step_across - pad_across + across * gap_across;
    const bool inside = 0 <= y && y < high && 0 <= z && z < wide;
    rows = inside ? x[((sample * channels + channel) * high + y) * wide + z] : T(0);
"""
_NUMBERS = (
    *('channels', 'high', 'wide', 'out_high', 'out_wide', 'k_high', 'k_wide'),
    *('step_down', 'step_across', 'pad_down', 'pad_across', 'gap_down', 'gap_across'),
)


@functools.cache
def _make_kernel() -> Any:
    numbers = ', '.join(f'int64 {name}' for name in _NUMBERS)
    return cuda.elementwise(
        f'raw T x, {numbers}', 'T rows', _ELEMENT, 'hybridmem_windows'
    )


def _columns_by_kernel(function: Any, x: Array, ksize: tuple[int, ...]) -> Array:
    steps = function.sy, function.sx
    pads = function.ph, function.pw
    gaps = function.dy, function.dx
    samples, channels, *sides = x.shape
    outer = [
        conv.get_conv_outsize(side, k, step, pad, function.cover_all, gap)
        for side, k, step, pad, gap in zip(sides, ksize, steps, pads, gaps, strict=True)
    ]
    rows = cuda.cupy.empty((samples, *outer, channels, *ksize), x.dtype)
    numbers = (channels, *sides, *outer, *ksize, *steps, *pads, *gaps)
    _make_kernel()(x, *numbers, rows)
    return rows.transpose(0, 3, 4, 5, 1, 2)


def columns(function: Any, x: Array, ksize: tuple[int, ...]) -> Array:
    """Windows as Chainer lays them out, in memory as a matrix of one row per window."""
    if not isinstance(x, np.ndarray) and not isinstance(function, _ND):
        return _columns_by_kernel(function, x, ksize)
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


def convolve(
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


# -- rules --------------------------------------------------------------------
STATE_BYTES = 4 * (624 + 1)  # of a Mersenne Twister, with its position


@dataclasses.dataclass(frozen=True)
class Way:
    """How a function runs in parts.

    Attributes:
        cut (str): What is cut: ``'windows'``, ``'channels'`` or ``'batch'``.
        parts (int): Into how many.
        exact (bool): Whether every bit is as if it were not cut.
    """

    cut: str
    parts: int
    exact: bool


@dataclasses.dataclass(frozen=True)
class CutRule:
    """How the arrays of a function are cut along one of its dimensions.

    Attributes:
        cut (str): Name of the dimension.
        inputs (tuple): Axis to cut of each input, None for whole ones; the last
            entry counts for all further inputs.
        outputs (tuple): Axis of each output, None for one that is summed over parts.
        exact (bool): Whether the bits stay the same on the host.
        least (int): Fewest entries in a part.
        reads (tuple of str): Attributes that are cut along axis 0.
        makes (tuple of str): Attributes that forward makes, likewise.
        fits (callable): Whether it holds for a function with these inputs.
        on_gpu (bool): Whether it holds for functions on a GPU, too.
    """

    cut: str = 'batch'
    inputs: tuple[int | None, ...] = (0,)
    outputs: tuple[int | None, ...] = (0,)
    exact: bool = True
    least: int = 2
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    fits: Callable[[Any, tuple[Array, ...]], bool] = lambda function, inputs: True
    on_gpu: bool = True

    def axis(self, index: int) -> int | None:
        """Along which an input is cut."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def length(self, inputs: tuple[Array, ...]) -> int:
        """Of the dimension that is cut."""
        index = next(i for i, axis in enumerate(self.inputs) if axis is not None)
        return int(inputs[index].shape[self.inputs[index]])


def _same_shapes(function: Any, inputs: tuple[Array, ...]) -> bool:
    del function
    return all(x.shape == inputs[0].shape for x in inputs)


def _without_cudnn(function: Any, inputs: tuple[Array, ...]) -> bool:
    del function
    return isinstance(inputs[0], np.ndarray) or not chainer.should_use_cudnn('>=auto')


def _pooled(function: Any, inputs: tuple[Array, ...]) -> bool:
    return not function.return_indices and _without_cudnn(function, inputs)


def _by_channel(function: Any, inputs: tuple[Array, ...]) -> bool:
    x, gamma = inputs[:2]
    return (
        function.axis in (None, (0, *range(2, x.ndim)))
        and gamma.ndim == 1
        and _without_cudnn(function, inputs)
    )


def _normalized(function: Any, inputs: tuple[Array, ...]) -> bool:
    chainers_own = functions.chooses_as_chainer(function)  # not across processes
    return chainers_own and _by_channel(function, inputs)


def _normalized_back(function: Any, inputs: tuple[Array, ...]) -> bool:
    return functions.is_general(function) and _by_channel(function, inputs)


_BLAS = CutRule(inputs=(0, None), exact=False, least=1)
_RULES: dict[type, CutRule] = {
    convolution_2d.Convolution2DFunction: _BLAS,
    convolution_2d.Convolution2DGradW: dataclasses.replace(
        _BLAS, inputs=(0,), outputs=(None,)
    ),
    deconvolution_2d.Deconvolution2DFunction: _BLAS,
    convolution_nd.ConvolutionND: _BLAS,
    convolution_nd.ConvolutionNDGradW: dataclasses.replace(
        _BLAS, inputs=(0,), outputs=(None,)
    ),
    deconvolution_nd.DeconvolutionND: _BLAS,
    linear.LinearFunction: dataclasses.replace(_BLAS, least=2),
    linear.LinearGradData: dataclasses.replace(_BLAS, inputs=(None, 0), least=2),
    linear.LinearGradWeight: dataclasses.replace(
        _BLAS, inputs=(0,), outputs=(None,), least=2
    ),
    bn.BatchNormalization: CutRule(
        cut='channels',
        inputs=(1, 0),
        outputs=(1,),
        reads=('running_mean', 'running_var'),
        makes=('mean', 'var', 'inv_std'),
        fits=_normalized,
    ),
    bn.BatchNormalizationGrad: CutRule(
        cut='channels',
        inputs=(1, 0, 1),
        outputs=(1, 0, 0),
        reads=('mean', 'inv_std'),
        fits=_normalized_back,
    ),
    bn.FixedBatchNormalization: CutRule(inputs=(0, None), fits=_by_channel),
    max_pooling_nd.MaxPoolingND: CutRule(makes=('indexes',), least=1, fits=_pooled),
    max_pooling_nd.MaxPoolingNDGrad: CutRule(least=1, fits=_without_cudnn),
    average_pooling_2d.AveragePooling2D: CutRule(least=1, fits=_pooled),
    average_pooling_2d.AveragePooling2DGrad: CutRule(least=1, fits=_without_cudnn),
    # On a GPU parts draw other numbers, and what has been drawn cannot be drawn again.
    dropout.Dropout: CutRule(makes=('mask',), on_gpu=False),
    relu.ReLUGrad2: CutRule(reads=('b',)),
    leaky_relu.LeakyReLU: CutRule(),
    functions.LeakyReLUGrad: CutRule(reads=('cond',)),
    sigmoid.Sigmoid: CutRule(),
    sigmoid.SigmoidGrad: CutRule(reads=('x',), fits=_same_shapes),
    tanh.TanhGrad: CutRule(reads=('x',), fits=_same_shapes),
}
KINDS = frozenset(_RULES)  # classes that have a rule
GPU_KINDS = frozenset(kind for kind in KINDS if _RULES[kind].on_gpu)
# Those whose forward leaves something that :func:`state` saves.
STATEFUL = frozenset(k for k in KINDS if _RULES[k].reads or _RULES[k].makes)
_WINDOWS = {
    convolution_2d.Convolution2DFunction: convolve,
    convolution_2d.Convolution2DGradW: weight_gradient,
    convolution_nd.ConvolutionND: convolve,
    convolution_nd.ConvolutionNDGradW: weight_gradient,
}


def ways(function: Any, inputs: tuple[Array, ...]) -> Iterator[Way]:
    """Ways to run a function in parts: exact ones first, then by their number."""
    rule = _RULES.get(type(function))
    if rule is None or not _plain(function, inputs) or not rule.fits(function, inputs):
        return
    if type(function) in _WINDOWS and _lays_out_windows(function, inputs):
        yield Way('windows', len(inputs[0]), True)  # a sample at a time
    parts = 2
    while parts * rule.least <= rule.length(inputs):
        yield Way(rule.cut, parts, rule.exact)
        parts *= 2


def _plain(function: Any, inputs: tuple[Array, ...]) -> bool:
    """Whether arrays have axes in the usual order and no other library computes.

    What has no element has none to be cut.
    """
    return (
        all(layout is None for layout in functions.input_layouts(function))
        and all(x.ndim > 0 and x.size > 0 for x in inputs)
        and not intel64.should_use_ideep('>=auto')
    )


def _lays_out_windows(function: Any, inputs: tuple[Array, ...]) -> bool:
    # One sample alone may be seen as the matrix without any copy.
    return (
        function.groups == 1 and len(inputs[0]) > 1 and _without_cudnn(function, inputs)
    )


def run(
    function: Any,
    inputs: tuple[Array, ...],
    way: Way,
    mark: Callable[[], None] = lambda: None,
) -> tuple[Array, ...]:
    """``function.forward(inputs)``, in parts.

    Attributes and marks of what is retained are set as by forward itself.

    Args:
        function: A function with a rule.
        inputs: Its arrays.
        way: One of :func:`ways`.
        mark: Called between two stages, of which there are as many for any batch.
    """
    rule = _RULES[type(function)]
    if way.cut == 'windows':
        return _WINDOWS[type(function)](function, inputs, mark)
    length = rule.length(inputs)
    outputs: list[Any] = []
    made: dict[str, Any] = {}
    for part in _cut(length, way.parts):
        clone = _clone(function, rule, part)
        results = clone.forward(_take_part(inputs, rule, part))
        if not outputs:
            outputs = [
                _sum_of(result) if axis is None else whole(result, axis, length)
                for result, axis in zip(results, rule.outputs, strict=True)
            ]
        types = [result.dtype for result in results]
        _put_part(results, outputs, rule, part)
        del results
        for name in rule.makes:
            value = getattr(clone, name)
            if value is None or getattr(function, name, None) is not None:
                continue  # it was there before
            if name not in made:
                made[name] = whole(value, 0, length)
            made[name][part] = value
        if part.start == 0:
            mark()
    mark()
    _take_over(function, clone, rule, length)
    vars(function).update(made)
    return tuple(
        output.astype(dtype, copy=False)
        for output, dtype in zip(outputs, types, strict=True)
    )


def _take_part(
    inputs: tuple[Array, ...], rule: CutRule, part: slice
) -> tuple[Array, ...]:
    """The inputs of one part."""
    cut = []
    for index, x in enumerate(inputs):
        axis = rule.axis(index)
        cut.append(x if axis is None else x[(slice(None),) * axis + (part,)])
    return tuple(cut)


def _put_part(
    results: tuple[Array, ...], outputs: list[Any], rule: CutRule, part: slice
) -> None:
    """Puts the results of a part into the whole outputs, or adds them up there."""
    for output, result, axis in zip(outputs, results, rule.outputs, strict=True):
        if axis is None:
            output += result
        else:
            output[(slice(None),) * axis + (part,)] = result


def _cut(length: int, parts: int) -> list[slice]:
    ends = [length * i // parts for i in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _sum_of(part: Array) -> Array:
    """Where parts are added up: in float32 at least."""
    xp: Any = chainer.backend.get_array_module(part)
    return xp.zeros(part.shape, xp.promote_types(part.dtype, xp.float32))


def _clone(function: Any, rule: CutRule, part: slice) -> Any:
    """A copy of the function that knows of one part only."""
    clone = copy.copy(function)
    for name in (*rule.reads, *rule.makes):
        value = getattr(clone, name, None)
        if value is not None:
            setattr(clone, name, value[part])
    if rule.cut == 'batch':
        functions.set_batch_size(clone, clone, part.stop - part.start)
    if isinstance(clone, max_pooling_nd.MaxPoolingNDGrad):
        clone.func = _clone(clone.func, _RULES[max_pooling_nd.MaxPoolingND], part)
    return clone


def _take_over(function: Any, clone: Any, rule: CutRule, length: int) -> None:
    """What forward has noted down that is no array of one part."""
    own = {*rule.reads, *rule.makes, 'func', functions.IN_SHAPE}
    vars(function).update(
        {name: value for name, value in vars(clone).items() if name not in own}
    )
    functions.set_batch_size(function, clone, length)


def state(function: Any, whole: bool = False) -> Callable[[], None]:
    """Saves what tells a forward that it has run, and what it changes elsewhere.

    All else that a forward sets, another one sets again.

    Args:
        function: Before its forward; it has a rule.
        whole: Whether it is to run as a whole.

    Returns:
        callable: Undoes the changes of a forward that has failed.
    """
    rule = _RULES[type(function)]
    names = rule.reads + rule.makes
    if not names:
        return _undo_nothing
    own = vars(function)
    values = [*map(own.get, names, itertools.repeat(_ABSENT))]
    undo = _outside(function, whole) if type(function) in _CHANGES_MORE else None

    def restore() -> None:
        for name, value in zip(names, values, strict=True):
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
        if undo is not None:
            undo()

    return restore


def _undo_nothing() -> None:
    """Nothing has changed."""


_ABSENT: Any = object()
_CHANGES_MORE = dropout.Dropout, bn.BatchNormalization


def _outside(function: Any, whole: bool) -> Callable[[], None] | None:
    """Undoes draws of random numbers and moves of statistics."""
    if type(function) is dropout.Dropout:
        return _generator()
    if function.running_mean is None:
        return None
    statistics = function.running_mean, function.running_var
    if whole and all(_moves_last(array) for array in statistics):
        return None
    # What is set aside is ours: the host device does not count it.
    kept = [(array, contextvars.Context().run(array.copy)) for array in statistics]

    def restore_statistics() -> None:
        for array, before in kept:
            array[...] = before

    return restore_statistics


def _generator() -> Callable[[], None]:
    """Undoes draws from NumPy's global generator, except of normal numbers.

    Takes two microseconds, where NumPy's own copy of the state takes fifty.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        drawn = np.random.get_state()
        return lambda: np.random.set_state(drawn)
    address = bits.ctypes.state_address
    kept = ctypes.string_at(address, STATE_BYTES)

    def rewind() -> None:
        ctypes.memmove(bits.ctypes.state_address, kept, STATE_BYTES)

    return rewind


def _moves_last(statistic: Array) -> bool:
    """Whether a whole forward cannot fail any more once it has moved a statistic.

    With CuPy its last kernel does that in place, unless cuDNN needs a wider type.
    """
    return not isinstance(statistic, np.ndarray) and statistic.dtype.itemsize >= 4


def whole(part: Array, axis: int, length: int) -> Array:
    """An array for all parts, contents undefined, with strides as if made at once.

    BLAS and NumPy's reductions sum in an order that depends on strides. So an array
    that is put together from parts must look at memory as the one made at once would.

    Args:
        part: The first part.
        axis: Along which the parts follow each other.
        length: Of the whole along this axis.
    """
    xp: Any = chainer.backend.get_array_module(part)
    shape = [*part.shape[:axis], length, *part.shape[axis + 1 :]]

    def outermost_first(a: int) -> tuple[bool, int, int]:
        # The stride of an axis of length one says nothing, but for what is to be
        # longer: of two equal ones, that of length one is inside.
        unknown = shape[a] == 1
        return not unknown, -part.strides[a], -part.shape[a]

    order = sorted(range(part.ndim), key=outermost_first)
    extents = [shape[a] for a in order]
    for place in range(1, len(order)):
        a, outer = order[place], order[place - 1]
        if a != axis and shape[outer] > 1:  # it may be cut out of something padded
            extents[place] = part.strides[outer] // part.strides[a]
    base = xp.empty(extents, part.dtype)
    cut = tuple(slice(shape[a]) for a in order)
    return base[cut].transpose([order.index(a) for a in range(part.ndim)])
