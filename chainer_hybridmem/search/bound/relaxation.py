"""The linear program with cuts, solved by HiGHS through SciPy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from chainer_hybridmem.interrupts import run_aside
from chainer_hybridmem.search.bound.cuts import find_tightest
from chainer_hybridmem.search.bound.events import Row, make_row
from chainer_hybridmem.search.bound.model import Model
from chainer_hybridmem.search.bound.sums import make_sums, sum_excess
from chainer_hybridmem.simulation.problem import Problem

STRETCHES = 30  # of operations, with one row and two pairs a round at most
VIOLATED = 1e-7  # of the limit
ROUNDING = 1e-9  # share given away for sums in floating point


@dataclasses.dataclass(frozen=True)
class Solution:
    """A solved relaxation: a safe value and the point where it is attained.

    Attributes:
        seconds (float): The value.
        x (ndarray): Of all columns.
        prices (ndarray): (n,) seconds that one byte less at each operation would save.
    """

    seconds: float
    x: np.ndarray
    prices: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """Rows over the columns that are in use.

    Attributes:
        used (ndarray): The columns.
        matrix (Any): Of ``matrix @ x[used] <= right``.
        right (ndarray): Likewise.
        equal (Any): Of ``equal @ x[used] == 0``.
        cost (ndarray): Of the columns in use.
        bounds (ndarray): Their ranges.
    """

    used: np.ndarray
    matrix: Any
    right: np.ndarray
    equal: Any
    cost: np.ndarray
    bounds: np.ndarray


class Relaxation:
    """A model, and the rows that points have violated.

    Rows for single operations are there for some positions only, and so are pairs:
    those that :meth:`cut` has found.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.
        sources (bool): Whether to ask for the sources of replays.
        ranks (int): As for :class:`.model.Model`.
        singles (bool): Likewise.

    Attributes:
        model (Model): Variables, and the rows that are always there.
        positions (set): Operations with rows of memory.
        pairs (dict): Kinds and operations of the rows of copies, in order.
    """

    def __init__(
        self,
        problem: Problem,
        limit_bytes: int,
        sources: bool = True,
        ranks: int = 1,
        singles: bool = False,
    ) -> None:
        self.model = Model(problem, limit_bytes, sources, ranks, singles)
        self._sums = make_sums(self.model)
        self._excess = sum_excess(self.model)
        self.positions: set[int] = set()
        self.pairs: dict[tuple[str, int, int], None] = {}

    def program(self, extra: list[Row] | None = None) -> Program:
        """The rows there are, those of ``extra`` included, over the columns in use."""
        model, at = self.model, self.model.columns
        rows = [*model.rows, *(extra or [])]
        positions = np.array(sorted(self.positions), np.int64)
        for k in positions.tolist():
            away, remade = at.away + k, at.remade + k
            rows.append(make_row([remade, away], [-1, -1], -float(self._excess[k])))
            rows.append(make_row([away, at.eligible + k], [1, -1], 0))
        stops = {model.problem.arrays.first_backward, model.n}
        for kind, left, right in self.pairs:
            stops |= {left, right + 1} if kind == 'out' else {left + 1, right + 1}
        order = at.waited + np.array(sorted(stops), np.int64)
        for one, other in itertools.pairwise(order.tolist()):
            rows.append(make_row([one, other], [1, -1], 0))
        rows += [self._pair(*pair) for pair in self.pairs]
        equations = [
            *self._sums.remade.between(positions, at.remade),
            *self._sums.eligible.between(positions, at.eligible),
        ]
        matrix, equal = self._matrix(rows), self._matrix(equations)
        used = np.zeros(at.end, bool)
        used[matrix.indices] = used[equal.indices] = True
        columns, known = np.nonzero(used)[0], model.variables
        return Program(
            used=columns,
            matrix=matrix[:, columns],
            right=np.array([right for _, _, right in rows]),
            equal=equal[:, columns],
            cost=known.cost[columns],
            bounds=np.stack([known.lower[columns], known.upper[columns]], axis=1),
        )

    def _matrix(self, rows: list[Row]) -> Any:
        from scipy import sparse

        at = self.model.columns
        if not rows:
            return sparse.csr_array((0, at.end))
        lengths = [len(columns) for columns, _, _ in rows]
        columns = np.concatenate([columns for columns, _, _ in rows])
        matrix = sparse.csr_array(
            (
                np.concatenate([values for _, values, _ in rows]),
                self.model.variables.same_as[columns],
                np.cumsum([0, *lengths]),
            ),
            shape=(len(rows), at.end),
        )
        matrix.sum_duplicates()
        return matrix

    def expanded(self, program: Program, x: np.ndarray) -> np.ndarray:
        """Values of all columns; what is not in use is 0."""
        at = self.model.columns
        whole = np.zeros(at.end)
        whole[program.used] = x
        waited = whole[at.waited : at.away]
        np.maximum.accumulate(waited, out=waited)
        return whole[self.model.variables.same_as]

    def solve(self) -> Solution | None:
        """The optimum, made safe against the solver's tolerances."""
        from scipy import optimize

        model = self.model
        program = self.program()
        result = run_aside(
            lambda: optimize.linprog(
                program.cost,
                A_ub=program.matrix,
                b_ub=program.right,
                A_eq=program.equal,
                b_eq=np.zeros(program.equal.shape[0]),
                bounds=program.bounds,
                method='highs-ds',
            )
        )
        if result.status != 0:
            return None
        # Multipliers of <= rows must not be positive in scipy's convention.
        below = np.minimum(result.ineqlin.marginals, 0)
        reduced = program.cost - program.matrix.T @ below
        reduced -= program.equal.T @ result.eqlin.marginals
        lower, upper = program.bounds.T
        attained = np.where(reduced > 0, lower, upper) * reduced
        value = float(attained.sum() + below @ program.right)
        seconds = model.base_seconds + min(value, model.longest)
        return Solution(
            seconds * (1 - ROUNDING),
            self.expanded(program, result.x),
            self._prices(below),
        )

    def _prices(self, below: np.ndarray) -> np.ndarray:
        """Multipliers of the rows of memory, which :meth:`program` has put first."""
        prices = np.zeros(self.model.n)
        positions = np.array(sorted(self.positions), np.int64)
        first = len(self.model.rows)
        rows = below[first : first + 2 * len(positions) : 2]
        prices[positions] = -rows / self.model.scaled.scale
        return prices

    def fractions(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Swapped and recomputed fraction of each map."""
        model, at = self.model, self.model.columns
        recompute = slice(at.recompute, at.recompute + model.n_maps)
        return x[: model.n_maps].copy(), x[recompute].copy()

    def everything_swapped(self) -> np.ndarray:
        """The point at which every map is swapped and nothing waits."""
        model, at = self.model, self.model.columns
        x = np.zeros(at.end)
        x[: model.n_maps] = 1
        x[at.eligible : at.late] = self._sums.eligible.sums(x, model.n)
        return x

    def cut(self, x: np.ndarray) -> bool:
        """Adds rows and pairs that a point violates, the worst of every stretch."""
        model, at = self.model, self.model.columns
        need = self._excess - self._sums.remade.sums(x, model.n)
        eligible = self._sums.eligible.sums(x, model.n)
        waited = x[at.waited : at.away]
        start = waited + model.elapsed
        run = waited[1:] + model.elapsed[:-1]
        away, pairs = np.empty((2, model.n)), np.empty((2, model.n), np.int64)
        find_tightest(
            self._sums.leaving.amounts(x, model.n),
            self._sums.coming.amounts(x, model.n),
            need,
            start,
            run,
            model.problem.arrays.first_backward,
            model.scaled.out_rate,
            model.scaled.in_rate,
            away,
            pairs,
        )
        (out_bytes, in_bytes), (out_from, in_to) = away, pairs
        width = -(-model.n // STRETCHES)
        found = False
        for kind, most in (('at', eligible), ('out', out_bytes), ('in', in_bytes)):
            missing = need - most
            for left in range(0, model.n, width):
                k = left + int(np.argmax(missing[left : left + width]))
                if missing[k] <= VIOLATED:
                    continue
                pair = (kind, k, k)
                if kind == 'out':
                    pair = (kind, int(out_from[k]), k)
                elif kind == 'in':
                    pair = (kind, k, int(in_to[k]))
                if kind == 'at' or pair in self.pairs:
                    new = k not in self.positions
                else:
                    new = True
                    self.pairs[pair] = None
                self.positions.add(k)
                found = found or new
        return found

    def _pair(self, kind: str, left: int, right: int) -> Row:
        """``N_k <= bytes of the free maps not back by then + rate * W(i, j)``."""
        model, at = self.model, self.model.columns
        a = model.problem.arrays
        k = right if kind == 'out' else left
        free = (a.release_from <= k) & (k < a.first_use)
        if kind == 'out':
            free &= a.copy_from < left
            i, j, rate, by = left, right, model.scaled.out_rate, k
        else:
            free &= a.first_use > right
            i, j, rate, by = left + 1, right, model.scaled.in_rate, right
        maps = np.nonzero(free)[0]
        back = []
        if model.chains.followed:
            size = model.scaled.size
            places = [(model.column_back(m, by), size[m]) for m in maps.tolist()]
            back = [(column, nbytes) for column, nbytes in places if column >= 0]
        columns = [at.away + k, *maps, *(column for column, _ in back)]
        values = [1.0, *-model.scaled.size[maps], *(nbytes for _, nbytes in back)]
        ends, signs, within = model.between(i, j)
        return make_row(
            [*columns, *ends], [*values, *(rate * s for s in signs)], rate * within
        )
