"""Benchmarks of instances with a known optimum, on few of them."""

from __future__ import annotations

import pytest
from support.foreign import solution

from benchmarks import checkmate_batches, tilings
from chainer_hybridmem.forecasting.batches import largest_planned
from chainer_hybridmem.lab.contest.instances import LINK
from chainer_hybridmem.lab.importing import checkmate
from chainer_hybridmem.planning.simulation import make_problem


@pytest.mark.parametrize('most', [1, 289, checkmate_batches.MOST])
def test_the_largest_batch_is_the_last_that_holds(most: int) -> None:
    found = largest_planned(lambda size: size <= most, checkmate_batches.MOST)
    assert found == most


def test_the_largest_batch_of_a_plan_is_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (0, 4), (4, 5)]
    data = solution([64, 32, 8, 32, 64, 1], [10, 20, 0, 40, 20, 0], edges, 3)
    graph = checkmate.read_solution(data)
    profile = checkmate.graph_profile(graph, LINK, 'small')
    problem = make_problem(profile, rules=[('*', 'no swap')])
    monkeypatch.setattr(checkmate_batches, 'MEMORY_BYTES', 10 * 2**20)
    network = checkmate_batches.Network(8, 2**17, 1)
    found = checkmate_batches.look(problem, network, 'hybrid')
    # An operation needs 160 KiB for 8 examples; 9 MiB are left.
    assert 1 < found['ours'] <= found['bound'] <= 8 * 9 * 1024 // 160


def test_a_tiling_is_laid_out_in_its_optimum() -> None:
    row = tilings.try_tiling(0)
    assert row['exact'] == 1 < row['smartpool']
    summary = tilings.summarise([row, {**row, 'exact': 1.5}])
    assert summary['exact']['equal'] == 1 and summary['exact']['worst'] == 1.5
