"""Checkpointing by rules: square-root segments, and keeping what is expensive.

``checkpoint-sqrt`` follows Chen et al. 2016 ("Training Deep Nets with Sublinear Memory
Cost"; memonger). Theirs: go through forward and add up the bytes made; where the sum
passes a budget, cut, keep what crosses the cut and begin a new sum; make everything
else again in backward, the last segment too. Search budgets around the square root of
(bytes kept × largest segment) at budget zero for the least memory (their algorithm 3).

Interpreted, because a graph is no chain and recorded recipes are not layers:

- A cut lies after an operation. Kept is every map made before it that a replay behind
  it reads. No cut lies where a transient crosses, because forward drops it.
- Of the cuts since the sum has passed half the budget, the one with the fewest crossing
  bytes is taken, of equal ones the last. They take the next allowed node.
- The sum counts maps that can be recomputed. What cannot stays in any case.
- Budgets are zero, infinite, and from a quarter to four times the root, in equal
  ratios.
- The memory of a segmentation is its simulated peak if replays keep all they make, so
  that each segment is made again once. Of those that fit, the least such peak wins.
  Under the limit itself replays keep what there is room for, as with every planner.

``checkpoint-speed`` is the rule that the library gradient-checkpointing calls "speed":
keep outputs of matrix products, recompute the rest. Its names of operations are
TensorFlow's; ours are those of Chainer's functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Candidate,
    Search,
)
from chainer_hybridmem.planning.search.planner_options import POSITIVE
from chainer_hybridmem.planning.search.replay_graph import replay_reads
from chainer_hybridmem.planning.simulation.problem import Problem

EXPENSIVE = (
    'convolution',
    'linearfunction',  # and bilinear
    'matmul',
    'einsum',
    'tensordot',
    'nstep',
)
BUDGETS = 33
WIDEST = 4.0  # times the first guess, and divided by it
UNLIMITED = 2**62


def checkpoint_sqrt(
    problem: Problem, limit_bytes: int, segments: int | None = None
) -> Plan:
    """Keeps what crosses cuts, recomputes the rest.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        segments: How many there are at most; None searches for the least memory.

    Raises:
        InfeasibleError: If no segmentation fits.
    """
    search = Search(problem, limit_bytes)
    cuts = _make_cuts(problem)
    budgets = _budgets(cuts) if segments is None else _budgets_for(cuts, segments)
    choices = list(dict.fromkeys(_ends(cuts, budget) for budget in budgets))
    best, made = _least_memory(search, choices, cuts)
    return search.finish('checkpoint-sqrt', best, segments=made)


def checkpoint_speed(problem: Problem, limit_bytes: int) -> Plan:
    """Keeps outputs of expensive operations, recomputes the rest.

    Raises:
        InfeasibleError: If that does not fit.
    """
    search = Search(problem, limit_bytes)
    operations = problem.profile.operations
    cheap = [not is_expensive(operations[s.producer].function) for s in problem.maps]
    action = np.where(problem.recomputable & np.array(cheap, bool), RECOMPUTE, KEEP)
    return search.finish('checkpoint-speed', search.evaluate(action))


def is_expensive(function: str) -> bool:
    """Whether a function name is that of a matrix product of some kind."""
    return any(name in function.lower() for name in EXPENSIVE)


class _Cuts(NamedTuple):
    """Where forward can be cut; positions are after operation k, b0 of them.

    Attributes:
        total_bytes (ndarray): (b0+1,) made before operation k, of recomputable maps.
        crossing_bytes (ndarray): (b0,) kept by a cut; infinite where none may be.
        nbytes (ndarray): (M,) of each map that can be recomputed; else 0.
        made (ndarray): (M,) operation that makes each map.
        last_read (ndarray): (M,) last operation whose replay reads it.
    """

    total_bytes: np.ndarray
    crossing_bytes: np.ndarray
    nbytes: np.ndarray
    made: np.ndarray
    last_read: np.ndarray


def _make_cuts(problem: Problem) -> _Cuts:
    arrays, n_maps, n = problem.arrays, len(problem.maps), problem.arrays.first_backward
    _, items, readers = replay_reads(problem)
    producer = np.maximum(arrays.producer, 0)  # what crosses iterations stays
    last_read = producer.copy()
    np.maximum.at(last_read, items, readers)
    maps, transients = np.arange(n_maps), np.unique(items[items >= n_maps])
    nbytes = np.where(problem.recomputable, arrays.size[:n_maps], 0)
    made = np.bincount(producer[maps], nbytes, n)
    crossing = _sums(producer[maps], last_read[maps], nbytes, n)
    passing = _sums(producer[transients], last_read[transients], None, n)
    return _Cuts(
        total_bytes=np.concatenate([[0.0], np.cumsum(made)]),
        crossing_bytes=np.where(passing > 0, math.inf, crossing),
        nbytes=nbytes,
        made=producer[maps],
        last_read=last_read[maps],
    )


def _sums(
    first: np.ndarray, last: np.ndarray, weights: np.ndarray | None, n: int
) -> np.ndarray:
    """(n,) weights of all that lives from operation ``first`` to before ``last``."""
    change = np.bincount(first, weights, n + 1) - np.bincount(last, weights, n + 1)
    return np.cumsum(change)[:n]


def _ends(cuts: _Cuts, budget: float) -> tuple[int, ...]:
    """The operations after which a budget cuts."""
    ends: list[int] = []
    total, begin = cuts.total_bytes, 0
    while total[-1] > total[begin] + budget:  # as searchsorted rounds it
        half, full = (
            int(np.searchsorted(total, total[begin] + share * budget, 'right')) - 1
            for share in (0.5, 1.0)
        )
        end = _cheapest(cuts.crossing_bytes, half, full)
        if end < 0 or total[end + 1] == total[-1]:
            break
        ends.append(end)
        begin = end + 1
    return tuple(ends)


def _cheapest(costs: np.ndarray, first: int, last: int) -> int:
    """Last of the cheapest positions from first to last, else the next; -1: none."""
    window = costs[first : last + 1]
    if np.isfinite(window).any():
        return last - int(np.argmin(window[::-1]))
    later = np.flatnonzero(np.isfinite(costs[last + 1 :]))
    return last + 1 + int(later[0]) if len(later) else -1


def _actions(cuts: _Cuts, ends: tuple[int, ...]) -> np.ndarray:
    """(M,) actions: what crosses a cut stays, like all that cannot be recomputed."""
    return np.where((cuts.nbytes > 0) & ~_crosses(cuts, ends), RECOMPUTE, KEEP)


def _crosses(cuts: _Cuts, ends: tuple[int, ...]) -> np.ndarray:
    """(M,) bool, whether a map is made before a cut and read after it."""
    return np.searchsorted(ends, cuts.made) < np.searchsorted(ends, cuts.last_read)


def _budgets(cuts: _Cuts) -> list[float]:
    """Budgets to try: 0, any, and some around √(bytes kept × largest segment at 0)."""
    ends = _ends(cuts, 0.0)
    borders = cuts.total_bytes[[0, *(end + 1 for end in ends), -1]]
    largest = float(np.diff(borders).max())
    kept = float(cuts.nbytes[_crosses(cuts, ends)].sum())
    ratios = np.geomspace(1 / WIDEST, WIDEST, BUDGETS)
    return [0.0, math.inf, *(math.sqrt(kept * largest) * ratios).tolist()]


def _budgets_for(cuts: _Cuts, segments: int) -> list[float]:
    """Budgets from the first that makes no more segments to where they are fewer."""
    first, end = (_first_budget(cuts, most) for most in (segments, segments - 1))
    budgets: list[float] = np.linspace(first, end, BUDGETS, endpoint=False).tolist()
    return budgets


def _first_budget(cuts: _Cuts, most: int) -> int:
    """The smallest budget that makes no more than so many segments."""
    low, high = -1, int(cuts.total_bytes[-1]) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if len(_ends(cuts, middle)) < most:
            high = middle
        else:
            low = middle
    return high


def _least_memory(
    search: Search, choices: Sequence[tuple[int, ...]], cuts: _Cuts
) -> tuple[Candidate, int]:
    """Picks the segmentation of least memory of those that fit; and its segments.

    If none fits, the one whose replays need least under the limit.
    """
    unlimited = Search(search.problem, UNLIMITED)

    def rank(candidate: Candidate) -> tuple[bool, int, float]:
        if not candidate.fits:
            return True, candidate.peak_bytes, candidate.seconds
        whole = unlimited.evaluate(candidate.action)
        return False, whole.peak_bytes, candidate.seconds

    candidates = [search.evaluate(_actions(cuts, ends)) for ends in choices]
    ranks = [rank(candidate) for candidate in candidates]
    best = ranks.index(min(ranks))
    search.simulations += unlimited.simulations
    return candidates[best], len(choices[best]) + 1


_ACTIONS = frozenset({Action.KEEP, Action.RECOMPUTE})
PLANNERS = (
    Planner(
        'checkpoint-sqrt',
        checkpoint_sqrt,
        source='Chen et al. 2016; memonger',
        options={'segments': POSITIVE._replace(optional=True)},
        acts_always=True,
        actions=_ACTIONS,
    ),
    Planner(
        'checkpoint-speed',
        checkpoint_speed,
        source='gradient-checkpointing',
        acts_always=True,
        quick=True,
        actions=_ACTIONS,
    ),
)
