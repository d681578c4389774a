"""Types only: when everything really ran in one guided iteration.

The counterpart of :class:`chainer_hybridmem.records.timeline.Timeline`, which is the
prediction. Times are seconds from the start of the iteration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from chainer_hybridmem.records.timeline import Interval, Timeline
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
        """In the form of a prediction."""

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
