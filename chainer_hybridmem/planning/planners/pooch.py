"""The two-stage search of Ito et al. (later PoocH), sections 4.4.2 and 4.4.3.

Stage 1, keep or swap. Everything starts on swap. A swap is *exposed* if compute
waits for it. Maps whose swap-in is exposed span an exhaustive keep/swap tree;
at each leaf exposed swap-outs are trimmed greedily: from the output layer
backwards, maps are kept while memory allows. The best simulated time wins.

Stage 2, swap or recompute, equation (1):
``r(X) = recompute_overhead(X) / swap_overhead(X)``, both from simulation with
all other maps fixed. Maps with ``r >= 1`` stay on swap; the smallest ``r < 1``
is flipped to recompute; repeat until no map is left.

Where the paper is silent: the tree has ``2**|L_I|`` leaves, so ``node_budget``
bounds the simulations of stage 1. If it does not suffice, the tree spans the
most exposed maps only and grows again from the best leaf while that helps; the
plan's options say so. ``swap_overhead`` is measured against copies of X that take
no time with memory as under swap.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
)
from chainer_hybridmem.planning.search.planner_options import POSITIVE
from chainer_hybridmem.planning.search.repairs import find_start
from chainer_hybridmem.planning.simulation.problem import Problem

NODE_BUDGET = 20_000
LARGEST_TREE = 10  # maps in one tree once the whole one is too large
MOST_SEEN = 2**20  # actions remembered


def swap_opt(
    problem: Problem, limit_bytes: int, node_budget: int = NODE_BUDGET
) -> Plan:
    """Stage 1 only: keep or swap."""
    search = Search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('swap-opt')
    best, complete = _stage_one(search, node_budget)
    return search.finish(
        'swap-opt', best, node_budget=node_budget, tree_complete=complete
    )


def pooch(problem: Problem, limit_bytes: int, node_budget: int = NODE_BUDGET) -> Plan:
    """Both stages: keep or swap, then swap or recompute."""
    search = Search(problem, limit_bytes)
    if search.in_core_fits():
        return search.finish_in_core('pooch')
    best, complete = _stage_one(search, node_budget)
    if best.fits:
        best = _stage_two(search, best)
    return search.finish('pooch', best, node_budget=node_budget, tree_complete=complete)


def faster_stage(problem: Problem, limit_bytes: int) -> Plan:
    """The faster one of ``swap-opt`` and ``pooch``, with stage 1 searched once.

    Raises:
        InfeasibleError: If neither fits.
    """
    search = Search(problem, limit_bytes)
    first, complete = _stage_one(search, NODE_BUDGET)
    options = {'node_budget': NODE_BUDGET, 'tree_complete': complete}
    if first.fits:
        second = _stage_two(search, first)
        if second.seconds < first.seconds:
            return search.finish('pooch', second, **options)
    return search.finish('swap-opt', first, **options)


def _stage_one(search: Search, node_budget: int) -> tuple[Candidate, bool]:
    """Returns the best candidate and whether one whole tree was searched."""
    base = find_start(search)
    if not base.fits:
        return base, True
    exposed = _by_exposure(base)
    best = _Tree(search, node_budget - search.simulations).run(base, exposed)
    if best.complete:
        return best.candidate, True
    while search.simulations < node_budget:
        tree = _Tree(search, node_budget - search.simulations)
        found = tree.run(best.candidate, _by_exposure(best.candidate)[:LARGEST_TREE])
        if found.candidate.seconds >= best.candidate.seconds:
            break
        best = found
    return best.candidate, False


def _by_exposure(candidate: Candidate) -> list[int]:
    """Maps whose swap-in compute waits for (L_I), longest wait first."""
    stall = candidate.need_stall
    waited = [m for m in range(len(stall)) if stall[m] > 0]
    return sorted(waited, key=lambda m: -stall[m])


class _Tree:
    """Depth-first keep/swap tree over some maps, others as they are."""

    def __init__(self, search: Search, budget: int) -> None:
        self.search = search
        self.last = search.simulations + budget
        self.complete = True
        self.may_keep = search.problem.arrays.allowed[:, KEEP]
        self.seen: dict[bytes, Candidate] = {}

    def run(self, base: Candidate, maps: list[int]) -> _Tree:
        self.candidate = base
        self._trim(base)
        self._branch(base, maps, 0)
        return self

    def _branch(self, candidate: Candidate, maps: list[int], depth: int) -> None:
        """Keep first; a set of keeps that does not fit is cut off whole."""
        if depth == len(maps):
            return
        if self.search.simulations >= self.last:
            self.complete = False
            return
        m = maps[depth]
        if candidate.action[m] == SWAP and self.may_keep[m]:
            kept = candidate.action.copy()
            kept[m] = KEEP
            child = self._evaluate(kept)
            if child.fits:
                self._trim(child)
                self._branch(child, maps, depth + 1)
        self._branch(candidate, maps, depth + 1)

    def _trim(self, candidate: Candidate) -> None:
        """Greedy trimming of exposed swap-outs, from the output layer on."""
        action, current = candidate.action.copy(), candidate
        for m in np.flatnonzero(self.may_keep & (action == SWAP))[::-1].tolist():
            if not current.release_stall.any():
                break
            if self.search.simulations >= self.last:
                self.complete = False
                break
            action[m] = KEEP
            trimmed = self._evaluate(action)
            if not trimmed.fits:
                break
            current = trimmed
            self._offer(current)
        self._offer(current)

    def _evaluate(self, action: np.ndarray) -> Candidate:
        """Simulates an assignment, but for most of those that come again."""
        key = action.tobytes()
        if key in self.seen:
            self.search.simulations += 1
            return self.seen[key]
        if len(self.seen) * len(action) > MOST_SEEN:
            self.seen.clear()
        found = self.seen[key] = self.search.evaluate(action)
        return found

    def _offer(self, candidate: Candidate) -> None:
        if candidate.seconds < self.candidate.seconds:
            self.candidate = candidate


def _stage_two(search: Search, best: Candidate) -> Candidate:
    recomputable = search.problem.recomputable
    remaining = [
        m for m in range(len(best.action)) if best.action[m] == SWAP and recomputable[m]
    ]
    current = best
    while remaining:
        ratios = {m: _ratio(search, current, m) for m in remaining}
        remaining = [m for m in remaining if ratios[m] < 1]
        if not remaining:
            break
        chosen = min(remaining, key=lambda m: (ratios[m], m))
        remaining.remove(chosen)
        action = current.action.copy()
        action[chosen] = RECOMPUTE
        current = search.evaluate(action)
    return current


def _ratio(search: Search, current: Candidate, m: int) -> float:
    """Equation (1); infinite where recompute does not fit or swap is free."""
    action = current.action.copy()
    without = search.evaluate(action, free=m).seconds
    swap_overhead = current.seconds - without
    if swap_overhead <= 0:
        return float(np.inf)
    action[m] = RECOMPUTE
    return (search.evaluate(action).seconds - without) / swap_overhead


_SOURCE = 'Ito et al., section 4.4'
_OPTIONS = {'node_budget': POSITIVE}
FASTER_STAGE = Planner('faster-stage', faster_stage, _SOURCE)
PLANNERS = (
    Planner(
        'swap-opt',
        swap_opt,
        _SOURCE,
        _OPTIONS,
        actions=frozenset({Action.KEEP, Action.SWAP}),
    ),
    Planner('pooch', pooch, _SOURCE, _OPTIONS),
)
