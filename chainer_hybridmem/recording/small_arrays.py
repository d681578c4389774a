"""Many small arrays of an iteration, counted together.

A program that loops over boxes or words with NumPy makes a hundred thousand arrays an
iteration. No plan decides about them; only their load counts. Between two events that
matter, their mallocs and frees are a *run*. Two figures of a run are enough: how high
it reaches above its start, and how much it leaves. So the load of every operation stays
the same to the byte, under every plan.

Events matter if a plan or a recipe names their storage, or if it is one of the largest.
So do the beginning of an operation and the end of the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_APART = 10_000  # storages without a name; up to so many are all kept apart
LARGEST_APART = 1_000  # of more, those that are


class Together(NamedTuple):
    """Events of which some stand for many.

    Attributes:
        events (list of int): ``+(id + 1)`` per malloc, ``-(id + 1)`` per free; ids from
            the number of storages on are new ones, in order.
        sizes (list of int): Bytes of each new storage.
        moved (ndarray): (n + 1,) where the events from each position on are now.
    """

    events: list[int]
    sizes: list[int]
    moved: np.ndarray


def find_small(nbytes: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Which storages are counted together: none, unless there are too many.

    Args:
        nbytes: (n,) int64, of each storage.
        named: (n,) bool, whether a plan, a recipe or an operation names it.

    Returns:
        ndarray: (n,) bool.
    """
    unnamed = np.flatnonzero(~named)
    small = np.zeros(len(nbytes), bool)
    if len(unnamed) > MOST_APART:
        sizes = nbytes[unnamed]
        place = len(sizes) - LARGEST_APART - 1
        small[unnamed] = sizes <= np.partition(sizes, place)[place]
    return small


def count_together(
    events: np.ndarray, nbytes: np.ndarray, small: np.ndarray, cuts: np.ndarray
) -> Together:
    """Replaces the events of small storages by few that have the same load.

    Args:
        events: (n,) int64, as in :class:`.profile.Profile`.
        nbytes: Bytes of each storage, int64.
        small: Which storages are counted together, bool.
        cuts: Positions, up to n, at which a run must not go on.
    """
    n = len(events)
    storage = np.abs(events) - 1
    inside = small[storage]
    cut = np.zeros(n + 1, bool)
    cut[cuts] = True
    follows = np.concatenate([[False], inside[:-1]])
    begins = inside & (cut[:n] | ~follows)
    runs = _runs(events[inside], nbytes[storage[inside]], begins[inside])
    made, sizes = _stand_ins(*runs, len(nbytes))
    result: list[int] = []
    kept = np.flatnonzero(~inside | begins)
    counts = np.zeros(n + 1, np.int64)
    numbers = iter(made)
    for position, event in zip(kept.tolist(), events[kept].tolist(), strict=True):
        before = len(result)
        if inside[position]:
            result += next(numbers)
        else:
            result.append(event)
        counts[position + 1] = len(result) - before
    return Together(result, sizes, np.cumsum(counts))


def _runs(
    events: np.ndarray, nbytes: np.ndarray, begins: np.ndarray
) -> tuple[int, list[int], list[int]]:
    """Load before the first run; rise and change of each run."""
    if not len(events):
        return 0, [], []
    born = np.isin(-events, events[events > 0])
    before = int(nbytes[(events < 0) & ~born].sum())
    change = np.where(events > 0, nbytes, -nbytes)
    load = np.cumsum(change)
    first = np.flatnonzero(begins)
    start = load[first] - change[first]
    rise = np.maximum.reduceat(load, first) - start
    left = load[np.append(first[1:], len(load)) - 1] - start
    return before, rise.tolist(), left.tolist()


def _stand_ins(
    before: int, rises: list[int], changes: list[int], first_id: int
) -> tuple[list[list[int]], list[int]]:
    """Events of each run, and the sizes of the storages in them.

    What a run leaves lies on a stack; a later run that frees takes from its top.
    """
    sizes: list[int] = []
    passing: list[list[int]] = []
    born: list[list[int]] = [[] for _ in rises]
    freed: list[list[int]] = [[] for _ in rises]
    stack = [(-1, before)] if before else []

    def new(nbytes: int) -> int:
        sizes.append(nbytes)
        return first_id + len(sizes)

    for run, (rise, change) in enumerate(zip(rises, changes, strict=True)):
        event = new(rise) if rise > max(change, 0) else 0
        passing.append([event, -event] if event else [])
        if change > 0:
            stack.append((run, change))
        while change < 0:
            since, nbytes = stack.pop()
            gone = min(nbytes, -change)
            change += gone
            if gone < nbytes:
                stack.append((since, nbytes - gone))
            event = new(gone)
            freed[run].append(-event)
            if since >= 0:
                born[since].append(event)
    for since, nbytes in stack:
        if since >= 0:
            born[since].append(new(nbytes))
    every = zip(passing, freed, born, strict=True)
    return [p + f + b for p, f, b in every], sizes
