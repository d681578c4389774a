"""Who else holds the memory of an array, as references tell.

The program may hold an array that the graph has let go (live_map, [held arrays]). A
weak reference finds that memory again without keeping it alive.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from chainer_hybridmem.devices.bits import fingerprint
from chainer_hybridmem.devices.protocol import Array, Device, Root, View


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
    held = device.arrays.root(array)
    if type(held).__weakrefoffset__:
        return weakref.ref(held)
    # CuPy's memory; there, views refer to the array they are of.
    reference = weakref.ref(array if array.base is None else array.base)

    def find_root() -> Root | None:
        alive = reference()
        return None if alive is None else device.arrays.root(alive)

    return find_root


def copy_memory(device: Device, target: Root, source: Root, nbytes: int) -> None:
    """Copies an allocation into another one of the same size."""
    whole = View(0, (nbytes,), (1,), '|u1')
    device.arrays.restore(target, whole)[...] = device.arrays.restore(source, whole)


def compute_uncounted_fingerprint(array: Array) -> int:
    """Uses NumPy's own memory, which the host device does not count."""
    return contextvars.Context().run(fingerprint, array)


def holds_alone(device: Device, references: Iterable[Reference]) -> bool:
    """Whether only these references have the memory of their arrays.

    The result is False where that is not certain.
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
    return device.arrays.held_by_none_but(arrays, fields)
