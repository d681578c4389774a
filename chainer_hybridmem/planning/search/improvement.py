"""Improves a plan in the background while training goes on.

One thread of low priority anneals on from the plan in use, round after round with new
seeds. It spends its time in compiled code that does not hold the interpreter lock;
everything else, such as writing the plan down, is left to who asks for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import threading

from chainer_hybridmem.interrupts import Worker, start_whole
from chainer_hybridmem.jit import clock
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.annealing import (
    TOLERANCE,
    WARMEST,
    Annealer,
    Budget,
    assignment_of,
)
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import Candidate, Search
from chainer_hybridmem.planning.search.repairs import undo_useless_moves
from chainer_hybridmem.planning.simulation.problem import Problem

STEPS = 4_000  # of a round; the thread ends between rounds
PATIENCE = 50  # rounds without progress after which it ends by itself
LEAST_GAIN = 1e-3  # of the time, below which a change of plans is not worth it
FIRST_SEED = 1_000
_LOWEST_PRIORITY = 19


class Improvement:
    """A search that goes on.

    Args:
        problem (Problem): What is planned.
        limit_bytes (int): Memory limit.
        plan (Plan): The plan in use.
        patience (int): Rounds without progress after which the search ends.

    Attributes:
        problem (Problem): What is planned.
    """

    def __init__(
        self,
        problem: Problem,
        limit_bytes: int,
        plan: Plan,
        patience: int = PATIENCE,
    ) -> None:
        self.problem = problem
        self._limit_bytes = limit_bytes
        self._patience = patience
        self._plan = plan
        self._best: Candidate | None = None  # replaced whole, by the thread alone
        self._simulations = 0
        self._stop = threading.Event()
        self._started = clock()
        # NumPy's memory handler belongs to the context; a fresh one has NumPy's own.
        self._thread = Worker(
            lambda: contextvars.Context().run(self._run), 'hybridmem-improvement'
        )

    def start(self) -> None:
        """Begins to search, if the system gives a thread for it."""
        with contextlib.suppress(RuntimeError):
            start_whole(self._thread, self._stop.set)

    @property
    def running(self) -> bool:
        """Whether the search goes on."""
        return self._thread.runs

    def close(self) -> None:
        """Ends the search after the present round, and waits for that."""
        self._stop.set()
        self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the search has ended by itself."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def better(self, plan: Plan) -> Plan | None:
        """A plan that is faster than this one by ``LEAST_GAIN``; None if there is none.

        Args:
            plan: The plan in use; what it cost counts for the new one too.
        """
        best = self._best
        if best is None or best.seconds >= plan.predicted_seconds * (1 - LEAST_GAIN):
            return None
        search = Search(self.problem, self._limit_bytes, barrier=False)
        found = search.finish(plan.planner, best, **{**plan.options, 'improved': True})
        return dataclasses.replace(
            found,
            lower_bound_seconds=plan.lower_bound_seconds,
            planning_seconds=(self._plan.planning_seconds + clock() - self._started),
            simulations=self._plan.simulations + self._simulations,
        )

    def _run(self) -> None:
        _lower_priority()
        search = Search(self.problem, self._limit_bytes, barrier=False)
        best = search.evaluate(assignment_of(self.problem, self._plan))
        if not best.fits:  # a plan with another schedule
            return
        bound = lower_bound(self.problem, self._limit_bytes).seconds
        goal = bound * (1 + TOLERANCE)
        annealer = Annealer(search, Budget(search, 0, None))
        number, stuck = 0, 0
        while best.seconds > goal and stuck < self._patience:
            if self._stop.is_set():
                return
            warm = 0.1 * (best.seconds - bound)
            if number % 5 == 4:  # now and then from far away
                warm = WARMEST * self.problem.in_core_seconds
            seed, late = FIRST_SEED + number, number % 2 == 1
            found = annealer.run_round(best, STEPS, warm, goal, seed, late=late)
            if found.seconds < best.seconds:
                found, stuck = undo_useless_moves(search, found), 0
            else:
                stuck += 1
            self._simulations = search.simulations
            self._best = best = found
            number += 1


def _lower_priority() -> None:
    """Gives this thread the lowest priority, where threads have one."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
