"""The linear program with whole decisions, solved by HiGHS through SciPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from chainer_hybridmem.planning.search.bound.model import (
    Row,
    least_copy_seconds,
    make_row,
)
from chainer_hybridmem.planning.search.bound.relaxation import Relaxation
from chainer_hybridmem.planning.search.bound.solver import run_solver
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.work import KEEP, RECOMPUTE, SWAP

TRUST = 1e-6  # share of the solver's bound given away for its tolerances


MOST_COLUMNS = 10_000  # maps times operations; more of them have proven nothing new
VIOLATED = 1e-7  # seconds


@dataclasses.dataclass(frozen=True)
class SolverAnswer:
    """What the solver says.

    Attributes:
        floor (float): No assignment that is not forbidden takes less time,
            however it is scheduled, unless it takes as long as the best plan.
        x (ndarray or None): The best point found.
        done (bool): Whether it is proven to be the best.
    """

    floor: float
    x: np.ndarray | None
    done: bool


class WholeRelaxation:
    """A relaxation whose decisions are whole, with assignments forbidden.

    Unlike the bound of the linear program, that of the solver's tree is trusted, up to
    the share :data:`TRUST`, which is given away.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.

    Attributes:
        relaxation (Relaxation): With decisions in fractions.
        forbidden (int): Assignments that are forbidden.
    """

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        columns = len(problem.maps) * len(problem.arrays.seconds)
        singles = columns <= MOST_COLUMNS
        self.relaxation = Relaxation(problem, limit_bytes, singles=singles)
        self.forbidden = 0
        at = self.relaxation.model.columns
        self._is_whole = np.zeros(at.end)
        self._is_whole[: at.replay] = 1
        self._is_whole[at.single :] = 1
        self._maps = WholeMaps(self.relaxation) if singles else None

    def divide(self, prices: np.ndarray) -> None:
        """Tells the parts of the iteration apart, as :meth:`.Relaxation.divide`."""
        self.relaxation.divide(prices)
        assert self.relaxation.segments is not None
        more = self.relaxation.model.columns.end - len(self._is_whole)
        self._is_whole = np.append(self._is_whole, np.zeros(more))
        self._is_whole[self.relaxation.segments.whole] = 1

    def cut(self, x: np.ndarray) -> bool:
        """Adds rows that a point violates; tells whether there were any."""
        found = self.relaxation.cut(x)
        return (self._maps is not None and self._maps.cut(x)) or found

    def action_at(self, x: np.ndarray) -> np.ndarray:
        """The (M,) actions at a point."""
        swapped, recomputed = self.relaxation.fractions(x)
        action = np.full(len(swapped), KEEP, np.int64)
        action[recomputed > 0.5] = RECOMPUTE
        action[swapped > 0.5] = SWAP
        model = self.relaxation.model
        a = model.problem.arrays
        replayed = x[model.columns.replay : model.columns.waited] > 0.5
        for t in np.flatnonzero(~a.read).tolist():
            asked = replayed[model.readers.get(t, [])].any()
            if replayed[a.producer[t]] or not asked:
                action[t] = RECOMPUTE
        return action

    def forbid(self, action: np.ndarray) -> None:
        """At least one map has another action."""
        at = self.relaxation.model.columns
        swapped = at.swap + np.nonzero(action == SWAP)[0]
        recomputed = at.recompute + np.nonzero(action == RECOMPUTE)[0]
        kept = np.nonzero(action == KEEP)[0]
        columns = [swapped, recomputed, at.swap + kept, at.recompute + kept]
        acting = len(swapped) + len(recomputed)
        values = np.concatenate([np.ones(acting), -np.ones(2 * len(kept))])
        self.relaxation.model.add_row(np.concatenate(columns), values, acting - 1)
        self.forbidden += 1

    def solve(
        self, best_seconds: float, time_budget: float, nodes: int | None = None
    ) -> SolverAnswer:
        """The best assignment that is not forbidden and may beat the best plan.

        Args:
            best_seconds: Time of the best plan.
            time_budget: Seconds after which the solver gives up.
            nodes: Of the solver's tree, after which it gives up; None: any number.
        """
        from scipy import optimize

        model = self.relaxation.model
        most = min(best_seconds - model.base_seconds, model.longest)
        at = model.columns
        # Without any point that it knows, the solver would not say what it has proven.
        rows = [make_row([at.waited + model.n, at.beyond], [1.0, -1.0], most)]
        if self._maps is not None:
            rows += self._maps.rows()
        program = self.relaxation.program(rows)
        lower, upper = program.bounds.T
        options = {'time_limit': time_budget, 'mip_rel_gap': 1e-6}
        if nodes is not None:
            options['node_limit'] = nodes
        try:
            result = run_solver(
                lambda: optimize.milp(
                    program.cost,
                    integrality=self._is_whole[program.used],
                    bounds=optimize.Bounds(lower, upper),
                    constraints=[
                        optimize.LinearConstraint(
                            program.matrix, -np.inf, program.right
                        ),
                        optimize.LinearConstraint(program.equal, 0, 0),
                    ],
                    options=options,
                )
            )
        except ValueError as error:
            if 'vector::' not in str(error):
                raise
            # HiGHS has run into a limit of its own and found out nothing.
            return SolverAnswer(model.base_seconds * (1 - TRUST), None, False)
        # SciPy gives a model that the solver refuses the same status.
        if result.status == 2 and 'nfeasible' in result.message:
            # Nothing is left that could be faster, or waits less.
            return SolverAnswer((model.base_seconds + most) * (1 - TRUST), None, True)
        floor = result.mip_dual_bound
        seconds = model.base_seconds
        if floor is not None and math.isfinite(floor):
            seconds += min(max(floor, 0.0), most, model.longest)
        x = None if result.x is None else self.relaxation.expanded(program, result.x)
        if x is not None and x[at.beyond] > VIOLATED:
            x = None
        return SolverAnswer(seconds * (1 - TRUST), x, result.status == 0)


class WholeMaps:
    """Variables and rows for the operations that a relaxation has rows of memory for.

    The linear program counts bytes: half a map may be away, and only half of it has to
    be copied in time. In truth a map leaves when all of it is copied, and takes all its
    memory before the first byte comes back. With whole decisions, a variable for each
    swapped map and operation says so.

    Args:
        relaxation (Relaxation): Whose model has the variables.
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self._relaxation = relaxation
        model = relaxation.model
        self._arrays = model.problem.arrays
        self._first = model.columns.single
        self._out_seconds, self._in_seconds = least_copy_seconds(model.problem)
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
                back = model.column_back(m, k)
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
