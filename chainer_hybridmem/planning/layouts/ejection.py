"""Layouts by ejection: what is in the way of a buffer looks for another place."""

from __future__ import annotations

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.layouts.canonical import MOST_CONFLICTS, conflicts
from chainer_hybridmem.planning.layouts.placement import (
    FIRST_FIT,
    NOWHERE,
    Blocks,
    Found,
    Start,
    place_in_order,
)
from chainer_hybridmem.planning.search.deadline import Deadline

_i64 = types.int64
PAIRS_PER_BLOCK = 2000  # that each attempt looks at
MOST_ATTEMPTS = 60  # at the bound
BISECTIONS = 5
# Blocks alive where the load is above these shares of the capacity are put in first.
LEVELS = ((0.9,), (0.8, 0.95), (0.7, 0.85, 0.97))
LARGE_SHARE = 0.002  # of the bound; larger buffers are large


class Ejection:
    """Layouts by ejection, in short attempts: most of those that succeed do so soon.

    Only the large blocks take part, those alive where the load is highest before the
    others, because they have the least choice. The small ones fill the holes.

    Args:
        blocks (Blocks): To be laid out.
        deadline (Deadline): After it, no attempt begins.
    """

    def __init__(self, blocks: Blocks, deadline: Deadline) -> None:
        self._blocks = blocks
        self._deadline = deadline
        large = blocks.size > blocks.bound_bytes * LARGE_SHARE
        small = np.flatnonzero(~large)
        self._small = small[np.argsort(-blocks.size[small], kind='stable')]
        self._large = np.flatnonzero(large)
        self._size, spans = blocks.size[large], blocks.spans[large]
        self._pointer = np.zeros(len(self._size) + 1, np.int64)
        count = conflicts(spans, self._pointer, np.zeros(0, np.int32))
        self._possible = len(self._size) > 0 and count <= MOST_CONFLICTS
        if not self._possible:
            return
        self._others = np.zeros(count, np.int32)
        conflicts(spans, self._pointer, self._others)
        self._failures = np.ones(len(self._size), np.int64)
        self._attempts = 0
        share = blocks.highest_loads()[large] / blocks.capacity
        area = self._size * blocks.lengths()[large].astype(float)
        keys = [*((levels, self._size) for levels in LEVELS), (LEVELS[1], area)]
        self._orders = [
            np.lexsort((spans[:, 0], -key, -np.searchsorted(levels, share)))
            for levels, key in keys
        ]

    def fit(self, capacity: int, pairs: int, enough: int = 0) -> Found | None:
        """The smallest of several layouts whose large blocks fit into a capacity.

        Args:
            capacity: Bytes for them; the first layout with everything inside is taken.
            pairs: Pairs of blocks that may be looked at.
            enough: Bytes; so is the first layout that needs no more than these.
        """
        if not self._possible:
            return None
        best: Found | None = None
        work = PAIRS_PER_BLOCK * len(self._large)
        for _ in range(min(MOST_ATTEMPTS, max(1, pairs // work))):
            if self._deadline.is_over:
                break
            offset = self._attempt(capacity, work)
            if offset is None:
                continue
            found = self._filled(offset)
            if best is None or found.nbytes < best.nbytes:
                best = found
            if best.nbytes <= max(capacity, enough):
                break
        return best

    def bisect(self, most: int, pairs: int) -> list[Found]:
        """Layouts for ever better capacities between the bound and ``most``."""
        low, high = self._blocks.capacity, most
        result: list[Found] = []
        for _ in range(BISECTIONS):
            if high - low <= low // 1000 or self._deadline.is_over:
                break
            target = (low + high) // 2
            found = self.fit(target, pairs // BISECTIONS)
            if found is None or found.nbytes >= high:
                low = target
            else:
                high = found.nbytes
            if found is not None:
                result.append(found)
        return result

    def _attempt(self, capacity: int, work: int) -> np.ndarray | None:
        """One attempt; every other one knows what the others have failed at."""
        number = self._attempts
        self._attempts += 1
        order = self._orders[number % len(self._orders)]
        if number % 2:
            self._failures = failures = 1 + self._failures // 2
        else:
            failures = np.ones_like(self._failures)
        offset = np.zeros(len(order), np.int64)
        fits = eject(
            order,
            self._size,
            self._pointer,
            self._others,
            capacity,
            work,
            number,
            failures,
            offset,
        )
        return offset if fits else None

    def _filled(self, large_offset: np.ndarray) -> Found:
        """Adds the small blocks; in the order of offsets none comes to lie higher."""
        order = self._large[np.argsort(large_offset, kind='stable')]
        order = np.concatenate([order, self._small])
        return place_in_order(self._blocks, Start('ejection', order, FIRST_FIT))


@compiled(
    types.boolean(
        _i64[::1],
        _i64[::1],
        _i64[::1],
        types.int32[::1],
        _i64,
        _i64,
        _i64,
        _i64[::1],
        _i64[::1],
    ),
    apart=True,
)
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
