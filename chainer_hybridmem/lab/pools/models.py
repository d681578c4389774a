"""Pool models: what serves mallocs and frees, as real pools do."""

from __future__ import annotations

import abc
import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.layouts.layout import Layout

CUPY_UNIT = 512  # bytes, CuPy's ALLOCATION_UNIT_SIZE; CnMem's granularity, too
ENDLESS = 2**60


class Pool(abc.ABC):
    """What serves mallocs and frees.

    Attributes:
        held_bytes (int): Taken from the device and not given back.
        occupied_bytes (int): Of these, in use, rounding included.
        device_calls (int): Calls to the device API so far.
        pool_bytes (int): Bytes asked for and served without one, so far.
        device_bytes (int): Bytes asked for and served by one, so far.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.occupied_bytes = 0
        self.device_calls = 0
        self.pool_bytes = 0
        self.device_bytes = 0

    @abc.abstractmethod
    def malloc(self, nbytes: int, buffer: int) -> Any:
        """Serves one request above zero; returns what :meth:`free` is given."""

    @abc.abstractmethod
    def free(self, block: Any) -> None:
        """Takes a block back."""

    def _served(self, nbytes: int, from_pool: bool) -> None:
        if from_pool:
            self.pool_bytes += nbytes
        else:
            self.device_bytes += nbytes


class CudaMalloc(Pool):
    """No pool. Its footprint is the load: the yardstick of Zhang et al."""

    def malloc(self, nbytes: int, buffer: int) -> int:
        self.device_calls += 1
        self.held_bytes += nbytes
        self.occupied_bytes += nbytes
        self._served(nbytes, from_pool=False)
        return nbytes

    def free(self, block: int) -> None:
        self.device_calls += 1
        self.held_bytes -= block
        self.occupied_bytes -= block


class _Block:
    """A part of a segment, linked to its neighbours in the same segment."""

    __slots__ = ('address', 'free', 'left', 'nbytes', 'right')

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.free = True
        self.left: _Block | None = None
        self.right: _Block | None = None


class SplittingPool(Pool):
    """Best fit with splitting and merging.

    CuPy (``SingleDeviceMemoryPool`` in ``cupy/cuda/memory.pyx``, versions 13 and 14):
    sizes are multiples of 512 bytes, one bin each; the smallest block that is large
    enough is taken and what is left over split off; a free block is merged with
    free neighbours of the same segment. Nothing is given back to the device. CuPy
    takes any block of a bin, here it is the one at the lowest address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.available: list[tuple[int, int]] = []  # (bytes, address), ascending
        self.blocks: dict[int, _Block] = {}  # free ones, by address
        self.device_end = 0

    def malloc(self, nbytes: int, buffer: int) -> _Block:
        need = -(-nbytes // CUPY_UNIT) * CUPY_UNIT
        at = bisect.bisect_left(self.available, (need, 0))
        from_pool = at < len(self.available)
        block = self._take(at) if from_pool else self._segment(need)
        if block.nbytes > need:
            self._split(block, need)
        block.free = False
        self.occupied_bytes += need
        self._served(nbytes, from_pool)
        return block

    def free(self, block: _Block) -> None:
        self.occupied_bytes -= block.nbytes
        block.free = True
        if block.right is not None and block.right.free:
            self._remove(block.right)
            self._merge(block, block.right)
        if block.left is not None and block.left.free:
            self._remove(block.left)
            block = self._merge(block.left, block)
        self._add(block)

    def _segment(self, nbytes: int) -> _Block:
        self.device_calls += 1
        self.held_bytes += nbytes
        block = _Block(self.device_end, nbytes)
        self.device_end += nbytes
        return block

    def _add(self, block: _Block) -> None:
        bisect.insort(self.available, (block.nbytes, block.address))
        self.blocks[block.address] = block

    def _remove(self, block: _Block) -> None:
        at = bisect.bisect_left(self.available, (block.nbytes, block.address))
        self._take(at)

    def _take(self, at: int) -> _Block:
        return self.blocks.pop(self.available.pop(at)[1])

    def _split(self, block: _Block, nbytes: int) -> None:
        rest = _Block(block.address + nbytes, block.nbytes - nbytes)
        rest.left, rest.right = block, block.right
        if rest.right is not None:
            rest.right.left = rest
        block.right, block.nbytes = rest, nbytes
        self._add(rest)

    def _merge(self, block: _Block, right: _Block) -> _Block:
        block.nbytes += right.nbytes
        block.right = right.right
        if block.right is not None:
            block.right.left = block
        return block


class CnMem(SplittingPool):
    """NVIDIA's CnMem (``src/cnmem.cpp``): one slab taken at the start, best fit.

    The list of free blocks is sorted by address and the first of the smallest is
    taken; blocks are split and merged as in CuPy's pool.

    Args:
        reserve_bytes: Size of the slab; beyond it the device is asked. None: as
            large as needed, and the footprint is the highest address ever used, about
            the smallest slab that the iteration gets along with.
    """

    def __init__(self, reserve_bytes: int | None = None) -> None:
        super().__init__()
        self.measured = reserve_bytes is None
        slab = self._segment(ENDLESS if reserve_bytes is None else reserve_bytes)
        if self.measured:
            self.held_bytes = 0
        self._add(slab)

    def malloc(self, nbytes: int, buffer: int) -> _Block:
        block = super().malloc(nbytes, buffer)
        if self.measured:
            self.held_bytes = max(self.held_bytes, block.address + block.nbytes)
        return block


class SizePool(Pool):
    """MXNet's pools: a free block is used again for exactly its rounded size.

    ``src/storage/pooled_storage_manager.h``. If the device is short, which is when
    less than the reserve would stay free, all free blocks are given back first.

    Args:
        rounded: Bytes of the block for so many bytes.
        device_memory_bytes: Memory of the device; None for no end of it.
        reserve_percent: Of it that stays free.
    """

    def __init__(
        self,
        rounded: Callable[[int], int],
        device_memory_bytes: int | None,
        reserve_percent: int,
    ) -> None:
        super().__init__()
        if not 0 <= reserve_percent <= 100:
            raise OptionError(
                f'reserve_percent is {reserve_percent}; it must be from 0 to 100.'
            )
        self.rounded = rounded
        self.device_memory_bytes = device_memory_bytes
        self.reserve_percent = reserve_percent
        self.available: dict[int, int] = defaultdict(int)  # free blocks by size

    def malloc(self, nbytes: int, buffer: int) -> int:
        need = self.rounded(nbytes)
        from_pool = self.available[need] > 0
        if from_pool:
            self.available[need] -= 1
        else:
            if self._short(need):
                self._release_all()
            self.device_calls += 1
            self.held_bytes += need
        self.occupied_bytes += need
        self._served(nbytes, from_pool)
        return need

    def free(self, block: int) -> None:
        self.occupied_bytes -= block
        self.available[block] += 1

    def _short(self, need: int) -> bool:
        if self.device_memory_bytes is None:
            return False
        reserve = self.device_memory_bytes * self.reserve_percent // 100
        return self.device_memory_bytes - self.held_bytes - reserve < need

    def _release_all(self) -> None:
        for nbytes, count in self.available.items():
            self.device_calls += count
            self.held_bytes -= count * nbytes
        self.available.clear()


class TablePool(Pool):
    """A layout made before: one slab, every request at its offset."""

    def __init__(self, layout: Layout, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layout = layout
        self.sizes = sizes
        self.held_bytes = layout.footprint_bytes
        self.device_calls = 1

    def malloc(self, nbytes: int, buffer: int) -> int:
        self.occupied_bytes += nbytes
        self._served(nbytes, from_pool=True)
        return buffer

    def free(self, block: int) -> None:
        self.occupied_bytes -= self.sizes[block]
