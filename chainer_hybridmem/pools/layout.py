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

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.errors import OptionError, PlanError
from chainer_hybridmem.pools import placement
from chainer_hybridmem.pools.placement import BEST_FIT, FIRST_FIT
from chainer_hybridmem.pools.trace import Trace, loads

CUDA_ALIGNMENT, HOST_ALIGNMENT = 512, 64
# Pairs of buffers that the parts of the search look at: about a second's work in all,
# and the same layout on every machine.
PAIRS = 120_000_000
QUICK_STARTS = 4  # ways to place before anything is ejected
EJECTING_SHARE, BISECTING_SHARE = 0.25, 0.2  # of the pairs
PAIRS_PER_BLOCK = 2000  # for each attempt of ejection
MOST_ATTEMPTS = 60  # at the bound
BISECTIONS = 5
# Blocks alive where the load is above these shares of the capacity are put in first.
LEVELS = ((0.9,), (0.8, 0.95), (0.7, 0.85, 0.97))
IMPROVED = 2  # of the ways to place, the best ones
MOST_ROUNDS = 5000  # for each; small problems are settled long before
LARGE_SHARE = 0.002  # of the bound; larger buffers are large
MOST_CONFLICTS = 20_000_000  # pairs of large buffers that live together
# See Note: [very many buffers].
MOST_BLOCKS = 5000
MOST_LARGE = 1000  # of more, that are searched for
MOST_SETTLED = 10_000  # of these and of those that live long; more lie on top
BRIEF_PART = 64  # of the iteration that something short-lived lasts at most


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

    def lengths(self) -> np.ndarray:
        """Moments each block is alive."""
        spans = self.spans
        return spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]

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


def exact(
    trace: Trace, alignment: int = 1, pairs: int = PAIRS, enough_bytes: int = 0
) -> Layout:
    """The smallest layout that can be found, optimal wherever it reaches the bound.

    Args:
        trace: One iteration.
        alignment: Every offset is a multiple of it, in bytes.
        pairs: Pairs of buffers that each part of the search may look at.
        enough_bytes: A layout that is no larger ends the search.

    Raises:
        OptionError: If the alignment is not a power of two.
    """
    blocks = _blocks(trace, alignment)
    if len(blocks.size) <= MOST_BLOCKS:
        offset, name = _found(blocks, pairs, enough_bytes)
    else:
        offset, name = _filled(blocks, pairs)
    return _layout(trace, blocks, offset, alignment, name)


def _found(
    blocks: _Blocks, pairs: int, enough_bytes: int = 0
) -> tuple[np.ndarray, str]:
    """Offsets and the way to them: see :func:`exact`."""
    n, capacity = len(blocks.size), blocks.capacity
    enough = max(capacity, enough_bytes - blocks.base_bytes)
    starts = _starts(blocks)
    found: list[_Found] = []
    for start in itertools.islice(starts, QUICK_STARTS):
        found.append(_place(blocks, start))
        if found[-1].nbytes <= enough:
            return found[-1].offset, start.name
    ejection = _Ejection(blocks)
    ejected = ejection.fit(capacity, int(pairs * EJECTING_SHARE), enough)
    if ejected is not None:
        found.append(ejected)
        if ejected.nbytes <= enough:
            return ejected.offset, 'ejection'
    for start in starts if ejected is None else ():
        found.append(_place(blocks, start))
        if found[-1].nbytes <= enough:
            return found[-1].offset, start.name
    most = min(one.nbytes for one in found)
    found += ejection.bisect(most, int(pairs * BISECTING_SHARE))
    found.sort(key=lambda one: one.nbytes)  # stable
    best, name = found[0], found[0].start.name
    rounds = min(MOST_ROUNDS, pairs // max(1, n * n) // IMPROVED)
    for seed, one in enumerate(found[:IMPROVED]):
        if best.nbytes <= enough:
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
    return best.offset, name


def _filled(blocks: _Blocks, pairs: int) -> tuple[np.ndarray, str]:
    """Offsets of very many blocks; see Note: [very many buffers]."""
    size, spans, lengths = blocks.size, blocks.spans, blocks.lengths()
    by_size = np.argsort(-size, kind='stable')
    large, others = by_size[:MOST_LARGE], by_size[MOST_LARGE:]
    lasting = lengths > blocks.end // BRIEF_PART
    lasting |= spans[:, 3] > spans[:, 2]
    core = _part(blocks, np.sort(large))
    offset, name = _found(core, pairs)
    large = np.sort(large)[np.argsort(offset, kind='stable')]
    settled = np.concatenate([large, others[lasting[others]]])[:MOST_SETTLED]
    placed = _part(blocks, settled)
    order = np.arange(len(settled))
    nowhere = np.zeros(len(settled), bool)
    found = _place(placed, _Start(name, order, FIRST_FIT, nowhere))
    result = np.zeros(len(size), np.int64)
    result[settled] = found.offset
    brief = others[~lasting[others]]
    brief = brief[np.argsort(spans[brief, 0], kind='stable')]
    visits = _visits(spans, settled)
    near = np.zeros((len(brief) + len(visits), 3), np.int64)
    placement.fill(brief, size, spans, visits, result, near)
    stacked = others[lasting[others]][len(settled) - len(large) :]
    top = (result + size).max() if len(size) else 0
    result[stacked] = top + np.cumsum(size[stacked]) - size[stacked]
    return result, f'{name}, filled'


def _part(blocks: _Blocks, chosen: np.ndarray) -> _Blocks:
    """Some of the blocks, as if there were no others."""
    part = dataclasses.replace(
        blocks,
        size=blocks.size[chosen],
        spans=blocks.spans[chosen],
        members=tuple(blocks.members[i] for i in chosen.tolist()),
    )
    bound = part.base_bytes + int(part.loads().max())
    return dataclasses.replace(part, bound_bytes=bound)


def _visits(spans: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(v, 3) int64: start, end and block of each interval, by start."""
    first = np.column_stack([spans[chosen, :2], chosen])
    second = np.column_stack([spans[chosen, 2:], chosen])
    visits = np.concatenate([first, second])
    visits = visits[visits[:, 1] > visits[:, 0]]
    return np.ascontiguousarray(visits[np.argsort(visits[:, 0], kind='stable')])


class _Ejection:
    """Layouts by ejection, in short attempts: most of those that succeed do so soon.

    Only the large blocks take part, those alive where the load is highest before the
    others, because they have the least choice. The small ones fill the holes.
    """

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        large = blocks.size > blocks.bound_bytes * LARGE_SHARE
        small = np.flatnonzero(~large)
        self._small = small[np.argsort(-blocks.size[small], kind='stable')]
        self._large = np.flatnonzero(large)
        self._size, spans = blocks.size[large], blocks.spans[large]
        self._pointer = np.zeros(len(self._size) + 1, np.int64)
        count = placement.conflicts(spans, self._pointer, np.zeros(0, np.int32))
        self._possible = len(self._size) > 0 and count <= MOST_CONFLICTS
        if not self._possible:
            return
        self._others = np.zeros(count, np.int32)
        placement.conflicts(spans, self._pointer, self._others)
        self._failures = np.ones(len(self._size), np.int64)
        self._attempts = 0
        share = blocks.highest_loads()[large] / blocks.capacity
        area = self._size * blocks.lengths()[large].astype(float)
        keys = [*((levels, self._size) for levels in LEVELS), (LEVELS[1], area)]
        self._orders = [
            np.lexsort((spans[:, 0], -key, -np.searchsorted(levels, share)))
            for levels, key in keys
        ]

    def fit(self, capacity: int, pairs: int, enough: int = 0) -> _Found | None:
        """The smallest of several layouts whose large blocks fit into a capacity.

        Args:
            capacity: Bytes for them; the first layout with everything inside is taken.
            pairs: Pairs of blocks that may be looked at.
            enough: Bytes; so is the first layout that needs no more than these.
        """
        if not self._possible:
            return None
        best: _Found | None = None
        work = PAIRS_PER_BLOCK * len(self._large)
        for _ in range(min(MOST_ATTEMPTS, max(1, pairs // work))):
            offset = self._attempt(capacity, work)
            if offset is None:
                continue
            found = self._filled(offset)
            if best is None or found.nbytes < best.nbytes:
                best = found
            if best.nbytes <= max(capacity, enough):
                break
        return best

    def bisect(self, most: int, pairs: int) -> list[_Found]:
        """Layouts for ever better capacities between the bound and ``most``."""
        low, high = self._blocks.capacity, most
        result: list[_Found] = []
        for _ in range(BISECTIONS):
            if high - low <= low // 1000:
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
        fits = placement.eject(
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

    def _filled(self, large_offset: np.ndarray) -> _Found:
        """With the small blocks; in the order of offsets none comes to lie higher."""
        order = self._large[np.argsort(large_offset, kind='stable')]
        order = np.concatenate([order, self._small])
        nowhere = np.zeros(len(order), bool)
        return _place(self._blocks, _Start('ejection', order, FIRST_FIT, nowhere))


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
    length = blocks.lengths()
    nowhere = np.zeros(len(length), bool)
    short = length < length.mean() if len(length) else nowhere
    for above, where in ((nowhere, ''), (short, ', short ones above')):
        for name, order in _orders(blocks, length):
            yield _Start(f'{name}, best fit{where}', order, BEST_FIT, above)
            yield _Start(f'{name}, first fit{where}', order, FIRST_FIT, above)


def _orders(blocks: _Blocks, length: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    size, start, end = blocks.size, blocks.spans[:, 0], blocks.spans[:, 1]
    highest = blocks.highest_loads()
    yield 'size', np.lexsort((start, -length, -size))
    yield 'load and size', np.lexsort((start, -length, -size, -highest))
    yield 'lifetime', np.lexsort((start, -size, -length))
    yield 'area', np.lexsort((start, -(size * length.astype(float))))
    yield 'load and lifetime', np.lexsort((start, -size, -length, -highest))
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
