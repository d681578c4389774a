"""Batch normalization, addition and ReLU in one loop, on a GPU in one kernel.

On the host, where an array has a type or layout for which no loop is compiled, NumPy
computes the same in place.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.recompute import cuda_sums, kernels
from chainer_hybridmem.recompute.kernels import COMPILED_TYPES


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
    """The sum of arrays and normalised arrays, then perhaps ReLU.

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
