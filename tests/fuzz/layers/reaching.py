"""What a program does with the arrays of a graph when forward is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REACHED: dict[str, Callable[[Any, Any], Any]] = {
    'node': lambda function, node: node.data,
    'variable': lambda function, node: node.get_variable().array,
    'outputs': lambda function, node: function.get_retained_outputs()[0].array,
    'list': lambda function, node: function.saved[1],
    'tuple': lambda function, node: function.pair[0],
}


def reach(
    function: Callable[[], Any], node: Callable[[], Any], through: str, writes: bool
) -> None:
    """Does what the layer ``reached`` has been told, if the graph lives."""
    if function() is None or node() is None:
        return
    array = REACHED[through](function(), node())
    array.sum()
    if writes:
        overwrite(array)


def overwrite(array: Any) -> None:
    """Changes half of the elements in place."""
    if array.ndim and getattr(array.flags, 'writeable', True):
        array[::2] *= array.dtype.type(0.5)
