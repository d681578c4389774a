"""Offline layouts: an offset for every buffer of an iteration.

SmartPool (Zhang et al. 2019, section III-C): buffers by descending size, each into the
smallest hole (best fit, the default) or the lowest one (first fit) that is free over
its whole lifetime; the pool grows where there is none. One buffer may share memory with
any number of others.

:func:`exact` goes on where that leaves something: no layout is smaller than the peak
load, so one that reaches it is optimal, proven by its own size. It places in
several orders and then improves the best ones (:mod:`.placement`).

Note: [very many buffers]
    Placing one buffer after the other looks at all pairs of them: a second for 25,000,
    16 for 100,000. Of more than :data:`MOST_BLOCKS` only the largest take part in the
    search. Of the others, those that live long go into the holes, the largest first;
    those that live shortly follow in one walk through time, for which only what is
    alive counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from chainer_hybridmem.pools import placement
from chainer_hybridmem.pools.ejection import Ejection
from chainer_hybridmem.pools.layout import Layout
from chainer_hybridmem.pools.placement import (
    BEST_FIT,
    FIRST_FIT,
    Blocks,
    Found,
    Start,
    list_starts,
    make_blocks,
    make_layout,
    place_in_order,
    take_part,
)
from chainer_hybridmem.pools.trace import Trace
from chainer_hybridmem.search.deadline import Deadline

# Pairs of buffers that the parts of the search look at: about a second's work in all,
# and the same layout on every machine.
PAIRS = 120_000_000
QUICK_STARTS = 4  # ways to place before anything is ejected
EJECTING_SHARE, BISECTING_SHARE = 0.25, 0.2  # of the pairs
HOPELESS_PART = 8  # of the pairs, where no layout can be small enough
IMPROVED = 2  # of the ways to place, the best ones
MOST_ROUNDS = 5000  # for each; small problems are settled long before
# See Note: [very many buffers].
MOST_BLOCKS = 5000
MOST_LARGE = 1000  # of more, that are searched for
MOST_SETTLED = 10_000  # of these and of those that live long; more lie on top
BRIEF_PART = 64  # of the iteration that something short-lived lasts at most


def smartpool(trace: Trace, alignment: int = 1, first_fit: bool = False) -> Layout:
    """The layout of SmartPool.

    Args:
        trace: One iteration.
        alignment: Every offset is a multiple of it, in bytes.
        first_fit: The lowest hole instead of the smallest.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    blocks = make_blocks(trace, alignment)
    name, fit = ('smartpool', BEST_FIT)
    if first_fit:
        name, fit = ('smartpool-first-fit', FIRST_FIT)
    order = np.argsort(-blocks.size, kind='stable')
    nowhere = np.zeros(len(order), bool)
    found = place_in_order(blocks, Start(name, order, fit, nowhere))
    return make_layout(trace, blocks, found.offset, alignment, name)


def exact(
    trace: Trace,
    alignment: int = 1,
    pairs: int = PAIRS,
    enough_bytes: int = 0,
    deadline: Deadline | None = None,
) -> Layout:
    """The smallest layout that can be found, optimal wherever it reaches the bound.

    Args:
        trace: One iteration.
        alignment: Every offset is a multiple of it, in bytes.
        pairs: Pairs of buffers that each part of the search may look at.
        enough_bytes: A layout that is no larger ends the search. If the peak load is
            larger, none will do, and the search is short.
        deadline: The search ends with it; None: the same layout on every machine.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    blocks = make_blocks(trace, alignment)
    deadline = deadline or Deadline()
    if 0 < enough_bytes < blocks.bound_bytes:
        pairs //= HOPELESS_PART
    if len(blocks.size) <= MOST_BLOCKS:
        offset, name = _found(blocks, pairs, deadline, enough_bytes)
    else:
        offset, name = _filled(blocks, pairs, deadline)
    return make_layout(trace, blocks, offset, alignment, name)


def _found(
    blocks: Blocks, pairs: int, deadline: Deadline, enough_bytes: int = 0
) -> tuple[np.ndarray, str]:
    """Offsets and the way to them: see :func:`exact`."""
    n, capacity = len(blocks.size), blocks.capacity
    enough = max(capacity, enough_bytes - blocks.base_bytes)
    starts = list_starts(blocks)
    found: list[Found] = []
    for start in itertools.islice(starts, QUICK_STARTS):
        found.append(place_in_order(blocks, start))
        if found[-1].nbytes <= enough or deadline.is_over:
            break
    if found[-1].nbytes <= enough:
        return found[-1].offset, found[-1].start.name
    ejection = Ejection(blocks, deadline)
    ejected = ejection.fit(capacity, int(pairs * EJECTING_SHARE), enough)
    if ejected is not None:
        found.append(ejected)
        if ejected.nbytes <= enough:
            return ejected.offset, 'ejection'
    for start in starts if ejected is None else ():
        if deadline.is_over:
            break
        found.append(place_in_order(blocks, start))
        if found[-1].nbytes <= enough:
            return found[-1].offset, start.name
    most = min(one.nbytes for one in found)
    found += ejection.bisect(most, int(pairs * BISECTING_SHARE))
    found.sort(key=lambda one: one.nbytes)  # stable
    best, name = found[0], found[0].start.name
    rounds = min(MOST_ROUNDS, pairs // max(1, n * n) // IMPROVED)
    for seed, one in enumerate(found[:IMPROVED]):
        if best.nbytes <= enough or deadline.is_over:
            break
        start, offset = one.start, np.zeros(n, np.int64)
        nbytes = placement.improve(
            start.order.copy(),
            blocks.size,
            blocks.spans,
            start.fit,
            start.above,
            capacity,
            rounds,
            seed,
            offset,
        )
        if nbytes < best.nbytes:
            best, name = Found(nbytes, offset, start), f'{start.name}, improved'
    return best.offset, name


def _filled(blocks: Blocks, pairs: int, deadline: Deadline) -> tuple[np.ndarray, str]:
    """Offsets of very many blocks; see Note: [very many buffers]."""
    size, spans, lengths = blocks.size, blocks.spans, blocks.lengths()
    by_size = np.argsort(-size, kind='stable')
    large, others = by_size[:MOST_LARGE], by_size[MOST_LARGE:]
    lasting = lengths > blocks.end // BRIEF_PART
    lasting |= spans[:, 3] > spans[:, 2]
    core = take_part(blocks, np.sort(large))
    offset, name = _found(core, pairs, deadline)
    large = np.sort(large)[np.argsort(offset, kind='stable')]
    settled = np.concatenate([large, others[lasting[others]]])[:MOST_SETTLED]
    placed = take_part(blocks, settled)
    order = np.arange(len(settled))
    nowhere = np.zeros(len(settled), bool)
    found = place_in_order(placed, Start(name, order, FIRST_FIT, nowhere))
    result = np.zeros(len(size), np.int64)
    result[settled] = found.offset
    brief = others[~lasting[others]]
    brief = brief[np.argsort(spans[brief, 0], kind='stable')]
    visits = list_visits(spans, settled)
    near = np.zeros((len(brief) + len(visits), 3), np.int64)
    placement.fill(brief, size, spans, visits, result, near)
    stacked = others[lasting[others]][len(settled) - len(large) :]
    top = (result + size).max() if len(size) else 0
    result[stacked] = top + np.cumsum(size[stacked]) - size[stacked]
    return result, f'{name}, filled'


def list_visits(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(v, 3) int64: start, end and block of each interval, by start."""
    first = np.column_stack([spans[chosen, :2], chosen])
    second = np.column_stack([spans[chosen, 2:], chosen])
    visits = np.concatenate([first, second])
    visits = visits[visits[:, 1] > visits[:, 0]]
    return np.ascontiguousarray(visits[np.argsort(visits[:, 0], kind='stable')])


def given(trace: Trace, offsets: Sequence[int], alignment: int = 1) -> Layout:
    """A layout with offsets from elsewhere; see :func:`.check_layout`."""
    ends = [o + s for o, s in zip(offsets, trace.sizes, strict=True) if s]
    return Layout(
        offsets=tuple(offsets),
        footprint_bytes=max(ends, default=0),
        bound_bytes=make_blocks(trace, alignment).bound_bytes,
        peak_load_bytes=trace.peak_load_bytes,
        alignment=alignment,
        found_by='given',
    )
