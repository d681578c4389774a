"""Which swapped maps are away at an operation, each of them whole or not at all.

The linear program counts bytes: half a map may be away, and only half of it has to be
copied in time. In truth a map leaves when all of it is copied, and takes all its memory
before the first byte comes back. With whole decisions, a variable for each swapped map
and operation says so.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.search.bound.events import Row, make_row
from chainer_hybridmem.search.bound.relaxation import Relaxation
from chainer_hybridmem.simulation.work import SWAP

MOST_COLUMNS = 10_000  # maps times operations; more of them have proven nothing new
VIOLATED = 1e-7  # seconds


class WholeMaps:
    """Variables and rows for the operations that a relaxation has rows of memory for.

    Args:
        relaxation (Relaxation): Whose model has the variables.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        model = relaxation.model
        self._arrays = model.problem.arrays
        self._first = model.columns.single
        self._out_seconds, self._in_seconds = model.least_copy_seconds()
        self._lanes: dict[tuple[str, int, int], None] = {}  # in order

    def _columns(self, maps: np.ndarray, k: int) -> np.ndarray:
        model = self._relaxation.model
        return np.asarray(self._first + k * model.n_maps + maps, np.int64)

    def _free(self, k: int) -> np.ndarray:
        """Maps that may be swapped and away while operation k runs."""
        a = self._arrays
        maps = np.arange(self._relaxation.model.n_maps)
        free = (a.release_from[maps] <= k) & (k < a.first_use[maps])
        return np.flatnonzero(free & a.allowed[maps, SWAP])

    def rows(self) -> list[Row]:
        """What is away is made of whole maps, copied out and in one after the other."""
        model = self._relaxation.model
        at, rows = model.columns, []
        for k in sorted(self._relaxation.positions):
            free = self._free(k)
            singles = self._columns(free, k)
            sizes = -model.scaled.size[free]
            rows.append(make_row([at.away + k, *singles], [1.0, *sizes], 0))
            for m, single in zip(free.tolist(), singles.tolist(), strict=True):
                columns, values = [single, at.swap + m], [1, -1]
                back = model.column_back(m, k) if model.chains.followed else -1
                if back >= 0:
                    columns.append(back)
                    values.append(1)
                rows.append(make_row(columns, values, 0))
        rows += [self._lane(*lane) for lane in self._lanes]
        return rows

    def _lane(self, kind: str, left: int, right: int) -> Row:
        """``seconds of the copies of what is away at k <= W(i, j)``."""
        a = self._arrays
        if kind == 'out':
            k, i, seconds = right, left, self._out_seconds
            maps = self._free(k)
            maps = maps[a.copy_from[maps] >= left]
        else:
            k, i, seconds = left, left + 1, self._in_seconds
            maps = self._free(k)
            maps = maps[a.first_use[maps] <= right]
        columns, values, within = self._relaxation.model.between(i, right)
        return make_row(
            [*self._columns(maps, k), *columns], [*seconds[maps], *values], within
        )

    def cut(self, x: np.ndarray) -> bool:
        """Adds the rows of copies that a point violates, the worst of each operation.

        Returns:
            bool: Whether there were any.
        """
        a, count = self._arrays, len(self._lanes)
        for k in sorted(self._relaxation.positions):
            free = self._free(k)
            free = free[x[self._columns(free, k)] > 0.5]
            ends = np.unique(a.first_use[free]).tolist()
            begins = np.unique(a.copy_from[free]).tolist()
            self._add_worst(x, [('out', i, k) for i in begins])
            self._add_worst(x, [('in', k, j) for j in ends])
        return len(self._lanes) > count

    def _add_worst(self, x: np.ndarray, lanes: list[tuple[str, int, int]]) -> None:
        worst, found = VIOLATED, None
        for lane in lanes:
            columns, values, right = self._lane(*lane)
            over = float(x[columns] @ values) - right
            if over > worst and lane not in self._lanes:
                worst, found = over, lane
        if found is not None:
            self._lanes[found] = None
            self._relaxation.pairs[found] = None
