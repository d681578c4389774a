"""How CuPy's arrays look at GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices.bits import same_bits
from chainer_hybridmem.devices.cuda.gpu import Gpu
from chainer_hybridmem.devices.cuda.memory import CudaMemory
from chainer_hybridmem.devices.ports import Arrays
from chainer_hybridmem.devices.references import held_by_none_but
from chainer_hybridmem.devices.values import Array, Root, View

_COMPARED_ELEMENTS = 1 << 24  # at a time; one byte each is allocated for them


class CudaArrays(Arrays):
    """Roots are CuPy's memory objects, which all views of an allocation share.

    Args:
        gpu: Where the arrays are.
        memory: Knows the ids of allocations.
    """

    def __init__(self, gpu: Gpu, memory: CudaMemory) -> None:
        self._memory = memory
        self._number = gpu.number
        self._new_array: Callable[..., Any] = gpu.cupy.ndarray
        self._new_memory: Callable[..., Any] = gpu.cuda.UnownedMemory
        self._new_pointer: Callable[..., Any] = gpu.cuda.MemoryPointer

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._new_array)  # type: ignore[arg-type]

    def allocation_id(self, array: Array) -> int:
        return self._memory.ident_of(array.data.mem)

    def root(self, array: Array) -> Root:
        return array.data.mem

    def root_bytes(self, root: Root) -> int:
        return int(root.size)

    def capture(self, array: Array) -> View:
        pointer = array.data
        offset_bytes = pointer.ptr - pointer.mem.ptr if array.size else 0
        return View(offset_bytes, array.shape, array.strides, array.dtype.str)

    def restore(self, root: Root, view: View) -> Array:
        pointer = self._new_pointer(root, view.offset_bytes)
        return self._new_array(view.shape, view.dtype, pointer, view.strides)

    def memory_at(self, address: int, nbytes: int) -> Root:
        return self._new_memory(address, nbytes, None, self._number)

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        owner = self._memory.find_owner(root)
        return None if owner is None else owner.call_last(look)

    def held_by_none_but(
        self, arrays: dict[int, Array], holders: dict[int, set[object]]
    ) -> bool:
        _add_bases(arrays, holders)
        return held_by_none_but(arrays, holders, self.root, _pointer_of)


def _add_bases(arrays: dict[int, Array], holders: dict[int, set[object]]) -> None:
    """Adds what views are of: these arrays refer to the memory as well."""
    for key in list(arrays):
        base = arrays[key].base
        if base is not None:
            arrays[id(base)] = base
            holders.setdefault(id(base), set()).add(key)


def _pointer_of(array: Array) -> Any:
    """What refers to the memory; views may share one."""
    return array.data
