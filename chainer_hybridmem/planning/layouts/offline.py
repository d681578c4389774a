"""Offline layouts: an offset for every buffer of an iteration.

SmartPool (Zhang et al. 2019, section III-C): buffers by descending size, each into the
smallest hole (best fit, the default) or the lowest one (first fit) that is free over
its whole lifetime; the pool grows where there is none. One buffer may share memory with
any number of others.

:func:`exact` goes on where that leaves something: no layout is smaller than the peak
load, so one that reaches it is optimal, proven by its own size. It places in several
orders (:mod:`.placement`) and searches all layouts that a capacity has room for, which
may also prove that there is none (:mod:`.canonical`), after blocks that fill rectangles
have been tried as one (:mod:`.gluing`). Where neither comes to an end,
blocks that are in the way of others look for other places (:mod:`.ejection`).

Note: [very many buffers]
    Placing one buffer after the other looks at all pairs of them: a second for 25,000,
    16 for 100,000. Of more than :data:`MOST_BLOCKS` only the largest take part in the
    search. Of the others, those that live long go into the holes, the largest first;
    those that live shortly follow in one walk through time, for which only what is
    alive counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.layouts import canonical, placement
from chainer_hybridmem.planning.layouts.canonical import ENDLESS, Canonical
from chainer_hybridmem.planning.layouts.ejection import Ejection
from chainer_hybridmem.planning.layouts.gluing import glue
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.planning.layouts.placement import (
    BEST_FIT,
    FIRST_FIT,
    Blocks,
    Start,
    list_starts,
    make_blocks,
    make_layout,
    place_in_order,
    smartpool_start,
    take_part,
)
from chainer_hybridmem.planning.layouts.trace import Trace
from chainer_hybridmem.planning.search.deadline import Deadline

# Pairs of buffers that the parts of the search look at: about a second's work in all,
# and the same layout on every machine.
PAIRS = 120_000_000
QUICK_STARTS = 6  # ways to place before the search, SmartPool's among them
SEARCH_TIMES = 4  # as many pairs for the search at the bound,
FEW_BLOCKS = 500  # of up to so many; fewer times as many of more blocks
BISECTIONS, BISECTING_SHARE = 4, 0.4  # above it: how many, and of the pairs for each
EJECTING_SHARE = 0.2  # of the pairs
GLUED_PART = 8  # of the blocks, and of the pairs, where that much can be glued
HOPELESS_PART = 8  # of the pairs, where no layout can be small enough
# See Note: [very many buffers].
MOST_BLOCKS = 5000
MOST_LARGE = 1000  # of more, that are searched for
MOST_SETTLED = 10_000  # of these and of those that live long; more lie on top
MOST_PLACED = 25_000  # up to so many, all are placed one after the other, too
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
    start = smartpool_start(blocks, FIRST_FIT if first_fit else BEST_FIT)
    found = place_in_order(blocks, start)
    return make_layout(trace, blocks, found.offset, alignment, start.name)


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
        found = _found(blocks, pairs, deadline, enough_bytes)
    else:
        found = _filled(blocks, pairs, deadline)
    layout = make_layout(trace, blocks, found.offset, alignment, found.name)
    bound_bytes = blocks.base_bytes + found.bound_bytes
    return dataclasses.replace(layout, bound_bytes=bound_bytes)


class Answer(NamedTuple):
    """The best layout so far, without the base, and what is proven."""

    nbytes: int
    offset: np.ndarray  # (n,) int64
    name: str
    bound_bytes: int

    def or_better(self, nbytes: int, offset: np.ndarray, name: str) -> Answer:
        """This one, or another layout if that is smaller."""
        if nbytes >= self.nbytes:
            return self
        return Answer(nbytes, offset, name, self.bound_bytes)


def _found(
    blocks: Blocks, pairs: int, deadline: Deadline, enough_bytes: int = 0
) -> Answer:
    """See :func:`exact`."""
    enough = max(blocks.capacity, enough_bytes - blocks.base_bytes)
    answer = Answer(ENDLESS, blocks.size, '', blocks.capacity)
    starts = list_starts(blocks)
    for number, start in enumerate(starts, 1):
        nbytes, offset, _ = place_in_order(blocks, start)
        answer = answer.or_better(nbytes, offset, start.name)
        if number == QUICK_STARTS:
            answer = _search(blocks, answer, pairs, enough, deadline)
        if answer.nbytes <= max(enough, answer.bound_bytes):
            break
        if number >= QUICK_STARTS and deadline.is_over:
            break
    return answer


def _search(
    blocks: Blocks, answer: Answer, pairs: int, enough: int, deadline: Deadline
) -> Answer:
    """Halves, again and again, what is open between the bound and the best layout."""
    if answer.nbytes <= enough or deadline.is_over:
        return answer
    glued, take_apart = glue(blocks)
    if GLUED_PART * len(glued.size) <= len(blocks.size):
        found = _found(glued, pairs // GLUED_PART, deadline)
        offset = take_apart(found.offset)
        answer = answer.or_better(found.nbytes, offset, f'{found.name}, glued')
        if answer.nbytes <= enough:
            return answer
    search = Canonical(blocks, deadline)
    if not search.possible:
        return _eject(blocks, answer, pairs, enough, deadline)
    unit = int(np.gcd.reduce(blocks.size))
    times = SEARCH_TIMES * min(1, max(1 / 8, FEW_BLOCKS / len(blocks.size)))
    low = target = enough
    left, given_up = int(pairs * times), 0
    while low < answer.nbytes and not deadline.is_over:
        status, offset = search.fit(target, left)
        if status == canonical.FITS:
            nbytes = int((offset + blocks.size).max())
            answer = answer.or_better(nbytes, offset, 'canonical')
        else:
            low = target // unit * unit + unit
        if status == canonical.CANNOT:
            answer = answer._replace(bound_bytes=max(low, answer.bound_bytes))
        if status == canonical.OPEN:
            left = int(pairs * BISECTING_SHARE)
            if not given_up:
                answer = _eject(blocks, answer, pairs, enough, deadline)
            given_up += 1
            if given_up == BISECTIONS:
                break
        target = max(low, (low + answer.nbytes - unit) // 2 // unit * unit)
    return answer


def _eject(
    blocks: Blocks, answer: Answer, pairs: int, enough: int, deadline: Deadline
) -> Answer:
    """By ejection, at the bound and then above it."""
    ejection = Ejection(blocks, deadline)
    found = [ejection.fit(enough, int(pairs * EJECTING_SHARE), enough)]
    if found[0] is None:
        found += ejection.bisect(answer.nbytes, int(pairs * EJECTING_SHARE))
    for one in found:
        if one is not None:
            answer = answer.or_better(one.nbytes, one.offset, 'ejection')
    return answer


def _filled(blocks: Blocks, pairs: int, deadline: Deadline) -> Answer:
    """Offsets of very many blocks; see Note: [very many buffers]."""
    size, spans, lengths = blocks.size, blocks.spans, blocks.lengths()
    by_size = np.argsort(-size, kind='stable')
    large, others = by_size[:MOST_LARGE], by_size[MOST_LARGE:]
    lasting = lengths > blocks.end // BRIEF_PART
    lasting |= spans[:, 3] > spans[:, 2]
    core = take_part(blocks, np.sort(large))
    core_answer = _found(core, pairs, deadline)
    large = np.sort(large)[np.argsort(core_answer.offset, kind='stable')]
    settled = np.concatenate([large, others[lasting[others]]])[:MOST_SETTLED]
    placed = take_part(blocks, settled)
    order = np.arange(len(settled))
    start = Start('by offset', order, FIRST_FIT)
    found = place_in_order(placed, start)
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
    filled = Answer(
        int((result + size).max()),
        result,
        f'{core_answer.name}, filled',
        max(blocks.capacity, core_answer.bound_bytes),
    )
    for fit in (BEST_FIT, FIRST_FIT):
        if len(size) <= MOST_PLACED and filled.nbytes > filled.bound_bytes:
            start = smartpool_start(blocks, fit)
            nbytes, offset, _ = place_in_order(blocks, start)
            filled = filled.or_better(nbytes, offset, start.name)
    return filled


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
