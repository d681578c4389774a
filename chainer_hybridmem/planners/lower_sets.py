"""Checkpointing by dynamic programming over lower sets.

Kusumoto et al. 2019, "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation". Notation, theirs:

=========  ==================================================================
symbol     meaning
=========  ==================================================================
V          nodes: here those of :mod:`.replay_graph`
L          lower set: whatever its nodes read is in it
boundary   of L: its nodes that are read outside it
L_1 … L_k  a canonical strategy: growing lower sets, L_k = V
V_i        stage i: the nodes of L_i that are not in L_{i-1}
U_i        boundaries of L_1 … L_i together: what is kept
T(S)       seconds of replaying the nodes of S
M(S)       bytes of the nodes of S
=========  ==================================================================

A strategy costs ``sum_i T(V_i - boundary(L_i))``, and stage i needs ``M(U_{i-1}) +
2 M(V_i) + M(G_i) + M(D_i)``: what is kept, the stage's values and gradients, gradients
of the nodes outside L_i that read it (G_i), and values outside L_i that these read
too (D_i). ``best[L, t]`` is the least M(U) of all strategies up to L that cost t and
need no more than a budget at any stage. The approximate programme has only the
lower sets "a node and all it depends on", the exact one has all of them.

Interpreted:

- Seconds are rounded to ``1 / LEVELS`` of one replay of everything. Theirs are small
  whole numbers by kind of layer.
- Maps that cannot be recomputed stay and are in nobody's budget.
- Their memory is not our simulator's, so budgets are searched for: the least possible
  by bisection, even steps from there to where the cheapest strategy needs no more, then
  even steps around the best. The cheapest strategy of each (time-centric) is simulated
  with the maps of the last stage recomputed, as in the paper, and kept: backward begins
  with these. The fastest that fits is the plan. If none fits, the dearest strategies
  (memory-centric) are tried in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.jit import compiled
from chainer_hybridmem.plan import Plan
from chainer_hybridmem.planners.base import KEEP, RECOMPUTE, Candidate, Search
from chainer_hybridmem.planners.replay_graph import ReplayGraph, make_replay_graph
from chainer_hybridmem.simulation.problem import Problem

LEVELS = 1000
MOST_LOWER_SETS = 3_000
HALVINGS = 10
STEPS = 32
NEVER = np.iinfo(np.int64).max


def checkpoint_dp(problem: Problem, limit_bytes: int) -> Plan:
    """The approximate programme.

    Raises:
        InfeasibleError: If none of its strategies fits.
    """
    search = _compiled_search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('checkpoint-dp')
    graph = make_replay_graph(problem)
    best = _fastest(search, graph, pruned_family(graph.reads))
    return search.finish('checkpoint-dp', best)


def checkpoint_dp_exact(
    problem: Problem, limit_bytes: int, most_lower_sets: int = MOST_LOWER_SETS
) -> Plan:
    """The exact programme.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        most_lower_sets: Time and memory grow with their square.

    Raises:
        InfeasibleError: If the graph has more lower sets, or no strategy fits.
    """
    search = _compiled_search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('checkpoint-dp-exact')
    graph = make_replay_graph(problem)
    family = whole_family(graph.reads, most_lower_sets)
    best = _fastest(search, graph, family)
    return search.finish('checkpoint-dp-exact', best, lower_sets=len(family))


def _compiled_search(problem: Problem, limit_bytes: int) -> Search:
    """On a fresh installation this compiles, which is not planning."""
    none = np.zeros(0, np.int64)
    strategy(make_stages(np.zeros((0, 0), bool), none, none, np.zeros((1, 0), bool)), 0)
    return Search(problem, limit_bytes)


def pruned_family(reads: np.ndarray) -> np.ndarray:
    """(F, V) bool: nothing, each node with all it depends on, and everything.

    Args:
        reads: (V, V) bool, whether node ``v`` reads ``w``, in topological order.
    """
    sets = np.eye(len(reads), dtype=bool)
    for v, row in enumerate(reads):
        sets[v] |= sets[row].any(axis=0)
    return _by_size([np.zeros(len(reads), bool), *sets, np.ones(len(reads), bool)])


def whole_family(reads: np.ndarray, most: int) -> np.ndarray:
    """(F, V) bool: all lower sets.

    Args:
        reads: As for :func:`pruned_family`.
        most: How many there may be.

    Raises:
        InfeasibleError: If there are more.
    """
    sources = [frozenset(np.flatnonzero(row).tolist()) for row in reads]
    found = [frozenset[int]()]
    known = set(found)
    for lower in found:
        for v, needs in enumerate(sources):
            larger = lower | {v}
            if v in lower or not needs <= lower or larger in known:
                continue
            if len(found) == most:
                raise InfeasibleError(
                    f'The graph has more than {most} lower sets, too many for the '
                    "exact programme. Raise most_lower_sets, or use 'checkpoint-dp', "
                    f'which has at most {len(reads) + 2} here.'
                )
            found.append(larger)
            known.add(larger)
    return _by_size([np.isin(np.arange(len(reads)), list(lower)) for lower in found])


def _by_size(sets: list[np.ndarray]) -> np.ndarray:
    """Without repetitions, small ones first."""
    family = np.unique(np.array(sets), axis=0)
    return family[np.argsort(family.sum(axis=1), kind='stable')]


class Stages(NamedTuple):
    """Every stage from one lower set to a larger one; P of them, by the larger set.

    Attributes:
        pointers (ndarray): (F+1,) int64, first stage to each set.
        sources (ndarray): (P,) int64, the smaller set.
        units (ndarray): (P,) int64, time of ``V_i - boundary(L_i)``.
        kept_bytes (ndarray): (P,) int64, what U grows by.
        used_bytes (ndarray): (P,) int64, what it needs beside U.
        levels (int): Units of everything.
    """

    pointers: np.ndarray
    sources: np.ndarray
    units: np.ndarray
    kept_bytes: np.ndarray
    used_bytes: np.ndarray
    levels: int


def make_stages(
    reads: np.ndarray, units: np.ndarray, nbytes: np.ndarray, family: np.ndarray
) -> Stages:
    """All stages between the lower sets of a family.

    Args:
        reads: (V, V) bool, whether node ``v`` reads ``w``.
        units: (V,) int64, time of each node.
        nbytes: (V,) int64, size of each node.
        family: (F, V) bool, small ones first.
    """
    inside, link = family.astype(np.float64), reads.astype(np.float64)
    boundary = boundaries(reads, family)
    readers = inside @ link.T > 0
    read_too = readers.astype(np.float64) @ link > 0
    outside_bytes = (~family & readers) @ nbytes + (~family & read_too) @ nbytes
    sizes, set_bytes, set_units = inside.sum(axis=1), family @ nbytes, family @ units
    pointers, parts = [0, 0], [np.zeros((4, 0), np.int64)]
    for j in range(1, len(family)):
        common = inside[:j] @ inside[j]
        smaller = np.flatnonzero((common == sizes[:j]) & (sizes[:j] < sizes[j]))
        fresh = boundary[j] & ~family[smaller]
        times = set_units[j] - set_units[smaller] - fresh @ units
        grown = set_bytes[j] - set_bytes[smaller]
        used_bytes = 2 * grown + outside_bytes[j]
        parts.append(np.stack([smaller, times, fresh @ nbytes, used_bytes]))
        pointers.append(pointers[-1] + len(smaller))
    columns = np.ascontiguousarray(np.concatenate(parts, axis=1), np.int64)
    sources, times, kept_bytes, used_bytes = columns
    return Stages(
        pointers=np.array(pointers, np.int64),
        sources=sources,
        units=times,
        kept_bytes=kept_bytes,
        used_bytes=used_bytes,
        levels=int(units.sum()),
    )


def boundaries(reads: np.ndarray, family: np.ndarray) -> np.ndarray:
    """(F, V) bool: nodes of each set that are read outside it."""
    outside = (~family).astype(np.float64)
    return family & (outside @ reads.astype(np.float64) > 0)


@compiled()
def _least_kept(
    pointers: np.ndarray,
    sources: np.ndarray,
    units: np.ndarray,
    kept_bytes: np.ndarray,
    used_bytes: np.ndarray,
    budget: int,
    dearest: bool,
    best: np.ndarray,
    chosen: np.ndarray,
) -> None:
    """Fills ``best`` (F, levels+1) with M(U), ``chosen`` with the last stage.

    Unless the dearest strategy is asked for, entries with an earlier one that keeps
    no more are left out: nothing cheap goes on from there.
    """
    count, never = len(best), best[0, 0]
    least = np.full(count, never)
    times = np.zeros(best.shape, np.int64)  # of the entries of each set
    entries = np.zeros(count, np.int64)
    best[0, 0] = least[0] = 0
    entries[0] = 1
    for j in range(1, count):
        for p in range(pointers[j], pointers[j + 1]):
            i, room = sources[p], budget - used_bytes[p]
            if least[i] > room:
                continue
            for e in range(entries[i]):
                t = times[i, e]
                kept = best[i, t] + kept_bytes[p]
                if best[i, t] <= room and kept < best[j, t + units[p]]:
                    best[j, t + units[p]] = kept
                    chosen[j, t + units[p]] = p
        for t in range(best.shape[1]):
            if best[j, t] < least[j] or (dearest and best[j, t] < never):
                least[j] = min(least[j], best[j, t])
                times[j, entries[j]] = t
                entries[j] += 1


class Strategy(NamedTuple):
    """A canonical strategy.

    Attributes:
        sets (tuple of int): Its lower sets by their place in the family, nothing first.
        units (int): Time of its replays.
        needed_bytes (int): Of its dearest stage.
    """

    sets: tuple[int, ...]
    units: int
    needed_bytes: int


def strategy(stages: Stages, budget: int, dearest: bool = False) -> Strategy | None:
    """The cheapest or the dearest strategy in time under a budget in bytes.

    Returns:
        Strategy or None: None if the budget is too small for any.
    """
    shape = len(stages.pointers) - 1, stages.levels + 1
    best, chosen = np.full(shape, NEVER), np.full(shape, -1, np.int64)
    _least_kept(*stages[:5], budget, dearest, best, chosen)
    times = np.flatnonzero(best[-1] != NEVER)
    if len(times) == 0:
        return None
    return _strategy(stages, best, chosen, int(times[-1 if dearest else 0]))


def _strategy(
    stages: Stages, best: np.ndarray, chosen: np.ndarray, units: int
) -> Strategy:
    sets, needed_bytes, t = [len(best) - 1], 0, units
    while sets[-1] > 0:
        stage = chosen[sets[-1], t]
        t -= stages.units[stage]
        sets.append(int(stages.sources[stage]))
        kept_bytes = best[sets[-1], t]
        needed_bytes = max(needed_bytes, int(kept_bytes + stages.used_bytes[stage]))
    return Strategy(tuple(sets[::-1]), units, needed_bytes)


def quantised(seconds: np.ndarray) -> np.ndarray:
    """(V,) int64: seconds in units of ``1 / LEVELS`` of them all."""
    return np.rint(seconds * (LEVELS / max(seconds.sum(), 1e-300))).astype(np.int64)


def _fastest(search: Search, graph: ReplayGraph, family: np.ndarray) -> Candidate:
    """The best candidate of all budgets; if none fits, the one of least peak."""
    trials = _Trials(search, graph, family)
    trials.search_budgets(dearest=False)
    if not trials.best().fits:
        trials.search_budgets(dearest=True)
    return trials.best()


class _Trials:
    """Simulates what the programme returns, each set of kept nodes once."""

    def __init__(self, search: Search, graph: ReplayGraph, family: np.ndarray) -> None:
        self.search = search
        self.node = graph.node
        self.family = family
        self.boundary = boundaries(graph.reads, family)
        units = quantised(graph.seconds)
        self.stages = make_stages(graph.reads, units, graph.nbytes, family)
        self.candidates: dict[bytes, Candidate] = {}

    def best(self) -> Candidate:
        """Of all candidates so far."""
        return min(self.candidates.values(), key=_rank)

    def search_budgets(self, dearest: bool) -> None:
        """Tries budgets from the least to where more changes nothing."""

        def rank(budget: int) -> tuple[float, int]:
            return self._rank_of(strategy(self.stages, budget, dearest))

        most = self._most_budget()
        least = self._least_budget(most)
        step = max(1, (most - least) // STEPS)
        best = min(range(least, most + step, step), key=rank)
        finer = max(1, 2 * step // STEPS)
        for budget in range(max(least, best - step), best + step, finer):
            rank(budget)

    def _most_budget(self) -> int:
        """What the cheapest strategy of all needs."""
        cheapest = strategy(self.stages, NEVER)
        return cheapest.needed_bytes if cheapest else 0

    def _least_budget(self, most: int) -> int:
        """The smallest one with a strategy, to a small part of the largest."""
        low, high = -1, most
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if strategy(self.stages, middle):
                high = middle
            else:
                low = middle
        return high

    def _rank_of(self, found: Strategy | None) -> tuple[float, int]:
        """Seconds and peak of a strategy, its last stage recomputed or kept."""
        if found is None:
            return np.inf, NEVER
        kept = np.any(self.boundary[list(found.sets)], axis=0, keepdims=True)[0]
        last_stage = ~self.family[found.sets[max(0, len(found.sets) - 2)]]
        return min(_rank(self._simulate(k)) for k in (kept, kept | last_stage))

    def _simulate(self, kept: np.ndarray) -> Candidate:
        key = kept.tobytes()
        if key not in self.candidates:
            stays = np.append(kept, True)[self.node]  # the last one is of no node
            action = np.where(stays, KEEP, RECOMPUTE)
            self.candidates[key] = self.search.evaluate(action)
        return self.candidates[key]


def _rank(candidate: Candidate) -> tuple[float, int]:
    return candidate.seconds, candidate.peak_bytes
