"""Batch normalization, addition and ReLU in one kernel on a GPU.

The kernel says per element what Chainer's and CuPy's own kernels say, in the same
order, each result rounded to the arrays' type.

Note: [contraction]
    NVRTC turns a product and a sum into one rounding. It does so within the expression
    of the normalization, as in Chainer's kernel. What follows are sums and comparisons,
    which nothing can be contracted with.

Note: [cuDNN]
    How cuDNN's batch normalization rounds is not written down. There are few ways that
    make sense: the trial finds out which one gives its bits, if any, and the recipe
    remembers it. Where Chainer's ReLU has gone through cuDNN, so does the replay, for
    what it makes of NaN and -0 is not written down either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from chainer.backends import cuda

from chainer_hybridmem.training.chainer_access import functions
from chainer_hybridmem.training.devices.protocol import Array
from chainer_hybridmem.training.recompute.kernels import NoFusedReplayError

_NORMALISED = 'T x{i}, U mean{i}, U inv_std{i}, U gamma{i}, U beta{i}'
FORMULAS = (
    'gamma{i} * (x{i} - mean{i}) * inv_std{i} + beta{i}',  # Chainer's own kernel
    '(x{i} - mean{i}) * inv_std{i} * gamma{i} + beta{i}',
    '(x{i} - mean{i}) * (inv_std{i} * gamma{i}) + beta{i}',
    'x{i} * (inv_std{i} * gamma{i}) + (beta{i} - mean{i} * (inv_std{i} * gamma{i}))',
)
_ARRAY, _TAKE = 'T x{i}', 'T v{i} = x{i};'
# As CuPy's maximum of an array and zero.
_RELU = 'T zero = 0; y = (isnan(v) | isnan(zero)) ? T(NAN) : T(max(v, zero));'
_NAN = """
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
"""


def add_up(terms: Sequence[tuple[Array, ...]], relu: Any, formula: int) -> Array:
    """The sum of arrays and normalised arrays, then perhaps ReLU.

    Args:
        terms: One or two: an array alone, or one with its mean, inverse standard
            deviation, gamma and beta, which broadcast to it.
        relu: The function; None if none follows.
        formula: Of the normalization, one of :data:`FORMULAS`.

    Raises:
        NoFusedReplayError: If arrays differ in type or shape.
    """
    arrays = {(term[0].dtype, term[0].shape) for term in terms}
    types = {parameter.dtype for term in terms for parameter in term[1:]}
    if len(arrays) > 1 or len(types) > 1:
        raise NoFusedReplayError('only arrays of one type and shape have one')
    by_cudnn = relu is not None and functions.is_relu_of_cudnn(relu)
    kernel = _make_kernel(
        tuple(len(term) > 1 for term in terms),
        relu is not None and not by_cudnn,
        formula,
    )
    y = kernel(*(array for term in terms for array in term))
    return functions.relu_of_cudnn(y) if by_cudnn else y


@functools.cache
def _make_kernel(normalised: tuple[bool, ...], relu: bool, formula: int) -> Any:
    """The kernel for some terms.

    Args:
        normalised: Whether each term is a normalised array.
        relu: Whether ReLU follows.
        formula: Of the normalization.
    """
    normalise = f'T v{{i}} = {FORMULAS[formula]};'
    arguments = ', '.join(
        (_NORMALISED if kind else _ARRAY).format(i=i)
        for i, kind in enumerate(normalised)
    )
    lines = [
        (normalise if kind else _TAKE).format(i=i) for i, kind in enumerate(normalised)
    ]
    lines.append('T v = v0 + v1;' if len(normalised) == 2 else 'T v = v0;')
    lines.append(_RELU if relu else 'y = v;')
    return cuda.elementwise(
        arguments, 'T y', ' '.join(lines), 'hybridmem_sum', preamble=_NAN
    )
