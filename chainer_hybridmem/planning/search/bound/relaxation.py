"""The linear program with cuts, solved by HiGHS through SciPy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planning.search.bound.model import Events, Model, Row, make_row
from chainer_hybridmem.planning.search.bound.segments import Segments, choose_divisions
from chainer_hybridmem.planning.search.bound.solver import run_solver
from chainer_hybridmem.planning.simulation.problem import Problem


# -- sums that the rows of memory and copies are about ------------------------
class Sums(NamedTuple):
    """At which position which column changes what may be away, and by how much.

    Attributes:
        remade (Events): Bytes of recomputed maps that are not there.
        eligible (Events): Bytes of swapped maps that may be away.
        leaving (Events): Of ``eligible``, with the position from which each map's copy
            may start.
        coming (Events): Likewise, with the position by which each map must be back.
    """

    remade: Events
    eligible: Events
    leaving: Events
    coming: Events


def make_sums(model: Model) -> Sums:
    """The sums of a model."""
    a, size, at = model.problem.arrays, model.scaled.size, model.columns
    b0 = a.first_backward
    maps = np.arange(model.n_maps)
    # Nothing that is released after b0 is away up to b0.
    late = maps[a.first_use > b0]
    sums = []
    for variable, delayed in (
        (at.recompute, at.late + model.n_maps),
        (at.swap, at.late),
    ):
        sums.append(
            [
                (a.release_from, variable + maps, size),
                (a.first_use, variable + maps, -size),
                (a.release_from[late], delayed + late, -size[late]),
                (np.full(len(late), b0 + 1), delayed + late, size[late]),
            ]
        )
    back = _list_back_steps(model)
    sums[1].append((back[0], back[1], -back[2]))
    if model.held:
        column, until, nbytes = (np.array(c) for c in zip(*model.held, strict=True))
        sums[0].append((np.full(len(column), b0), column, -nbytes))
        sums[0].append((until, column, nbytes))
    remade, eligible = (Events(parts) for parts in sums)
    # The same for single maps: what is away by the end of its copy, or its use.
    at_start = (a.release_from, at.swap + maps, size)
    at_end = (a.first_use, at.swap + maps, -size)
    leaving = Events(
        [at_start, at_end, (back[0], back[1], -back[2])],
        [a.copy_from, a.copy_from, a.copy_from[back[3]]],
    )
    early = a.release_from[back[3]]
    coming = Events(
        [
            at_start,
            at_end,
            (early, back[1], back[2]),
            (a.first_use[back[3]], back[1], -back[2]),
        ],
        [a.first_use, a.first_use, back[0], back[0]],
    )
    return Sums(remade, eligible, leaving, coming)


def _list_back_steps(model: Model) -> tuple[np.ndarray, ...]:
    """Position, column, bytes and map of every step towards being back."""
    steps: list[tuple[int, int, float, int]] = []
    for m, positions in enumerate(model.chains.breaks):
        size = float(model.scaled.size[m])
        use = int(model.problem.arrays.first_use[m])
        for place, k in enumerate(positions):
            column = model.columns.back_of[m] + place
            following = [*positions[place + 1 :], use]
            steps.append((k, column, size, m))
            steps.append((following[0], column, -size, m))
    table = np.array(steps, float).reshape(-1, 4)
    whole = table[:, [0, 1, 3]].astype(np.int64)
    return whole[:, 0], whole[:, 1], table[:, 2], whole[:, 2]


def sum_excess(model: Model) -> np.ndarray:
    """(n,) load above the limit if every map were kept."""
    a = model.problem.arrays
    alive = np.zeros(model.n + 2)
    np.add.at(alive, a.producer[: model.n_maps] + 1, model.scaled.size)
    np.add.at(alive, a.last_use + 1, -model.scaled.size)
    base = model.fixed / model.scaled.scale
    return base + np.cumsum(alive)[: model.n] - model.scaled.limit


# -- cuts: the pairs of operations whose rows a point violates most -----------
_i64, _f64 = types.int64, types.float64
_changes = types.Tuple((_i64[::1], _i64[::1], _f64[::1]))


@compiled(
    types.void(
        _changes,
        _changes,
        _f64[::1],
        _f64[::1],
        _f64[::1],
        _i64,
        _f64,
        _f64,
        _f64[:, ::1],
        _i64[:, ::1],
    ),
    apart=True,
)
def find_tightest(
    outs: tuple[np.ndarray, np.ndarray, np.ndarray],
    ins: tuple[np.ndarray, np.ndarray, np.ndarray],
    need: np.ndarray,
    start: np.ndarray,
    run: np.ndarray,
    first_backward: int,
    out_rate: float,
    in_rate: float,
    most: np.ndarray,
    pair: np.ndarray,
) -> None:
    """The pairs that allow the fewest bytes to be away.

    Args:
        outs: Pointers by position, slots and bytes: from the position on so many
            more bytes may be away whose copy may start at the slot.
        ins: Likewise, with what must have been copied back by the slot.
        need: (n,) bytes that have to be away; where none, nothing is looked for.
        start: (n+1,) time at which the wait before each operation begins.
        run: (n,) time at which each operation begins.
        most: Result, (2, n): per operation k the bytes that may have left by then, and
            those that can be back in time; infinite where nothing is looked for.
        pair: Result, (2, n): the i of the pair that says so, and the j of that pair.
    """
    out_pointers, out_slots, out_values = outs
    in_pointers, in_slots, in_values = ins
    n = len(need)
    out_bytes, in_bytes = most[0], most[1]
    out_from, in_to = pair[0], pair[1]
    out_bytes[:] = in_bytes[:] = np.inf
    out_from[:] = in_to[:] = 0
    leaving, coming = np.zeros(n + 1), np.zeros(n + 1)
    for k in range(n):
        for e in range(out_pointers[k], out_pointers[k + 1]):
            leaving[out_slots[e]] += out_values[e]
        for e in range(in_pointers[k], in_pointers[k + 1]):
            coming[in_slots[e]] += in_values[e]
        if need[k] <= 0:
            continue
        earlier = 0.0
        for i in range(k + 1):
            allowed = earlier + out_rate * (run[k] - start[i])
            if allowed < out_bytes[k]:
                out_bytes[k], out_from[k] = allowed, i
            earlier += leaving[i]
        later = 0.0
        for j in range(first_backward, n):
            later += coming[j]
        for j in range(first_backward, n):
            later -= coming[j]
            if j > k:
                allowed = later + in_rate * (run[j] - start[k + 1])
                if allowed < in_bytes[k]:
                    in_bytes[k], in_to[k] = allowed, j


# -- the program, solved ------------------------------------------------------
STRETCHES = 30  # of operations, with one row and two pairs a round at most
VIOLATED = 1e-7  # of the limit
NO_PART = 1e-6  # of a map: what a slow link copies within an iteration
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
class LinearProgram:
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
        ranks: int = 1,
        singles: bool = False,
    ) -> None:
        self.model = Model(problem, limit_bytes, ranks, singles)
        self._sums = make_sums(self.model)
        self._excess = sum_excess(self.model)
        self.positions: set[int] = set()
        self.pairs: dict[tuple[str, int, int], None] = {}
        self.segments: Segments | None = None

    def divide(self, prices: np.ndarray) -> None:
        """Adds rows about parts of the iteration, once; :attr:`Solution.prices` go.

        Args:
            prices: (n,) seconds per byte of each operation's memory.
        """
        divisions = choose_divisions(self.model, prices)
        self.positions.update(divisions)
        self.segments = Segments(self.model, divisions, self._excess)

    def program(self, extra: list[Row] | None = None) -> LinearProgram:
        """The rows there are, those of ``extra`` included, over the columns in use."""
        model, at = self.model, self.model.columns
        rows = [*model.rows, *(extra or [])]
        positions = np.array(sorted(self.positions), np.int64)
        for k in positions.tolist():
            away, remade = at.away + k, at.remade + k
            rows.append(make_row([remade, away], [-1, -1], -float(self._excess[k])))
            rows.append(make_row([away, at.eligible + k], [1, -1], 0))
        stops = {model.problem.arrays.first_backward, model.n}
        if self.segments is not None:
            stops |= self.segments.stops
        for kind, left, right in self.pairs:
            stops |= {left, right + 1} if kind == 'out' else {left + 1, right + 1}
        order = at.waited + np.array(sorted(stops), np.int64)
        for one, other in itertools.pairwise(order.tolist()):
            rows.append(make_row([one, other], [1, -1], 0))
        rows += [self._pair(*pair) for pair in self.pairs]
        if self.segments is not None:
            rows += self.segments.rows
        equations = [
            *self._sums.remade.between(positions, at.remade),
            *self._sums.eligible.between(positions, at.eligible),
        ]
        matrix, equal = self._matrix(rows), self._matrix(equations)
        used = np.zeros(at.end, bool)
        used[matrix.indices] = used[equal.indices] = True
        columns, known = np.nonzero(used)[0], model.variables
        return LinearProgram(
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

    def expanded(self, program: LinearProgram, x: np.ndarray) -> np.ndarray:
        """Values of all columns; what is not in use is 0."""
        at = self.model.columns
        whole = np.zeros(at.end)
        whole[program.used] = x
        waited = whole[at.waited : at.away]
        np.maximum.accumulate(waited, out=waited)
        values: np.ndarray = whole[self.model.variables.same_as]
        return values

    def solve(self) -> Solution | None:
        """The optimum, made safe against the solver's tolerances."""
        from scipy import optimize

        model = self.model
        program = self.program()
        result = run_solver(
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
        """Swapped and recomputed fraction of each map, without what is next to none."""
        model, at = self.model, self.model.columns
        recompute = slice(at.recompute, at.recompute + model.n_maps)
        parts = x[: model.n_maps], x[recompute]
        swapped, recomputed = (np.where(part < NO_PART, 0.0, part) for part in parts)
        return swapped, recomputed

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
        size = model.scaled.size
        places = [(model.column_back(m, by), size[m]) for m in maps.tolist()]
        back = [(column, nbytes) for column, nbytes in places if column >= 0]
        columns = [at.away + k, *maps, *(column for column, _ in back)]
        values = [1.0, *-size[maps], *(nbytes for _, nbytes in back)]
        ends, signs, within = model.between(i, j)
        return make_row(
            [*columns, *ends], [*values, *(rate * s for s in signs)], rate * within
        )
