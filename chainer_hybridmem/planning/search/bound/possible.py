"""What no plan can do with a map under a limit, whatever it does with all others.

Where memory is short, an operation leaves no room beside it: nothing else is there
while it runs, and what is needed later is brought back or made again behind it. A
replay takes memory itself, and needs what it reads at that moment. So there are maps
that cannot be kept, and maps of which no replay can be in time, at whatever position.
What is left open here counts as possible; ``docs/internals/bound.md`` has the proof.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.simulation.arrays import find_maker
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.work import SWAP

MOST_CELLS = 20_000_000  # items times operations, about a second


class Possible(NamedTuple):
    """Per map whether a plan may do it.

    Attributes:
        keep (ndarray): (M,) whether the map may be kept.
        recompute (ndarray): (M,) whether it may be recomputed.
    """

    keep: np.ndarray
    recompute: np.ndarray


def find_possible(problem: Problem, limit_bytes: int, fixed: np.ndarray) -> Possible:
    """What is possible under a limit; everything where no answer fits or that is long.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
        fixed: (n,) bytes that are there while each operation runs, without maps.
    """
    a, n_maps = problem.arrays, len(problem.maps)
    everything = Possible(np.ones(n_maps, bool), problem.recomputable.copy())
    if len(a.size) * len(a.seconds) > MOST_CELLS:
        return everything
    positions = _Positions(problem, limit_bytes, fixed)
    if (positions.room < 0).any():
        return everything
    found = positions.find()
    if (found.keep | found.recompute | a.allowed[:, SWAP]).all():
        return found
    return everything


class _Positions:
    """At which positions an item can be there; one item after the other.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
        fixed: As for :func:`find_possible`.

    Attributes:
        room (ndarray): (n,) bytes that each operation leaves beside what is there in
            every plan.
    """

    def __init__(self, problem: Problem, limit_bytes: int, fixed: np.ndarray) -> None:
        self._problem, self._arrays = problem, problem.arrays
        self._n, self._n_maps = len(fixed), len(problem.maps)
        self.room = limit_bytes - fixed - self._needed()
        # For a replay before each operation; there is none in forward.
        self._left = limit_bytes - self._arrays.fixed_start
        self._left[: self._arrays.first_backward] = -1
        self._there: dict[int, np.ndarray] = {}  # (n,) per item, before each operation

    def _needed(self) -> np.ndarray:
        """(n,) bytes of maps that every plan has in memory while an operation runs."""
        a, change = self._arrays, np.zeros(self._n + 1, np.int64)
        for m in np.flatnonzero(a.read).tolist():
            for first, end in self._spans(m):
                if first < end:
                    change[first] += a.size[m]
                    change[end] -= a.size[m]
        return np.cumsum(change)[:-1]

    def _spans(self, m: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """While which operations a map is there in any case: first ones and ends."""
        a = self._arrays
        forward = int(a.producer[m]) + 1, int(a.release_from[m])
        used = max(int(a.first_use[m]), forward[1])
        return forward, (used, int(a.last_use[m]) + 1)

    def find(self) -> Possible:
        """Goes through all items in order of production."""
        a = self._arrays
        keep = np.ones(self._n_maps, bool)
        recompute = self._problem.recomputable.copy()
        for item in np.argsort(a.producer, kind='stable').tolist():
            if a.present[item] or (item < self._n_maps and not a.read[item]):
                continue  # it may be there everywhere
            fits = a.size[item] <= self.room
            if item >= self._n_maps:
                self._there[item] = self._remade(item, fits)
                continue
            for first, end in self._spans(item):
                fits[first:end] = True
            remade = self._remade(item, fits)
            stays = self._stays(item, fits)
            self._there[item] = remade | stays
            first, end = int(a.producer[item]) + 1, int(a.last_use[item]) + 1
            keep[item] = fits[first:end].all()
            recompute[item] &= remade[a.first_use[item]]
        return Possible(keep, recompute)

    def _stays(self, m: int, fits: np.ndarray) -> np.ndarray:
        """Where a map may be there without a replay: not yet away, back, or later."""
        a, place = self._arrays, np.arange(self._n)
        full = np.flatnonzero(~fits)
        made, used = int(a.producer[m]), int(a.last_use[m])
        # The first operation from a position on that it does not fit beside.
        after = np.searchsorted(full, [made + 1, used + 1])
        first, later = (full[i] if i < len(full) else self._n for i in after)
        following = np.append(full, self._n)[np.searchsorted(full, place)]
        not_yet = (place > made) & (place <= first)
        back = (place <= used) & (following > used)
        return np.asarray(not_yet | back | ((place > used) & (place <= later)))

    def _remade(self, item: int, fits: np.ndarray) -> np.ndarray:
        """Where an item may be there because a replay has made it, then or before."""
        a, place = self._arrays, np.arange(self._n)
        op = find_maker(a, item)
        if op < 0:
            return np.zeros(self._n, bool)
        makes = a.recipe_peak[op] <= self._left
        for source in a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
            makes &= self._there.get(source, True)
        made = np.maximum.accumulate(np.where(makes, place, -1))
        blocked = np.maximum.accumulate(np.where(fits, -1, place))
        return made > np.append(-1, blocked[:-1])
