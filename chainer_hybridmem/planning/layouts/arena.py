"""Places for the mallocs of an iteration that repeats, found from its log.

Two guided iterations are logged as they are, with every malloc and free, and what
the second one allocates and frees is laid out in one arena. Before that, the trace
of a plan tells nearly the same (:func:`logs_of`). What has no fixed place lies beside
the arena: blocks below the size that the device places, what was there before, and
what outlives its own successor (a batch that is freed after the next one is made).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.planning.layouts.offline import exact
from chainer_hybridmem.planning.layouts.trace import Trace
from chainer_hybridmem.planning.search.deadline import Deadline

MOST_BUFFERS_EACH = 1 << 32  # more than an operation allocates
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


class _EventLog:
    """An iteration's events as arrays, and the mallocs that the device would place.

    Attributes:
        events (ndarray): (n,) int64, ``+id`` and ``-id``.
        nbytes (ndarray): (n,) int64, of each event.
        mallocs (ndarray): (m,) positions of blocks that could lie in the arena.
        idents (ndarray): (m,) their ids.
        blocks (ndarray): (m,) bytes that they take up there.
        operations (ndarray): (m,) whose they are.
        keys (ndarray): (m,) operation, and position among its mallocs; ascending.
    """

    def __init__(self, log: IterationLog, block_bytes: Callable[[int], int]) -> None:
        table = np.array(log.events, np.int64).reshape(-1, 2)
        self.events, self.nbytes = table[:, 0], table[:, 1]
        sizes, which = np.unique(self.nbytes, return_inverse=True)
        blocks = np.array([block_bytes(size) for size in sizes.tolist()], np.int64)
        of_event = blocks[which.reshape(-1)] if len(table) else np.zeros(0, np.int64)
        self.mallocs = np.flatnonzero((self.events > 0) & (of_event > 0))
        self.idents = self.events[self.mallocs]
        self.blocks = of_event[self.mallocs]
        self.operations = np.searchsorted(log.starts[1:], self.mallocs, 'right')
        first = np.searchsorted(self.operations, self.operations)
        ordinals = np.arange(len(self.mallocs)) - first
        self.keys = self.operations * MOST_BUFFERS_EACH + ordinals

    def freed_at(self, idents: np.ndarray) -> np.ndarray:
        """Positions of the frees of some ids; behind all events where there is none."""
        frees = np.flatnonzero(self.events < 0)
        return _looked_up(-self.events[frees], frees, idents, len(self.events))

    def same_as(self, other: _EventLog) -> np.ndarray:
        """(m,) ids of the mallocs of the same place and bytes in another log, or 0."""
        number = np.arange(len(other.keys))
        found = _looked_up(other.keys, number, self.keys, -1)
        idents = np.append(other.idents, 0)[found]
        nbytes = np.append(other.nbytes[other.mallocs], -1)[found]
        return np.where(nbytes == self.nbytes[self.mallocs], idents, 0)


def _looked_up(
    keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, otherwise: int
) -> np.ndarray:
    """The value of each wanted key; the last one where it comes twice."""
    if not len(keys):
        return np.full(len(wanted), otherwise, np.int64)
    order = np.argsort(keys, kind='stable')
    place = np.searchsorted(keys, wanted, 'right', order) - 1
    at = order[place]  # -1: the last one, which is larger
    return np.where((place >= 0) & (keys[at] == wanted), values[at], otherwise)


def lay_out(
    logs: tuple[IterationLog, IterationLog],
    block_bytes: Callable[[int], int],
    alignment: int,
    moves_in: bool = True,
    enough_bytes: int = 0,
    deadline: Deadline | None = None,
) -> Arena:
    """Lays out an iteration.

    Args:
        logs: An iteration and the next one, which is laid out.
        block_bytes: What a malloc takes up in the arena; 0 if it never lies there.
        alignment: Every offset is a multiple of it, in bytes.
        moves_in: Whether what one iteration leaves to the next may have a place.
        enough_bytes: No smaller one is looked for; of the arena and all beside it.
        deadline: The search ends with it.
    """
    before, log = (_EventLog(one, block_bytes) for one in logs)
    freed = log.freed_at(log.idents)
    goes = freed < len(log.events)
    others = log.same_as(before)
    gone = log.freed_at(others)
    tied = ~goes & (others != 0) & (gone < log.mallocs) & moves_in
    tied[tied] = _tied(log.blocks[tied], log.mallocs[tied], gone[tied])
    placed = goes | tied
    taken = np.where(tied, others, 0)[placed]
    inside = np.concatenate([log.idents[placed], taken[taken != 0]])
    side_bytes = _side_bytes(log, inside, logs[1].initial_bytes)
    layout = exact(
        _trace(log, placed, taken),
        alignment,
        enough_bytes=max(1, enough_bytes - side_bytes) if enough_bytes else 0,
        deadline=deadline,
    )
    offsets = np.full(len(placed), BESIDE, np.int64)
    offsets[placed] = layout.offsets[: int(placed.sum())]
    counts = np.bincount(log.operations, minlength=len(logs[1].starts))
    return Arena(
        entries=tuple(zip(log.blocks.tolist(), offsets.tolist(), strict=True)),
        segments=(0, *np.cumsum(counts).tolist()),
        side_bytes=side_bytes,
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
        return 4 * n + buffer + 1  # there before the log

    def log(iteration: int) -> IterationLog:
        events = [
            (ident(e - 1, iteration) if e > 0 else -ident(-e - 1, iteration))
            for e in trace.events
        ]
        sizes = [trace.sizes[abs(event) - 1] for event in trace.events]
        starts = (0, *trace.operation_starts[1:])
        return IterationLog(tuple(zip(events, sizes, strict=True)), starts, initial)

    return log(1), log(2)


def _tied(blocks: np.ndarray, positions: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """Which mallocs the layout ties to what they were in the iteration before.

    It takes each of several of one size to live until the last of them is freed.
    """
    sizes, which = np.unique(blocks, return_inverse=True)
    until = np.zeros(len(sizes), np.int64)
    np.maximum.at(until, which.reshape(-1), gone)
    return until[which.reshape(-1)] <= positions


def _trace(log: _EventLog, placed: np.ndarray, taken: np.ndarray) -> Trace:
    """What lies in the arena: the mallocs in order, then what they were before.

    Args:
        log: What is laid out.
        placed: (m,) bool, mallocs with a place.
        taken: For each of them, the id that it has taken the place of, or 0.
    """
    n, tied = len(taken), np.flatnonzero(taken)
    idents = np.concatenate([log.idents[placed], taken[tied]])
    blocks = log.blocks[placed]
    index = _looked_up(idents, np.arange(len(idents)), np.abs(log.events), -1)
    events = np.where(log.events > 0, index + 1, -(index + 1))[index >= 0]
    return Trace(
        (*blocks.tolist(), *blocks[tied].tolist()),
        tuple(events.tolist()),
        (),
        tuple(zip(tied.tolist(), range(n, len(idents)), strict=True)),
    )


def _side_bytes(log: _EventLog, inside: np.ndarray, initial_bytes: int) -> int:
    """Highest load of what is not inside of the arena.

    Args:
        log: What is laid out.
        inside: Ids.
        initial_bytes: Load before the first event.
    """
    idents = np.abs(log.events)
    within = np.isin(idents, inside)
    born = np.isin(idents, log.events[log.events > 0])
    load = initial_bytes - int(log.nbytes[within & ~born].sum())
    change = np.where(log.events > 0, log.nbytes, -log.nbytes)[~within]
    return load + max(0, int(np.cumsum(change).max(initial=0)))
