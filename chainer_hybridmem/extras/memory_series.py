"""Samples a memory pool while Chainer runs, cheaply enough to leave on.

The four series of MXNet's memory pool profile: bytes in use, bytes
held but free, bytes served from what the pool held, bytes asked of the system or
driver. They are sampled where an operation begins, not at every malloc; the pool
itself remembers the highest load in between.

Note: [bounded time]
    After each sample operations pass unseen for a hundred times as long as the sample
    took. Operations of a millisecond are all sampled; of those that take some
    microseconds only some are, and where the next samples are that far away, the
    clock is looked at only every few operations.

Note: [bounded log]
    Samples go to one block of memory, taken at the start. When it is full, two
    neighbours become one, which has the later one's figures and the higher peak,
    and from then on only every second (fourth, ...) operation is sampled. So a
    log always spans the whole run.
"""

from __future__ import annotations

import array
import json
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import chainer

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.reporting.chrome_trace import profile_trace
from chainer_hybridmem.training.devices.protocol import PoolFigures

SERIES = (
    'occupied_bytes',
    'free_bytes',
    'pool_allocated_bytes',
    'device_allocated_bytes',
)
SHARE = 0.01  # of the time, that sampling may take
MOST_UNSEEN = 7  # operations that pass without a look at the clock
_ROW = struct.Struct('=d6q')
_MOST_LABELS = 4096


class MeasuredPool(Protocol):
    """Where the figures come from."""

    name: str
    unknown: tuple[str, ...]

    def open(self) -> None:
        """Begins to count."""

    def close(self) -> None:
        """Ends what :meth:`open` began."""

    def figures(self) -> PoolFigures:
        """The figures now; the peak begins anew."""


class Sample(NamedTuple):
    """The pool where one operation begins.

    Attributes:
        seconds (float): Since profiling began.
        label (str): The operation that begins.
        occupied_bytes (int): In use.
        free_bytes (int): Held from the system or driver, but not in use.
        pool_allocated_bytes (int): Served since profiling began from memory that the
            pool held already.
        device_allocated_bytes (int): Asked of the system or driver since then.
        peak_bytes (int): Highest ``occupied_bytes`` since the sample before.
    """

    seconds: float
    label: str
    occupied_bytes: int
    free_bytes: int
    pool_allocated_bytes: int
    device_allocated_bytes: int
    peak_bytes: int


class SampleLog:
    """A log of samples in one block of memory; see [bounded log].

    Args:
        capacity (int): Most samples kept, an even number.

    Attributes:
        stride (int): Operations from one sample to the next, if there is time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows = bytearray(_ROW.size * capacity)
        self._count = 0
        self._labels: dict[str, int] = {}
        self.stride = 1

    def append(self, seconds: float, label: str, figures: PoolFigures) -> None:
        """Adds a sample; halves the log first if it is full."""
        number = self._labels.get(label)
        if number is None:
            number = len(self._labels)
            if number < _MOST_LABELS:
                self._labels[label] = number
            else:
                number = -1
        if self._count == self._capacity:
            self._halve()
        _ROW.pack_into(self._rows, _ROW.size * self._count, seconds, number, *figures)
        self._count += 1

    def _halve(self) -> None:
        rows = list(_ROW.iter_unpack(self._rows))
        for i, (first, second) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
            peak = max(first[-1], second[-1])
            _ROW.pack_into(self._rows, _ROW.size * i, *second[:-1], peak)
        self._count //= 2
        self.stride *= 2

    def read(self, pool_bytes: int, device_bytes: int) -> list[Sample]:
        """The samples in order of time.

        Args:
            pool_bytes: What the pool had served when profiling began.
            device_bytes: What it had asked for then.
        """
        names = [*self._labels, 'other']
        rows = _ROW.iter_unpack(memoryview(self._rows)[: _ROW.size * self._count])
        return [
            Sample(
                t, names[n], used, free, served - pool_bytes, asked - device_bytes, peak
            )
            for t, n, used, free, served, asked, peak in rows
        ]


class MemoryProfiler(chainer.FunctionHook):
    """Samples a pool while it is entered; see :func:`profile_memory`.

    Args:
        find_pool: Called when it is entered.
        capacity: Most samples kept; see [bounded log].
        share: Of the time, that sampling may take; 0 for no limit.
    """

    name = 'hybridmem-memory'

    def __init__(
        self, find_pool: Callable[[], MeasuredPool], capacity: int, share: float = SHARE
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 2:
            raise OptionError(f'capacity is {capacity!r}; 2 samples or more are kept.')
        self._find_pool = find_pool
        self._capacity = capacity & -2
        self._log = SampleLog(0)
        self._pool: MeasuredPool | None = None
        self._open = False
        self._start = 0.0
        self._base = (0, 0)
        self._pause = 1 / share if share else 0.0
        self._start_counting()

    def _start_counting(self) -> None:
        """No operation has been seen yet."""
        self._passed = 0  # operations, up to the last one looked at
        self._span = self._left = 0  # that pass unseen after it, and those to come
        self._looked = self._resume = 0.0

    def __enter__(self) -> MemoryProfiler:
        if self._open:
            raise SessionError('This memory profiler is entered already.')
        return begin_whole(self, self._begin)

    def _begin(self) -> MemoryProfiler:
        pool = self._find_pool()
        pool.open()
        try:
            super().__enter__()
        except BaseException:
            pool.close()
            raise
        self._pool, self._open = pool, True
        self._log = SampleLog(self._capacity)
        self._start_counting()
        first = pool.figures()
        self._base = first.pool_allocated_bytes, first.device_allocated_bytes
        self._start = timing.now()
        self._sample('start')
        return self

    @held_back
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if not self._open:
            return
        assert self._pool is not None
        self._open = False
        self._sample('end')
        super().__exit__(kind, error, trace)
        self._pool.close()

    # -- hooks ----------------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """A forward function begins."""
        self._left -= 1
        if self._left < 0:
            self._look(function, '')

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """A backward function begins."""
        self._left -= 1
        if self._left < 0:
            self._look(function, 'backward of ')

    def _look(self, function: Any, prefix: str) -> None:
        """Samples if it is time to, and decides how many operations pass unseen."""
        start = now = timing.now()
        passed = self._span - self._left
        self._passed += passed
        unseen = 0
        if start >= self._resume:
            self._sample(prefix + function.label)
            now = timing.now()
            self._resume = now + (now - start) * self._pause
            unseen = self._log.stride - 1
        pace = (start - self._looked) / passed  # seconds per operation
        if pace * MOST_UNSEEN < self._resume - now:
            unseen = max(unseen, MOST_UNSEEN)
        self._looked = start
        self._span = self._left = unseen

    def _sample(self, label: str) -> None:
        assert self._pool is not None
        seconds = timing.now() - self._start
        self._log.append(seconds, label, self._pool.figures())

    # -- results --------------------------------------------------------------
    @property
    def stride(self) -> int:
        """Operations from one sample to the next, if there is time."""
        return self._log.stride

    @property
    def operations(self) -> int:
        """Operations seen so far."""
        return self._passed + self._span - self._left

    @property
    def pool(self) -> str:
        """Name of the pool; empty before it is entered."""
        return '' if self._pool is None else self._pool.name

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this pool cannot tell, in words."""
        return () if self._pool is None else self._pool.unknown

    @property
    def samples(self) -> list[Sample]:
        """The samples so far, in order of time."""
        return self._log.read(*self._base)

    def series(self) -> dict[str, array.array[Any]]:
        """The four series, ``seconds`` and ``peak_bytes``, each as an array."""
        samples = self.samples
        return {
            name: array.array(
                'd' if name == 'seconds' else 'q', [getattr(s, name) for s in samples]
            )
            for name in ('seconds', *SERIES, 'peak_bytes')
        }

    def save(self, path: str) -> None:
        """Writes the log as a Chrome trace, for Perfetto.

        Raises:
            FormatError: If the file cannot be written.
        """
        trace = profile_trace(self.samples, self.pool)
        library.write_text(path, json.dumps(trace))

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run.

        Returns:
            dict: Name of the pool, samples, operations, highest bytes in use and
            held, bytes served and asked for in all, what is unknown.
        """
        samples = self.samples
        last = samples[-1] if samples else None
        return {
            'pool': self.pool,
            'samples': len(samples),
            'operations': self.operations,
            'peak_bytes': max((s.peak_bytes for s in samples), default=0),
            'held_bytes': max(
                (s.occupied_bytes + s.free_bytes for s in samples), default=0
            ),
            'pool_allocated_bytes': last.pool_allocated_bytes if last else 0,
            'device_allocated_bytes': last.device_allocated_bytes if last else 0,
            'unknown': list(self.unknown),
        }
