"""Offline layouts: an offset for every buffer of an iteration.

SmartPool (Zhang et al. 2019, section III-C): buffers by descending size, each into the
smallest hole (best fit, the default) or the lowest one (first fit) that is free over
its whole lifetime; the pool grows where there is none. One buffer may share memory with
any number of others.

:func:`exact` goes on where that leaves something: no layout is smaller than the peak
load, so one that reaches it is optimal, proven by its own size. It places in
several orders and then improves the best ones (:mod:`.placement`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.errors import OptionError, PlanError
from chainer_hybridmem.pools import placement
from chainer_hybridmem.pools.placement import BEST_FIT, FIRST_FIT
from chainer_hybridmem.pools.trace import Trace, loads

CUDA_ALIGNMENT, HOST_ALIGNMENT = 512, 64
# Pairs of buffers that each part of the search looks at: about a second's work in all,
# and the same layout on every machine.
PAIRS = 120_000_000
IMPROVED = 2  # of the ways to place, the best ones
MOST_ROUNDS = 5000  # for each; small problems are settled long before
ATTEMPTS = 6  # capacities that ejection tries
LARGE_SHARE = 0.002  # of the bound; larger buffers are large
MOST_CONFLICTS = 20_000_000  # pairs of large buffers that live together


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every buffer of a trace lies.

    Attributes:
        offsets (tuple of int): First byte of each buffer.
        footprint_bytes (int): End of the highest buffer.
        bound_bytes (int): No layout is smaller: the peak load, every size rounded
            up to the alignment.
        peak_load_bytes (int): Highest load of the trace, nothing rounded.
        alignment (int): Every offset is a multiple of it.
        found_by (str): The order and fit, or the search, that found it.
    """

    offsets: tuple[int, ...]
    footprint_bytes: int
    bound_bytes: int
    peak_load_bytes: int
    alignment: int
    found_by: str

    @property
    def optimal(self) -> bool:
        """Whether the footprint is proven to be the smallest possible."""
        return self.footprint_bytes == self.bound_bytes

    @property
    def competitive_ratio(self) -> float:
        """Footprint over peak load."""
        if not self.peak_load_bytes:
            return 1.0
        return self.footprint_bytes / self.peak_load_bytes

    @property
    def gap(self) -> float:
        """Footprint over the proven bound, minus 1."""
        return self.footprint_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What is placed: buffers, carried pairs as one, without what always lives."""

    size: np.ndarray  # (n,) int64, rounded up
    spans: np.ndarray  # (n, 4) int64, see placement
    end: int
    members: tuple[tuple[int, ...], ...]  # buffers of each block
    base_bytes: int  # below all: what lives from start to end
    base: tuple[tuple[int, int], ...]  # (buffer, offset) there
    bound_bytes: int
    alignment: int

    def loads(self) -> np.ndarray:
        first = loads(self.size, self.spans[:, 0], self.spans[:, 1], self.end)
        return first + loads(self.size, self.spans[:, 2], self.spans[:, 3], self.end)

    @property
    def capacity(self) -> int:
        """Bytes above the base that no layout can do without."""
        return self.bound_bytes - self.base_bytes


class _Start(NamedTuple):
    """One way to place."""

    name: str
    order: np.ndarray  # (n,) int64
    fit: int
    above: np.ndarray  # (n,) bool, see placement


class _Found(NamedTuple):
    """What it leads to."""

    nbytes: int
    offset: np.ndarray  # (n,) int64
    start: _Start


def smartpool(trace: Trace, alignment: int = 1, first_fit: bool = False) -> Layout:
    """The layout of SmartPool.

    Args:
        trace: One iteration.
        alignment: Every offset is a multiple of it, in bytes.
        first_fit: The lowest hole instead of the smallest.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    blocks = _blocks(trace, alignment)
    name, fit = ('smartpool', BEST_FIT)
    if first_fit:
        name, fit = ('smartpool-first-fit', FIRST_FIT)
    order = np.argsort(-blocks.size, kind='stable')
    nowhere = np.zeros(len(order), bool)
    found = _place(blocks, _Start(name, order, fit, nowhere))
    return _layout(trace, blocks, found.offset, alignment, name)


def exact(trace: Trace, alignment: int = 1, pairs: int = PAIRS) -> Layout:
    """The smallest layout that can be found, optimal wherever it reaches the bound.

    Args:
        trace: One iteration.
        alignment: Every offset is a multiple of it, in bytes.
        pairs: Pairs of buffers that each part of the search may look at.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    blocks = _blocks(trace, alignment)
    n, capacity = len(blocks.size), blocks.capacity
    found: list[_Found] = []
    for start in _starts(blocks):
        found.append(_place(blocks, start))
        if found[-1].nbytes <= capacity:
            return _layout(trace, blocks, found[-1].offset, alignment, start.name)
    found.sort(key=lambda one: one.nbytes)  # stable
    found = sorted([*_ejected(blocks, found, pairs), *found], key=lambda f: f.nbytes)
    best, name = found[0], found[0].start.name
    rounds = min(MOST_ROUNDS, pairs // max(1, n * n) // IMPROVED)
    for seed, one in enumerate(found[:IMPROVED]):
        if best.nbytes <= capacity:
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
            best, name = _Found(nbytes, offset, start), f'{start.name}, improved'
    return _layout(trace, blocks, best.offset, alignment, name)


def _ejected(blocks: _Blocks, found: list[_Found], pairs: int) -> list[_Found]:
    """Layouts by ejection: first at the bound, then by bisection below the best one.

    Only the large buffers take part; the small ones fill the holes. Placed again in
    the order of their offsets, each as low as it goes, none comes to lie higher.
    """
    large = np.flatnonzero(blocks.size > blocks.bound_bytes * LARGE_SHARE)
    small = np.flatnonzero(blocks.size <= blocks.bound_bytes * LARGE_SHARE)
    small = small[np.argsort(-blocks.size[small], kind='stable')]
    size, spans = blocks.size[large], blocks.spans[large]
    pointer = np.zeros(len(large) + 1, np.int64)
    count = placement.conflicts(spans, pointer, np.zeros(0, np.int32))
    if not len(large) or count > MOST_CONFLICTS:
        return []
    others = np.zeros(count, np.int32)
    placement.conflicts(spans, pointer, others)
    low, high = blocks.capacity, found[0].nbytes
    target, result = low, []
    nowhere = np.zeros(len(blocks.size), bool)
    for attempt in range(ATTEMPTS):
        offset = found[attempt % 2].offset[large]
        work = pairs // ATTEMPTS
        if placement.eject(size, pointer, others, target, work, attempt, offset):
            order = np.concatenate([large[np.argsort(offset, kind='stable')], small])
            start = _Start('ejection', order, FIRST_FIT, nowhere)
            result.append(_place(blocks, start))
            high = target
        else:
            low = target
        unit = (high - low) // 2 // blocks.alignment * blocks.alignment
        if low == high or unit < low // 1000:
            break
        target = low + unit
    return result


def given(trace: Trace, offsets: Sequence[int], alignment: int = 1) -> Layout:
    """A layout that somebody else has made; see :func:`check_layout`."""
    ends = [o + s for o, s in zip(offsets, trace.sizes, strict=True) if s]
    return Layout(
        offsets=tuple(offsets),
        footprint_bytes=max(ends, default=0),
        bound_bytes=_blocks(trace, alignment).bound_bytes,
        peak_load_bytes=trace.peak_load_bytes,
        alignment=alignment,
        found_by='given',
    )


def check_layout(trace: Trace, layout: Layout) -> None:
    """Checks a layout, slowly and simply: pairs alive together must not overlap.

    A carried buffer must lie where its successor does, which lives until the last of
    its size is free. What comes before its successor is free is left out.

    Raises:
        PlanError: Naming two buffers, or one outside of the footprint.
    """
    lower, upper = trace.lifetimes()
    last: dict[int, int] = {}
    for left, taken in trace.carried:
        nbytes = trace.sizes[left]
        last[nbytes] = max(last.get(nbytes, 0), int(upper[taken]))
    for left, taken in trace.carried:
        until = last[trace.sizes[left]]
        if until > lower[left] or not trace.sizes[left]:
            continue
        upper[taken] = until
        if layout.offsets[left] != layout.offsets[taken]:
            raise PlanError(
                f'Buffer {trace.name(left)} lies at byte {layout.offsets[left]}, but '
                f'in the next iteration at {layout.offsets[taken]}.'
            )
    for i, offset in enumerate(layout.offsets):
        end = offset + trace.sizes[i]
        if offset < 0 or end > layout.footprint_bytes or offset % layout.alignment:
            raise PlanError(
                f'Buffer {trace.name(i)} lies from byte {offset} to {end} of '
                f'{layout.footprint_bytes}, alignment {layout.alignment}.'
            )
    by_start = sorted(range(len(lower)), key=lambda i: lower[i])
    alive: list[int] = []
    for i in by_start:
        alive = [j for j in alive if upper[j] > lower[i]]
        if not trace.sizes[i] or lower[i] >= upper[i]:
            continue
        for j in alive:
            if (
                layout.offsets[i] < layout.offsets[j] + trace.sizes[j]
                and layout.offsets[j] < layout.offsets[i] + trace.sizes[i]
            ):
                raise PlanError(
                    f'Buffers {trace.name(i)} and {trace.name(j)} live together from '
                    f'moment {max(lower[i], lower[j])}, but their memory overlaps.'
                )
        alive.append(i)


def check_alignment(alignment: int) -> None:
    """Refuses an alignment that is not a power of two up to 1 GiB.

    Raises:
        OptionError: With the value.
    """
    if not (1 <= alignment <= 2**30 and alignment & (alignment - 1) == 0):
        raise OptionError(
            f'alignment is {alignment}; it must be a power of two, such as 512.'
        )


def _blocks(trace: Trace, alignment: int) -> _Blocks:
    check_alignment(alignment)
    lower, upper = trace.lifetimes()
    rounded = -(-np.array(trace.sizes, np.int64) // alignment) * alignment
    partner = _carried(trace, lower, upper)
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
    blocks = _Blocks(
        size=size,
        spans=np.array(spans, np.int64).reshape(len(spans), 4),
        end=trace.end,
        members=tuple(members),
        base_bytes=height,
        base=tuple(base),
        bound_bytes=0,
        alignment=alignment,
    )
    bound = height + int(blocks.loads().max())
    return dataclasses.replace(blocks, bound_bytes=bound)


def _carried(
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


def _place(blocks: _Blocks, start: _Start) -> _Found:
    n = len(blocks.size)
    offset, work = np.zeros(n, np.int64), np.zeros(n, np.int64)
    nbytes = placement.place(
        start.order,
        blocks.size,
        blocks.spans,
        start.fit,
        start.above,
        blocks.capacity,
        offset,
        work,
    )
    return _Found(nbytes, offset, start)


def _starts(blocks: _Blocks) -> Iterator[_Start]:
    """Ways to place that are worth a try, SmartPool's first.

    In the last ones, what lives shorter than the mean goes to the top of the pool.
    """
    spans = blocks.spans
    length = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]
    nowhere = np.zeros(len(length), bool)
    short = length < length.mean() if len(length) else nowhere
    for above, where in ((nowhere, ''), (short, ', short ones above')):
        for name, order in _orders(blocks, length):
            yield _Start(f'{name}, best fit{where}', order, BEST_FIT, above)
            yield _Start(f'{name}, first fit{where}', order, FIRST_FIT, above)


def _orders(blocks: _Blocks, length: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    size, start, end = blocks.size, blocks.spans[:, 0], blocks.spans[:, 1]
    every = blocks.loads()
    highest = np.array(
        [
            max(every[a:b].max(initial=0), every[c:d].max(initial=0))
            for a, b, c, d in blocks.spans
        ],
        np.int64,
    )
    yield 'size', np.lexsort((start, -length, -size))
    yield 'lifetime', np.lexsort((start, -size, -length))
    yield 'area', np.lexsort((start, -(size * length.astype(float))))
    yield 'load and lifetime', np.lexsort((start, -size, -length, -highest))
    yield 'load and size', np.lexsort((start, -length, -size, -highest))
    yield 'start', np.lexsort((-size, -length, start))
    yield 'end', np.lexsort((-size, -length, -end))


def _layout(
    trace: Trace, blocks: _Blocks, offset: np.ndarray, alignment: int, found_by: str
) -> Layout:
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
