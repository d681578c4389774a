"""Compiled: places buffers one after the other, and improves the order.

A buffer has up to two intervals of moments, the second one (from the start of the
iteration) if it is carried over from the iteration before. Offsets are chosen
greedily, in a hole that is free over the whole lifetime, else on top of what is placed.
So a layout is an order of the buffers, and better layouts are found among orders.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.jit import compiled

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


@compiled()
def conflicts(spans: np.ndarray, pointer: np.ndarray, others: np.ndarray) -> int:
    """Which buffers live together with each: ``others[pointer[i]:pointer[i + 1]]``.

    Args:
        spans: As for :func:`place`.
        pointer: Result, (n + 1,) int64.
        others: Result, as many int32 as there are; too few fill the pointer alone.

    Returns:
        int: How many there are.
    """
    n = len(spans)
    total = 0
    for i in range(n):
        pointer[i] = total
        lower, upper = spans[i, 0], spans[i, 1]
        lower2, upper2 = spans[i, 2], spans[i, 3]
        for j in range(n):
            a, b, c, d = spans[j, 0], spans[j, 1], spans[j, 2], spans[j, 3]
            meets = (
                (lower < b and a < upper)
                or (lower2 < b and a < upper2)
                or (lower < d and c < upper)
                or (lower2 < d and c < upper2)
            )
            if meets and i != j:
                if total < len(others):
                    others[total] = j
                total += 1
    pointer[n] = total
    return total


@compiled()
def eject(
    order: np.ndarray,
    size: np.ndarray,
    pointer: np.ndarray,
    others: np.ndarray,
    capacity: int,
    work: int,
    seed: int,
    failures: np.ndarray,
    offset: np.ndarray,
) -> bool:
    """Fits buffers into a capacity one after the other, ejecting what is in the way.

    Guided ejection search (Nagata, Bräysy, 2009): a buffer without a hole is put where
    it ejects the least, bytes times how often each has been without a hole itself;
    what is ejected looks for a place next, the largest first. A hole is the smallest
    one; of it the lower end is taken, the upper one at the top.

    Args:
        order: Buffers as they are put in, (n,) int64.
        size: Bytes of each, (n,) int64.
        pointer: See :func:`conflicts`.
        others: Likewise.
        capacity: Bytes that must suffice.
        work: Pairs of buffers that may be looked at.
        seed: Of the random numbers.
        failures: How often each has been without a hole, (n,) int64; counted on.
        offset: Result, if all find a place, (n,) int64.

    Returns:
        bool: Whether all do.
    """
    np.random.seed(seed)
    n = len(size)
    weight = size // max(1, capacity >> 20) + 1  # whole numbers, and small
    waiting = np.zeros(n, np.int64)
    starts, ends, costs = np.zeros(n + 1, np.int64), offset.copy(), offset.copy()
    by_start, by_end = offset.copy(), offset.copy()
    offset[:] = NOWHERE
    put_in, count, done = 0, 0, 0
    while done < work:
        if count > 0:
            at = np.random.randint(count)
            for k in range(count):
                if size[waiting[k]] > size[waiting[at]]:
                    at = k
            i = waiting[at]
            count -= 1
            waiting[at] = waiting[count]
        elif put_in < len(order):
            i = order[put_in]
            put_in += 1
        else:
            return True
        need = size[i]
        if need > capacity:
            return False
        near = 0
        for q in range(pointer[i], pointer[i + 1]):
            j = others[q]
            if offset[j] != NOWHERE:
                starts[near], ends[near] = offset[j], offset[j] + size[j]
                costs[near] = failures[j] * weight[j]
                by_start[near] = by_end[near] = near
                near += 1
        done += 1 + count + near + pointer[i + 1] - pointer[i]
        _sort(starts, by_start, near)
        offset[i] = _hole(need, capacity, near, starts, ends, by_start)
        if offset[i] != NOWHERE:
            continue
        _sort(ends, by_end, near)
        best = _least_cost(need, capacity, near, starts, ends, costs, by_start, by_end)
        failures[i] += 1
        for q in range(pointer[i], pointer[i + 1]):
            j = others[q]
            meets = offset[j] < best + need and best < offset[j] + size[j]
            if offset[j] != NOWHERE and meets:
                offset[j] = NOWHERE
                waiting[count] = j
                count += 1
        offset[i] = best
    return False


@compiled(inline=True, counted=False)
def _sort(keys: np.ndarray, order: np.ndarray, n: int) -> None:
    """Orders the first n numbers in ``order`` by their keys (Shell's sort)."""
    gap = 1
    while gap < n // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, n):
            item, at = order[k], k
            while at >= gap and keys[order[at - gap]] > keys[item]:
                order[at] = order[at - gap]
                at -= gap
            order[at] = item
        gap //= 3


@compiled(inline=True, counted=False)
def _hole(
    need: int,
    capacity: int,
    near: int,
    starts: np.ndarray,
    ends: np.ndarray,
    by_start: np.ndarray,
) -> int:
    """Where in the smallest hole; :data:`NOWHERE` if there is none."""
    best, top, smallest, ties = NOWHERE, 0, capacity + 1, 0
    for k in range(near + 1):
        start = starts[by_start[k]] if k < near else capacity
        hole = start - top
        if need <= hole <= smallest:
            ties = ties + 1 if hole == smallest else 1
            smallest = hole
            if ties == 1 or np.random.randint(ties) == 0:
                best = top if k < near else start - need
        if k < near:
            top = max(top, ends[by_start[k]])
    return best


@compiled(inline=True, counted=False)
def _least_cost(
    need: int,
    capacity: int,
    near: int,
    starts: np.ndarray,
    ends: np.ndarray,
    costs: np.ndarray,
    by_start: np.ndarray,
    by_end: np.ndarray,
) -> int:
    """Where what is in the way costs the least.

    That is above an end, below a start, at the bottom or at the top. What is in the
    way of a place starts below its upper end, but does not end below the place.
    """
    highest = capacity - need
    best, least, ties = NOWHERE, np.int64(2**62), 0
    for upwards in range(2):
        came, went, cost = 0, 0, 0
        for k in range(near + 1):
            if upwards:
                place_at = ends[by_end[k - 1]] if k > 0 else 0
            else:
                place_at = starts[by_start[k]] - need if k < near else highest
            if not 0 <= place_at <= highest:
                continue
            while came < near and starts[by_start[came]] < place_at + need:
                cost += costs[by_start[came]]
                came += 1
            while went < near and ends[by_end[went]] <= place_at:
                cost -= costs[by_end[went]]
                went += 1
            if cost <= least:
                ties = ties + 1 if cost == least else 1
                least = cost
                if ties == 1 or np.random.randint(ties) == 0:
                    best = place_at
    return best
