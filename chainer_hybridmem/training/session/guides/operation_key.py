"""What one operation of a signature looks like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.training.chainer_access import graph, own_code

OperationKey = tuple[Any, ...]


def make_forward_key(function: Any, in_data: tuple[Any, ...]) -> OperationKey:
    """What a forward function is known by.

    Args:
        function: Before its forward.
        in_data: Its inputs.

    Returns:
        tuple: Its class, shape and type of each input, names of arrays it is given, and
        whether its code is Chainer's: if not, no plan that runs it again is followed.
    """
    own = graph.target(function)
    name, *given = graph.name_and_arrays(own)
    if own_code.find_foreign(type(own)):
        given.append('foreign')
    return name, *[(x.shape, x.dtype.char) for x in in_data], *given


def make_backward_key(forward: int, function: Any) -> OperationKey:
    """What a backward function is known by.

    Args:
        forward: The operation it belongs to; negative if that is of another iteration.
        function: The function.
    """
    return 'backward', forward if forward >= 0 else graph.function_name(function)


def extend_fingerprint(before: int, function: Any, in_data: tuple[Any, ...]) -> int:
    """Fingerprint of forward functions of which one more is about to run."""
    shapes = [x.shape for x in in_data]
    return hash((before, graph.function_name(function), *shapes))


def find_fingerprint(operations: Iterable[OperationKey]) -> int:
    """Fingerprint of the forward functions that come before the first backward."""
    found = 0
    for name, *parts in operations:
        if name == 'backward':
            break
        shapes = [part[0] for part in parts if type(part) is tuple]
        found = hash((found, name, *shapes))
    return found
