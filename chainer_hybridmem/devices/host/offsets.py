"""Planned offsets in the arena of NumPy's memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from chainer_hybridmem.devices.host import counter_words
from chainer_hybridmem.devices.host.memory import HostMemory
from chainer_hybridmem.devices.offset_table import OffsetTable
from chainer_hybridmem.devices.ports import Offsets
from chainer_hybridmem.devices.values import PlaceFigures

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena


class HostOffsets(Offsets):
    """The arena is a range of addresses as large as the limit.

    Args:
        memory: Which reserves it.
    """

    alignment_bytes = counter_words.ALIGNMENT
    moves_in = True  # it takes addresses first, and memory as it is touched

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    @functools.cached_property
    def _table(self) -> OffsetTable:
        return OffsetTable(self._memory.counter.table_address)

    def block_bytes(self, nbytes: int) -> int:
        return counter_words.block_bytes(nbytes)

    def follow(self, arena: Arena) -> bool:
        """See :meth:`.Offsets.follow`; the system may have refused the addresses."""
        counter = self._memory.counter
        if self._table.expect(arena):
            counter.release_side()  # the arena takes its memory over
        return counter.arena_bytes >= arena.slab_bytes

    def seek(self, k: int) -> None:
        self._table.seek(k)

    def figures(self) -> PlaceFigures:
        return self._table.figures()
