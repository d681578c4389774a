"""What native code knows of an arena, and one in memory of another allocator."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.devices import slab as native
from chainer_hybridmem.devices.protocol import PlaceFigures

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena


class Table:
    """The mallocs that an arena expects, where native code looks them up.

    Args:
        address: Of the table's words; see :mod:`.slab`.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        fields = ctypes.c_int64 * (native.TABLE_BYTES // 8)
        self._words = fields.from_address(address)
        self._arena: Arena | None = None
        self._segments: tuple[int, ...] = ()
        self._entries: Any = None  # keeps their memory

    def expect(self, arena: Arena) -> bool:
        """Takes over an arena's entries; whether they are others than before."""
        if arena is self._arena:
            return False
        self._arena = arena
        self._segments = arena.segments
        self._entries = (ctypes.c_int64 * max(1, 2 * len(arena.entries)))(
            *itertools.chain.from_iterable(arena.entries)
        )
        self.seek(-1)
        self._words[native.ENTRIES // 8] = ctypes.addressof(self._entries)
        return True

    def seek(self, k: int) -> None:
        """The next mallocs are those of operation k; -1 for none of them."""
        self._words[native.NEXT // 8] = self._segments[k] if k >= 0 else 0
        self._words[native.STOP // 8] = self._segments[k + 1] if k >= 0 else 0

    @property
    def sought(self) -> bool:
        """Whether mallocs of an operation are expected."""
        return bool(self._words[native.STOP // 8])

    def figures(self) -> PlaceFigures:
        """What has become of blocks so far."""
        words = self._words
        return PlaceFigures(
            words[native.PLACED // 8],
            words[native.MISSED // 8],
            words[native.TAKEN // 8],
        )


class Slab:
    """One piece of memory with places for the blocks of an iteration.

    Args:
        pointer: Owns the memory; its ``ptr`` is the first address.
        nbytes: Its size.

    Attributes:
        nbytes (int): Its size.
        table (Table): What is expected to lie where.
    """

    def __init__(self, pointer: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pointer = pointer
        fields = ctypes.c_int64 * ((native.SLAB_BYTES + native.TABLE_BYTES) // 8)
        self._words = fields()
        self._slab = ctypes.addressof(self._words)
        self._holes = (ctypes.c_int64 * (native.HOLE_BYTES // 8 * native.MOST_HOLES))()
        self._words[native.HOLES // 8] = ctypes.addressof(self._holes)
        native.begin(self._slab, pointer.ptr, nbytes)
        self.table = Table(self._slab + native.SLAB_BYTES)

    def place(self, nbytes: int) -> Block | None:
        """The planned place of the next malloc, if it has one that is free."""
        if not self.table.sought:
            return None
        address = native.place(self.table.address, self._slab, nbytes)
        return Block(self, address) if address else None

    def cut(self, nbytes: int) -> Block | None:
        """Space in a hole, for what has no place."""
        address = native.cut(self._slab, nbytes)
        return Block(self, address) if address else None

    def _join(self, address: int, extent: int) -> None:
        native.join(self._slab, address, extent)


class Block:
    """A block of a slab; given back when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_extent', '_slab', 'ptr')

    def __init__(self, slab: Slab, address: int) -> None:
        self._slab = slab  # which keeps the memory
        self.ptr = address
        self._extent = slab._words[native.EXTENT // 8]

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._slab._join(self.ptr, self._extent)
