"""Checkpointing by dynamic programming over lower sets.

Kusumoto et al. 2019, "A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation". Notation, theirs:

=========  ==================================================================
symbol     meaning
=========  ==================================================================
V          nodes: here those of ``planning/search/replay_graph``
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
too (D_i). For each L and each time the programme finds the least M(U) of all strategies
up to L that cost this time and need no more than a budget at any stage. The approximate
programme has only the lower sets "a node and all it depends on", the exact one has all.

Interpreted:

- Theirs are small whole seconds by kind of layer. Ours are measured: of the strategies
  whose sums round to the same level the one that keeps least goes on, with its exact
  sum. Everything together is 400 levels, less for families of more than 625 sets.
- Maps that cannot be recomputed stay; no budget counts them.
- Their memory is not our simulator's, so budgets are searched for: none at all, even
  steps from the least possible to where the cheapest strategy needs no more, then even
  steps around the best. Of each, up to 24 strategies are simulated, from the cheapest
  (time-centric) to the dearest (memory-centric), with the maps of the last stage
  recomputed, as in the paper, and kept: backward begins with these. The fastest that
  fits is the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Candidate,
    Search,
)
from chainer_hybridmem.planning.search.planner_options import POSITIVE
from chainer_hybridmem.planning.search.replay_graph import (
    ReplayGraph,
    make_replay_graph,
)
from chainer_hybridmem.planning.simulation.problem import Problem

LEVELS, FEWEST_LEVELS = 400, 100
ENTRIES = 250_000  # lower sets × levels, for families of many sets
MOST_LOWER_SETS = 3_000
HALVINGS = 10  # to find the least budget
STEPS = 16  # budgets, twice
SPREAD = 24  # strategies of each
UNLIMITED = 2**62


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
        InfeasibleError: If no strategy fits.
        OptionError: If the graph has more lower sets.
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
    sizes = np.ones(1, np.int64)
    stages = make_stages(
        np.zeros((1, 1), bool), np.ones(1), sizes, np.tri(2, 1, -1, bool)
    )
    strategies(stages, UNLIMITED, 1.0, 1, 1)
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
        OptionError: If there are more.
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
                raise OptionError(
                    f'The graph has more than {most} lower sets, too many for the '
                    "exact programme. Raise most_lower_sets, or use 'checkpoint-dp', "
                    f'which has at most {len(reads) + 2} here.'
                )
            found.append(larger)
            known.add(larger)
    return _by_size([np.isin(np.arange(len(reads)), list(lower)) for lower in found])


def _by_size(sets: list[np.ndarray]) -> np.ndarray:
    """Sorts lower sets by size and leaves out repetitions."""
    family = np.unique(np.array(sets), axis=0)
    return family[np.argsort(family.sum(axis=1), kind='stable')]


class Stages(NamedTuple):
    """Every stage from one lower set to a larger one; P of them, by the larger set.

    Attributes:
        pointers (ndarray): (F+1,) int64, first stage to each set.
        sources (ndarray): (P,) int64, the smaller set.
        seconds (ndarray): (P,) of ``V_i - boundary(L_i)``.
        kept_bytes (ndarray): (P,) int64, what U grows by.
        used_bytes (ndarray): (P,) int64, what it needs beside U.
    """

    pointers: np.ndarray
    sources: np.ndarray
    seconds: np.ndarray
    kept_bytes: np.ndarray
    used_bytes: np.ndarray


def make_stages(
    reads: np.ndarray, seconds: np.ndarray, nbytes: np.ndarray, family: np.ndarray
) -> Stages:
    """All stages between the lower sets of a family.

    Args:
        reads: (V, V) bool, whether node ``v`` reads ``w``.
        seconds: (V,) of each node.
        nbytes: (V,) int64, size of each node.
        family: (F, V) bool, small ones first.
    """
    inside, link = family.astype(np.float64), reads.astype(np.float64)
    boundary = boundaries(reads, family)
    readers = inside @ link.T > 0
    read_too = readers.astype(np.float64) @ link > 0
    around = (~family & readers) @ nbytes + (~family & read_too) @ nbytes
    counts, outside = inside.sum(axis=1), 1 - inside
    pointers, parts = [0], [np.zeros((0, 4))]
    for j, (here, edge) in enumerate(zip(family, boundary, strict=True)):
        common = inside[:j] @ inside[j]
        smaller = np.flatnonzero((common == counts[:j]) & (counts[:j] < counts[j]))
        weights = [seconds * (here & ~edge), nbytes * (here & edge), 2 * nbytes * here]
        grown = (outside[:j] @ np.stack(weights, axis=1))[smaller] + [0, 0, around[j]]
        parts.append(np.column_stack([smaller, grown]))
        pointers.append(pointers[-1] + len(smaller))
    sources, spent, kept_bytes, used_bytes = np.concatenate(parts).T
    return Stages(
        pointers=np.array(pointers, np.int64),
        sources=sources.astype(np.int64),
        seconds=spent.copy(),
        kept_bytes=kept_bytes.astype(np.int64),
        used_bytes=used_bytes.astype(np.int64),
    )


def boundaries(reads: np.ndarray, family: np.ndarray) -> np.ndarray:
    """(F, V) bool: nodes of each set that are read outside it."""
    outside = (~family).astype(np.float64)
    return family & (outside @ reads.astype(np.float64) > 0)


class StrategyTable(NamedTuple):
    """What the programme knows of each lower set and level; -1 is "no strategy".

    Attributes:
        kept_bytes (ndarray): (F, levels+1) int64, least M(U).
        spent (ndarray): (F, levels+1) seconds of the strategy that keeps so little.
        stage (ndarray): (F, levels+1) int64, its last stage.
        level (ndarray): (F, levels+1) int64, its level before that stage.
    """

    kept_bytes: np.ndarray
    spent: np.ndarray
    stage: np.ndarray
    level: np.ndarray


@compiled()
def _fill(stages: Stages, table: StrategyTable, budget: int, per_second: float) -> None:
    """Finds the least M(U) of all sets and levels, small sets first."""
    kept_bytes, spent, stage, level = table
    pointers, sources, seconds, stage_bytes, used_bytes = stages
    count, levels = kept_bytes.shape
    entries = np.zeros((count, levels), np.int64)  # levels with a strategy
    filled = np.zeros(count, np.int64)
    least = np.full(count, budget)  # M(U) of any level
    kept_bytes[0, 0] = least[0] = 0
    filled[0] = 1
    for j in range(1, count):
        for p in range(pointers[j], pointers[j + 1]):
            i, room = sources[p], budget - used_bytes[p]
            if least[i] > room:
                continue
            for e in range(filled[i]):
                t = entries[i, e]
                if kept_bytes[i, t] > room:
                    continue
                kept, time = kept_bytes[i, t] + stage_bytes[p], spent[i, t] + seconds[p]
                to = int(time * per_second + 0.5)
                known = kept_bytes[j, to]
                if known < 0 or kept < known or (kept == known and time < spent[j, to]):
                    kept_bytes[j, to], spent[j, to] = kept, time
                    stage[j, to], level[j, to] = p, t
        for t in range(levels):
            if kept_bytes[j, t] >= 0:
                least[j] = min(least[j], kept_bytes[j, t])
                entries[j, filled[j]] = t
                filled[j] += 1


class Strategy(NamedTuple):
    """A canonical strategy.

    Attributes:
        sets (tuple of int): Its lower sets by their place in the family, nothing first.
        seconds (float): Of its replays.
        needed_bytes (int): Of its dearest stage.
    """

    sets: tuple[int, ...]
    seconds: float
    needed_bytes: int


def strategies(
    stages: Stages, budget: int, total_seconds: float, levels: int, most: int
) -> list[Strategy]:
    """Those that keep least for their time, under a budget.

    Args:
        stages: Of a family.
        budget: Bytes that no stage may exceed.
        total_seconds: Of one replay of everything.
        levels: How many times are told apart between none and that.
        most: How many to return, evenly spread if there are more.

    Returns:
        list of Strategy: From the cheapest to the dearest in time.
    """
    shape = len(stages.pointers) - 1, levels + 1
    table = StrategyTable(
        np.full(shape, -1), np.zeros(shape), *np.full((2, *shape), -1)
    )
    per_second = levels / total_seconds if total_seconds > 0 else 0.0
    _fill(stages, table, budget, per_second)
    found = np.flatnonzero(table.kept_bytes[-1] >= 0)
    if len(found) > most:
        found = found[np.linspace(0, len(found) - 1, most).astype(int)]
    return [_strategy(stages, table, int(t)) for t in found]


def _strategy(stages: Stages, table: StrategyTable, level: int) -> Strategy:
    sets, needed_bytes = [len(table.spent) - 1], 0
    seconds = float(table.spent[-1, level])
    while sets[-1] > 0:
        stage = table.stage[sets[-1], level]
        level = int(table.level[sets[-1], level])
        sets.append(int(stages.sources[stage]))
        kept_bytes = table.kept_bytes[sets[-1], level]
        needed_bytes = max(needed_bytes, int(kept_bytes + stages.used_bytes[stage]))
    return Strategy(tuple(sets[::-1]), seconds, needed_bytes)


def _fastest(search: Search, graph: ReplayGraph, family: np.ndarray) -> Candidate:
    """The best candidate of all budgets; if none fits, the one of least peak."""
    trials = _Trials(search, graph, family)
    trials.rank(UNLIMITED)
    most = trials.strategies(UNLIMITED, 1)[0].needed_bytes
    least = trials.least_budget(most)
    step = max(1, (most - least) // STEPS)
    best = min(range(least, most + step, step), key=trials.rank)
    finer = max(1, 2 * step // STEPS)
    for budget in range(max(least, best - step), best + step, finer):
        trials.rank(budget)
    return min(trials.candidates.values(), key=_rank)


class _Trials:
    """Simulates what the programme returns, each set of kept nodes once."""

    def __init__(self, search: Search, graph: ReplayGraph, family: np.ndarray) -> None:
        self.search = search
        self.node = graph.node
        self.family = family
        self.boundary = boundaries(graph.reads, family)
        self.stages = make_stages(graph.reads, graph.seconds, graph.nbytes, family)
        self.total_seconds = float(graph.seconds.sum())
        self.levels = max(FEWEST_LEVELS, min(LEVELS, ENTRIES // len(family)))
        self.candidates: dict[bytes, Candidate] = {}

    def strategies(self, budget: int, most: int) -> list[Strategy]:
        """See :func:`strategies`."""
        return strategies(self.stages, budget, self.total_seconds, self.levels, most)

    def least_budget(self, most: int) -> int:
        """The smallest one with a strategy, to a small part of the largest."""
        low, high = -1, most
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            if self.strategies(middle, 1):
                high = middle
            else:
                low = middle
        return high

    def rank(self, budget: int) -> tuple[float, int]:
        """Seconds and peak of the best candidate of a budget that has one."""
        return min(self._rank_of(s) for s in self.strategies(budget, SPREAD))

    def _rank_of(self, strategy: Strategy) -> tuple[float, int]:
        """Seconds and peak of a strategy, its last stage recomputed or kept."""
        kept = np.logical_or.reduce(self.boundary[list(strategy.sets)])
        last_stage = ~self.family[strategy.sets[max(0, len(strategy.sets) - 2)]]
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


_ACTIONS = frozenset({Action.KEEP, Action.RECOMPUTE})
_SOURCE = 'Kusumoto et al. 2019'
PLANNERS = (
    Planner('checkpoint-dp', checkpoint_dp, _SOURCE, actions=_ACTIONS),
    Planner(
        'checkpoint-dp-exact',
        checkpoint_dp_exact,
        _SOURCE,
        {'most_lower_sets': POSITIVE},
        actions=_ACTIONS,
    ),
)
