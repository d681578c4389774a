"""The best assignment of keep, swap and recompute, with a proof where time allows.

Two questions are kept apart:

``proved``
    whether no assignment of actions is faster *with the positions that our
    scheduler chooses* (``planning/simulation/kernel``).
``lower_bound_seconds``
    below which no executable plan can be, *whatever its positions*.

The relaxation of ``planning/search/bound`` is solved with whole decisions
(mixed-integer linear programming, HiGHS through SciPy), and in small problems with
whole maps at every moment: that gives the bound. Where there are few assignments, all
are simulated. Else the relaxation's solution is simulated and then
forbidden, and the next best one is asked for, until none is left that could be faster
than the best plan so far, which at first is that of ``hybrid``. Only what is proven
before the first assignment is forbidden holds for every plan, for a forbidden one may
be faster with other positions.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.jit import clock
from chainer_hybridmem.planning.planners.hybrid import hybrid
from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.annealing import count_steps
from chainer_hybridmem.planning.search.bound import (
    TRUST,
    WIDE_GAP,
    WholeRelaxation,
    bound_of_parts,
    lower_bound,
    tighten,
)
from chainer_hybridmem.planning.search.candidates import (
    Candidate,
    Search,
    count_assignments,
)
from chainer_hybridmem.planning.search.planner_options import SECONDS
from chainer_hybridmem.planning.search.repairs import find_start
from chainer_hybridmem.planning.simulation.problem import Problem

ENUMERATED = 100_000  # assignments, at most, that are simply all simulated
TIME_BUDGET = 60.0
MORE = 4  # times the steps of the default planner, where its gap is wide


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
    run = _ExactSearch(problem, limit_bytes, late, time_budget)
    run.solve()
    return run.plan(first)


def _incumbent(problem: Problem, limit_bytes: int) -> Plan | None:
    """The default planner's plan, sought for longer where its gap is wide, if any."""
    try:
        plan = hybrid(problem, limit_bytes)
    except InfeasibleError:
        if not problem.rules:
            raise
        return None
    if plan.predicted_seconds <= plan.lower_bound_seconds * (1 + WIDE_GAP):
        return plan
    more = hybrid(problem, limit_bytes, steps=MORE * count_steps(problem))
    return min(plan, more, key=lambda p: p.predicted_seconds)


class _ExactSearch:
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
        self.bound_seconds = lower_bound(problem, limit_bytes).seconds
        if self.incumbent is not None:
            self.seconds = self.incumbent.predicted_seconds
            proven = self.incumbent.lower_bound_seconds
            self.bound_seconds = max(self.bound_seconds, proven)
        self.best: tuple[Search, Candidate] | None = None
        self.proved = False

    def offer(self, action: np.ndarray) -> None:
        """Simulates an assignment and remembers it if it is the best."""
        for search in self.searches:
            candidate = search.evaluate(action)
            if candidate.seconds < self.seconds:
                self.seconds = candidate.seconds
                self.best = (search, candidate)

    def solve(self) -> None:
        """The best assignments that the relaxation knows of, one after the other."""
        deadline = clock() + self.time_budget
        if count_assignments(self.problem) <= ENUMERATED:
            for search in self.searches:
                self.offer(search.find_fastest().action)
            self.proved = True
        if self.seconds > self.bound_seconds * (1 + 2 * TRUST):
            proven = bound_of_parts(self.problem, self.limit_bytes)
            self.bound_seconds = max(self.bound_seconds, proven)
        relaxation = WholeRelaxation(self.problem, self.limit_bytes)
        bound = tighten(relaxation.relaxation)
        if self.seconds > self.bound_seconds * (1 + WIDE_GAP):
            relaxation.divide(bound.prices)
            tighten(relaxation.relaxation)
        while self.seconds > self.bound_seconds:
            left = deadline - clock()
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
            planning_seconds=clock() - self.searches[0].started,
        )


PLANNERS = (
    Planner('exact', exact, source='this project', options={'time_budget': SECONDS}),
)
