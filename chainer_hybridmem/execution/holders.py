"""Who else holds the memory of an array, as references tell.

The program may hold an array that the graph has let go (live_map, [held arrays]). A
weak reference finds that memory again without keeping it alive.
"""

from __future__ import annotations

import contextvars
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from chainer_hybridmem.devices.bits import fingerprint
from chainer_hybridmem.devices.protocol import Array, Device, Root


class Reference(Protocol):
    """One reference of the graph to an array; see :class:`.graph.SlotRef`."""

    @property
    def place(self) -> Hashable:
        """The same for references that are one and the same field."""

    def get(self) -> Array | None:
        """The array; None if it is away."""

    def shared(self) -> bool:
        """Whether others have the container of the array."""


def find_nothing() -> None:
    """In place of :func:`track_memory` where there is no array."""


def track_memory(device: Device, array: Array | None) -> Callable[[], Root | None]:
    """Finds the allocation of an array for as long as any reference keeps it alive."""
    if array is None:
        return find_nothing
    held = device.root(array)
    if type(held).__weakrefoffset__:
        return weakref.ref(held)
    # CuPy's memory; there, views refer to the array they are of.
    reference = weakref.ref(array if array.base is None else array.base)

    def find_root() -> Root | None:
        alive = reference()
        return None if alive is None else device.root(alive)

    return find_root


def compute_uncounted_fingerprint(array: Array) -> int:
    """Uses NumPy's own memory, which the host device does not count."""
    return contextvars.Context().run(fingerprint, array)


_dictionary = {0: object()}
_REFERENCES = sys.getrefcount(_dictionary[0])  # to what is in one dictionary alone


def holds_alone(device: Device, references: Iterable[Reference]) -> bool:
    """Whether only these references have the memory of their arrays.

    Counts Python's references. The result is False where that is not certain.
    """
    arrays: dict[int, Array] = {}
    fields: dict[int, set[object]] = {}  # of the graph, that refer to each array
    for reference in references:
        array = reference.get()
        if array is not None:
            if reference.shared():
                return False
            arrays[id(array)] = array
            fields.setdefault(id(array), set()).add(reference.place)
    array = None  # every reference counts
    on_gpu = device.kind == 'cuda'
    if on_gpu:
        _add_bases(arrays, fields)
    roots: dict[int, Root] = {}
    known: dict[int, int] = {}  # references to each root
    pointers: dict[int, list[Any]] = {}  # of CuPy's arrays; views may share one
    for key in arrays:
        root = device.root(arrays[key])
        if id(root) not in roots:
            roots[id(root)] = root
            known[id(root)] = 0
        if root is arrays[key]:
            known[id(root)] += 1 + len(fields[key])  # 1: in `arrays`
            continue
        if sys.getrefcount(arrays[key]) != _REFERENCES + len(fields[key]):
            return False
        pointer = id(arrays[key].data) if on_gpu else 0
        known[id(root)] += pointer not in pointers
        if on_gpu:
            pointers.setdefault(pointer, []).append(arrays[key].data)
    root = None
    if any(
        sys.getrefcount(same[0]) != _REFERENCES + 2 * len(same) - 1
        for same in pointers.values()
    ):
        return False
    return all(sys.getrefcount(roots[key]) == _REFERENCES + known[key] for key in roots)


def _add_bases(arrays: dict[int, Array], fields: dict[int, set[object]]) -> None:
    """Adds what CuPy's views are of: these arrays refer to the memory as well."""
    for key in list(arrays):
        base = arrays[key].base
        if base is not None:
            arrays[id(base)] = base
            fields.setdefault(id(base), set()).add(key)
