"""The mallocs that an arena expects, where native code looks them up."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.training.devices import slab as native
from chainer_hybridmem.training.devices.values import PlaceFigures

if TYPE_CHECKING:
    from chainer_hybridmem.planning.layouts.arena import Arena

_RANGE = slice(native.NEXT // 8, native.STOP // 8 + 1)


class OffsetTable:
    """Size and offset of each malloc that an arena expects, by operation.

    Args:
        address: Of the table's words; see :mod:`.slab`.

    Attributes:
        is_sought (bool): Whether mallocs of an operation are expected.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        fields = ctypes.c_int64 * (native.TABLE_BYTES // 8)
        self._words = fields.from_address(address)
        self._arena: Arena | None = None
        self._ranges: list[list[Any]] = [[0, 0]]  # of entries; the last is empty
        self._entries: Any = None  # keeps their memory
        self.is_sought = False

    def expect(self, arena: Arena) -> bool:
        """Takes over an arena's entries; whether they are others than before."""
        if arena is self._arena:
            return False
        self._arena = arena
        self._ranges = [*map(list, itertools.pairwise(arena.segments)), [0, 0]]
        self._entries = (ctypes.c_int64 * max(1, 2 * len(arena.entries)))(
            *itertools.chain.from_iterable(arena.entries)
        )
        self.seek(-1)
        self._words[native.ENTRIES // 8] = ctypes.addressof(self._entries)
        return True

    def seek(self, k: int) -> None:
        """The next mallocs are those of operation k; -1 for none of them."""
        self._words[_RANGE] = self._ranges[k]
        self.is_sought = k >= 0

    def lose_place(self) -> None:
        """There is no memory at the offset of the last malloc."""
        self._words[native.PLACED // 8] -= 1
        self._words[native.TAKEN // 8] += 1

    def figures(self) -> PlaceFigures:
        """What has become of blocks so far."""
        words = self._words
        return PlaceFigures(
            words[native.PLACED // 8],
            words[native.MISSED // 8],
            words[native.TAKEN // 8],
        )
