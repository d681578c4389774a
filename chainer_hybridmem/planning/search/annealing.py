"""Simulated annealing on simulated time, round by round, within a budget."""

from __future__ import annotations

import math

import numpy as np

from chainer_hybridmem.jit import clock
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search import local_search
from chainer_hybridmem.planning.search.candidates import (
    NUMBERS,
    Candidate,
    Search,
    number_kinds,
)
from chainer_hybridmem.planning.simulation.problem import Problem

LEAST_STEPS, MOST_STEPS = 50_000, 100_000
STEPS_TIMES_OPERATIONS = 32_000_000  # less than a second of today's processors
LARGE_STEPS_TIMES_OPERATIONS = 200_000_000  # with more than MANY_MAPS
TOLERANCE = 1e-4  # of the bound
FIRST_PART = 100  # steps of a round's first part
PART_SECONDS = 0.2  # of each that follows
COLD = 1e-5  # last temperature, of the in-core time
WARMEST = 2e-3  # first temperature, likewise
# Beyond so many feature maps everything swapped is too far from anything good: rounds
# follow each other from the relaxation rounded.
MANY_MAPS = 250

NO_GROUPS = np.zeros(0, np.int64)


def count_steps(problem: Problem) -> int:
    """Steps of all rounds together where neither they nor the time are limited."""
    n = len(problem.arrays.seconds)
    many = len(problem.maps) > MANY_MAPS
    work = LARGE_STEPS_TIMES_OPERATIONS if many else STEPS_TIMES_OPERATIONS
    return min(MOST_STEPS, max(LEAST_STEPS, work // n))


class Budget:
    """What is left of the steps and of the time.

    Args:
        search (Search): Whose simulations are counted.
        steps (int or None): Steps in all, if they are limited.
        seconds (float or None): Time in all, if it is limited.
    """

    def __init__(
        self, search: Search, steps: int | None, seconds: float | None
    ) -> None:
        self.search = search
        if steps is None:
            steps = count_steps(search.problem) if seconds is None else 2**62
        self.total = self.left = steps
        self.deadline = None if seconds is None else search.started + seconds
        self.seconds_per_step = 0.0

    def share_out(self) -> None:
        """What is left, in steps, is what the rounds to come share."""
        self.total = self.left
        if self.deadline is not None and self.seconds_per_step > 0:
            seconds = max(self.deadline - clock(), 0.0)
            self.total = min(self.total, int(seconds / self.seconds_per_step))

    def take(self, share: float) -> int:
        """Steps of one round: a share of all, as far as steps and time allow."""
        steps = min(self.left, max(1, int(self.total * share)))
        if self.deadline is not None and self.seconds_per_step > 0:
            left = self.deadline - clock()
            steps = min(steps, int(left / self.seconds_per_step))
        return max(steps, 0)

    def count(self, steps: int, seconds: float) -> None:
        """Counts a round."""
        self.left = max(self.left - steps, 0)
        self.search.simulations += steps
        if steps:
            self.seconds_per_step = seconds / steps

    @property
    def left_seconds(self) -> float:
        """Until its time is over; infinite if that is not limited."""
        return math.inf if self.deadline is None else self.deadline - clock()

    def allows(self, simulations: int) -> bool:
        """Whether there is time for so many simulations."""
        return simulations * self.seconds_per_step < self.left_seconds


def actions_of(plan: Plan) -> np.ndarray:
    """The (M,) actions of a plan."""
    return np.array([NUMBERS[entry.action] for entry in plan.maps], np.int64)


class Annealer:
    """Rounds of annealing of one search, within a budget.

    Args:
        search (Search): Judges the candidates.
        budget (Budget): Counts their number and time.

    Attributes:
        search (Search): Likewise.
        budget (Budget): Likewise.
    """

    def __init__(self, search: Search, budget: Budget) -> None:
        self.search = search
        self.budget = budget
        self._kinds = number_kinds(search.problem)

    def run_round(
        self,
        start: Candidate,
        steps: int,
        warm: float,
        goal: float,
        seed: int,
        groups: tuple[np.ndarray, np.ndarray] | None = None,
        late: bool = False,
    ) -> Candidate:
        """One round; its best candidate.

        Args:
            start: Where it begins.
            steps: Candidates to judge.
            warm: First temperature in seconds.
            goal: Seconds that are good enough.
            seed: Of the random moves.
            groups: Maps that are alike, to be changed together; see
                :func:`.alike.group_alike`.
            late: Whether it decides which recomputed maps are LATE as well.
        """
        search, problem = self.search, self.search.problem
        # Where no time at all was measured, one temperature is as good as another.
        cold = COLD * problem.in_core_seconds or COLD
        if steps == 0 or start.seconds <= goal:
            return start
        began = clock()
        pointers, alike = groups or (NO_GROUPS, NO_GROUPS)
        current, best, state = start.action.copy(), start.action.copy(), np.zeros(4)
        done, part, judged = 0, FIRST_PART, FIRST_PART
        # Ctrl-C comes out between two calls only: none of them takes long.
        while done < steps and judged == part:
            if done:
                rate = done / (clock() - began)
                part = max(FIRST_PART, int(rate * PART_SECONDS))
            part = min(part, steps - done)
            judged = local_search.anneal(
                problem.arrays,
                current,
                search.limit_bytes,
                search.lead,
                problem.swap_out_seconds,
                problem.swap_in_seconds,
                search.barrier,
                self._kinds,
                pointers,
                alike,
                steps,
                max(warm, 2 * cold),
                cold,
                goal,
                seed,
                late,
                search.work,
                best,
                state,
                part,
            )
            done += judged
        self.budget.count(done, clock() - began)
        found = search.evaluate(best)
        return found if found.seconds < start.seconds else start
