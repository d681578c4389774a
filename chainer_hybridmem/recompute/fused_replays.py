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

import types
from collections.abc import Callable, Sequence
from typing import Any

from chainer.functions.activation.relu import ReLU
from chainer.functions.math.basic_math import Add
from chainer.functions.normalization import batch_normalization
from chainer.functions.normalization.local_response_normalization import (
    LocalResponseNormalization,
)
from chainer.functions.pooling.max_pooling_nd import MaxPoolingND

from chainer_hybridmem.chainer_access.functions import is_by_cudnn
from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.recompute import (
    cuda_sums,
    local_responses,
    max_pooling,
    normalised_sums,
)
from chainer_hybridmem.recompute.no_fused_replay import NoFusedReplayError

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
    return type(function) is BatchNormalization and attribute in _STATISTICS


def find_candidates(function: Any) -> list[tuple[Any, ...]]:
    """Functions that one fused replay could cover, ending with the given one.

    Returns:
        list of tuple of FunctionNode: The given one comes last; what covers
        most comes first. Empty if only the whole forward will do.
    """
    kind = type(function)
    if kind in (BatchNormalization, MaxPoolingND, LocalResponseNormalization):
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
    """Whether a fused replay that ends here could be part of a longer one."""
    return type(function) in (BatchNormalization, Add)


def find_inputs(functions: Sequence[Any]) -> list[Any]:
    """Variable nodes that a fused replay of these functions reads."""
    nodes = []
    for function in functions:
        for node in function.inputs:
            if not any(node.creator_node is other for other in functions):
                nodes.append(node)
    return nodes


def list_formulas(functions: Sequence[Any]) -> range:
    """The ways in which a fused replay may round: several where cuDNN has normalised.

    The first one is that of Chainer's own code.
    """
    by_cudnn = any(
        type(function) is BatchNormalization and is_by_cudnn(function)
        for function in functions
    )
    return range(len(cuda_sums.FORMULAS) if by_cudnn else 1)


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
    if type(last) is MaxPoolingND:
        return max_pooling.pool(last, fetch(last.inputs[0]))
    if type(last) is LocalResponseNormalization:
        return local_responses.normalise(last, fetch(last.inputs[0]))
    head = last.inputs[0].creator_node if type(last) is ReLU else last
    if type(head) is Add:
        creators = [node.creator_node for node in head.inputs]
        terms = [
            normalised_sums.normalise(creator, *map(fetch, creator.inputs))
            if any(creator is function for function in functions)
            else fetch(node)
            for node, creator in zip(head.inputs, creators, strict=True)
        ]
    else:
        terms = [normalised_sums.normalise(head, *map(fetch, head.inputs))]
    relu = last if type(last) is ReLU else None
    return (normalised_sums.add_up(terms, relu, formula),), types.SimpleNamespace()
