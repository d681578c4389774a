"""The measured policy of Capuchin (Peng et al. 2020, ASPLOS).

Times are those of the in-core timeline; o_m and i_m are the seconds of map m's copies
out and in.

- *Peak usage*: the operations whose in-core load exceeds the limit.
- *Candidates*: maps with more than one access that live during peak usage.
- *FreeTime* = SwapInStart - SwapOutEnd, where SwapOutEnd = evicted access + o_m and
  SwapInStart = back access - i_m. Candidates with FreeTime >= 0 are swapped, longest
  first, until the bytes saved reach the highest load minus the limit.
- Still short: the map with the largest *MSPS* = saved bytes / recompute time is
  recomputed, or swapped if its exposed time is shorter. Each choice changes what
  the others' recompute takes: a chain whose source is gone is longer by that source's
  chain, and a source that others pass through is made again with each of them.
- *In-trigger*: the last access before SwapInStart, never inside peak usage.
- Swaps are decoupled: compute waits only when memory is asked for. Recomputes are
  collective. Both are the simulator's.

What is interpreted:

- Accesses are operations, and a map is away once, between the phases: its evicted
  access is the last use in forward, its back access the first in backward, sooner if a
  replay reads it.
- Chainer's graph holds every map to its own end, which would put most of backward
  inside peak usage. Here a map's in-core load ends with its last use, as in the
  frameworks of the paper and in every plan of ours.
- Peak usage may have gaps. A trigger comes after the last such operation before the
  back access; if that is the one just before it, the copy begins when it is needed.
- *Exposed* is what compute waits for the copies of all maps chosen so far, one after
  the other in each direction, with a map more than without it, if every swap-in begins
  as early as its trigger may be. A map whose FreeTime is not negative but that is
  exposed is not swapped for free. Without this the rule swaps everything on a slow
  link: every copy alone would be hidden.
- What cannot be recomputed has no MSPS and comes last, longest FreeTime first.
- Triggers that do not fit into memory together move later; the first needed is served
  first. Copies keep the order of need: one with an early trigger takes those in front
  of it along.
- Bytes saved at the peak are not the load at every moment, and replays need memory.
  While the simulator says that the choice does not fit, choosing goes on by the same
  rule. If no candidate is left, recomputes are given up as in
  ``superneurons``; the plan's options say how many.
- Run-time feedback (swap-ins that compute has waited for begin earlier) is rehearsed
  instead: it acts on ``rehearsals`` simulated iterations before the plan is handed
  over, and on none that runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.jit import clock
from chainer_hybridmem.lab.planners.feedback import (
    reachable,
    rehearsed,
    with_swap_ins,
)
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Search,
    kept_load,
)
from chainer_hybridmem.planning.search.planner_options import COUNT
from chainer_hybridmem.planning.search.repairs import give_up_recomputes
from chainer_hybridmem.planning.simulation.arrays import ProblemArrays
from chainer_hybridmem.planning.simulation.obedience import obeyed
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.timeline import run_lanes
from chainer_hybridmem.planning.simulation.work import make_work

REHEARSALS = 20


class Usage(NamedTuple):
    """The in-core iteration under a limit.

    Attributes:
        start (ndarray): (n,) seconds at which each operation starts.
        peak (ndarray): (n,) whether its load exceeds the limit.
        after_peak (ndarray): (n,) position after the last such operation before each,
            in backward.
        missing_bytes (int): By how much the highest load exceeds the limit.
    """

    start: np.ndarray
    peak: np.ndarray
    after_peak: np.ndarray
    missing_bytes: int


def capuchin(problem: Problem, limit_bytes: int, rehearsals: int = REHEARSALS) -> Plan:
    """Swaps what is hidden, then takes the cheaper of swap and recompute.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        rehearsals: Simulated iterations that the feedback acts on.

    Raises:
        InfeasibleError: If not even swapping everything fits.
    """
    n = len(problem.arrays.seconds)
    search = Search(problem, limit_bytes, lead=np.arange(n), barrier=False)
    if search.in_core_fits():
        return search.finish_in_core('capuchin', rehearsals=rehearsals)
    usage = in_core_usage(problem, limit_bytes)
    action = search.fill(KEEP)
    left = action != KEEP  # rules say so
    missing_bytes = usage.missing_bytes - int(
        problem.arrays.size[: len(left)][left].sum()
    )
    candidate = search.evaluate(action)
    for m, choice in choices(problem, usage):
        if candidate.fits:
            break
        action[m] = choice
        missing_bytes -= int(problem.arrays.size[m])
        if missing_bytes <= 0:
            candidate = search.evaluate(action)
    candidate, given_up = give_up_recomputes(search, action)
    options = {'rehearsals': rehearsals, 'given_up_recomputes': given_up}
    plan = search.finish('capuchin', candidate, **options)  # swap-ins at their need
    wanted = in_triggers(problem, usage, plan)
    plan = with_swap_ins(problem, plan, reachable(problem, plan, wanted))
    plan = rehearsed(problem, plan, rehearsals)
    spent = clock() - search.started
    return dataclasses.replace(plan, planning_seconds=spent)


def in_core_usage(problem: Problem, limit_bytes: int) -> Usage:
    """Times and loads of the iteration without swap and recompute."""
    a = problem.arrays
    work = make_work(a)
    work.swap_out[:] = -1
    run_lanes(problem, work)
    load = kept_load(problem)
    peak = load > limit_bytes
    ends = np.where(peak, np.arange(len(peak)) + 1, 0)
    after_peak = np.maximum.accumulate(np.append(a.first_backward, ends[:-1]))
    return Usage(work.start, peak, after_peak, int(load.max()) - limit_bytes)


def free_seconds(problem: Problem, usage: Usage) -> np.ndarray:
    """(M,) FreeTime of every map in seconds."""
    a = problem.arrays
    swap_out_end = usage.start[a.copy_from] + problem.swap_out_seconds
    swap_in_start = usage.start[a.first_use] - problem.swap_in_seconds
    seconds: np.ndarray = swap_in_start - swap_out_end
    return seconds


def in_triggers(problem: Problem, usage: Usage, plan: Plan) -> dict[int, int]:
    """Position at which each swap-in is to begin if memory allows, by storage."""
    triggers = {}
    for m, entry in enumerate(plan.maps):
        if entry.action is not Action.SWAP:
            continue
        needed = entry.needed_before
        swap_in_start = usage.start[needed] - problem.swap_in_seconds[m]
        access = int(np.searchsorted(usage.start, swap_in_start)) - 1
        triggers[entry.storage] = max(access, int(usage.after_peak[needed]))
    return triggers


def choices(problem: Problem, usage: Usage) -> Iterator[tuple[int, int]]:
    """Candidates and their actions in the order of the rule.

    What may not be kept is decided before; what can only be kept is no candidate.
    """
    a = problem.arrays
    free = free_seconds(problem, usage)
    peaks = np.append(0, np.cumsum(usage.peak))
    producer = np.maximum(a.producer[: len(problem.maps)], 0)
    during = peaks[a.last_use + 1] > peaks[producer]
    action = obeyed(a, np.full(len(problem.maps), KEEP))
    during &= (action == KEEP) & a.allowed[:, [SWAP, RECOMPUTE]].any(axis=1)
    candidates = sorted(np.flatnonzero(during).tolist(), key=lambda m: (-free[m], m))
    waits, rest = SwapWaits(problem, usage), []
    costs = RecomputeCosts(a, problem.recomputable)
    for m in np.flatnonzero(action == SWAP).tolist():
        waits.swap(m)
    for m in np.flatnonzero(action == RECOMPUTE).tolist():
        costs.recompute(m)
    for m in candidates:
        if a.allowed[m, SWAP] and free[m] >= 0 and waits.exposed(m) == 0:
            waits.swap(m)
            yield m, SWAP
        else:
            rest.append(m)
    while rest:
        # Of equal MSPS the one with the longest FreeTime, as they are sorted.
        m = min(rest, key=lambda m: costs.seconds(m) / a.size[m])
        rest.remove(m)
        if a.allowed[m, SWAP] and waits.exposed(m) < costs.seconds(m):
            waits.swap(m)
            yield m, SWAP
        else:
            costs.recompute(m)
            yield m, RECOMPUTE


class SwapWaits:
    """What compute waits for the copies of the maps swapped so far.

    Args:
        problem: What is planned.
        usage: The in-core iteration.
    """

    def __init__(self, problem: Problem, usage: Usage) -> None:
        a = problem.arrays
        self._evicted = usage.start[a.copy_from].tolist()
        self._earliest = usage.start[usage.after_peak[a.first_use]].tolist()
        self._back = usage.start[a.first_use].tolist()
        self._out_seconds = problem.swap_out_seconds.tolist()
        self._in_seconds = problem.swap_in_seconds.tolist()
        self._swapped: list[int] = []
        self._waited = 0.0

    def exposed(self, m: int) -> float:
        """Seconds that swapping map m adds."""
        return max(0.0, self._waits([*self._swapped, m]) - self._waited)

    def swap(self, m: int) -> None:
        """Map m is swapped from here on."""
        self._swapped.append(m)
        self._waited = self._waits(self._swapped)

    def _waits(self, swapped: list[int]) -> float:
        """Seconds compute waits for swap-ins; copies in order of their accesses."""
        out_end, end = {}, 0.0
        for m in sorted(swapped, key=self._evicted.__getitem__):
            out_end[m] = end = max(end, self._evicted[m]) + self._out_seconds[m]
        end = waited = 0.0
        for m in sorted(swapped, key=self._back.__getitem__):
            begin = max(end, self._earliest[m] + waited, out_end[m])
            end = begin + self._in_seconds[m]
            waited = max(waited, end - self._back[m])
        return waited


class RecomputeCosts:
    """What recomputing each map takes, given what else is recomputed.

    Args:
        arrays: The problem's arrays.
        recomputable: (M,) whether a map can be made again.
    """

    def __init__(self, arrays: ProblemArrays, recomputable: np.ndarray) -> None:
        self._arrays = arrays
        self._recomputable = recomputable
        self._recomputed: list[int] = []
        self._known: dict[int, float] = {}  # seconds that have not changed since
        self._operations: list[set[int]] = []  # replayed for each map
        self._sources: list[set[int]] = []  # maps that these read
        for m, possible in enumerate(recomputable.tolist()):
            operations, sources = self._chain(m) if possible else (set(), set())
            self._operations.append(operations)
            self._sources.append(sources)

    def _chain(self, m: int) -> tuple[set[int], set[int]]:
        """A map's producer, those of what forward drops on the way, and their maps."""
        a, n_maps = self._arrays, len(self._arrays.first_use)
        operations: set[int] = set()
        sources: set[int] = set()
        stack = [int(a.producer[m])]
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
        return operations, sources

    def seconds(self, m: int) -> float:
        """What recomputing map m adds: its chain, and what others repeat of it."""
        if m not in self._known:
            self._known[m] = self._added(m) if self._recomputable[m] else math.inf
        return self._known[m]

    def _added(self, m: int) -> float:
        own = self._operations[m]
        repeated = (
            self._total(own - self._operations[other])
            for other in self._recomputed
            if m in self._sources[other]
        )
        return self._total(own) + math.fsum(repeated)

    def _total(self, operations: set[int]) -> float:
        return math.fsum(self._arrays.recipe_seconds[list(operations)])

    def recompute(self, m: int) -> None:
        """Map m is recomputed from here on: what reads it makes it again."""
        self._recomputed.append(m)
        readers = [r for r, sources in enumerate(self._sources) if m in sources]
        for reader in readers:
            self._sources[reader].remove(m)
            self._sources[reader] |= self._sources[m]
            self._operations[reader] |= self._operations[m]
        for other in (m, *readers):  # and whose chains these make again
            for changed in (other, *self._sources[other]):
                self._known.pop(changed, None)


PLANNERS = (
    Planner(
        'capuchin', capuchin, source='Peng et al. 2020', options={'rehearsals': COUNT}
    ),
)
