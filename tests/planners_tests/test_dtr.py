"""h-DTR: what it evicts, against its definition spelled out."""

from __future__ import annotations

import numpy as np
import pytest
from support import toys

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.lab.planners.dtr import Evictions, dtr
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, least_memory
from chainer_hybridmem.planning.search.replay_graph import make_replay_graph
from chainer_hybridmem.planning.simulation import Problem, make_problem

MIB = toys.MIB


def h_by_definition(problem: Problem, m: int, k: int, evicted: set[int]) -> float:
    """Section 3.2 of the paper, node by node."""
    graph, a = make_replay_graph(problem), problem.arrays

    def reached(node: int, reads: np.ndarray) -> set[int]:
        found: set[int] = set()
        todo = [node]
        while todo:
            for other in np.flatnonzero(reads[todo.pop()]):
                if other in evicted and other not in found:
                    found.add(int(other))
                    todo.append(int(other))
        return found

    node = int(graph.node[m])
    neighbourhood = reached(node, graph.reads) | reached(node, graph.reads.T)
    seconds = graph.seconds[node] + sum(graph.seconds[v] for v in neighbourhood)
    staleness = float(a.seconds[a.copy_from[m] : k].sum())
    return seconds / (a.size[m] * staleness) if staleness > 0 else np.inf


@pytest.mark.parametrize('seed', range(30))
def test_the_choice_is_the_smallest_h(seed: int) -> None:
    rng = np.random.RandomState(seed)
    problem = make_problem(toys.random_network(seed, nodes=14))
    a, evictions = problem.arrays, Evictions(problem)
    action = np.full(len(problem.maps), KEEP, np.int64)
    graph, evicted = make_replay_graph(problem), set()
    for k in np.sort(rng.randint(0, len(a.seconds), 12)):
        able = [
            m
            for m in range(len(action))
            if action[m] == KEEP
            and problem.recomputable[m]
            and a.producer[m] < k
            and a.release_from[m] <= k < a.first_use[m]
        ]
        m = evictions.choose(int(k), action)
        if not able:
            assert m == -1
            continue
        values = {other: h_by_definition(problem, other, k, evicted) for other in able}
        assert values[m] == pytest.approx(min(values.values()))
        action[m] = RECOMPUTE
        evictions.evict(m)
        evicted.add(int(graph.node[m]))


def test_stale_large_and_cheap_maps_leave_first() -> None:
    """Map 0 is stalest; map 2 costs a hundredth; map 4 holds ten times the bytes."""
    sizes = [10 * MIB] * 8
    sizes[4] = 100 * MIB
    seconds = [1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0, 1.0]
    problem = make_problem(toys.chain(8, seconds=seconds, nbytes=sizes))
    evictions = Evictions(problem)
    action = np.full(len(problem.maps), KEEP, np.int64)
    order = []
    for _ in range(3):
        m = evictions.choose(7, action)
        order.append(m)
        action[m] = RECOMPUTE
        evictions.evict(m)
    # h x 10 MiB at 7: map 0 1/5.01; map 2 .01/4; map 4 .1/2; then map 3 has 2's
    # replay added: 1.01/3 against map 0's 1/5.01 and map 1's 1.01/4.01.
    assert order == [2, 4, 0]


@pytest.mark.parametrize('share', [0.9, 0.7, 0.5])
def test_plans_are_valid_and_swap_nothing(share: float) -> None:
    problem = make_problem(toys.chain(16))
    least, _ = least_memory(problem)
    limit = int(least + share * (problem.in_core_peak_bytes - least))
    plan = dtr(problem, limit)
    assert max(check_plan(problem.profile, plan)) <= limit
    actions = {entry.action for entry in plan.maps}
    assert actions == {Action.KEEP, Action.RECOMPUTE}


def test_it_recomputes_nothing_where_all_fits() -> None:
    problem = make_problem(toys.chain(8))
    plan = dtr(problem, problem.in_core_peak_bytes)
    assert {entry.action for entry in plan.maps} == {Action.KEEP}


def test_a_limit_that_recomputing_cannot_keep() -> None:
    problem = make_problem(toys.chain(8))
    least, _ = least_memory(problem)
    with pytest.raises(InfeasibleError, match="Planner 'dtr' does not fit|alone needs"):
        dtr(problem, least)
