"""How NumPy's arrays look at memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy

from chainer_hybridmem.devices.bits import same_bits
from chainer_hybridmem.devices.host.array_data import address_of, bytes_of, root_of
from chainer_hybridmem.devices.host.memory import HostMemory
from chainer_hybridmem.devices.ports import Arrays
from chainer_hybridmem.devices.references import held_by_none_but
from chainer_hybridmem.devices.values import Array, Root, View

_NUMBERS = '?biufcmM'  # kinds of types
_COMPARED_ELEMENTS = 1 << 18  # at a time; one byte each is allocated for them


class HostArrays(Arrays):
    """Roots are the arrays that own their memory.

    Args:
        memory: Knows the ids of allocations.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def owns(self, array: Any) -> bool:
        """Arrays of numbers; subclasses, objects and records cannot be made again."""
        if type(array) is not numpy.ndarray:
            return False
        return array.dtype.kind in _NUMBERS

    def allocation_id(self, array: Array) -> int:
        return self._memory.ident_of(root_of(array))

    def root(self, array: Array) -> Root:
        return root_of(array)

    def root_bytes(self, root: Root) -> int:
        return int(root.nbytes)

    def capture(self, array: Array) -> View:
        offset = address_of(array) - address_of(root_of(array))
        return View(
            offset_bytes=offset if array.size else 0,
            shape=array.shape,
            strides=array.strides,
            dtype=array.dtype.str,
            writeable=array.flags.writeable,
        )

    def restore(self, root: Root, view: View) -> Array:
        if not isinstance(root, numpy.ndarray):
            raise TypeError(f'not a NumPy array: {type(root).__name__}')
        array: Array = numpy.ndarray(
            view.shape,
            view.dtype,
            buffer=bytes_of(root),
            offset=view.offset_bytes,
            strides=view.strides,
        )
        if not view.writeable:
            array.setflags(write=False)
        return array

    def memory_at(self, address: int, nbytes: int) -> Root:
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return numpy.frombuffer(memory, numpy.uint8)

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        address = address_of(root)
        # NumPy calls back before it frees the memory.
        return weakref.ref(root, lambda _: look(address))

    def held_by_none_but(
        self, arrays: dict[int, Array], holders: dict[int, set[object]]
    ) -> bool:
        return held_by_none_but(arrays, holders, root_of)
