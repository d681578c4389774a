"""The replay of an iteration through pool models.

A replay repeats one iteration: the first is cold, the later ones warm. What the
iteration starts with is allocated before the first.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.lab.pools.catalogue import POOLS, make_pool
from chainer_hybridmem.lab.pools.models import Pool, TablePool
from chainer_hybridmem.planning.layouts.layout import CUDA_ALIGNMENT, Layout
from chainer_hybridmem.planning.layouts.trace import Trace

NEARLY = 1.001  # times the smallest footprint counts as equal to it


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
        free: np.ndarray = self.held_bytes - self.occupied_bytes
        return free

    @property
    def fragmentation(self) -> np.ndarray:
        """Part of the held bytes beyond the load, in [0, 1]."""
        held = np.maximum(self.held_bytes, 1)
        beyond = np.clip(1 - self.load_bytes / held, 0, 1)
        fragmentation: np.ndarray = beyond * (self.held_bytes > 0)
        return fragmentation


@dataclasses.dataclass(frozen=True)
class PoolReplay:
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


def replay(trace: Trace, pool: str, iterations: int = 2, **options: Any) -> PoolReplay:
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
    run = _PoolFeeder(trace, model)
    calls = 0
    for _ in range(iterations):
        calls = model.device_calls
        run.iterate()
    series = Series(*np.array(run.rows, np.int64).reshape(-1, 5).T)
    held = int(series.held_bytes.max(initial=0))
    return PoolReplay(
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


class _PoolFeeder:
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
) -> list[PoolReplay]:
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


def recommend(replays: Sequence[PoolReplay]) -> PoolReplay:
    """Picks the pool with the fewest device calls of those with least footprint.

    Footprints less than a thousandth apart count as equal: rounding is no reason. The
    yardstick ``cudamalloc`` is recommended only if it is alone: the model knows
    nothing of what thousands of calls cost, nor of the driver's fragmentation.
    """
    pools = [r for r in replays if r.pool != 'cudamalloc'] or replays
    least = min(r.footprint_bytes for r in pools)
    near = [r for r in pools if r.footprint_bytes <= least * NEARLY]
    return min(near, key=lambda r: (r.warm_device_calls, r.footprint_bytes))
