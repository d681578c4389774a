"""Plans as schedules of Checkmate's, checked by its own constraints."""

import dataclasses

import numpy as np
import pytest
from support.foreign import solution

from chainer_hybridmem.errors import InfeasibleError, PlanError
from chainer_hybridmem.lab.contest.checkmate_rules import graph_of, judge, judge_plan
from chainer_hybridmem.lab.importing import checkmate
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.simulation import make_problem

LINK = Link(1e-5, 12e9, 12e9)


def drawn(seed):
    """A network of random width whose backward reads what it likes."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 9))
    edges = []
    for i in range(1, n):
        edges += [(j, i) for j in range(i) if j == i - 1 or rng.random() < 0.2]
    for i in range(n):  # backward of n - 1 - i is n + i
        edges += [(n + i - 1, n + i)] if i else [(n - 1, n)]
        forward = n - 1 - i
        edges += [(j, n + i) for j in range(forward + 1) if rng.random() < 0.4]
    size = [int(s) for s in rng.integers(8, 64, 2 * n)]
    units = [int(u) for u in rng.integers(1, 50, 2 * n)]
    return solution(
        size, units, sorted(set(edges)), n, fixed_kib=int(rng.integers(0, 50))
    )


@pytest.mark.parametrize('seed', range(12))
def test_plans_keep_checkmates_constraints_with_the_same_objective(seed):
    graph = checkmate.read_solution(drawn(seed))
    profile = checkmate.graph_profile(graph, LINK, 'drawn')
    assert graph_of(profile) == graph
    problem = make_problem(profile, rules={'*': 'no swap'})
    judged = 0
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        limit = int(share * problem.in_core_peak_bytes)
        for planner in ('hybrid', 'checkpoint-sqrt'):
            try:
                plan = make_plan(problem, limit, planner)
            except InfeasibleError:
                continue
            cost = judge_plan(profile, plan, limit)
            assert cost.units == round(plan.predicted_seconds * 1e5)
            judged += 1
    assert judged


# 0 > 1 (the loss); backward 2 of 1, and 3 of 0, which reads 0 again.
GRAPH = checkmate.read_solution(
    solution([4, 2, 1, 0], [10, 0, 5, 20], [(0, 1), (1, 2), (2, 3), (0, 3)], 2)
)
KEEPS = ([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
         [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0]])  # fmt: skip
AGAIN = ([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]],
         [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])  # fmt: skip


def rows(schedule):
    return [[bytearray(row) for row in matrix] for matrix in schedule]


def test_the_objective_counts_everything_that_runs():
    assert judge(GRAPH, *rows(KEEPS), 7) == (35, 7)
    assert judge(GRAPH, *rows(AGAIN), 6) == (45, 6)


@pytest.mark.parametrize(
    ('matrix', 't', 'i', 'says'),
    [
        (0, 2, 2, 'does not end with operation 2'),
        (0, 0, 3, 'does not end with operation 0'),
        (1, 1, 1, 'begins with something'),
        (1, 1, 0, 'runs in stage 1 without the product of operation 0'),
        (0, 3, 0, 'runs in stage 3 without the product of operation 0'),
        (1, 2, 1, 'runs in stage 2 without the product of operation 1'),
    ],
)
def test_each_constraint_is_checked(matrix, t, i, says):
    schedule = rows(AGAIN)
    schedule[matrix][t][i] ^= 1
    with pytest.raises(PlanError, match=says):
        judge(GRAPH, *schedule, 100)


def test_what_appears_from_nowhere_is_refused():
    schedule = rows(AGAIN)
    schedule[1][3][0] = 1
    with pytest.raises(PlanError, match='neither kept nor made'):
        judge(GRAPH, *schedule, 100)


def test_the_budget_is_checked():
    with pytest.raises(PlanError, match='needs 7 KiB; the budget is 6 KiB'):
        judge(GRAPH, *rows(KEEPS), 6)


def test_a_swap_is_none_of_checkmates():
    profile = checkmate.graph_profile(GRAPH, LINK, 'small')
    problem = make_problem(profile)
    plan = make_plan(problem, problem.in_core_peak_bytes, 'swap-all')
    with pytest.raises(PlanError, match='is swapped'):
        judge_plan(profile, plan, problem.in_core_peak_bytes)


def test_an_operation_that_makes_two_buffers_is_refused():
    profile = checkmate.graph_profile(GRAPH, LINK, 'small')
    first = dataclasses.replace(profile.operations[0], writes=(0, 1))
    profile = dataclasses.replace(profile, operations=(first, *profile.operations[1:]))
    with pytest.raises(PlanError, match='makes 2 buffers'):
        graph_of(profile)
