"""The measured policy of Capuchin (Peng et al. 2020, ASPLOS).

Notation: times are those of the in-core timeline; o_m and i_m are the seconds of map
m's copies out and in.

- *Peak usage*: the operations whose in-core load exceeds the limit.
- *Candidates*: maps with more than one access that live during peak usage.
- *FreeTime* = SwapInStart - SwapOutEnd, where SwapOutEnd = evicted access + o_m and
  SwapInStart = back access - i_m. Candidates with FreeTime >= 0 are swapped, longest
  first, until the bytes saved reach the highest load minus the limit.
- Still short: the map with the largest *MSPS* = saved bytes / recompute time is
  recomputed, or swapped if the time its copies stay exposed (-FreeTime) is shorter.
  Each choice changes what the others' recompute takes: a chain whose source is gone is
  longer by that source's chain, and a source that others pass through is made again
  with each of them.
- *In-trigger*: the last access before SwapInStart, never inside peak usage.
- Swaps are decoupled (nobody waits until memory is asked for), recomputes collective:
  both are the simulator's.

What is interpreted:

- Accesses are operations, and a map is away once, between the phases: its evicted access
  is the last use in forward, its back access the first in backward, sooner if a replay
  reads it.
- Chainer's graph holds every map to its own end, which would put most of backward
  inside peak usage. Here a map's in-core load ends with its last use, as in the
  frameworks of the paper and in every plan of ours.
- Peak usage may have gaps. A trigger comes after the last such operation before the back
  access; if that is the one just before it, the copy begins when it is needed.
- What cannot be recomputed has no MSPS and comes last, longest FreeTime first.
- Triggers that do not fit into memory together move later, the first needed is served
  first. Copies keep the order of need: one with an early trigger takes those before it along.
- Bytes saved at the peak are not the load at every moment, and replays need memory. While
  the simulator says that the choice does not fit, choosing goes on by the same
  rule; if no candidate is left, recomputes are given up as in
  :mod:`chainer_hybridmem.planners.superneurons`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.plan import Plan
from chainer_hybridmem.planners.base import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planners.feedback import reachable
from chainer_hybridmem.planners.superneurons import give_up_recomputes
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation.problem import Arrays, Problem


class Usage(NamedTuple):
    """The in-core iteration.

    Attributes:
        start (ndarray): (n,) seconds at which each operation starts.
        load (ndarray): (n,) highest load of each operation in bytes, if every map
            goes with its last use.
    """

    start: np.ndarray
    load: np.ndarray


def capuchin(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps what is hidden, then takes the cheapest of swap and recompute."""
    n = len(problem.arrays.seconds)
    search = Search(problem, limit_bytes, lead=np.arange(n), barrier=False)
    if search.in_core_fits():
        return search.finish_in_core('capuchin')
    usage = in_core_usage(problem)
    action, missing_bytes = search.fill(KEEP), int(usage.load.max()) - limit_bytes
    candidate = search.evaluate(action)
    for m, choice in choices(problem, usage, limit_bytes):
        if candidate.fits:
            break
        action[m] = choice
        missing_bytes -= int(problem.arrays.size[m])
        if missing_bytes <= 0:
            candidate = search.evaluate(action)
    candidate, given_up = give_up_recomputes(search, action)
    at_need = search.finish('capuchin', candidate)
    positions = search.positions(candidate)
    triggers = {
        s.id: in_trigger(problem, usage, limit_bytes, m, int(positions.needed[m]))
        for m, s in enumerate(problem.maps)
        if candidate.action[m] == SWAP
    }
    reached = reachable(problem, at_need, triggers)
    for m, s in enumerate(problem.maps):
        positions.swap_in[m] = reached.get(s.id, -1)
    return search.finish_at(
        'capuchin', candidate.action, positions, given_up_recomputes=given_up
    )


def in_core_usage(problem: Problem) -> Usage:
    """Times and loads of the iteration without swap and recompute."""
    a, n_maps = problem.arrays, len(problem.maps)
    work = kernel.make_work(a)
    work.swap_out[:] = -1
    kernel.lanes(a, problem.swap_out_seconds, problem.swap_in_seconds, work)
    change = np.zeros(len(a.seconds) + 1, np.int64)
    np.add.at(change, a.producer[:n_maps] + 1, a.size[:n_maps])
    np.add.at(change, a.last_use + 1, -a.size[:n_maps])
    return Usage(work.start, np.cumsum(change)[:-1] + a.fixed_peak)


def free_seconds(problem: Problem, usage: Usage) -> np.ndarray:
    """(M,) FreeTime in seconds; below zero, how long the copies stay exposed."""
    a = problem.arrays
    swap_out_end = usage.start[a.copy_from] + problem.swap_out_seconds
    swap_in_start = usage.start[a.first_use] - problem.swap_in_seconds
    return swap_in_start - swap_out_end


def in_trigger(
    problem: Problem, usage: Usage, limit_bytes: int, m: int, needed: int
) -> int:
    """Position at which the swap-in of map m is to begin, if memory allows."""
    peak = np.flatnonzero(usage.load[:needed] > limit_bytes)
    after_peak = int(peak[-1]) + 1 if len(peak) else 0
    swap_in_start = usage.start[needed] - problem.swap_in_seconds[m]
    access = int(np.searchsorted(usage.start, swap_in_start)) - 1
    return min(needed, max(access, after_peak, problem.arrays.first_backward))


def choices(
    problem: Problem, usage: Usage, limit_bytes: int
) -> Iterator[tuple[int, int]]:
    """Candidates and their actions in the order of the paper's rule."""
    a = problem.arrays
    free = free_seconds(problem, usage)
    peak = np.append(0, np.cumsum(usage.load > limit_bytes))
    during = peak[a.last_use + 1] > peak[a.producer[: len(problem.maps)]]
    candidates = sorted(np.flatnonzero(during).tolist(), key=lambda m: (-free[m], m))
    for m in candidates:
        if free[m] >= 0:
            yield m, SWAP
    rest = [m for m in candidates if free[m] < 0]
    chains = Chains(a, problem.recomputable)
    while rest:
        # Of equal MSPS the one with the longest FreeTime, as they are sorted.
        m = min(rest, key=lambda m: chains.seconds(m) / a.size[m])
        rest.remove(m)
        if chains.seconds(m) > -free[m]:
            yield m, SWAP
        else:
            chains.recompute(m)
            yield m, RECOMPUTE


class Chains:
    """What recomputing each map takes, given what else is recomputed.

    Args:
        arrays: The problem's arrays.
        recomputable: (M,) whether a map can be made again.
    """

    def __init__(self, arrays: Arrays, recomputable: np.ndarray) -> None:
        self._arrays = arrays
        self._recomputed: list[int] = []
        self._operations: list[set[int]] = []
        self._sources: list[set[int]] = []
        for m, possible in enumerate(recomputable.tolist()):
            operations: set[int] = set()
            sources: set[int] = set()
            if possible:
                self._pass(int(arrays.producer[m]), operations, sources)
            self._operations.append(operations)
            self._sources.append(sources)
        self._possible = recomputable

    def _pass(self, operation: int, operations: set[int], sources: set[int]) -> None:
        """Adds an operation and those that make again what forward drops."""
        a, n_maps = self._arrays, len(self._arrays.first_use)
        stack = [operation]
        while stack:
            k = stack.pop()
            if k in operations:
                continue
            operations.add(k)
            for item in a.inputs[a.input_ptr[k] : a.input_ptr[k + 1]].tolist():
                if item < n_maps:
                    sources.add(item)
                elif not a.present[item]:
                    stack.append(int(a.producer[item]))

    def seconds(self, m: int) -> float:
        """What recomputing map m adds: its chain, and what others repeat of it."""
        if not self._possible[m]:
            return math.inf
        own = self._operations[m]
        repeats = [
            self._seconds(own - self._operations[other])
            for other in self._recomputed
            if m in self._sources[other]
        ]
        return math.fsum([self._seconds(own), *repeats])

    def _seconds(self, operations: set[int]) -> float:
        return math.fsum(self._arrays.recipe_seconds[list(operations)])

    def recompute(self, m: int) -> None:
        """Map m is gone: whoever reads it makes it again."""
        self._recomputed.append(m)
        for operations, sources in zip(self._operations, self._sources, strict=True):
            if m in sources:
                sources.remove(m)
                sources |= self._sources[m]
                operations |= self._operations[m]
