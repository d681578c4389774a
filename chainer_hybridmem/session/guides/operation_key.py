"""What one operation of a signature looks like."""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.chainer_access import graph

OperationKey = tuple[Any, ...]


def make_forward_key(function: Any, in_data: tuple[Any, ...]) -> OperationKey:
    """What a forward function is known by.

    Args:
        function: Before its forward.
        in_data: Its inputs.

    Returns:
        tuple: Its class, shape and type of each input, names of arrays it is given.
    """
    return (
        type(graph.target(function)).__name__,
        *[(x.shape, x.dtype.char) for x in in_data],
        *graph.given_arrays(function),
    )


def make_backward_key(forward: int, name: str) -> OperationKey:
    """What a backward function is known by.

    Args:
        forward: The operation it belongs to; negative if that is of another iteration.
        name: Of the function.
    """
    return ('backward', forward) if forward >= 0 else ('backward', name)
