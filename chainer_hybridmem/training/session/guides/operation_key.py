"""What one operation of a signature looks like."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.training.chainer_access import graph, own_code

OperationKey = tuple[Any, ...]
BACKWARD = 'backward'
"""First in the key of a backward function; the second is the operation of its forward,
or its name if that is of another iteration; the third is the wiring of the last forward
function in the first backward, and 0 in all others."""
# A comprehension is a call in Python 3.11; these are none.
_shape_of = operator.attrgetter('shape')
_look_of = operator.attrgetter('shape', 'dtype.char')


def make_forward_key(
    function: Any, in_data: tuple[Any, ...], wiring: int = 0
) -> OperationKey:
    """What a forward function is known by.

    Args:
        function: Before its forward.
        in_data: Its inputs.
        wiring: Which operations have made the inputs of the function before: this one
            has none yet. A program may pass on another array, of its own or of another
            function, where a plan has recorded one that replays make again.

    Returns:
        tuple: Its class, shape and type of each input, names of arrays it is given,
        whether its code is Chainer's: if not, no plan that runs it again is followed;
        and the wiring.
    """
    own = graph.target(function)
    name, *given = graph.name_and_arrays(own)
    if own_code.find_foreign(type(own)):
        given.append('foreign')
    return name, *map(_look_of, in_data), *given, wiring


def extend_fingerprint(
    before: int, function: Any, in_data: tuple[Any, ...], wiring: int
) -> int:
    """Fingerprint of forward functions of which one more is about to run."""
    shapes = map(_shape_of, in_data)
    return hash((before, graph.function_name(function), *shapes, wiring))


def find_fingerprint(operations: Iterable[OperationKey]) -> int:
    """Fingerprint of the forward functions that come before the first backward."""
    found = 0
    for name, *parts in operations:
        *parts, wiring = parts
        if name == BACKWARD:
            return hash((found, wiring))
        shapes = [part[0] for part in parts if type(part) is tuple]
        found = hash((found, name, *shapes, wiring))
    return found
