"""Finds the iteration in a raw log of mallocs and frees.

SmartPool (Zhang et al. 2019, section V) takes two equal consecutive subsequences of
the log as an iteration. Short repetitions are everywhere, a malloc and a free of
the same size, say; so here the repetition that covers most of the log counts, and of
several that cover the same its shortest period.

The Z-function of the reversed log (Gusfield 1997, section 1.4) gives for every period
how far the log's end repeats with it, all in linear time. A log that ends with
something else, such as an evaluation, is also looked at from earlier ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from numba import types

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.layouts.trace import Trace

Log = Sequence[tuple[Hashable, int]]
LEAST_SHARE = 0.5  # of the log that the repetition must cover
ENDS = (8, 7, 6, 5, 4)  # eighths of the log


@dataclasses.dataclass(frozen=True)
class Repetition:
    """The part of a log that repeats: ``log[i] == log[i - period]`` inside.

    Attributes:
        start (int): First entry.
        stop (int): First entry after it; at least ``start + 2 * period``.
        period (int): Entries of one iteration.
    """

    start: int
    stop: int
    period: int


def find_iteration(log: Log) -> Repetition | None:
    """The repetition that covers most of a log.

    Args:
        log: ``(id, bytes)`` for a malloc, ``(id, -1)`` for a free.

    Returns:
        Repetition or None: None if nothing repeats so much.
    """
    symbols = _symbols(log)
    best = None
    for eighths in ENDS:
        found = _repeats_at_end(symbols, len(symbols) * eighths // 8)
        if found is not None and (best is None or _length(found) > _length(best)):
            best = found
    if best is None or _length(best) < LEAST_SHARE * len(symbols):
        return None
    return best


def iteration_trace(log: Log) -> Trace:
    """The trace of one iteration of a raw log: the second one that repeats.

    What is freed in it and was allocated in the one before is carried.

    Args:
        log: ``(id, bytes)`` for a malloc, ``(id, -1)`` for a free.

    Raises:
        FormatError: If no iteration is found.
    """
    found = find_iteration(log)
    if found is None:
        raise FormatError(
            f'No iteration is found: no two equal consecutive parts cover '
            f'{LEAST_SHARE:.0%} of the {len(log)} mallocs and frees. Record more '
            f'iterations of the same shape.'
        )
    first = found.start + found.period
    alive: dict[Hashable, tuple[int, int]] = {}  # id to entry and bytes
    for position in range(first):
        _follow(log[position], position, alive)
    return _slice(log, first, found, alive)


def _slice(
    log: Log,
    first: int,
    found: Repetition,
    alive: dict[Hashable, tuple[int, int]],
) -> Trace:
    sizes: list[int] = []
    events: list[int] = []
    buffer_of: dict[Hashable, int] = {}
    allocated_at: dict[int, int] = {}  # entry to buffer, those before included
    for key, (position, nbytes) in alive.items():
        buffer_of[key] = allocated_at[position] = len(sizes)
        sizes.append(nbytes)
    before = len(sizes)
    for position in range(first, first + found.period):
        key, nbytes = log[position]
        if nbytes >= 0:
            buffer_of[key] = allocated_at[position] = len(sizes)
            sizes.append(int(nbytes))
            events.append(len(sizes))
        elif key in buffer_of:
            events.append(-(buffer_of.pop(key) + 1))
    staying = set(buffer_of.values())
    carried = []
    for position, taken in allocated_at.items():
        left = allocated_at.get(position + found.period, -1)
        gone = taken < before and taken not in staying and position >= found.start
        if gone and left in staying and sizes[left] == sizes[taken]:
            carried.append((left, taken))
    return Trace(tuple(sizes), tuple(events), (), tuple(carried))


def _follow(
    entry: tuple[Hashable, int],
    position: int,
    alive: dict[Hashable, tuple[int, int]],
) -> int:
    """Keeps account of what is alive; the entry as one number.

    Mallocs are above zero, frees below, frees of something unknown zero.
    """
    key, nbytes = entry
    if nbytes < 0:
        return -(alive.pop(key, (0, -1))[1] + 1)
    if key in alive:
        raise FormatError(
            f'Entry {position} of the log allocates {key!r}, which is not free.'
        )
    alive[key] = (position, int(nbytes))
    return int(nbytes) + 1


def _symbols(log: Log) -> np.ndarray:
    alive: dict[Hashable, tuple[int, int]] = {}
    symbols = [_follow(entry, p, alive) for p, entry in enumerate(log)]
    return np.array(symbols, np.int64)


def _length(found: Repetition) -> int:
    return found.stop - found.start


def _repeats_at_end(symbols: np.ndarray, end: int) -> Repetition | None:
    """The longest repetition that ends at ``end``, made longer where it goes on."""
    if end < 2:
        return None
    same = np.zeros(end, np.int64)
    _z_function(np.ascontiguousarray(symbols[:end][::-1]), same)
    periods = np.arange(end)
    covered = np.where((same >= periods) & (periods > 0), same + periods, 0)
    period = int(covered.argmax())  # the first, so the shortest, of the longest
    if period == 0:
        return None
    stop = end
    while stop < len(symbols) and symbols[stop] == symbols[stop - period]:
        stop += 1
    return Repetition(end - int(covered[period]), stop, period)


@compiled(
    types.void(
        types.int64[::1],
        types.int64[::1],
    ),
    apart=True,
    counted=False,
)
def _z_function(symbols: np.ndarray, same: np.ndarray) -> None:
    """``same[p]``: how many symbols from p on equal those from 0 on."""
    n = len(symbols)
    left = right = 0
    for p in range(1, n):
        k = 0
        if p < right:
            k = min(right - p, same[p - left])
        while p + k < n and symbols[k] == symbols[p + k]:
            k += 1
        same[p] = k
        if p + k > right:
            left, right = p, p + k
