"""A bound where maps have to be made again and again: forward, reversed in passes.

Backward needs what forward has made in reverse order. Let forward be cut into levels,
each of which ends with a product that backward reads, so that the later a level, the
earlier backward reads it. Whatever a schedule does, the times at which nothing of the
first levels is there divide it into passes: each begins with what is always there and
makes a level again that is not there, and as long as it is needed, something of the
levels up to that one takes memory. Between two such levels the same holds for what
memory is left. The dynamic program over first level, last level and memory taken is
the fastest schedule of a chain of equal maps, and of no graph above the fastest one.
Why is in ``docs/internals/bound.md``.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.bound.model import find_fixed
from chainer_hybridmem.planning.simulation.arrays import find_maker
from chainer_hybridmem.planning.simulation.in_core import fixed_load
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.work import KEEP, LATE, RECOMPUTE

MOST_OPERATIONS = 3000  # of forward; the tables of more take too much memory
MOST_LEVELS = 200  # as many as take seconds
MOST_UNITS = 256  # of memory, that sizes are rounded down to
LEAST_UNITS = 20
MOST_CELLS = 2_200_000_000  # levels by levels by levels by units
SHARES = (0.0, 1 / 16, 1 / 4, 1 / 2, 1.0)  # of the largest product, in turns


# -- the graph of forward -----------------------------------------------------
class Graph(NamedTuple):
    """What may leave and be made again; n operations, b of forward.

    Attributes:
        seconds (ndarray): (b,) of running each operation of forward again.
        made (list of list of int): What each operation of forward makes.
        maker (dict): The operation of each product, those of backward included.
        size (dict): Bytes of each product.
        reads (list of list of int): Products that are there while an operation runs,
            for the first time or again.
        room (ndarray): (n,) bytes that each operation leaves beside those, what it
            makes, and what is always there.
        run_room (ndarray): (b,) likewise, while an operation of forward runs again.
    """

    seconds: np.ndarray
    made: list[list[int]]
    maker: dict[int, int]
    size: dict[int, int]
    reads: list[list[int]]
    room: np.ndarray
    run_room: np.ndarray


def graph_of_schedules(profile: Profile, limit_bytes: int) -> Graph:
    """What every schedule of Checkmate's form has to do.

    Args:
        profile: Its operations work on nothing in place.
        limit_bytes: Memory limit.
    """
    left = [s for s in profile.storages if s.producer >= 0 and s.freed_at >= 0]
    maker = {s.id: s.producer for s in left}
    size = {s.id: s.nbytes for s in left}
    reads = [set(op.reads) & maker.keys() for op in profile.operations]
    for storage in left:
        for use in (*storage.forward_uses, *storage.backward_uses):
            reads[use].add(storage.id)
    for s, v in maker.items():
        reads[v].discard(s)
    start, peak, _ = fixed_load(profile, set(size))
    seconds = [op.device_seconds for op in profile.operations]
    seconds = seconds[: profile.first_backward]
    return _graph(seconds, maker, size, reads, limit_bytes - start, limit_bytes - peak)


def graph_of_plans(problem: Problem, limit_bytes: int) -> Graph:
    """What every plan has to do that swaps nothing."""
    a = problem.arrays
    made = [m for m in range(len(a.size)) if find_maker(a, m) >= 0]
    again = set(np.array(made, np.int64)[~a.present[made]].tolist())
    reads = [
        set(a.inputs[a.input_ptr[v] : a.input_ptr[v + 1]].tolist()) & again
        for v in range(len(a.seconds))
    ]
    left = limit_bytes - find_fixed(problem)
    for m in np.flatnonzero(a.read).tolist():
        first, end = int(a.first_use[m]), int(a.last_use[m]) + 1
        if m not in again:  # it is kept
            left[max(int(a.producer[m]) + 1, 0) : end] -= a.size[m]
            continue
        for t in range(first, end):
            reads[t].add(m)
    return _graph(
        np.maximum(a.recipe_seconds[: a.first_backward], 0).tolist(),
        {m: int(a.producer[m]) for m in again},
        {m: int(a.size[m]) for m in again},
        reads,
        limit_bytes - a.fixed_start,
        left,
    )


def _graph(
    seconds: list[float],
    maker: dict[int, int],
    size: dict[int, int],
    reads: list[set[int]],
    left: np.ndarray,
    room: np.ndarray,
) -> Graph:
    made: list[list[int]] = [[] for _ in seconds]
    own = np.zeros(len(seconds), np.int64)
    for s, v in maker.items():
        if v < len(seconds):
            made[v].append(s)
            own[v] += size[s]
    return Graph(
        seconds=np.array(seconds, float),
        made=made,
        maker=maker,
        size=size,
        reads=[sorted(ids) for ids in reads],
        room=room,
        run_room=left.max() - own,
    )


def choose_ends(graph: Graph, least_bytes: int) -> list[tuple[int, int]]:
    """Operations that end levels, ascending, and when backward reads what they make.

    A longest sequence with descending times, of products that have ``least_bytes``;
    none where forward is too long.
    """
    b = len(graph.seconds)
    if b > MOST_OPERATIONS:
        return []
    last: dict[int, int] = {}
    for t in range(b, len(graph.reads)):
        for s in graph.reads[t]:
            if graph.maker[s] < b and graph.size[s] >= least_bytes:
                last[graph.maker[s]] = t
    tails: list[int] = []  # the largest last time of a sequence of each length, negated
    found: list[int] = []
    before: dict[int, int] = {}
    for v in sorted(last):
        place = bisect.bisect_right(tails, -last[v])
        if place < len(tails):
            tails[place], found[place] = -last[v], v
        else:
            tails.append(-last[v])
            found.append(v)
        before[v] = found[place - 1] if place else -1
    ends: list[int] = []
    v = found[-1] if found else -1
    while v >= 0:
        ends.append(v)
        v = before[v]
    ends.reverse()
    if len(ends) > MOST_LEVELS:
        chosen = np.linspace(0, len(ends) - 1, MOST_LEVELS).round().astype(int)
        ends = [ends[i] for i in chosen.tolist()]
    return [(v, last[v]) for v in ends]


# -- levels: what passes cost and what they take ------------------------------
class Levels(NamedTuple):
    """Tables of L levels; level 0 is what is always there.

    Attributes:
        cost (ndarray): (L + 1, L + 1) seconds of a pass from a level to a later one.
        least (ndarray): (L + 1, L + 1) bytes that something of the levels after the
            first up to the second takes.
        most (ndarray): (2, L + 1, L + 1) bytes that may be taken meanwhile: if the
            pass reverses levels behind the second one, and if it does not.
    """

    cost: np.ndarray
    least: np.ndarray
    most: np.ndarray


def make_levels(graph: Graph, ends: list[tuple[int, int]], least_bytes: int) -> Levels:
    """The tables; what is smaller than ``least_bytes`` counts as always there.

    Args:
        graph: Of forward.
        ends: Operations that end levels, and when backward reads what they make.
        least_bytes: Of a product that passes make again.
    """
    count, last = len(ends), ends[-1][0]
    size = {s: nbytes for s, nbytes in graph.size.items() if nbytes >= least_bytes}
    level = np.searchsorted([v for v, _ in ends], np.arange(last + 1)) + 1
    begins = np.searchsorted(level, np.arange(count + 1), side='right')
    lies = {s: int(level[v]) for s, v in graph.maker.items() if v <= last and s in size}
    runs = _ancestors(graph, size, last)
    summed = np.cumsum(runs * graph.seconds[: last + 1], axis=1)
    summed = np.concatenate([np.zeros((last + 1, 1)), summed], axis=1)
    above = [_sum_above(graph, lies, t, count) for t in range(len(graph.reads))]
    left = graph.run_room[: last + 1, None] - np.array(above[: last + 1])
    cost = np.full((count + 1, count + 1), np.inf)
    least = np.full((count + 1, count + 1), np.inf)
    most = np.full((2, count + 1, count + 1), np.inf)
    for k, (end, at) in enumerate(ends, 1):
        begin, lower = begins[k - 1], np.arange(k)
        own = [v for v in range(begin, end + 1) if size.keys() & set(graph.made[v])]
        outside = summed[own, begin][:, None] - summed[own][:, begins[:k]]
        cost[:k, k] = outside.min(axis=0) + summed[end, -1] - summed[end, begin]
        smallest = min(size[s] for v in own for s in graph.made[v] if s in size)
        least[:k, k] = np.minimum(smallest, least[:k, k - 1])
        least[k - 1, k] = smallest
        sure = np.append(runs[own, :begin].all(axis=0), runs[end, begin:])
        sure = np.flatnonzero(sure)
        inside = level[sure][:, None] > lower
        room = np.where(inside, left[sure, :k], np.inf).min(axis=0)
        earlier = ends[k][1] if k < count else at - 1
        for several, times in enumerate(([at], range(earlier + 1, at + 1))):
            for t in times:
                behind = above[t][k]
                beside = np.maximum(above[t][:k] - behind, least[:k, k])
                room = np.minimum(room, graph.room[t] - behind - beside)
            most[several, :k, k] = room
    return Levels(cost, least, most)


def _ancestors(graph: Graph, size: dict[int, int], last: int) -> np.ndarray:
    """(last + 1, last + 1) what runs if an operation runs and nothing is there."""
    runs = np.eye(last + 1, dtype=bool)
    for v in range(last + 1):
        for u in {graph.maker[s] for s in graph.reads[v] if s in size}:
            runs[v] |= runs[u]
    return runs


def _sum_above(graph: Graph, lies: dict[int, int], t: int, count: int) -> np.ndarray:
    """(count + 1,) bytes there while t runs: of later levels than each, or of none."""
    own = np.zeros(count + 2)
    for s in graph.reads[t]:
        own[lies.get(s, count + 1)] += graph.size[s]
    return np.cumsum(own[::-1])[::-1][1:]


# -- the dynamic program ------------------------------------------------------
_f64 = types.float64


@compiled(
    types.void(
        _f64[:, ::1],
        types.int64[:, ::1],
        types.int64[:, :, ::1],
        types.int64,
        _f64[:, :, ::1],
        _f64[:, ::1],
    ),
    apart=True,
)
def reverse_from(
    cost: np.ndarray,
    least: np.ndarray,
    most: np.ndarray,
    i: int,
    whole: np.ndarray,
    more: np.ndarray,
) -> None:
    """Fills the rows of one level from those of the later ones.

    Args:
        cost: As :attr:`Levels.cost`.
        least: As :attr:`Levels.least`, in units of memory.
        most: As :attr:`Levels.most`, likewise.
        i: The level.
        whole: Result, (L + 2, L + 2, units): the fewest seconds to reverse the levels
            between two if so many units are taken and none of them is there.
        more: Result, (L + 2, units): likewise up to the end, beyond one run of each.
    """
    count, units = len(cost) - 1, whole.shape[2]
    whole[i, i + 1, :] = 0.0
    for j in range(i + 2, count + 2):
        whole[i, j, :] = np.inf
        for k in range(i + 1, j):
            take, top = least[i, k], most[1 if k < j - 1 else 0, i, k]
            for d in range(min(units, top + 1)):
                rest = 0.0
                if k < j - 1:
                    if d + take >= units:
                        break
                    rest = whole[k, j, d + take]
                seconds = cost[i, k] + rest + whole[i, k, d]
                if seconds < whole[i, j, d]:
                    whole[i, j, d] = seconds
    if i == count:
        more[i, :] = 0.0
        return
    more[i, :] = np.inf
    for k in range(i + 1, count + 1):
        take, top = least[i, k], most[1 if k < count else 0, i, k]
        for d in range(min(units, top + 1)):
            rest = 0.0
            if k < count:
                if d + take >= units:
                    break
                rest = more[k, d + take]
            more[i, d] = min(more[i, d], rest + whole[i, k, d])


class ReversalTables(NamedTuple):
    """The dynamic program, filled; see :func:`reverse_from`.

    Attributes:
        cost (ndarray): As there.
        least (ndarray): Likewise.
        most (ndarray): Likewise.
        whole (ndarray): Likewise.
        more (ndarray): Likewise.
    """

    cost: np.ndarray
    least: np.ndarray
    most: np.ndarray
    whole: np.ndarray
    more: np.ndarray


def _reverse(levels: Levels) -> ReversalTables | None:
    """None if nothing fits."""
    count = len(levels.cost) - 1
    pairs = np.triu_indices(count + 1, 1)
    highest = levels.most[0][pairs].max()
    if highest < 0:
        return None
    unit = float(np.gcd.reduce(levels.least[pairs].astype(np.int64)))
    unit = max(unit, highest / min(MOST_UNITS, MOST_CELLS // count**3 + LEAST_UNITS))
    units = int(highest // unit) + 1
    least, most = (np.zeros(t.shape, np.int64) for t in (levels.least, levels.most))
    least[pairs] = levels.least[pairs] // unit
    for several in range(2):
        most[several][pairs] = levels.most[several][pairs] // unit
    whole = np.full((count + 2, count + 2, units), np.inf)
    more = np.full((count + 1, units), np.inf)
    for i in range(count, -1, -1):
        reverse_from(levels.cost, least, most, i, whole, more)
    return ReversalTables(levels.cost, least, most, whole, more)


def seconds_of_passes(graph: Graph) -> float:
    """Seconds that replays take at least; infinite if nothing fits.

    Args:
        graph: Of schedules or plans.
    """
    largest = max((graph.size[s] for made in graph.made for s in made), default=0)
    best, tried = 0.0, set[int]()
    for share in SHARES:
        ends = choose_ends(graph, max(math.ceil(share * largest), 1))
        if not ends:
            continue
        least_bytes = min(n for n in graph.size.values() if n >= share * largest)
        if least_bytes not in tried:
            tried.add(least_bytes)
            tables = _reverse(make_levels(graph, ends, least_bytes))
            seconds = math.inf if tables is None else float(tables.more[0, 0])
            best = max(best, seconds)
    return best


def find_passes(problem: Problem, limit_bytes: int) -> np.ndarray:
    """(M,) actions that make fewest passes if the end of a level is what stays.

    On a chain of equal maps no plan without swaps is faster. Elsewhere it may not fit.

    Args:
        problem: What to plan; what can be made again is.
        limit_bytes: Memory limit.
    """
    a, graph = problem.arrays, graph_of_plans(problem, limit_bytes)
    action = np.where(problem.recomputable, RECOMPUTE, KEEP).astype(np.int64)
    ends = choose_ends(graph, 1)
    if not ends:
        return action
    levels = make_levels(graph, ends, 1)
    for k, (v, _) in enumerate(ends, 1):
        levels.least[:k, k] = sum(graph.size[s] for s in graph.made[v])
    tables = _reverse(levels)
    if tables is None or math.isinf(tables.more[0, 0]):
        return action
    stays = _follow(tables)
    for k, (v, _) in enumerate(ends, 1):
        for m in graph.made[v]:
            if m < len(action) and a.read[m]:
                action[m] = stays[k]
    return action


def _follow(tables: ReversalTables) -> list[int]:
    """Actions by level: kept, or made to stay after how many passes."""
    cost, least, most, whole, more = tables
    count, i, d = len(cost) - 1, 0, 0
    stays, passed = [KEEP] * (count + 1), np.zeros(count + 1, np.int64)
    todo = []  # levels between two to reverse, and memory taken; the last one first
    while i < count:
        for k in range(i + 1, count + 1):
            e = d + int(least[i, k])
            if most[1 if k < count else 0, i, k] < d or (
                k < count and e >= len(more[0])
            ):
                continue
            rest = more[k, e] if k < count else 0.0
            if rest + whole[i, k, d] == more[i, d]:
                break
        todo.append((i, k, d))
        i, d = k, e
    while todo:
        i, j, d = todo.pop()
        if j - i < 2:
            continue
        for k in range(i + 1, j):
            e, several = d + int(least[i, k]), k < j - 1
            if most[int(several), i, k] < d or (several and e >= whole.shape[2]):
                continue
            rest = whole[k, j, e] if several else 0.0
            if cost[i, k] + rest + whole[i, k, d] == whole[i, j, d]:
                break
        stays[k] = LATE + int(passed[k]) if passed[k] else RECOMPUTE
        passed[i + 1 : k + 1] += 1
        todo += [(i, k, d), (k, j, e)]
    return stays
