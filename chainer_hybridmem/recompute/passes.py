"""One pass instead of a whole forward.

BatchNormalization keeps the mean and inverse standard deviation of its batch:
its output is an elementwise function of its input and these. Where forward
drops that output on the way through an addition or a ReLU, the end of the
chain is made straight from its beginning, without any array in between. Max
pooling finds values and indexes in one walk over its input, without the array
of all windows that forward builds.

A pass covers one or more forward functions. It is used only where a profile
has compared it bit for bit with what forward has made.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import chainer
import numpy as np
from chainer.functions.activation.relu import ReLU
from chainer.functions.math.basic_math import Add
from chainer.functions.normalization import batch_normalization
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND
from chainer.utils.conv import get_conv_outsize

from chainer_hybridmem.chainer_access import functions
from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.recompute import kernels

BatchNormalization = batch_normalization.BatchNormalization
Fetch = Callable[[Any], Array]  # array of a variable node

_COMPILED = (np.dtype(np.float32), np.dtype(np.float64))
_STATISTICS = frozenset({'mean', 'var', 'inv_std'})
POOLED_CHANNELS = 64  # turned to be innermost at a time


class NoPassError(Exception):
    """These functions have no pass for these arrays."""


def stays(function: Any, attribute: str) -> bool:
    """Whether an attribute is too small beside a function's input to leave.

    The statistics of a batch have one number per channel, and a pass needs
    them: they stay with the graph whatever the plan.
    """
    return type(function) is BatchNormalization and attribute in _STATISTICS


def candidates(function: Any) -> list[tuple[Any, ...]]:
    """Functions that one pass could cover, ending with the given one.

    Returns:
        list of tuple of FunctionNode: The given one comes last; what covers
        most comes first. Empty if only the whole forward will do.
    """
    kind = type(function)
    if kind in (BatchNormalization, MaxPoolingND):
        return [(function,)]
    if kind is Add:
        return _before_add(function)
    if kind is ReLU:
        before = function.inputs[0].creator_node
        if type(before) is BatchNormalization:
            return [(before, function)]
        if type(before) is Add:
            return [(*covered, function) for covered in _before_add(before)]
    return []


def _before_add(add: Any) -> list[tuple[Any, ...]]:
    """The additions of one or two outputs of BatchNormalization."""
    found: list[Any] = []
    for node in add.inputs:
        creator = node.creator_node
        if type(creator) is BatchNormalization and creator not in found:
            found.append(creator)
    result = [(normalisation, add) for normalisation in found]
    if len(found) == 2:
        result.insert(0, (*found, add))
    return result


def may_go_on(function: Any) -> bool:
    """Whether a pass over a function's output could be a longer one's part."""
    return type(function) in (BatchNormalization, Add)


def outside_inputs(functions: Sequence[Any]) -> list[Any]:
    """Variable nodes that a pass over these functions reads."""
    nodes = []
    for function in functions:
        for node in function.inputs:
            if not any(node.creator_node is other for other in functions):
                nodes.append(node)
    return nodes


def run(
    functions: Sequence[Any], fetch: Fetch
) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    """Makes again what the last one of the functions has made.

    Args:
        functions: One of :func:`candidates`.
        fetch: Gives the array of each of :func:`outside_inputs`.

    Returns:
        Output arrays of the last function, and an object with the attributes
        that its forward sets and the pass makes again.

    Raises:
        NoPassError: If there is no pass for arrays like these.
    """
    last = functions[-1]
    if type(last) is MaxPoolingND:
        return _max_pooling(last, fetch(last.inputs[0]))
    head = last.inputs[0].creator_node if type(last) is ReLU else last
    if type(head) is Add:
        creators = [node.creator_node for node in head.inputs]
        terms = [
            _normalised(creator, fetch)
            if any(creator is function for function in functions)
            else fetch(node)
            for node, creator in zip(head.inputs, creators, strict=True)
        ]
    else:
        terms = [_normalised(head, fetch)]
    return (_sum(terms, type(last) is ReLU),), types.SimpleNamespace()


# -- batch normalization, addition, ReLU --------------------------------------
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


def _normalised(function: Any, fetch: Fetch) -> _Normalised:
    x, gamma, beta = (fetch(node) for node in function.inputs)
    expander, dtype = function.expander, np.promote_types(x.dtype, gamma.dtype)
    return _Normalised(
        x,
        function.mean[expander],
        function.inv_std[expander],
        gamma[expander].astype(dtype, copy=False),
        beta[expander].astype(dtype, copy=False),
    )


def _sum(terms: list[Any], relu: bool) -> Array:
    """The sum of arrays and normalised arrays, then perhaps ReLU."""
    terms.sort(key=lambda term: not isinstance(term, _Normalised))  # a + b is b + a
    if not isinstance(terms[0].x, np.ndarray):
        if len(terms) == 1 and not relu:
            xp = chainer.backend.get_array_module(terms[0].x)
            return functions.apply_normalization(xp, terms[0].x, *terms[0].parameters)
        raise NoPassError('on this device only BatchNormalization alone has a pass')
    y = _compiled_sum(terms, relu)
    return _numpy_sum(terms, relu) if y is None else y


def _compiled_sum(terms: list[Any], relu: bool) -> Array | None:
    """In a compiled loop; None for types and layouts that have none."""
    x = terms[0].x
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    arguments: list[Any] = []
    shape: tuple[int, ...] | None = None
    for term in terms:
        normalised = isinstance(term, _Normalised)
        array = term.x if normalised else term
        raw = array.transpose(order)
        same = array.dtype == x.dtype and array.shape == x.shape
        if not (same and array.dtype in _COMPILED and raw.flags.c_contiguous):
            return None
        if normalised:
            if shape is None:
                shape = _around_channels(term.mean.transpose(order).shape, raw.shape)
            if shape is None or any(p.dtype != x.dtype for p in term.parameters):
                return None
            if any(p.shape != terms[0].mean.shape for p in term.parameters):
                return None
        arguments.append(raw.reshape(shape))
        if normalised:
            for parameter in term.parameters:
                arguments.append(
                    np.ascontiguousarray(parameter.transpose(order).reshape(-1))
                )
    assert shape is not None
    y = np.empty_like(x)
    raw = y.transpose(order)
    if not raw.flags.c_contiguous:
        return None
    floor = x.dtype.type(0 if relu else -np.inf)
    _loop(len(arguments), len(shape))(*arguments, floor, raw.reshape(shape))
    return y


def _loop(arguments: int, ndim: int) -> Any:
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


# -- max pooling --------------------------------------------------------------
def _max_pooling(
    function: Any, x: Array
) -> tuple[tuple[Array, ...], types.SimpleNamespace]:
    host = isinstance(x, np.ndarray) and x.dtype in _COMPILED
    if not host or function.ndim != 2:
        raise NoPassError('only two dimensions on the host have a pass')
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
