"""Whole arrays with the layout of their parts.

BLAS and NumPy's reductions sum in an order that depends on strides. So an array that
is put together from parts must look at memory as the one made at once would.
"""

from __future__ import annotations

from typing import Any

import chainer

from chainer_hybridmem.devices.protocol import Array


def whole(part: Array, axis: int, length: int) -> Array:
    """An array for all parts, contents undefined, with strides as if made at once.

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
