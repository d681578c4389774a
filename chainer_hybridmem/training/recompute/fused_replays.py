"""Fused replays: one loop or kernel instead of one or more whole forwards.

BatchNormalization keeps the mean and inverse standard deviation of its batch:
its output is an elementwise function of its input and these. Where forward
drops that output on the way through an addition or a ReLU, the end of the
chain is made straight from its beginning, without any array in between. Max
pooling finds values and indexes in one walk over its input, without the array
of all windows that forward builds on the host; on a GPU forward does the same.
There, local response normalization runs one kernel instead of three.

A fused replay covers one or more forward functions. Plans use it only where a
recording has compared it bit for bit with what forward has made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from chainer.backends import cuda
from chainer.functions.activation.relu import ReLU
from chainer.functions.math.basic_math import Add
from chainer.functions.normalization import batch_normalization
from chainer.functions.normalization.local_response_normalization import (
    LocalResponseNormalization,
)
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND
from chainer.utils.conv import get_conv_outsize

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.chainer_access.functions import is_by_cudnn
from chainer_hybridmem.training.devices.protocol import Array
from chainer_hybridmem.training.recompute import cuda_sums, kernels
from chainer_hybridmem.training.recompute.kernels import (
    COMPILED_TYPES,
    NoFusedReplayError,
)

__all__ = [
    'Fetch',
    'NoFusedReplayError',
    'find_candidates',
    'find_inputs',
    'list_formulas',
    'may_go_on',
    'run',
    'stays',
]
BatchNormalization = batch_normalization.BatchNormalization
Fetch = Callable[[Any], Array]  # array of a variable node

_STATISTICS = frozenset({'mean', 'var', 'inv_std'})


def stays(function: Any, attribute: str) -> bool:
    """Whether an attribute is too small beside a function's input to leave.

    The statistics of a batch have one number per channel, and a fused replay
    needs them: they stay with the graph whatever the plan.
    """
    return attribute in _STATISTICS and graph.kind_of(function) is BatchNormalization


def find_candidates(function: Any) -> list[tuple[Any, ...]]:
    """Functions that one fused replay could cover, ending with the given one.

    Returns:
        list of tuple of FunctionNode: The given one comes last; what covers
        most comes first. Empty if only the whole forward will do.
    """
    kind = graph.kind_of(function)
    if kind in (BatchNormalization, MaxPoolingND, LocalResponseNormalization):
        return [(function,)]
    if kind is Add:
        return _before_add(function)
    if kind is ReLU:
        before = function.inputs[0].creator_node
        if graph.kind_of(before) is BatchNormalization:
            return [(before, function)]
        if graph.kind_of(before) is Add:
            return [(*covered, function) for covered in _before_add(before)]
    return []


def _before_add(add: Any) -> list[tuple[Any, ...]]:
    """The additions of one or two outputs of BatchNormalization."""
    found: list[Any] = []
    for node in add.inputs:
        creator = node.creator_node
        if graph.kind_of(creator) is BatchNormalization and creator not in found:
            found.append(creator)
    result = [(normalisation, add) for normalisation in found]
    if len(found) == 2:
        result.insert(0, (*found, add))
    return result


def may_go_on(function: Any) -> bool:
    """Whether a fused replay that ends here could be part of a longer one."""
    return graph.kind_of(function) in (BatchNormalization, Add)


def find_inputs(functions: Sequence[Any]) -> list[Any]:
    """Variable nodes that a fused replay of these functions reads."""
    nodes = []
    for function in functions:
        for node in function.inputs:
            if not any(node.creator_node is other for other in functions):
                nodes.append(node)
    return nodes


def list_formulas(functions: Sequence[Any], fetch: Fetch) -> range:
    """The ways in which a fused replay may round: several where cuDNN has normalised.

    The first one is that of Chainer's own code. Of those for cuDNN there are none as
    long as a gamma is all ones or a beta all zeros, as before the first update: with
    these the wrong one may give the same bits, and others later.

    Raises:
        NoFusedReplayError: If a gamma or a beta is not at hand.
    """
    normalised = [
        function
        for function in functions
        if graph.kind_of(function) is BatchNormalization and is_by_cudnn(function)
    ]
    for function in normalised:
        gamma, beta = map(fetch, function.inputs[1:])
        if not ((gamma != 1).any() and (beta != 0).any()):
            return range(0)
    return range(len(cuda_sums.FORMULAS) if normalised else 1)


def run(
    functions: Sequence[Any], fetch: Fetch, formula: int = 0
) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    """Makes the outputs of the last one of the functions again.

    Args:
        functions: One of :func:`find_candidates`.
        fetch: Gives the array of each of :func:`find_inputs`.
        formula: One of :func:`list_formulas`.

    Returns:
        Output arrays of the last function, and an object with the attributes
        that its forward sets and the replay makes again.

    Raises:
        NoFusedReplayError: If there is no loop for arrays like these.
    """
    last = functions[-1]
    kind = graph.kind_of(last)
    if kind is MaxPoolingND:
        return pool(last, fetch(last.inputs[0]))
    if kind is LocalResponseNormalization:
        return normalise_responses(last, fetch(last.inputs[0]))
    head = last.inputs[0].creator_node if kind is ReLU else last
    if graph.kind_of(head) is Add:
        creators = [node.creator_node for node in head.inputs]
        terms = [
            normalise(creator, *map(fetch, creator.inputs))
            if any(creator is function for function in functions)
            else fetch(node)
            for node, creator in zip(head.inputs, creators, strict=True)
        ]
    else:
        terms = [normalise(head, *map(fetch, head.inputs))]
    relu = last if kind is ReLU else None
    return (add_up(terms, relu, formula),), types.SimpleNamespace()


# -- max pooling --------------------------------------------------------------
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


# -- local response normalization ---------------------------------------------
_SQUARE = """
template <class H> __device__ inline H square(H x) { return x * x; }  // float16
__device__ inline float square(float x) { return __fmul_rn(x, x); }
__device__ inline double square(double x) { return __dmul_rn(x, x); }
"""
_LOOP = """
int half_n = n / 2;
int start = i / size * channels * size + i % size;
float sum = 0;
for (int j = 0; j < channels + half_n; ++j) {
  if (j < channels) {
    sum += square(x[start + j * size]);
  }
  if (j >= n) {
    sum -= square(x[start + (j - n) * size]);
  }
  if (j >= half_n) {
    int at = start + (j - half_n) * size;
    T response = sum;
    T value = k + alpha * response;
    scale[at] = value;
    y[at] = x[at] * pow(value, -beta);
  }
}
"""


def normalise_responses(
    function: Any, x: Array
) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    """Outputs and scales of a local response normalization, in one kernel on a GPU.

    Chainer runs three: the squares, their sums over neighbouring channels, the outputs.
    The kernel runs the second one's loop, with the others' arithmetic inside.

    Note: [rounding]
        Chainer's squares and sums lie in arrays of the input's type between its
        kernels. Here they are rounded to that type too; the functions of CUDA that
        round a product keep the compiler from turning square and sum into one rounding.

    Args:
        function: ``LocalResponseNormalization``.
        x: Its input, (n, c, ...).

    Returns:
        Output arrays, and an object with the attributes ``y`` and ``scale``.

    Raises:
        NoFusedReplayError: If the input is not on a GPU.
    """
    if isinstance(x, np.ndarray):
        raise NoFusedReplayError('only arrays on a GPU have one')
    samples, channels = x.shape[:2]
    y, scale = (cuda.cupy.empty(x.shape, x.dtype) for _ in range(2))
    _make_kernel()(
        *(x, x.size // (samples * channels), channels),
        *(function.n, function.k, function.alpha, function.beta),
        *(y, scale),
        size=x.size // channels,
    )
    return (y,), types.SimpleNamespace(y=y, scale=scale)


@functools.cache
def _make_kernel() -> Any:
    return cuda.elementwise(
        'raw T x, int32 size, int32 channels, int32 n, T k, T alpha, T beta',
        'raw T y, raw T scale',
        _LOOP,
        'hybridmem_lrn',
        preamble=_SQUARE,
    )


@dataclasses.dataclass
class _Normalised:
    """What BatchNormalization makes of an array; parameters broadcast to it."""

    x: Array
    mean: Array
    inv_std: Array
    gamma: Array
    beta: Array

    @property
    def parameters(self) -> tuple[Array, ...]:
        return self.mean, self.inv_std, self.gamma, self.beta


def normalise(function: Any, x: Array, gamma: Array, beta: Array) -> _Normalised:
    """What a batch normalization makes of its inputs, not yet computed."""
    expander, dtype = function.expander, np.promote_types(x.dtype, gamma.dtype)
    return _Normalised(
        x,
        function.mean[expander],
        function.inv_std[expander],
        gamma[expander].astype(dtype, copy=False),
        beta[expander].astype(dtype, copy=False),
    )


def add_up(terms: list[Any], relu: Any, formula: int) -> Array:
    """The sum of arrays and normalised arrays, then perhaps ReLU; in one pass.

    On the host, where an array has a type or layout for which no loop is compiled,
    NumPy computes the same in place.

    Args:
        terms: One or two; at least one is what :func:`normalise` returns.
        relu: The function; None if none follows.
        formula: Of the normalization on a GPU.

    Raises:
        NoFusedReplayError: If there is no loop for these arrays.
    """
    terms.sort(key=lambda term: not isinstance(term, _Normalised))  # a + b is b + a
    if not isinstance(terms[0].x, np.ndarray):
        return cuda_sums.add_up(
            [
                (term.x, *term.parameters) if isinstance(term, _Normalised) else (term,)
                for term in terms
            ],
            relu,
            formula,
        )
    y = _compiled_sum(terms, relu is not None)
    return _numpy_sum(terms, relu is not None) if y is None else y


def _compiled_sum(terms: list[Any], relu: bool) -> Array | None:
    """In a compiled loop; None for types and layouts that have none."""
    first = terms[0]
    x = first.x
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    if not all(_fits_loop(term, first, order) for term in terms):
        return None
    shape = _around_channels(
        first.mean.transpose(order).shape, x.transpose(order).shape
    )
    if shape is None:
        return None
    arguments: list[Array] = []
    for term in terms:
        if not isinstance(term, _Normalised):
            arguments.append(term.transpose(order).reshape(shape))
            continue
        arguments.append(term.x.transpose(order).reshape(shape))
        for parameter in term.parameters:
            flat = parameter.transpose(order).reshape(-1)
            arguments.append(np.ascontiguousarray(flat))
    y = np.empty_like(x)
    raw = y.transpose(order)
    if not raw.flags.c_contiguous:
        return None
    floor = x.dtype.type(0 if relu else -np.inf)
    _find_loop(len(arguments), len(shape))(*arguments, floor, raw.reshape(shape))
    return y


def _fits_loop(term: Any, first: _Normalised, order: list[int]) -> bool:
    """Whether a term has the type and layout of the first one, and a loop has them.

    Args:
        term: An array or a normalised array.
        first: The first term, which is normalised.
        order: Axes of the first term as they lie in memory, outermost first.
    """
    normalised = isinstance(term, _Normalised)
    array, x = term.x if normalised else term, first.x
    if array.dtype != x.dtype or array.shape != x.shape:
        return False
    if array.dtype not in COMPILED_TYPES:
        return False
    if not array.transpose(order).flags.c_contiguous:
        return False
    return not normalised or all(
        p.dtype == x.dtype and p.shape == first.mean.shape for p in term.parameters
    )


def _find_loop(arguments: int, ndim: int) -> Any:
    rows, planes = {
        5: (kernels.normalise_rows, kernels.normalise_planes),
        6: (kernels.normalise_add_rows, kernels.normalise_add_planes),
        10: (kernels.normalise_both_rows, kernels.normalise_both_planes),
    }[arguments]
    return rows if ndim == 2 else planes


def _around_channels(
    parameter: tuple[int, ...], x: tuple[int, ...]
) -> tuple[int, ...] | None:
    """``(outer, channels)`` or ``(outer, channels, inner)`` of a shape.

    Args:
        parameter: Shape of a parameter broadcast to x: 1 where it is the same
            along an axis.
        x: Shape of x, axes in memory order.

    Returns:
        None if the channels are not next to each other.
    """
    own = [axis for axis, length in enumerate(parameter) if length != 1]
    if not own:
        return None
    first, end = own[0], own[-1] + 1
    if parameter[first:end] != x[first:end]:
        return None
    outer, channels = math.prod(x[:first]), math.prod(x[first:end])
    inner = math.prod(x[end:])
    return (outer, channels) if inner == 1 else (outer, channels, inner)


def _numpy_sum(terms: list[Any], relu: bool) -> Array:
    """With NumPy's own loops, in place from the second one on."""
    arrays = [_numpy_term(term) for term in terms]
    y = arrays[0]
    if len(arrays) == 2:
        np.add(y, arrays[1], out=y)
    return np.maximum(y, 0, out=y) if relu else y


def _numpy_term(term: Any) -> Array:
    if not isinstance(term, _Normalised):
        return term
    y = np.subtract(term.x, term.mean)
    np.multiply(y, term.inv_std, out=y)
    np.multiply(y, term.gamma, out=y)
    np.add(y, term.beta, out=y)
    return y.astype(term.x.dtype, copy=False)
