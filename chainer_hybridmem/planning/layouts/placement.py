"""Compiled: places buffers one after the other, in some order.

A buffer has up to two intervals of moments, the second one (from the start of the
iteration) if it is carried over from the iteration before. Offsets are chosen
greedily, in a hole that is free over the whole lifetime, else on top of what is placed.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.layouts.layout import Layout, check_alignment
from chainer_hybridmem.planning.layouts.trace import Trace, loads

_i64 = types.int64
FIRST_FIT, BEST_FIT = 0, 1
NOWHERE = -1


@compiled(
    _i64(
        _i64[::1],
        _i64[::1],
        _i64[:, ::1],
        _i64,
        _i64[::1],
        _i64[::1],
    ),
    apart=True,
    counted=False,
)
def place(
    order: np.ndarray,
    size: np.ndarray,
    spans: np.ndarray,
    fit: int,
    offset: np.ndarray,
    placed: np.ndarray,
) -> int:
    """Places buffers in one order.

    Args:
        order: Buffers, (n,) int64.
        size: Bytes of each, (n,) int64.
        spans: Lower, upper, second lower, second upper of each, (n, 4) int64.
        fit: :data:`FIRST_FIT` for the lowest hole, :data:`BEST_FIT` for the smallest.
        offset: Result, (n,) int64.
        placed: Work, (n,) int64.

    Returns:
        int: Footprint in bytes.
    """
    count = 0
    footprint = 0
    for position in range(len(order)):
        i = order[position]
        need = size[i]
        lower, upper = spans[i, 0], spans[i, 1]
        lower2, upper2 = spans[i, 2], spans[i, 3]
        top = 0
        best = NOWHERE
        smallest = np.int64(2**62)
        for k in range(count):
            j = placed[k]
            a, b = spans[j, 0], spans[j, 1]
            meets = lower < b and a < upper
            if not meets:
                c, d = spans[j, 2], spans[j, 3]
                meets = (
                    (lower2 < b and a < upper2)
                    or (lower < d and c < upper)
                    or (lower2 < d and c < upper2)
                )
            if not meets:
                continue
            hole = offset[j] - top
            if hole >= need and hole < smallest:
                best, smallest = top, hole
                if fit == FIRST_FIT:
                    break
            top = max(top, offset[j] + size[j])
        if best == NOWHERE:
            best = top
        offset[i] = best
        footprint = max(footprint, best + need)
        k = count
        while k > 0 and offset[placed[k - 1]] > best:
            placed[k] = placed[k - 1]
            k -= 1
        placed[k] = i
        count += 1
    return footprint


@compiled(
    types.void(
        _i64[::1],
        _i64[::1],
        _i64[:, ::1],
        _i64[:, ::1],
        _i64[::1],
        _i64[:, ::1],
    ),
    apart=True,
    counted=False,
)
def fill(
    order: np.ndarray,
    size: np.ndarray,
    spans: np.ndarray,
    visits: np.ndarray,
    offset: np.ndarray,
    near: np.ndarray,
) -> None:
    """Puts short-lived buffers into the lowest holes between those that have a place.

    Time goes by once: only what is alive is looked at.

    Args:
        order: Buffers by the start of their only interval, (m,) int64.
        size: Bytes of each, (n,) int64.
        spans: As for :func:`place`.
        visits: Lower, upper and buffer of each interval of what has a place, by lower,
            (v, 3) int64.
        offset: Of what has a place, and the result, (n,) int64.
        near: Work, (m + v, 3) int64: what is alive, by offset.
    """
    count = came = 0
    for position in range(len(order)):
        i = order[position]
        lower, upper, need = spans[i, 0], spans[i, 1], size[i]
        alive = 0
        for k in range(count):
            if near[k, 1] > lower:
                for field in range(3):
                    near[alive, field] = near[k, field]
                alive += 1
        count = alive
        while came < len(visits) and visits[came, 0] < upper:
            if visits[came, 1] > lower:
                start, stop, j = visits[came, 0], visits[came, 1], visits[came, 2]
                count = _insert(near, count, start, stop, j, offset)
            came += 1
        top = 0
        for k in range(count):
            j = near[k, 2]
            if near[k, 0] >= upper:  # comes later
                continue
            if offset[j] - top >= need:
                break
            top = max(top, offset[j] + size[j])
        offset[i] = top
        count = _insert(near, count, lower, upper, i, offset)


@compiled(inline=True, counted=False)
def _insert(
    near: np.ndarray, count: int, start: int, stop: int, buffer: int, offset: np.ndarray
) -> int:
    """Among what is alive, by offset; how much that is now."""
    k = count
    while k > 0 and offset[near[k - 1, 2]] > offset[buffer]:
        for field in range(3):
            near[k, field] = near[k - 1, field]
        k -= 1
    near[k, 0], near[k, 1], near[k, 2] = start, stop, buffer
    return count + 1


# -- orders -------------------------------------------------------------------
class Start(NamedTuple):
    """One way to place."""

    name: str
    order: np.ndarray  # (n,) int64
    fit: int


class Found(NamedTuple):
    """Offsets that a start leads to, and the bytes that they take."""

    nbytes: int
    offset: np.ndarray  # (n,) int64
    start: Start


def place_in_order(blocks: Blocks, start: Start) -> Found:
    """Gives each block an offset, in the order and by the fit of a start."""
    n = len(blocks.size)
    offset, work = np.zeros(n, np.int64), np.zeros(n, np.int64)
    nbytes = place(
        start.order,
        blocks.size,
        blocks.spans,
        start.fit,
        offset,
        work,
    )
    return Found(nbytes, offset, start)


def smartpool_start(blocks: Blocks, fit: int) -> Start:
    """SmartPool's way to place."""
    name = 'smartpool' if fit == BEST_FIT else 'smartpool-first-fit'
    order = np.argsort(-blocks.size, kind='stable')
    return Start(name, order, fit)


def list_starts(blocks: Blocks) -> Iterator[Start]:
    """Ways to place that are worth a try, SmartPool's among the first six."""
    for name, order in _orders(blocks, blocks.lengths()):
        yield Start(f'{name}, best fit', order, BEST_FIT)
        yield Start(f'{name}, first fit', order, FIRST_FIT)


def _orders(blocks: Blocks, length: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    size, start, end = blocks.size, blocks.spans[:, 0], blocks.spans[:, 1]
    highest = blocks.highest_loads()
    yield 'size', np.lexsort((start, -length, -size))
    yield 'load and size', np.lexsort((start, -length, -size, -highest))
    yield 'smartpool', smartpool_start(blocks, BEST_FIT).order
    yield 'lifetime', np.lexsort((start, -size, -length))
    yield 'area', np.lexsort((start, -(size * length.astype(float))))
    yield 'load and lifetime', np.lexsort((start, -size, -length, -highest))
    yield 'start', np.lexsort((-size, -length, start))
    yield 'end', np.lexsort((-size, -length, -end))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What is placed: buffers, carried pairs as one, without what always lives."""

    size: np.ndarray  # (n,) int64, rounded up
    spans: np.ndarray  # (n, 4) int64, see placement
    end: int
    members: tuple[tuple[int, ...], ...]  # buffers of each block
    base_bytes: int  # below all: what lives from start to end
    base: tuple[tuple[int, int], ...]  # (buffer, offset) there
    bound_bytes: int
    alignment: int
    times: np.ndarray  # (end + 1,) int64, of each moment

    def loads(self) -> np.ndarray:
        first = loads(self.size, self.spans[:, 0], self.spans[:, 1], self.end)
        second = loads(self.size, self.spans[:, 2], self.spans[:, 3], self.end)
        both: np.ndarray = first + second
        return both

    def lengths(self) -> np.ndarray:
        """Moments each block is alive."""
        spans = self.spans
        lengths: np.ndarray = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]
        return lengths

    def durations(self) -> np.ndarray:
        """Time that each block is alive."""
        times = self.times[self.spans]
        durations: np.ndarray = times[:, 1] - times[:, 0] + times[:, 3] - times[:, 2]
        return durations

    def highest_loads(self) -> np.ndarray:
        """Highest load while each block is alive."""
        every = self.loads()
        return np.array(
            [
                max(every[a:b].max(initial=0), every[c:d].max(initial=0))
                for a, b, c, d in self.spans.tolist()
            ],
            np.int64,
        )

    @property
    def capacity(self) -> int:
        """Bytes above the base that no layout can do without."""
        return self.bound_bytes - self.base_bytes


def make_blocks(trace: Trace, alignment: int) -> Blocks:
    """The blocks of a trace.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    check_alignment(alignment)
    lower, upper = trace.lifetimes()
    rounded = -(-np.array(trace.sizes, np.int64) // alignment) * alignment
    partner = _find_carried(trace, lower, upper)
    second = {taken for taken, _ in partner.values()}
    members: list[tuple[int, ...]] = []
    spans: list[tuple[int, int, int, int]] = []
    base: list[tuple[int, int]] = []
    height = 0
    for i in range(len(rounded)):
        if i in second or not rounded[i] or lower[i] >= upper[i]:
            continue
        if lower[i] == 0 and upper[i] == trace.end:
            base.append((i, height))
            height += int(rounded[i])
        elif i in partner:
            taken, until = partner[i]
            members.append((i, taken))
            spans.append((int(lower[i]), int(upper[i]), 0, until))
        else:
            members.append((i,))
            spans.append((int(lower[i]), int(upper[i]), 0, 0))
    size = rounded[[m[0] for m in members]] if members else np.zeros(0, np.int64)
    blocks = Blocks(
        size=size,
        spans=np.array(spans, np.int64).reshape(len(spans), 4),
        end=trace.end,
        members=tuple(members),
        base_bytes=height,
        base=tuple(base),
        bound_bytes=0,
        alignment=alignment,
        times=_times(trace),
    )
    bound = height + int(blocks.loads().max())
    return dataclasses.replace(blocks, bound_bytes=bound)


def _times(trace: Trace) -> np.ndarray:
    """The time at which each moment begins, and the end of the last one.

    If nothing is known of it, frees and the mallocs that follow are at one time, as
    long after those before as these are before the next.
    """
    times = np.array(trace.times, np.int64)
    if not trace.times:
        frees = np.array(trace.events, np.int64) < 0
        times = np.cumsum(frees & ~np.append(frees[:1], frees[:-1]))
    if not len(times):
        return np.zeros(2, np.int64)
    return np.concatenate([times[:1], times, times[-1:]])


def _find_carried(
    trace: Trace, lower: np.ndarray, upper: np.ndarray
) -> dict[int, tuple[int, int]]:
    """What each buffer left behind is in the next iteration, and until when.

    Of several with one size any may be freed first: each is taken to live until the
    last of them is. What is not free when its successor comes stays untied: it
    lies elsewhere every other iteration.
    """
    until: dict[int, int] = defaultdict(int)
    for left, taken in trace.carried:
        nbytes = trace.sizes[left]
        until[nbytes] = max(until[nbytes], int(upper[taken]))
    return {
        left: (taken, until[trace.sizes[left]])
        for left, taken in trace.carried
        if until[trace.sizes[left]] <= lower[left]
    }


def take_part(blocks: Blocks, chosen: np.ndarray) -> Blocks:
    """Some of the blocks, as if there were no others."""
    part = dataclasses.replace(
        blocks,
        size=blocks.size[chosen],
        spans=blocks.spans[chosen],
        members=tuple(blocks.members[i] for i in chosen.tolist()),
    )
    bound = part.base_bytes + int(part.loads().max())
    return dataclasses.replace(part, bound_bytes=bound)


def make_layout(
    trace: Trace, blocks: Blocks, offset: np.ndarray, alignment: int, found_by: str
) -> Layout:
    """Writes offsets of blocks down as offsets of all buffers of a trace."""
    offsets = [0] * len(trace.sizes)
    for buffer, where in blocks.base:
        offsets[buffer] = where
    for buffers, where in zip(blocks.members, offset.tolist(), strict=True):
        for buffer in buffers:
            offsets[buffer] = blocks.base_bytes + where
    ends = (offset + blocks.size).max(initial=0)
    return Layout(
        offsets=tuple(offsets),
        footprint_bytes=blocks.base_bytes + int(ends),
        bound_bytes=blocks.bound_bytes,
        peak_load_bytes=trace.peak_load_bytes,
        alignment=alignment,
        found_by=found_by,
    )
