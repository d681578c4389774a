"""Plans as schedules of MONeT's, checked by its own constraints."""

import dataclasses

import pytest

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.lab.contest.monet_rules import as_schedule, judge, judge_plan
from chainer_hybridmem.lab.importing.checkmate import KIB
from chainer_hybridmem.lab.importing.monet import (
    MonetGraph,
    graph_profile,
    list_begins,
    operations_of,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.simulation import make_problem

LINK = Link(1e-5, 12e9, 12e9)


def chain(n, kib=100, workspace=7):
    """Convolution and ReLU in turns, then the loss; backward reads what they read.

    A ReLU may write over what it reads, which its backward reads, too.
    """
    loss, size = 2 * n, 4 * n + 1
    reads = [[]] + [[i - 1] for i in range(1, size)]
    for b in range(loss + 1, size):
        forward = 2 * loss - b
        reads[b] += [forward - 1] if forward else []
    relus = range(1, loss, 2)
    labels = [f'/{i}/{"relu" if i % 2 else "conv"}' for i in range(loss)]
    return MonetGraph(
        kib=(kib,) * size,
        fixed_kib=(50,) * (loss + 1) + tuple(50 + 3 * (b + 1) for b in range(2 * n)),
        reads=tuple(map(tuple, reads)),
        held=tuple(frozenset([i - 1] if i else []) for i in range(size)),
        held_kib=(0,) + (kib,) * (size - 1),
        units=((20,) * size, (15,) * size, (18,) * size),
        workspace_kib=(
            (workspace,) * size,
            (workspace,) * size,
            tuple(-kib if i in relus else workspace for i in range(size)),
        ),
        over={i: i - 1 for i in relus},
        labels=(*labels, '/loss', *(f'/b{b}' for b in range(2 * n))),
        forward=(-1,) * (loss + 1) + tuple(range(loss - 1, -1, -1)),
        loss=loss,
    )


@pytest.mark.parametrize('share', [1.0, 0.8, 0.6, 0.5])
def test_plans_keep_monets_constraints_and_win_by_writing_in_place(share):
    graph = chain(5)
    profile = graph_profile(graph, LINK)
    problem = make_problem(profile, rules={'*': 'no swap'})
    limit = int(share * problem.in_core_peak_bytes)
    plan = make_plan(problem, limit, 'hybrid')
    schedule = as_schedule(graph, profile, plan)
    cost = judge(graph, schedule, 10**6)
    planned = round(plan.predicted_seconds * 1e5)
    in_place = sum(map(sum, schedule.in_place))
    assert cost.units == planned - 2 * in_place
    # MONeT counts what a stage reads twice where the stage makes more of it.
    assert cost.peak_kib <= limit // KIB + graph.kib[0]
    assert judge_plan(graph, profile, plan, cost.peak_kib * KIB) == cost
    assert bool(in_place) is (share < 1)  # what is kept cannot be written over


def test_gradients_of_parameters_and_workspaces_are_counted():
    graph = chain(2)
    problem = make_problem(graph_profile(graph, LINK))
    without = dataclasses.replace(
        graph,
        fixed_kib=(50,) * len(graph.kib),
        workspace_kib=((0,) * len(graph.kib),) * 3,
    )
    plain = make_problem(graph_profile(without, LINK))
    assert problem.in_core_peak_bytes > plain.in_core_peak_bytes


def test_what_a_stage_begins_with_is_an_operation_without_a_time():
    graph = chain(2)
    profile = graph_profile(graph, LINK)
    places = operations_of(graph)
    assert [profile.operations[p].label for p in places] == list(graph.labels)
    begins = list_begins(graph)
    for i, there in enumerate(begins):
        before = profile.operations[places[i] - 1]
        assert (before.label == f'{graph.labels[i]}/begin') is bool(there)
        if there:
            assert before.reads == there and before.device_seconds == 0
    assert any(begins)


@pytest.fixture
def kept():
    """A graph, and the schedule that keeps everything."""
    graph = chain(2)
    profile = graph_profile(graph, LINK)
    problem = make_problem(profile, rules={'*': 'no swap'})
    plan = make_plan(problem, problem.in_core_peak_bytes, 'hybrid')
    return graph, as_schedule(graph, profile, plan)


@pytest.mark.parametrize(
    ('matrix', 't', 'i', 'says'),
    [
        ('runs', 0, 2, 'not a whole forward pass'),
        ('kept', 0, 0, 'not a whole forward pass'),
        ('kept', 4, 3, 'neither kept nor made'),
        ('in_place', 0, 0, 'cannot write in place'),
        ('in_place', 0, 1, 'neither kept nor made'),
        ('runs', 4, 3, 'without the product of operation 2'),
    ],
)
def test_a_broken_schedule_is_refused(kept, matrix, t, i, says):
    graph, schedule = kept
    rows = [bytearray(row) for row in getattr(schedule, matrix)]
    rows[t][i] ^= 1
    with pytest.raises(PlanError, match=says):
        judge(graph, dataclasses.replace(schedule, **{matrix: rows}), 10**6)


def test_the_budget_is_checked_and_reached(kept):
    graph, schedule = kept
    peak = judge(graph, schedule, 10**6).peak_kib
    judge(graph, schedule, peak)
    with pytest.raises(PlanError, match=f'needs {peak} KiB; the budget is {peak - 1}'):
        judge(graph, schedule, peak - 1)


def test_a_swap_is_none_of_monets():
    graph = chain(2)
    profile = graph_profile(graph, LINK)
    problem = make_problem(profile)
    plan = make_plan(problem, problem.in_core_peak_bytes, 'swap-all')
    with pytest.raises(PlanError, match='is swapped'):
        judge_plan(graph, profile, plan, problem.in_core_peak_bytes)
