"""Blocks that are never split, so that free memory can always be given back.

A pool that cuts blocks for small arrays out of large free ones keeps the large ones
as long as a small one lives: memory for an arena is then free and not to be had.
A block is used again on the stream that it was made on: only there what was issued
before is over before what is issued next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class WholeBlocks:
    """Free blocks by their size and stream.

    Attributes:
        total_bytes (int): Of all blocks, free or in use.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._free: dict[tuple[int, int], list[Any]] = {}

    def take(self, nbytes: int, stream: int) -> Block | None:
        """A free block of exactly this size."""
        free = self._free.get((nbytes, stream))
        return Block(self, free.pop(), nbytes, stream) if free else None

    def add(self, memory: Any, nbytes: int, stream: int) -> Block:
        """A new block.

        Args:
            memory: With its address ``ptr``; given back with the last reference.
            nbytes: Its size.
            stream: Address of the stream that will use it.
        """
        self.total_bytes += nbytes
        return Block(self, memory, nbytes, stream)

    def give(self, memory: Any, nbytes: int, stream: int) -> None:
        """A block is free."""
        self._free.setdefault((nbytes, stream), []).append(memory)

    def free_all(self) -> None:
        """Gives back what is free."""
        for (nbytes, _), blocks in self._free.items():
            self.total_bytes -= nbytes * len(blocks)
        self._free.clear()


class Block:
    """A block in use; free when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_blocks', '_memory', '_nbytes', '_stream', 'ptr')

    def __init__(
        self, blocks: WholeBlocks, memory: Any, nbytes: int, stream: int
    ) -> None:
        self._blocks = blocks
        self._memory = memory
        self._nbytes = nbytes
        self._stream = stream
        self.ptr = memory.ptr

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._blocks.give(self._memory, self._nbytes, self._stream)
