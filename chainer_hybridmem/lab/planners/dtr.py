"""Dynamic tensor rematerialization (Kirisame et al. 2021, ICLR), as a plan.

DTR decides while the program runs. When an allocation does not fit, it evicts the
tensor with the smallest

    h(t) = (seconds of t + seconds of its evicted neighbourhood) / (bytes x staleness)

until the allocation fits, and makes an evicted tensor again when it is read (section
3.2, heuristic h-DTR). The *evicted neighbourhood* of t holds the evicted tensors that a
replay of t runs as well, and those whose replay runs t. *Staleness* is the time since
the last access. Nothing is swapped.

What is interpreted:

- The choices become a plan: each map is kept or recomputed. A recomputed map is made
  again before its first use in backward; what later operations read stays from then
  on if it fits, as in all plans of ours.
- DTR may evict a tensor that forward reads again. Here a map leaves after its last use
  in forward, because a plan takes no map away twice.
- Inside backward the simulator says which operation exceeds the limit. The map with
  the smallest h at that moment goes until all operations fit. Replays count.
- The runtime of DTR, and the cost of its choices while it runs, are not simulated.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Candidate,
    Search,
    kept_load,
)
from chainer_hybridmem.planning.search.replay_graph import make_replay_graph
from chainer_hybridmem.planning.simulation.problem import Problem


def dtr(problem: Problem, limit_bytes: int) -> Plan:
    """Recomputes what h-DTR evicts.

    Raises:
        InfeasibleError: If recomputing alone does not keep the limit.
    """
    search = Search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('dtr')
    evictions = Evictions(problem)
    action = search.fill(KEEP)
    _walk_forward(problem, limit_bytes, evictions, action)
    candidate = _walk_backward(search, evictions, action)
    return search.finish('dtr', candidate)


def _walk_forward(
    problem: Problem, limit_bytes: int, evictions: Evictions, action: np.ndarray
) -> None:
    """Evicts at each operation of forward, in order, until it fits."""
    a = problem.arrays
    load = kept_load(problem)
    for m in np.flatnonzero(action == RECOMPUTE).tolist():  # rules say so
        evictions.evict(m)
        load[a.release_from[m] : a.first_use[m]] -= a.size[m]
    for k in range(a.first_backward):
        while load[k] > limit_bytes:
            m = evictions.choose(k, action)
            if m < 0:
                break
            action[m] = RECOMPUTE
            evictions.evict(m)
            load[k : a.first_use[m]] -= a.size[m]


def _walk_backward(
    search: Search, evictions: Evictions, action: np.ndarray
) -> Candidate:
    """Evicts more while an operation, with the replays before it, does not fit."""
    candidate = search.evaluate(action)
    while not candidate.fits:
        m = evictions.choose(candidate.worst, action)
        if m < 0:
            break
        action[m] = RECOMPUTE
        evictions.evict(m)
        candidate = search.evaluate(action)
    return candidate


class Evictions:
    """What is evicted so far, and what h says about the rest.

    Shapes: V nodes of the replay graph, M maps.

    Args:
        problem (Problem): What to plan.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._graph = make_replay_graph(problem)
        count = len(self._graph.seconds)
        self._begin = np.concatenate([[0.0], np.cumsum(problem.arrays.seconds)])
        # above[v, w]: w is evicted, and a replay of v runs w. below is its transpose
        # for evicted v, and holds for v in memory what its eviction would make longer.
        self._above = np.zeros((count, count), bool)
        self._below = np.zeros((count, count), bool)
        self._evicted = np.zeros(count, bool)

    def choose(self, k: int, action: np.ndarray) -> int:
        """The map with the smallest h at operation ``k``; -1 if none can leave."""
        a = self._problem.arrays
        n_maps = len(action)
        able = (
            self._problem.recomputable
            & (action == KEEP)
            & (a.producer[:n_maps] < k)
            & (a.release_from <= k)
            & (a.first_use > k)
        )
        maps = np.flatnonzero(able)
        if not len(maps):
            return -1
        nodes = self._graph.node[maps]
        neighbourhood = self._above[nodes] | self._below[nodes]
        seconds = self._graph.seconds[nodes] + neighbourhood @ self._graph.seconds
        staleness = self._begin[k] - self._begin[a.copy_from[maps]]
        with np.errstate(divide='ignore', invalid='ignore'):
            h = seconds / (a.size[maps] * np.maximum(staleness, 0.0))
        return int(maps[np.argmin(np.nan_to_num(h, nan=np.inf, posinf=np.inf))])

    def evict(self, m: int) -> None:
        """Map ``m`` is evicted: replays that read it run its node as well."""
        node = self._graph.node[m]
        if self._evicted[node]:
            return
        self._evicted[node] = True
        sources, readers = self._above[node].copy(), self._below[node].copy()
        sources[node] = readers[node] = True
        reads = self._graph.reads
        self._above[reads[:, readers].any(axis=1)] |= sources
        self._below[reads[sources].any(axis=0)] |= readers


DTR = Planner(
    'dtr',
    dtr,
    'Kirisame et al. 2021',
    quick=True,
    actions=frozenset({Action.KEEP, Action.RECOMPUTE}),
)
PLANNERS = (DTR,)
