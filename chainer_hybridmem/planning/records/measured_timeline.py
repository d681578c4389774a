"""Types only: when everything really ran in one guided iteration.

The counterpart of :class:`.records.timeline.Timeline`, which is the prediction. Times
are seconds from the start of the iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.units import format_count, format_seconds

# Kinds of intervals of operations.
OPERATIONS = ('forward', 'backward', 'all-reduce', 'update')


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The memory pool at one moment.

    Attributes:
        seconds (float): When.
        occupied_bytes (int): In use.
        free_bytes (int): Held from the system or driver, but not in use.
        pool_allocated_bytes (int): Served in this iteration from memory the pool held.
        device_allocated_bytes (int): Asked in it of the system or driver.
        peak_bytes (int): Highest ``occupied_bytes`` from here to the next sample.
    """

    seconds: float
    occupied_bytes: int
    free_bytes: int
    pool_allocated_bytes: int
    device_allocated_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One malloc or free.

    Attributes:
        block (int): ``+id`` for a malloc, ``-id`` for a free.
        nbytes (int): Size.
        operation (int): Operation during which, or before which, it happened.
        storage (int): Storage of the profile that a planned action made; -1 if it is
            not known.
    """

    block: int
    nbytes: int
    operation: int
    storage: int = -1


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured iteration.

    Attributes:
        planner (str): Planner of the plan that was followed.
        profile_fingerprint (str): Of the plan's profile.
        memory_limit_bytes (int): Limit of the session.
        device (dict): Name, kind and versions.
        total_seconds (float): Time of the iteration.
        load_bytes (tuple of int): Highest load while each operation ran, what was done
            before it included.
        intervals (tuple of Interval): All lanes, by start. One for each operation, in
            order. A stall or replay may lie inside another interval of compute.
        uses (tuple of tuple): Storage and the operation that a swap-in was waited for.
        samples (tuple of Sample): The pool, in order of time.
        events (tuple of MemoryEvent): Every malloc and free, in host issue order.
    """

    planner: str
    profile_fingerprint: str
    memory_limit_bytes: int
    device: dict[str, Any]
    total_seconds: float
    load_bytes: tuple[int, ...]
    intervals: tuple[Interval, ...]
    uses: tuple[tuple[int, int], ...]
    samples: tuple[Sample, ...]
    events: tuple[MemoryEvent, ...]

    def __repr__(self) -> str:
        return (
            f'<Measured timeline of a plan of {self.planner}: '
            f'{format_count(len(self.load_bytes), "operation")}, '
            f'{format_seconds(self.total_seconds)}>'
        )

    @property
    def timeline(self) -> Timeline:
        """The measured intervals in the form of a prediction."""

        def seconds(kind: str) -> float:
            chosen = (i for i in self.intervals if i.kind == kind)
            return sum(i.end_seconds - i.start_seconds for i in chosen)

        return Timeline(
            total_seconds=self.total_seconds,
            peak_bytes=max(self.load_bytes),
            stall_seconds=seconds('stall'),
            host_stall_seconds=0.0,
            recompute_seconds=seconds('recompute'),
            load_bytes=self.load_bytes,
            intervals=self.intervals,
        )


FORMAT = 'chainer_hybridmem/timeline'
VERSION = 1
KINDS = {
    'compute': (*OPERATIONS, 'recompute', 'stall'),
    'd2h': ('swap-out',),
    'h2d': ('swap-in',),
}
_LONGEST_SECONDS = 1e9


def serialise_timeline(measured: Measured) -> str:
    """The JSON text of a measured timeline."""
    return files.serialise(measured, FORMAT, VERSION)


def parse_timeline(text: str) -> Measured:
    """Reads what :func:`serialise_timeline` has written.

    Raises:
        FormatError: If the text is no such file, or its parts contradict each other.
    """
    measured = files.read_record(Measured, text, FORMAT, VERSION)
    check_measured(measured)
    return measured


def check_measured(measured: Measured) -> None:
    """Refuses a measured timeline whose parts contradict each other.

    Raises:
        FormatError: Naming the first contradiction found.
    """
    if not 0 <= measured.total_seconds < _LONGEST_SECONDS:
        raise _broken(f'it takes {measured.total_seconds} seconds')
    sizes = (measured.memory_limit_bytes, *measured.load_bytes)
    if not all(0 <= n < files.LARGEST_SIZE for n in sizes):
        raise _broken(f'its limit and loads are {sizes[:9]}')
    operations = [i for i in measured.intervals if i.kind in OPERATIONS]
    if not operations or len(operations) != len(measured.load_bytes):
        raise _broken(
            f'it has {len(operations)} operations and {len(measured.load_bytes)} loads'
        )
    _check_intervals(measured.intervals)
    for one, two in itertools.pairwise(operations):
        if two.start_seconds < one.end_seconds:
            raise _broken(f'{two.label!r} begins before {one.label!r} has ended')
    for storage, operation in measured.uses:
        if storage < 0 or not 0 <= operation < len(operations):
            raise _broken(f'storage {storage} is used by operation {operation}')
    _check_samples(measured.samples)
    _check_events(measured.events, len(operations))


def _check_intervals(intervals: tuple[Interval, ...]) -> None:
    for interval in intervals:
        if interval.kind not in KINDS.get(interval.lane, ()):
            raise _broken(f'a {interval.kind!r} is in lane {interval.lane!r}')
        first, last = interval.start_seconds, interval.end_seconds
        if not -_LONGEST_SECONDS < first <= last < _LONGEST_SECONDS:
            raise _broken(f'{interval.label!r} runs from {first} to {last}')
        if not -1 <= interval.storage < files.LARGEST_SIZE:
            raise _broken(f'{interval.label!r} has storage {interval.storage}')


def _check_samples(samples: tuple[Sample, ...]) -> None:
    before = -math.inf
    for sample in samples:
        if not before <= sample.seconds < _LONGEST_SECONDS:
            raise _broken(f'a sample is at {sample.seconds} after one at {before}')
        before = sample.seconds
        if not all(0 <= n < files.LARGEST_SIZE for n in dataclasses.astuple(sample)):
            raise _broken(f'a sample is {sample}')


def _check_events(events: tuple[MemoryEvent, ...], operations: int) -> None:
    """Each block is allocated once at most, and freed once while it is there."""
    allocated: set[int] = set()
    freed: set[int] = set()
    for event in events:
        block = abs(event.block)
        seen = allocated if event.block > 0 else freed
        if not block or block in seen or (event.block > 0 and block in freed):
            raise _broken(f'block {event.block} comes twice or after its free')
        seen.add(block)
        if not 0 <= event.nbytes < files.LARGEST_SIZE:
            raise _broken(f'block {event.block} has {event.nbytes} bytes')
        if not 0 <= event.operation < operations or event.storage < -1:
            raise _broken(f'event {event} is out of range')


def _broken(why: str) -> FormatError:
    return files.broken('timeline', why)
