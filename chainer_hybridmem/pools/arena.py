"""Places for the mallocs of an iteration that repeats, found from its log.

Two guided iterations are logged as they are, with every malloc and free, and what
the second one allocates and frees is laid out in one arena. Before that, the trace
of a plan tells nearly the same (:func:`logs_of`). What has no fixed place lies beside
the arena: blocks below the size that the device places, what was there before, and
what outlives its own successor (a batch that is freed after the next one is made).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator

from chainer_hybridmem.pools.layout import Layout, exact
from chainer_hybridmem.pools.trace import Trace

BESIDE = -1  # offset of a malloc that is expected, but has no place


@dataclasses.dataclass(frozen=True)
class IterationLog:
    """One iteration's mallocs and frees.

    Attributes:
        events (tuple of pairs): ``(+id, bytes)`` per malloc, ``(-id, bytes)`` per
            free; ids are never used twice.
        starts (tuple of int): First event of each operation.
        initial_bytes (int): Load before the first event.
    """

    events: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    initial_bytes: int


@dataclasses.dataclass(frozen=True)
class Arena:
    """Where the mallocs of an iteration lie.

    Attributes:
        entries (tuple of pairs): ``(bytes, offset)`` of each expected malloc in
            order, or :data:`BESIDE` for offset. Bytes are those of the block.
        segments (tuple of int): First entry of each operation, and the end.
        side_bytes (int): Highest load of all that lies beside the arena.
        layout (Layout): Of the arena.
    """

    entries: tuple[tuple[int, int], ...]
    segments: tuple[int, ...]
    side_bytes: int
    layout: Layout

    @property
    def slab_bytes(self) -> int:
        """Bytes of the arena itself."""
        return self.layout.footprint_bytes

    @property
    def footprint_bytes(self) -> int:
        """Bytes of the arena and of what lies beside it."""
        return self.slab_bytes + self.side_bytes

    @property
    def placed(self) -> int:
        """Mallocs that have a place."""
        return sum(offset != BESIDE for _, offset in self.entries)


@dataclasses.dataclass(frozen=True)
class _Malloc:
    """One malloc of a block that the device would place."""

    key: tuple[int, int, int]  # operation, position among its mallocs, bytes
    ident: int
    position: int  # in the log
    block: int  # bytes


def lay_out(
    logs: tuple[IterationLog, IterationLog],
    block_bytes: Callable[[int], int],
    alignment: int,
    moves_in: bool = True,
) -> Arena:
    """Lays out an iteration.

    Args:
        logs: An iteration and the next one, which is laid out.
        block_bytes: What a malloc takes up in the arena; 0 if it never lies there.
        alignment: Every offset is a multiple of it, in bytes.
        moves_in: Whether what one iteration leaves to the next may have a place.
    """
    before, log = logs
    mallocs = list(_mallocs(log, block_bytes))
    earlier = {malloc.key: malloc.ident for malloc in _mallocs(before, block_bytes)}
    freed = {-e: p for p, (e, _) in enumerate(log.events) if e < 0}
    taken = {}  # what is left behind, and what it was in the iteration before
    for malloc in mallocs:
        other = earlier.get(malloc.key, 0)
        gone = freed.get(other, len(log.events))
        if moves_in and malloc.ident not in freed and gone < malloc.position:
            taken[malloc.ident] = other
    _untie(mallocs, taken, freed)
    placed = [m for m in mallocs if m.ident in freed or m.ident in taken]
    layout = exact(_trace(log, placed, taken), alignment)
    offsets = {m.ident: o for m, o in zip(placed, layout.offsets, strict=False)}
    counts = [0] * (len(log.starts) + 1)
    for malloc in mallocs:
        counts[malloc.key[0] + 1] += 1
    for k in range(len(log.starts)):
        counts[k + 1] += counts[k]
    return Arena(
        entries=tuple((m.block, offsets.get(m.ident, BESIDE)) for m in mallocs),
        segments=tuple(counts),
        side_bytes=_side_bytes(log, {*offsets, *taken.values()}),
        layout=layout,
    )


def logs_of(trace: Trace) -> tuple[IterationLog, IterationLog]:
    """Logs of two iterations of a trace, such as a plan's; to be laid out."""
    n = len(trace.sizes)
    left = {taken: left for left, taken in trace.carried}
    lower, _ = trace.lifetimes()
    initial = sum(trace.sizes[b] for b in range(n) if not lower[b])

    def ident(buffer: int, iteration: int) -> int:
        if lower[buffer]:
            return iteration * n + buffer + 1
        if buffer in left:
            return (iteration - 1) * n + left[buffer] + 1
        return 4 * n + buffer + 1  # nobody has allocated it

    def log(iteration: int) -> IterationLog:
        events = [
            (ident(e - 1, iteration) if e > 0 else -ident(-e - 1, iteration))
            for e in trace.events
        ]
        sizes = [trace.sizes[abs(event) - 1] for event in trace.events]
        starts = (0, *trace.operation_starts[1:])
        return IterationLog(tuple(zip(events, sizes, strict=True)), starts, initial)

    return log(1), log(2)


def _mallocs(log: IterationLog, block_bytes: Callable[[int], int]) -> Iterator[_Malloc]:
    operation, ordinal = 0, 0
    starts = [*log.starts[1:], len(log.events)]
    for position, (event, nbytes) in enumerate(log.events):
        while position >= starts[operation]:
            operation, ordinal = operation + 1, 0
        block = block_bytes(nbytes) if event > 0 else 0
        if block:
            yield _Malloc((operation, ordinal, nbytes), event, position, block)
            ordinal += 1


def _untie(
    mallocs: list[_Malloc], taken: dict[int, int], freed: dict[int, int]
) -> None:
    """Leaves out what the layout would not tie to its successor.

    It takes each of several of one size to live until the last of them is freed.
    """
    until: dict[int, int] = defaultdict(int)
    tied = [m for m in mallocs if m.ident in taken]
    for malloc in tied:
        last = freed[taken[malloc.ident]]
        until[malloc.block] = max(until[malloc.block], last)
    for malloc in tied:
        if until[malloc.block] > malloc.position:
            del taken[malloc.ident]


def _trace(log: IterationLog, placed: list[_Malloc], taken: dict[int, int]) -> Trace:
    """What lies in the arena: the mallocs in order, then what they were before."""
    index = {malloc.ident: i for i, malloc in enumerate(placed)}
    sizes = [malloc.block for malloc in placed]
    carried = []
    for malloc in placed:
        if malloc.ident in taken:
            carried.append((index[malloc.ident], len(sizes)))
            index[taken[malloc.ident]] = len(sizes)
            sizes.append(malloc.block)
    events = []
    for event, _ in log.events:
        if abs(event) in index:
            events.append((index[abs(event)] + 1) * (1 if event > 0 else -1))
    return Trace(tuple(sizes), tuple(events), (), tuple(carried))


def _side_bytes(log: IterationLog, inside: set[int]) -> int:
    """Highest load of what is not inside of the arena."""
    sizes = {abs(event): nbytes for event, nbytes in log.events}
    born = {event for event, _ in log.events if event > 0}
    load = log.initial_bytes - sum(sizes[i] for i in inside if i not in born)
    peak = load
    for event, nbytes in log.events:
        if abs(event) not in inside:
            load += nbytes if event > 0 else -nbytes
            peak = max(peak, load)
    return peak
