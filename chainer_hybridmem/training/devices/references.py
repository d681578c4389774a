"""Counts references to arrays and to their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.training.devices.values import Array, Root

_dictionary = {0: object()}
_REFERENCES = sys.getrefcount(_dictionary[0])  # to what is in one dictionary alone


def count_references(held: dict[int, Any], key: int) -> int:
    """References to what a dictionary holds, but for the dictionary's own."""
    return sys.getrefcount(held[key]) - _REFERENCES


def held_by_none_but(
    arrays: dict[int, Array],
    holders: dict[int, set[object]],
    root_of: Callable[[Array], Root],
    pointer_of: Callable[[Array], Any] | None = None,
) -> bool:
    """See :meth:`.Arrays.held_by_none_but`.

    Args:
        arrays: By ``id()``.
        holders: What refers to each array.
        root_of: The owner of the memory behind an array.
        pointer_of: What refers to the root in place of the array, where there is such
            an object; several arrays may share one.
    """
    roots: dict[int, Root] = {}
    known: dict[int, int] = {}  # references to each root
    pointers: dict[int, list[Any]] = {}
    for key in arrays:
        root = root_of(arrays[key])
        if id(root) not in roots:
            roots[id(root)] = root
            known[id(root)] = 0
        if root is arrays[key]:
            known[id(root)] += 1 + len(holders[key])  # 1: in `arrays`
            continue
        if count_references(arrays, key) != len(holders[key]):
            return False
        if pointer_of is None:
            known[id(root)] += 1
            continue
        pointer = id(pointer_of(arrays[key]))
        known[id(root)] += pointer not in pointers
        pointers.setdefault(pointer, []).append(pointer_of(arrays[key]))
    root = None
    if any(
        sys.getrefcount(same[0]) != _REFERENCES + 2 * len(same) - 1
        for same in pointers.values()
    ):
        return False
    return all(count_references(roots, key) == known[key] for key in roots)
