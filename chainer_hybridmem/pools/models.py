"""Pool models, and the replay of an iteration through them.

=====================  ========================================================
name                   rule
=====================  ========================================================
cudamalloc             no pool: every malloc and free calls the device API
cnmem                  one slab; smallest free block that fits, split and merged
cupy                   likewise in blocks of the device, which it asks for as needed
naive                  MXNet: a free block of exactly the rounded size
round                  MXNet: likewise, rounded to powers of two, later multiples
smartpool              offline layout, by size, best fit; a table at run time
smartpool-first-fit    likewise, first fit
exact                  offline layout, as small as can be found
=====================  ========================================================

A replay repeats one iteration: the first is cold, the later ones warm. What the
iteration starts with is allocated before the first.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.pools.layout import (
    CUDA_ALIGNMENT,
    Layout,
    check_alignment,
    exact,
    smartpool,
)
from chainer_hybridmem.pools.trace import Trace

CUPY_UNIT = 512  # bytes, CuPy's ALLOCATION_UNIT_SIZE; CnMem's granularity, too
PAGE_BYTES = 4096  # MXNET_GPU_MEM_POOL_PAGE_SIZE
LARGE_BYTES = 2**21  # MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE
LINEAR_CUTOFF = 24  # MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF
RESERVE_PERCENT = 5  # MXNET_GPU_MEM_POOL_RESERVE
ENDLESS = 2**60
NEARLY = 1.001  # times the smallest footprint counts as equal to it


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
        """See :class:`Pool`."""
        self.device_calls += 1
        self.held_bytes += nbytes
        self.occupied_bytes += nbytes
        self._served(nbytes, from_pool=False)
        return nbytes

    def free(self, block: int) -> None:
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
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
        """See :class:`Pool`."""
        self.occupied_bytes += nbytes
        self._served(nbytes, from_pool=True)
        return buffer

    def free(self, block: int) -> None:
        """See :class:`Pool`."""
        self.occupied_bytes -= self.sizes[block]


# -- by name -----------------------------------------------------------------------


def round_multiple(nbytes: int, page_bytes: int, large_bytes: int) -> int:
    """MXNet Naive: a multiple of the page; if that is large, of ``large_bytes``."""
    result = -(-nbytes // page_bytes) * page_bytes
    if result > large_bytes:
        result = -(-result // large_bytes) * large_bytes
    return result


def round_power(nbytes: int, page_bytes: int, linear_cutoff: int) -> int:
    """MXNet Round: a power of two up to ``2**linear_cutoff``, then multiples of it."""
    if nbytes > 1 << linear_cutoff:
        return -(-nbytes >> linear_cutoff) << linear_cutoff
    return max(1 << (nbytes - 1).bit_length(), page_bytes)


def _cudamalloc(trace: Trace) -> Pool:
    return CudaMalloc()


def _cnmem(trace: Trace, reserve_bytes: int | None = None) -> Pool:
    if reserve_bytes is not None and not 0 < reserve_bytes < ENDLESS:
        raise OptionError(f'reserve_bytes is {reserve_bytes}; it must be above zero.')
    return CnMem(reserve_bytes)


def _cupy(trace: Trace) -> Pool:
    return SplittingPool()


def _naive(
    trace: Trace,
    page_bytes: int = PAGE_BYTES,
    large_bytes: int = LARGE_BYTES,
    device_memory_bytes: int | None = None,
    reserve_percent: int = RESERVE_PERCENT,
) -> Pool:
    if page_bytes < 1 or large_bytes < 1:
        raise OptionError(
            f'page_bytes is {page_bytes} and large_bytes {large_bytes}; both must be '
            f'above zero.'
        )
    return SizePool(
        lambda n: round_multiple(n, page_bytes, large_bytes),
        device_memory_bytes,
        reserve_percent,
    )


def _round(
    trace: Trace,
    page_bytes: int = PAGE_BYTES,
    linear_cutoff: int = LINEAR_CUTOFF,
    device_memory_bytes: int | None = None,
    reserve_percent: int = RESERVE_PERCENT,
) -> Pool:
    check_alignment(page_bytes)
    if not 20 <= linear_cutoff <= 34 or page_bytes > 1 << linear_cutoff:
        raise OptionError(
            f'linear_cutoff is {linear_cutoff}; it must be from 20 to 34, and the page '
            f'({page_bytes} bytes) no larger than 2**linear_cutoff.'
        )
    return SizePool(
        lambda n: round_power(n, page_bytes, linear_cutoff),
        device_memory_bytes,
        reserve_percent,
    )


def _smartpool(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(smartpool(trace, alignment), trace.sizes)


def _smartpool_first_fit(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(smartpool(trace, alignment, first_fit=True), trace.sizes)


def _exact(trace: Trace, alignment: int = CUDA_ALIGNMENT) -> Pool:
    return TablePool(exact(trace, alignment), trace.sizes)


POOLS: dict[str, Callable[..., Pool]] = {
    'cudamalloc': _cudamalloc,
    'cnmem': _cnmem,
    'cupy': _cupy,
    'naive': _naive,
    'round': _round,
    'smartpool': _smartpool,
    'smartpool-first-fit': _smartpool_first_fit,
    'exact': _exact,
}


def check_names(names: Iterable[str]) -> None:
    """Refuses names of pools that there are not.

    Raises:
        UnknownNameError: Naming the pools there are.
    """
    for name in names:
        if name not in POOLS:
            close = difflib.get_close_matches(str(name), POOLS, 1)
            hint = f' Did you mean {close[0]!r}?' if close else ''
            raise UnknownNameError(
                f'There is no pool {name!r}.{hint} Pools: {", ".join(POOLS)}.'
            )


def make_pool(name: str, trace: Trace, **options: Any) -> Pool:
    """An empty pool.

    Raises:
        UnknownNameError: Naming the pools there are.
        OptionError: If it has no such option, or not with this value.
    """
    check_names([name])
    known = list(inspect.signature(POOLS[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise OptionError(
                f'Pool {name!r} has no option {option!r}; it has '
                f'{", ".join(known) or "none"}.'
            )
    return POOLS[name](trace, **options)


# -- replay ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Series:
    """A pool over time: one value after each request, all iterations in a row.

    The four series of MXNet's profiler (occupied, free, from the pool, from the
    device API), and the load. Shapes ``(requests,)``, int64, bytes.
    """

    load_bytes: np.ndarray
    occupied_bytes: np.ndarray
    held_bytes: np.ndarray
    pool_bytes: np.ndarray
    device_bytes: np.ndarray

    @property
    def free_bytes(self) -> np.ndarray:
        """Held, but not in use."""
        return self.held_bytes - self.occupied_bytes

    @property
    def fragmentation(self) -> np.ndarray:
        """Part of the held bytes that nobody has asked for, in [0, 1]."""
        held = np.maximum(self.held_bytes, 1)
        return np.clip(1 - self.load_bytes / held, 0, 1) * (self.held_bytes > 0)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a pool has done with an iteration, repeated.

    Attributes:
        pool (str): Name of the pool.
        iterations (int): How often it ran.
        footprint_bytes (int): Most bytes held at any moment.
        peak_load_bytes (int): Most bytes asked for at any moment.
        device_calls (int): Calls to the device API, in all iterations.
        pool_bytes (int): Bytes served without one, in all iterations.
        device_bytes (int): Bytes served by one, in all iterations.
        warm_device_calls (int): Calls in the last iteration alone.
        series (Series): The pool over time.
        layout (Layout or None): Of the pools that have one.
    """

    pool: str
    iterations: int
    footprint_bytes: int
    peak_load_bytes: int
    device_calls: int
    pool_bytes: int
    device_bytes: int
    warm_device_calls: int
    series: Series
    layout: Layout | None = None

    @property
    def competitive_ratio(self) -> float:
        """Footprint over peak load."""
        if not self.peak_load_bytes:
            return 1.0
        return self.footprint_bytes / self.peak_load_bytes

    def figures(self) -> dict[str, Any]:
        """Plain values; the columns of ``hybridmem layout``."""
        layout = self.layout
        return {
            'pool': self.pool,
            'footprint_bytes': self.footprint_bytes,
            'peak_load_bytes': self.peak_load_bytes,
            'competitive_ratio': self.competitive_ratio,
            'device_calls': self.device_calls,
            'pool_bytes': self.pool_bytes,
            'device_bytes': self.device_bytes,
            'warm_device_calls': self.warm_device_calls,
            'iterations': self.iterations,
            'bound_bytes': layout.bound_bytes if layout is not None else None,
            'optimal': layout.optimal if layout is not None else None,
            'found_by': layout.found_by if layout is not None else None,
        }


def replay(trace: Trace, pool: str, iterations: int = 2, **options: Any) -> Replay:
    """Runs an iteration through a pool, several times in a row.

    Args:
        trace: The iteration.
        pool: A name of :data:`POOLS`.
        iterations: How often; the first is cold.
        options: Of that pool.

    Raises:
        UnknownNameError: If there is no such pool.
        OptionError: If it has no such option, or not with this value.
    """
    if iterations < 1:
        raise OptionError(f'iterations is {iterations}; it must be at least 1.')
    model = make_pool(pool, trace, **options)
    run = _Run(trace, model)
    calls = 0
    for _ in range(iterations):
        calls = model.device_calls
        run.iterate()
    series = Series(*np.array(run.rows, np.int64).reshape(-1, 5).T)
    held = int(series.held_bytes.max(initial=0))
    return Replay(
        pool=pool,
        iterations=iterations,
        footprint_bytes=held,
        peak_load_bytes=int(series.load_bytes.max(initial=0)),
        device_calls=model.device_calls,
        pool_bytes=model.pool_bytes,
        device_bytes=model.device_bytes,
        warm_device_calls=model.device_calls - (calls if iterations > 1 else 0),
        series=series,
        layout=model.layout if isinstance(model, TablePool) else None,
    )


class _Run:
    """Feeds a pool with one iteration after the other."""

    def __init__(self, trace: Trace, pool: Pool) -> None:
        self.trace, self.pool = trace, pool
        self.blocks: dict[int, Any] = {}  # by buffer; None for empty ones
        self.load = 0
        self.rows: list[tuple[int, int, int, int, int]] = []
        born = {event - 1 for event in trace.events if event > 0}
        freed = {-event - 1 for event in trace.events if event < 0}
        self.initial = [i for i in range(len(trace.sizes)) if i not in born]
        self.leftovers = born - freed

    def iterate(self) -> None:
        """One iteration; what the one before has left is taken over first."""
        carried = {}
        for left, taken in self.trace.carried:
            if left in self.blocks:
                carried[taken] = self.blocks.pop(left)
        for buffer in sorted(self.leftovers & set(self.blocks)):
            self._free(buffer)
        self.blocks.update(carried)
        for buffer in self.initial:
            if buffer not in self.blocks:
                self._malloc(buffer)
        for event in self.trace.events:
            if event > 0:
                self._malloc(event - 1)
            else:
                self._free(-event - 1)

    def _malloc(self, buffer: int) -> None:
        nbytes = self.trace.sizes[buffer]
        self.blocks[buffer] = self.pool.malloc(nbytes, buffer) if nbytes else None
        self.load += nbytes
        self._note()

    def _free(self, buffer: int) -> None:
        block = self.blocks.pop(buffer)
        if block is not None:
            self.pool.free(block)
        self.load -= self.trace.sizes[buffer]
        self._note()

    def _note(self) -> None:
        pool = self.pool
        self.rows.append(
            (
                self.load,
                pool.occupied_bytes,
                pool.held_bytes,
                pool.pool_bytes,
                pool.device_bytes,
            )
        )


def compare(
    trace: Trace,
    alignment: int = CUDA_ALIGNMENT,
    pools: Iterable[str] = POOLS,
    iterations: int = 2,
) -> list[Replay]:
    """Replays an iteration through several pools, with their default options.

    Raises:
        UnknownNameError: If there is no such pool.
        OptionError: If the alignment is not a power of two.
    """
    results = []
    for name in pools:
        known = inspect.signature(POOLS[name]).parameters if name in POOLS else ()
        options = {'alignment': alignment} if 'alignment' in known else {}
        results.append(replay(trace, name, iterations, **options))
    return results


def recommend(replays: Sequence[Replay]) -> Replay:
    """Of the smallest footprints the one with the fewest device calls once warm.

    Footprints less than a thousandth apart count as equal: rounding is no reason. The
    yardstick ``cudamalloc`` is recommended only if it is alone: the model knows
    nothing of what thousands of calls cost, nor of the driver's fragmentation.
    """
    pools = [r for r in replays if r.pool != 'cudamalloc'] or replays
    least = min(r.footprint_bytes for r in pools)
    near = [r for r in pools if r.footprint_bytes <= least * NEARLY]
    return min(near, key=lambda r: (r.warm_device_calls, r.footprint_bytes))
