"""The best assignment of keep, swap and recompute, with a proof where time allows.

Two questions are kept apart:

``proved``
    whether no assignment of actions is faster *with the positions that our
    scheduler chooses* (``simulation/kernel``).
``lower_bound_seconds``
    below which no executable plan can be, *whatever its positions*.

The relaxation of ``search/bound`` is solved with whole decisions (mixed-integer linear
programming, HiGHS through SciPy), and in small problems with whole maps at every
moment: that gives the bound. Where there are few
assignments, all are simulated. Else the relaxation's solution is simulated and then
forbidden, and the next best one is asked for, until none is left that could be faster
than the best plan so far, which at first is that of ``hybrid``. Only what is proven
before the first assignment is forbidden holds for every plan, for a forbidden one may
be faster with other positions.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.interrupts import run_aside
from chainer_hybridmem.planners.hybrid import hybrid
from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.bound import lower_bound, tighten
from chainer_hybridmem.search.bound.model import Row, make_row
from chainer_hybridmem.search.bound.relaxation import Relaxation
from chainer_hybridmem.search.candidates import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
    count_assignments,
)
from chainer_hybridmem.search.planner_options import SECONDS
from chainer_hybridmem.search.repairs import find_start
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.terminal import c_output_on_stderr

ENUMERATED = 100_000  # assignments, at most, that are simply all simulated
TIME_BUDGET = 60.0


def exact(problem: Problem, limit_bytes: int, time_budget: float = TIME_BUDGET) -> Plan:
    """The fastest assignment under our scheduler, with the tightest bound.

    Args:
        problem: What to plan.
        limit_bytes: Memory limit.
        time_budget: Seconds after which the best plan so far is taken, as ``proved``
            in the plan's options then says; the result depends on the machine if
            they do not suffice. The incumbent's own search comes on top.

    Raises:
        InfeasibleError: If nothing fits.
    """
    late = Search(problem, limit_bytes, barrier=False)
    if late.in_core_fits():
        return late.finish_in_core(
            'exact', time_budget=time_budget, proved=True, gap=0.0
        )
    first = find_start(late)
    if not (first.fits or problem.rules):
        return late.finish('exact', first)  # raises, with the numbers
    run = _Run(problem, limit_bytes, late, time_budget)
    run.solve()
    return run.plan(first)


def _incumbent(problem: Problem, limit_bytes: int) -> Plan | None:
    """The plan of the default planner; None if rules keep it from finding one."""
    try:
        return hybrid(problem, limit_bytes)
    except InfeasibleError:
        if not problem.rules:
            raise
        return None


class _Run:
    """One search: the best so far, and what is proven about it."""

    def __init__(
        self, problem: Problem, limit_bytes: int, late: Search, time_budget: float
    ) -> None:
        self.problem, self.limit_bytes = problem, limit_bytes
        # Backward may begin while copies are under way, or wait for them all.
        self.searches = (late, Search(problem, limit_bytes))
        self.time_budget = time_budget
        self.incumbent = _incumbent(problem, limit_bytes)
        self.seconds = math.inf
        if self.incumbent is not None:
            self.seconds = self.incumbent.predicted_seconds
        self.best: tuple[Search, Candidate] | None = None
        self.bound_seconds = lower_bound(problem, limit_bytes).seconds
        self.proved = False

    def offer(self, action: np.ndarray) -> None:
        """Simulates an assignment and remembers it if it is the best."""
        for search in self.searches:
            candidate = search.evaluate(action)
            if candidate.seconds < self.seconds:
                self.seconds = candidate.seconds
                self.best = (search, candidate)

    def enumerate(self) -> None:
        """Simulates all assignments."""
        for search in self.searches:
            self.offer(search.find_fastest().action)
        self.proved = True

    def solve(self) -> None:
        """The best assignments that the relaxation knows of, one after the other."""
        deadline = timing.now() + self.time_budget
        if count_assignments(self.problem) <= ENUMERATED:
            self.enumerate()
        relaxation = WholeRelaxation(self.problem, self.limit_bytes)
        tighten(relaxation.relaxation)
        while self.seconds > self.bound_seconds:
            left = deadline - timing.now()
            if left <= 0:
                break
            answer = relaxation.solve(self.seconds, left)
            if not relaxation.forbidden:
                self.bound_seconds = max(self.bound_seconds, answer.floor)
            if answer.x is not None:
                self.offer(relaxation.action_at(answer.x))
            if answer.floor >= self.seconds * (1 - 2 * TRUST):
                self.proved = True
                break
            if answer.x is None:
                break
            if not relaxation.cut(answer.x) and answer.done:
                if self.proved:  # everything has been simulated: no need to go on
                    break
                relaxation.forbid(relaxation.action_at(answer.x))

    def plan(self, first: Candidate) -> Plan:
        """The best plan, with what is proven.

        Args:
            first: What a refusal is about.

        Raises:
            InfeasibleError: If there is none.
        """
        if self.best is None and self.incumbent is None:
            return self.searches[0].finish('exact', first)  # raises
        bound_seconds = min(self.bound_seconds, self.seconds)
        attained = self.seconds <= bound_seconds * (1 + 2 * TRUST)
        options = {
            'time_budget': self.time_budget,
            'proved': self.proved or attained,
            'gap': self.seconds / bound_seconds - 1 if bound_seconds > 0 else 0.0,
        }
        found, simulations = self.incumbent, 0
        if found is not None:
            simulations = found.simulations
        if self.best is not None:
            search, candidate = self.best
            found = search.finish('exact', candidate)
        assert found is not None
        return dataclasses.replace(
            found,
            planner='exact',
            options=options,
            lower_bound_seconds=bound_seconds,
            simulations=simulations + sum(s.simulations for s in self.searches),
            planning_seconds=timing.now() - self.searches[0].started,
        )


PLANNERS = (
    Planner('exact', exact, source='this project', options={'time_budget': SECONDS}),
)


# -- whole decisions ----------------------------------------------------------
TRUST = 1e-6  # share of the solver's bound given away for its tolerances


@dataclasses.dataclass(frozen=True)
class Answer:
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

    def solve(self, best_seconds: float, time_budget: float) -> Answer:
        """The best assignment that is not forbidden and may beat the best plan.

        Args:
            best_seconds: Time of the best plan.
            time_budget: Seconds after which the solver gives up.
        """
        from scipy import optimize

        model = self.relaxation.model
        most = min(best_seconds - model.base_seconds, model.longest)
        total = np.array([model.columns.waited + model.n])
        rows = [make_row(total, [1.0], most)]
        if self._maps is not None:
            rows += self._maps.rows()
        program = self.relaxation.program(rows)
        lower, upper = program.bounds.T
        try:
            with c_output_on_stderr():  # HiGHS prints some lines without being asked
                result = run_aside(
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
                        options={'time_limit': time_budget, 'mip_rel_gap': 1e-6},
                    )
                )
        except ValueError as error:
            if 'vector::' not in str(error):
                raise
            # HiGHS has run into a limit of its own and found out nothing.
            return Answer(model.base_seconds * (1 - TRUST), None, False)
        # SciPy gives a model that the solver refuses the same status.
        if result.status == 2 and 'nfeasible' in result.message:
            # Nothing is left that could be faster.
            return Answer(best_seconds * (1 - TRUST), None, True)
        floor = result.mip_dual_bound
        seconds = model.base_seconds
        if floor is not None and math.isfinite(floor):
            seconds += min(max(floor, 0.0), most, model.longest)
        x = None if result.x is None else self.relaxation.expanded(program, result.x)
        return Answer(seconds * (1 - TRUST), x, result.status == 0)


MOST_COLUMNS = 10_000  # maps times operations; more of them have proven nothing new
VIOLATED = 1e-7  # seconds


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
