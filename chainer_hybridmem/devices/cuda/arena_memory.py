"""The memory of an arena on a GPU, cut by native code that never looks at it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices import slab as native
from chainer_hybridmem.devices.offset_table import OffsetTable


class ArenaMemory:
    """One piece of memory with offsets for the blocks of an iteration.

    Args:
        pointer: Owns the memory; its ``ptr`` is the first address.
        nbytes: Its size.
        stream: Address of the stream on which its parts are used again.

    Attributes:
        nbytes (int): Its size.
        stream (int): As given.
        table (OffsetTable): What is expected to lie where.
    """

    def __init__(self, pointer: Any, nbytes: int, stream: int = 0) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self._pointer = pointer
        fields = ctypes.c_int64 * ((native.SLAB_BYTES + native.TABLE_BYTES) // 8)
        self._words = fields()
        self._slab = ctypes.addressof(self._words)
        self._holes = (ctypes.c_int64 * (native.HOLE_BYTES // 8 * native.MOST_HOLES))()
        self._words[native.HOLES // 8] = ctypes.addressof(self._holes)
        native.begin(self._slab, pointer.ptr, nbytes)
        self.table = OffsetTable(self._slab + native.SLAB_BYTES)

    def place(self, nbytes: int) -> Block | None:
        """The planned space of the next malloc, if it has some that is free."""
        if not self.table.sought:
            return None
        address = native.place(self.table.address, self._slab, nbytes)
        return Block(self, address) if address else None

    @property
    def extent(self) -> int:
        """Bytes of the block that was cut last."""
        return self._words[native.EXTENT // 8]

    def cut(self, nbytes: int) -> Block | None:
        """Space in a hole, for what has no planned offset."""
        address = native.cut(self._slab, nbytes)
        return Block(self, address) if address else None

    def join(self, address: int, extent: int) -> None:
        """Makes the space of a block free."""
        native.join(self._slab, address, extent)


class Block:
    """A block of an arena; given back when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_arena', '_extent', 'ptr')

    def __init__(self, arena: ArenaMemory, address: int) -> None:
        self._arena = arena  # which keeps the memory
        self.ptr = address
        self._extent = arena.extent

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._arena.join(self.ptr, self._extent)
