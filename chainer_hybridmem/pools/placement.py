"""Compiled: places buffers one after the other, and improves the order.

A buffer has up to two intervals of moments, the second one (from the start of the
iteration) if it is carried over from the iteration before. Offsets are chosen
greedily, in a hole that is free over the whole lifetime, else on top of what is placed.
So a layout is an order of the buffers, and better layouts are found among orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.pools.blocks import Blocks

FIRST_FIT, BEST_FIT = 0, 1
NOWHERE = -1


@compiled(counted=False)
def place(
    order: np.ndarray,
    size: np.ndarray,
    spans: np.ndarray,
    fit: int,
    above: np.ndarray,
    capacity: int,
    offset: np.ndarray,
    placed: np.ndarray,
) -> int:
    """Places buffers in one order.

    Args:
        order: Buffers, (n,) int64.
        size: Bytes of each, (n,) int64.
        spans: Lower, upper, second lower, second upper of each, (n, 4) int64.
        fit: :data:`FIRST_FIT` for the lowest hole, :data:`BEST_FIT` for the smallest.
        above: Which of them go to the highest hole below ``capacity`` instead, at its
            upper end, (n,) bool.
        capacity: Bytes that are to suffice.
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
            if hole >= need:
                if above[i]:
                    best = offset[j] - need
                elif hole < smallest:
                    best, smallest = top, hole
                    if fit == FIRST_FIT:
                        break
            top = max(top, offset[j] + size[j])
        if above[i] and capacity - top >= need:
            best = capacity - need
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


@compiled(counted=False)
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


@compiled()
def improve(
    order: np.ndarray,
    size: np.ndarray,
    spans: np.ndarray,
    fit: int,
    above: np.ndarray,
    capacity: int,
    rounds: int,
    seed: int,
    best_offset: np.ndarray,
) -> int:
    """Moves buffers that stick out of the capacity towards the front of the order.

    Squeaky-wheel optimisation (Joslin, Clements, 1999): what has been placed badly
    is placed earlier next time. Each round moves either all buffers that stick out, or
    one of them, by a random distance, and now and then changes something else; an
    order is kept if it is not worse.

    Args:
        order: Where to start; the best order in the end.
        rounds: Orders to try.
        seed: Of the random numbers.
        best_offset: Result, (n,) int64.

    The others are those of :func:`place`.

    Returns:
        int: Footprint of the best layout in bytes.
    """
    np.random.seed(seed)
    n = len(order)
    offset, placed, moved = np.zeros_like(order), order.copy(), order.copy()
    footprint = place(order, size, spans, fit, above, capacity, best_offset, placed)
    excess = _excess(size, best_offset, capacity)
    for _ in range(rounds):
        if footprint <= capacity:
            break
        out = 0
        for position in range(n):
            i = order[position]
            if best_offset[i] + size[i] > capacity:
                moved[out] = position
                out += 1
        if np.random.random() < 0.5:
            moved[0] = moved[np.random.randint(out)]
            out = 1
        candidate = order.copy()
        if np.random.random() < 0.25:
            a, b = np.random.randint(n), np.random.randint(n)
            candidate[a], candidate[b] = candidate[b], candidate[a]
        share = np.random.random()
        for k in range(out):  # ascending: those behind stay where they are
            position = moved[k]
            to = np.int64(position * share)
            i = candidate[position]
            for q in range(position, to, -1):
                candidate[q] = candidate[q - 1]
            candidate[to] = i
        result = place(candidate, size, spans, fit, above, capacity, offset, placed)
        spilled = _excess(size, offset, capacity)
        if result < footprint or (result == footprint and spilled <= excess):
            footprint, excess = result, spilled
            order[:] = candidate
            best_offset[:] = offset
    return footprint


@compiled(inline=True, counted=False)
def _excess(size: np.ndarray, offset: np.ndarray, capacity: int) -> float:
    """Bytes that stick out of the capacity, summed over all buffers."""
    total = 0.0
    for i in range(len(size)):
        total += max(0, min(offset[i] + size[i] - capacity, size[i]))
    return total


class Start(NamedTuple):
    """One way to place."""

    name: str
    order: np.ndarray  # (n,) int64
    fit: int
    above: np.ndarray  # (n,) bool, see placement


class Found(NamedTuple):
    """What it leads to."""

    nbytes: int
    offset: np.ndarray  # (n,) int64
    start: Start


def place_in_order(blocks: Blocks, start: Start) -> Found:
    """Places the blocks."""
    n = len(blocks.size)
    offset, work = np.zeros(n, np.int64), np.zeros(n, np.int64)
    nbytes = place(
        start.order,
        blocks.size,
        blocks.spans,
        start.fit,
        start.above,
        blocks.capacity,
        offset,
        work,
    )
    return Found(nbytes, offset, start)


def list_starts(blocks: Blocks) -> Iterator[Start]:
    """Ways to place that are worth a try, SmartPool's first.

    In the last ones, what lives shorter than the mean goes to the top of the pool.
    """
    length = blocks.lengths()
    nowhere = np.zeros(len(length), bool)
    short = length < length.mean() if len(length) else nowhere
    for above, where in ((nowhere, ''), (short, ', short ones above')):
        for name, order in _orders(blocks, length):
            yield Start(f'{name}, best fit{where}', order, BEST_FIT, above)
            yield Start(f'{name}, first fit{where}', order, FIRST_FIT, above)


def _orders(blocks: Blocks, length: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    size, start, end = blocks.size, blocks.spans[:, 0], blocks.spans[:, 1]
    highest = blocks.highest_loads()
    yield 'size', np.lexsort((start, -length, -size))
    yield 'load and size', np.lexsort((start, -length, -size, -highest))
    yield 'lifetime', np.lexsort((start, -size, -length))
    yield 'area', np.lexsort((start, -(size * length.astype(float))))
    yield 'load and lifetime', np.lexsort((start, -size, -length, -highest))
    yield 'start', np.lexsort((-size, -length, start))
    yield 'end', np.lexsort((-size, -length, -end))
