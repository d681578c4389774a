"""A search that goes on in a thread, and what it finds."""

from __future__ import annotations

import contextvars
import time

import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search import local_search
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.improvement import LEAST_GAIN, Improvement
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate


def tight(seed: int) -> tuple[Problem, int]:
    problem = make_problem(toys.random_graph(seed, 12))
    least, _ = least_memory(problem)
    return problem, (least + problem.in_core_peak_bytes) // 2


@pytest.mark.parametrize('seed', range(4))
def test_finds_a_better_plan(seed: int) -> None:
    problem, limit = tight(seed)
    plan = make_plan(problem, limit, 'swap-all')
    search = Improvement(problem, limit, plan, patience=2)
    search.start()
    search.wait(600)
    assert not search.running
    better = search.better(plan)
    assert better is not None
    assert better.planner == plan.planner and better.options['improved']
    assert better.predicted_seconds < plan.predicted_seconds * (1 - LEAST_GAIN)
    assert better.lower_bound_seconds <= better.predicted_seconds
    assert better.simulations > plan.simulations
    assert max(check_plan(problem.profile, better, limit)) <= limit
    seconds = simulate(problem, better).total_seconds
    assert seconds == pytest.approx(better.predicted_seconds)
    assert search.better(better) is None  # strictly better only


def test_training_runs_meanwhile() -> None:
    """Compiled code that holds the interpreter lock would stop it."""
    assert local_search.anneal.targetoptions['nogil']


def test_ends_when_it_is_told_to() -> None:
    problem, limit = tight(3)
    search = Improvement(
        problem, limit, make_plan(problem, limit, 'swap-all'), patience=10**9
    )
    search.start()
    began = time.process_time()  # of this process, not of others beside it
    search.close()
    assert not search.running
    assert time.process_time() - began < 30


def test_the_context_of_the_program_is_not_inherited() -> None:
    """NumPy's memory handler is in the context: what is planned must not count."""
    variable = contextvars.ContextVar('variable', default='none')
    seen: list[str] = []

    class Looking(Improvement):
        def _run(self) -> None:
            seen.append(variable.get())

    problem, limit = tight(3)
    variable.set('program')
    search = Looking(problem, limit, make_plan(problem, limit, 'swap-all'))
    search.start()
    search.wait(600)
    assert seen == ['none']
