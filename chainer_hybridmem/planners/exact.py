"""The best assignment of keep, swap and recompute, with a proof where time allows.

Two questions are kept apart:

``proved``
    whether no assignment of actions is faster *with the positions that our
    scheduler chooses* (:mod:`chainer_hybridmem.simulation.kernel`).
``lower_bound_seconds``
    below which no executable plan can be, *whatever its positions*.

The relaxation of :mod:`.bound` is solved with whole decisions (mixed-integer linear
programming, HiGHS through SciPy): that gives the bound. Where there are few
assignments, all are simulated. Else the relaxation's solution is simulated and then
forbidden, and the next best one is asked for, until none is left that could be faster
than the best plan so far, which at first is that of :mod:`.hybrid`. Only what is proven
before the first assignment is forbidden holds for every plan, for a forbidden one may
be faster with other positions.

Unlike the bound of the linear program, that of the solver's tree is trusted, up to the
share ``TRUST``, which is given away.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.planners.hybrid import hybrid
from chainer_hybridmem.planners.planner import Planner
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.bound import Relaxation, lower_bound, tightened
from chainer_hybridmem.search.candidates import KEEP, RECOMPUTE, SWAP, Candidate, Search
from chainer_hybridmem.search.options import SECONDS
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation import problem as problem_module
from chainer_hybridmem.simulation.kernel import Work
from chainer_hybridmem.simulation.problem import Arrays, Problem

ENUMERATED = 100_000  # assignments, at most, that are simply all simulated
TIME_BUDGET = 60.0
TRUST = 1e-6  # share of the solver's bound given away for its tolerances


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
    everything_out = late.evaluate(late.fill(SWAP))
    if not everything_out.fits:
        return late.finish('exact', everything_out)  # raises, with the numbers
    run = _Run(problem, limit_bytes, late, time_budget)
    run.solve()
    return run.plan()


def assignments(problem: Problem) -> int:
    """Number of ways to keep, swap or recompute every map."""
    return math.prod(3 if able else 2 for able in problem.recomputable.tolist())


@compiled(uses=(kernel, problem_module))
def fastest(
    a: Arrays,
    limit: int,
    lead: np.ndarray,
    out_seconds: np.ndarray,
    in_seconds: np.ndarray,
    barrier: bool,
    recomputable: np.ndarray,
    w: Work,
) -> Any:
    """Simulates every assignment: the first of the fastest, and how many there are."""
    action = np.zeros(len(recomputable), np.int64)
    best = action.copy()
    best_seconds, count, m = np.inf, 0, 0
    while m < len(action):
        seconds = kernel.judge(
            a, action, limit, lead, out_seconds, in_seconds, barrier, best_seconds, w
        ).seconds
        count += 1
        if seconds < best_seconds:
            best_seconds = seconds
            best[:] = action
        m = 0
        while m < len(action):  # count up in a mixed radix
            action[m] += 1
            if action[m] <= (2 if recomputable[m] else 1):
                break
            action[m] = 0
            m += 1
    return best, count


class _Run:
    """One search: the best so far, and what is proven about it."""

    def __init__(
        self, problem: Problem, limit_bytes: int, late: Search, time_budget: float
    ) -> None:
        self.problem, self.limit_bytes = problem, limit_bytes
        # Backward may begin while copies are under way, or wait for them all.
        self.searches = (late, Search(problem, limit_bytes))
        self.time_budget = time_budget
        self.incumbent = hybrid(problem, limit_bytes)
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
            action, count = fastest(
                self.problem.arrays,
                self.limit_bytes,
                search.lead,
                self.problem.swap_out_seconds,
                self.problem.swap_in_seconds,
                search.barrier,
                self.problem.recomputable,
                search.work,
            )
            search.simulations += count
            self.offer(action)
        self.proved = True

    def solve(self) -> None:
        """The best assignments that the relaxation knows of, one after the other."""
        deadline = time.perf_counter() + self.time_budget
        if assignments(self.problem) <= ENUMERATED:
            self.enumerate()
        relaxation = _Whole(self.problem, self.limit_bytes)
        tightened(relaxation)
        while self.seconds > self.bound_seconds:
            left = deadline - time.perf_counter()
            if left <= 0:
                break
            answer = relaxation.solve_whole(self.seconds, left)
            if not relaxation.forbidden:
                self.bound_seconds = max(self.bound_seconds, answer.floor)
            if answer.x is not None:
                self.offer(relaxation.action(answer.x))
            if answer.floor >= self.seconds * (1 - 2 * TRUST):
                self.proved = True
                break
            if answer.x is None:
                break
            if not relaxation.cut(answer.x) and answer.done:
                if self.proved:  # everything has been simulated: no need to go on
                    break
                relaxation.forbid(relaxation.action(answer.x))

    def plan(self) -> Plan:
        """The best plan, with what is proven."""
        bound_seconds = min(self.bound_seconds, self.seconds)
        attained = self.seconds <= bound_seconds * (1 + 2 * TRUST)
        options = {
            'time_budget': self.time_budget,
            'proved': self.proved or attained,
            'gap': self.seconds / bound_seconds - 1 if bound_seconds > 0 else 0.0,
        }
        plan = self.incumbent
        if self.best is not None:
            search, candidate = self.best
            plan = search.finish('exact', candidate)
        simulations = [search.simulations for search in self.searches]
        return dataclasses.replace(
            plan,
            planner='exact',
            options=options,
            lower_bound_seconds=bound_seconds,
            simulations=self.incumbent.simulations + sum(simulations),
            planning_seconds=time.perf_counter() - self.searches[0].started,
        )


@dataclasses.dataclass(frozen=True)
class _Answer:
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


class _Whole(Relaxation):
    """The relaxation with whole decisions, and with assignments forbidden."""

    def __init__(self, problem: Problem, limit_bytes: int) -> None:
        super().__init__(problem, limit_bytes)
        self.forbidden = 0
        self.whole = np.zeros(self.columns)
        self.whole[: self.first_replay] = 1

    def action(self, x: np.ndarray) -> np.ndarray:
        """The assignment at a point."""
        swapped, recomputed = self.fractions(x)
        action = np.full(self.n_maps, KEEP, np.int64)
        action[recomputed > 0.5] = RECOMPUTE
        action[swapped > 0.5] = SWAP
        return action

    def forbid(self, action: np.ndarray) -> None:
        """At least one map has another action."""
        swapped = self.first_swap + np.nonzero(action == SWAP)[0]
        recomputed = self.first_recompute + np.nonzero(action == RECOMPUTE)[0]
        kept = np.nonzero(action == KEEP)[0]
        columns = [swapped, recomputed, self.first_swap + kept]
        columns.append(self.first_recompute + kept)
        acting = len(swapped) + len(recomputed)
        values = np.concatenate([np.ones(acting), -np.ones(2 * len(kept))])
        self._row(np.concatenate(columns), values, acting - 1)
        self.forbidden += 1

    def solve_whole(self, best_seconds: float, time_budget: float) -> _Answer:
        """The best assignment that is not forbidden and may beat the best plan."""
        from scipy import optimize

        most = best_seconds - self.base_seconds
        faster = (np.array([self.first_waited + self.n]), np.ones(1), most)
        program = self.program([faster])
        lower, upper = program.bounds.T
        try:
            result = optimize.milp(
                program.cost,
                integrality=self.whole[program.used],
                bounds=optimize.Bounds(lower, upper),
                constraints=[
                    optimize.LinearConstraint(program.matrix, -np.inf, program.right),
                    optimize.LinearConstraint(program.equal, 0, 0),
                ],
                options={'time_limit': time_budget, 'mip_rel_gap': 1e-6},
            )
        except ValueError as error:
            if 'vector::' not in str(error):
                raise
            # HiGHS has run into a limit of its own and found out nothing.
            return _Answer(self.base_seconds * (1 - TRUST), None, False)
        # SciPy gives a model that the solver refuses the same status.
        if result.status == 2 and 'nfeasible' in result.message:
            # Nothing is left that could be faster.
            return _Answer(best_seconds * (1 - TRUST), None, True)
        floor = result.mip_dual_bound
        seconds = self.base_seconds
        if floor is not None and math.isfinite(floor):
            seconds += min(max(floor, 0.0), most, self.longest)
        x = None if result.x is None else self.expanded(program, result.x)
        return _Answer(seconds * (1 - TRUST), x, result.status == 0)


PLANNERS = (
    Planner('exact', exact, source='this project', options={'time_budget': SECONDS}),
)
