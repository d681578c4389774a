"""Gradients of one variable added up in place, bit for bit.

Where branches of a network join, backward adds two arrays into a third. If nothing else
refers to one of the two any more, the sum can take its place.
"""

from __future__ import annotations

import sys
from typing import Any

import chainer

from chainer_hybridmem.chainer_access import sums_of_gradients
from chainer_hybridmem.devices.protocol import Array


def _references(holder: list[Any], index: int) -> int:
    item = holder[index]
    return sys.getrefcount(item)


_ALONE = _references([object()], 0)  # what its list alone holds


def add_in_place(gradients: list[Any]) -> bool:
    """Replaces two gradients by their sum, if it may take the place of one.

    Args:
        gradients: Variables; with success only the sum is left.

    Returns:
        bool: Whether they were added.
    """
    if len(gradients) != 2:
        return False
    first, second = (variable.array for variable in gradients)
    if first.shape != second.shape or first.dtype != second.dtype or not first.ndim:
        return False
    order = _order_of_sum(first, second)
    del first, second
    for index in (0, 1):
        total = _place(gradients, index, order)
        if total is None:
            continue
        target, other = gradients[index].array, gradients[1 - index].array
        axis = order[0]
        for i in range(total.shape[axis]):  # ahead of what is still to be read
            part = (slice(None),) * axis + (i,)
            total[part] = target[part] + other[part]
        needed = any(variable.requires_grad for variable in gradients)
        gradients[:] = [chainer.Variable(total, requires_grad=needed)]
        return True
    return False


def _order_of_sum(first: Array, second: Array) -> list[int]:
    """Axes of the sum, outermost first; found out with a corner of the arrays."""
    corner = (slice(2),) * first.ndim
    total = first[corner] + second[corner]
    # Those of length one say nothing.
    return sorted(
        range(first.ndim), key=lambda a: (first.shape[a] == 1, -total.strides[a])
    )


def _place(gradients: list[Any], index: int, order: list[int]) -> Any:
    """The sum's array in the memory of a gradient, None if it may not be there.

    A gradient may be cut out of something padded; the sum is not.
    """
    if not _alone(gradients, index):
        return None
    array = gradients[index].array
    turned = array.transpose(order)
    owner = turned if array.base is None else array.base
    if not owner.flags.c_contiguous or owner.dtype != array.dtype:
        return None
    # In the same order as the sum, with nothing in the same place twice.
    least = array.itemsize
    for axis in reversed(range(array.ndim)):
        if turned.shape[axis] > 1:
            if turned.strides[axis] < least:
                return None
            least = turned.strides[axis] * turned.shape[axis]
    flat = owner.reshape(-1)[: array.size]
    inverse = [order.index(a) for a in range(array.ndim)]
    return flat.reshape(turned.shape).transpose(inverse)


def _alone(gradients: list[Any], index: int) -> bool:
    """Whether only the list refers to a variable and to the memory behind it."""
    if _references(gradients, index) > _ALONE:
        return False
    held = sums_of_gradients.holder(gradients[index])
    if _references(held, 0) > _ALONE:
        return False
    base = held[0].base
    if base is None:
        return True
    # A view keeps the array that owns the memory; others may view it, too.
    return base.base is None and _references([base], 0) <= _ALONE + 2
