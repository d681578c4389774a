"""An arena in memory of another allocator, such as a GPU's pool."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices import slab as native
from chainer_hybridmem.pools.arena import Arena


class Slab:
    """One piece of memory with places for the blocks of an iteration.

    Args:
        pointer: Owns the memory; its ``ptr`` is the first address.
        nbytes: Its size.

    Attributes:
        nbytes (int): Its size.
    """

    def __init__(self, pointer: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pointer = pointer
        fields = ctypes.c_int64 * ((native.SLAB_BYTES + native.TABLE_BYTES) // 8)
        self._words = fields()
        self._slab = ctypes.addressof(self._words)
        self._table = self._slab + native.SLAB_BYTES
        self._holes = (ctypes.c_int64 * (native.HOLE_BYTES // 8 * native.MOST_HOLES))()
        self._words[native.HOLES // 8] = ctypes.addressof(self._holes)
        native.begin(self._slab, pointer.ptr, nbytes)
        self._arena: Arena | None = None
        self._segments: tuple[int, ...] = ()
        self._entries: Any = None

    def expect(self, arena: Arena) -> None:
        """The mallocs of the iterations to come and their places."""
        if arena is self._arena:
            return
        self._arena = arena
        self._segments = arena.segments
        self._entries = (ctypes.c_int64 * max(1, 2 * len(arena.entries)))(
            *itertools.chain.from_iterable(arena.entries)
        )
        self.seek(-1)
        self._set(native.ENTRIES, ctypes.addressof(self._entries))

    def seek(self, k: int) -> None:
        """The next mallocs are those of operation k; -1 for none of them."""
        self._set(native.NEXT, self._segments[k] if k >= 0 else 0)
        self._set(native.STOP, self._segments[k + 1] if k >= 0 else 0)

    def _set(self, field: int, value: int) -> None:
        self._words[(native.SLAB_BYTES + field) // 8] = value

    def place(self, nbytes: int) -> Block | None:
        """The planned place of the next malloc, if it has one that is free."""
        if not self._words[(native.SLAB_BYTES + native.STOP) // 8]:
            return None
        address = native.place(self._table, self._slab, nbytes)
        return Block(self, address) if address else None

    def cut(self, nbytes: int) -> Block | None:
        """Space in a hole, for what has no place."""
        address = native.cut(self._slab, nbytes)
        return Block(self, address) if address else None

    def figures(self) -> tuple[int, int, int]:
        """Blocks so far that got their place, that had none, whose place was taken."""
        words = self._words
        first = (native.SLAB_BYTES + native.PLACED) // 8
        return words[first], words[first + 1], words[first + 2]

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
