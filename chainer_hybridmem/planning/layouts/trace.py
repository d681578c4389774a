"""A memory trace: what is allocated and freed, in order, and nothing else.

Notation of this package:

========  ===============================================================
symbol    meaning
========  ===============================================================
buffer    one allocation, from its malloc to its free
event     ``+(i + 1)`` for the malloc of buffer i, ``-(i + 1)`` for its
          free, as in :mod:`chainer_hybridmem.planning.records.profile`
moment    0 before the first event, t + 1 after event t; lifetimes are
          half-open intervals ``[lower, upper)`` of moments
carried   a buffer left behind by one iteration and freed in the next
load      bytes of all buffers alive at a moment
========  ===============================================================

An iteration repeats. A buffer allocated at moment a and freed at moment f of
the next iteration is two buffers of the trace: one alive in ``[a, end)``, one
in ``[0, f)``. They are *carried* and must share one offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from chainer_hybridmem.errors import FormatError

MOST_BUFFERS = 1_000_000
MOST_BYTES = 2**53  # in all; sums stay inside 64 bits with any rounding


@dataclasses.dataclass(frozen=True)
class Trace:
    """One iteration's mallocs and frees.

    Attributes:
        sizes (tuple of int): Bytes of each buffer.
        events (tuple of int): Mallocs and frees in order. A buffer without a
            malloc is there from the start, one without a free stays.
        names (tuple of str): What each buffer is called in files.
        carried (tuple of pairs): ``(left, taken)``: buffer ``left`` outlives the
            iteration and is buffer ``taken`` of the next one.
        operation_starts (tuple of int): First event of each operation; empty if
            unknown. What a plan frees before an operation belongs to the one before.
        times (tuple of int): When each event is, on any axis; empty if unknown. A
            search looks at the longest lives first.
    """

    sizes: tuple[int, ...]
    events: tuple[int, ...]
    names: tuple[str, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    operation_starts: tuple[int, ...] = ()
    times: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """How many moments the trace has."""
        return len(self.events) + 1

    def name(self, buffer: int) -> str:
        """What a buffer is called in files and messages."""
        return self.names[buffer] if self.names else str(buffer)

    def lifetimes(self) -> tuple[np.ndarray, np.ndarray]:
        """First moment of each buffer, and the first moment without it."""
        lower = np.zeros(len(self.sizes), np.int64)
        upper = np.full(len(self.sizes), self.end, np.int64)
        events = np.array(self.events, np.int64)
        moments = np.arange(1, self.end, dtype=np.int64)
        born, freed = events > 0, events < 0
        lower[events[born] - 1] = moments[born]
        upper[-events[freed] - 1] = moments[freed]
        return lower, upper

    def loads(self) -> np.ndarray:
        """Bytes alive at each moment; shape ``(end,)``."""
        return loads(self.sizes, *self.lifetimes(), self.end)

    @property
    def peak_load_bytes(self) -> int:
        """Highest load at any moment."""
        return int(self.loads().max())


def loads(
    sizes: Sequence[int] | np.ndarray, lower: np.ndarray, upper: np.ndarray, end: int
) -> np.ndarray:
    """Bytes alive at each moment of buffers with these lifetimes."""
    changes = np.zeros(end + 1, np.int64)
    nbytes = np.asarray(sizes, np.int64)
    np.add.at(changes, lower, nbytes)
    np.add.at(changes, upper, -nbytes)
    return np.cumsum(changes)[:end]


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuses too many buffers, too many bytes, and sizes below zero.

    Raises:
        FormatError: With the value.
    """
    if len(sizes) > MOST_BUFFERS:
        raise FormatError(
            f'There are {len(sizes)} buffers; at most {MOST_BUFFERS} can be laid out.'
        )
    total = 0
    for index, nbytes in enumerate(sizes):
        if nbytes < 0:
            raise FormatError(f'Buffer {index} has {nbytes} bytes.')
        total += nbytes
    if total > MOST_BYTES:
        raise FormatError(
            f'All buffers together have {total} bytes; at most {MOST_BYTES} (2**53) '
            f'can be laid out.'
        )


def from_lifetimes(
    sizes: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    names: Sequence[str] = (),
) -> Trace:
    """A trace of buffers with half-open lifetimes on any time axis.

    At the same time, frees come before mallocs.

    Args:
        sizes: Bytes of each buffer.
        lower: Time at which each is allocated.
        upper: Time at which each is freed, after ``lower``.
        names: What they are called in files.

    Raises:
        FormatError: If a lifetime is empty, a size cannot be, or a name is missing.
    """
    if names and len(names) != len(sizes):
        raise FormatError(f'There are {len(sizes)} buffers and {len(names)} names.')
    for index, (start, stop) in enumerate(zip(lower, upper, strict=True)):
        if not start < stop:
            raise FormatError(
                f'Buffer {names[index] if names else index} lives from {start} to '
                f'{stop}; the end must come after the start.'
            )
    order = [(start, 1, i + 1) for i, start in enumerate(lower)]
    order += [(stop, 0, -(i + 1)) for i, stop in enumerate(upper)]
    order.sort()
    check_sizes(sizes)
    return Trace(
        tuple(int(s) for s in sizes),
        tuple(e for _, _, e in order),
        tuple(names),
        times=tuple(int(time) for time, _, _ in order),
    )


def from_log(log: Iterable[tuple[Hashable, int]]) -> Trace:
    """A trace of a raw log.

    Args:
        log: ``(id, bytes)`` for a malloc, ``(id, -1)`` for a free. A pointer is an
            id: it may come again once it is free. An id that is freed without a
            malloc was there before the log; its size is not known and it is left out.

    Raises:
        FormatError: If an id is allocated while it is alive.
    """
    sizes: list[int] = []
    names: list[str] = []
    events: list[int] = []
    alive: dict[Hashable, int] = {}
    for position, (key, nbytes) in enumerate(log):
        if nbytes < 0:
            buffer = alive.pop(key, None)
            if buffer is not None:
                events.append(-(buffer + 1))
            continue
        if key in alive:
            raise FormatError(
                f'Entry {position} of the log allocates {key!r}, which is not free.'
            )
        alive[key] = len(sizes)
        sizes.append(int(nbytes))
        names.append(f'{key}' if isinstance(key, str) else f'{len(names)}')
        events.append(len(sizes))
    check_sizes(sizes)
    return Trace(tuple(sizes), tuple(events), tuple(names))
