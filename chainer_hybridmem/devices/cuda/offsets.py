"""Planned offsets in one piece of GPU memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from chainer_hybridmem.devices.cuda.arena_memory import ArenaMemory
from chainer_hybridmem.devices.cuda.block_pool import BlockPool
from chainer_hybridmem.devices.cuda.gpu import UNIT_BYTES, Gpu, round_up
from chainer_hybridmem.devices.ports import Offsets
from chainer_hybridmem.devices.values import PlaceFigures

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena


class CudaOffsets(Offsets):
    """The arena is one block of the driver's.

    Args:
        gpu: Where it lies.
        pool: Which gives that block, and whose other blocks lie beside it.
    """

    alignment_bytes = UNIT_BYTES
    moves_in = False

    def __init__(self, gpu: Gpu, pool: BlockPool) -> None:
        self._gpu = gpu
        self._pool = pool
        self._counted = PlaceFigures(0, 0, 0)  # in arenas that are gone
        self._missing_bytes = 0

    def block_bytes(self, nbytes: int) -> int:
        return round_up(nbytes)

    def follow(self, arena: Arena) -> bool:
        """See :meth:`.Offsets.follow`; a larger arena replaces a smaller one."""
        memory = self._pool.arena
        if memory is None or memory.nbytes < arena.slab_bytes:
            memory = self._replace(memory, arena.slab_bytes)
        if memory is None:
            return False
        memory.table.expect(arena)
        return True

    def _replace(self, smaller: ArenaMemory | None, nbytes: int) -> ArenaMemory | None:
        """Memory for an arena; None if there is none beside what blocks need."""
        former = weakref.ref(smaller) if smaller is not None else None
        del smaller
        counted = self._counted
        self.release()
        block = self._pool.new_block(nbytes)
        if block is None:
            self._missing_bytes = max(0, self._pool.excess_bytes(nbytes))
            # Where blocks keep it alive, the rest of it is still to be used.
            kept = former() if former is not None else None
            if kept is not None:
                self._pool.use_arena(kept)
                self._counted = counted
            return None
        memory = ArenaMemory(block, nbytes, self._gpu.compute().ptr)
        self._pool.use_arena(memory)
        return memory

    @property
    def missing_bytes(self) -> int:
        return self._missing_bytes

    def release(self) -> None:
        """See :meth:`.Offsets.release`."""
        self._counted = self.figures()
        self._pool.use_arena(None)  # it goes with the last block in it
        self._pool.give_back()

    def seek(self, k: int) -> None:
        memory = self._pool.arena
        if memory is not None:
            memory.table.seek(k)

    def figures(self) -> PlaceFigures:
        memory = self._pool.arena
        if memory is None:
            return self._counted
        return PlaceFigures(
            *map(sum, zip(self._counted, memory.table.figures(), strict=True))
        )

    def close(self) -> None:
        self._pool.use_arena(None)
