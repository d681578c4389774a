"""Nodes, and what their GPUs share."""

from __future__ import annotations

from typing import Any

import pytest
from support import toys

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.forecasting.estimation import (
    all_reduce_bytes,
    load_device_model,
    load_node,
    node_names,
    with_all_reduce,
)
from chainer_hybridmem.forecasting.estimation.nodes import parameter_bytes
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.sharing import share_links
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem, simulate


@pytest.mark.parametrize('name', node_names())
def test_each_node(name: str) -> None:
    node = load_node(name)
    assert node.source and node.title
    assert load_device_model(node.gpu).name == node.gpu
    assert node.ranks_on_link(node.gpus) == node.gpus_per_link
    assert node.ranks_on_link(1) == 1
    with pytest.raises(OptionError, match=f'has {node.gpus} GPUs, not'):
        node.ranks_on_link(node.gpus + 1)


def test_gpus_are_spread_over_the_links() -> None:
    node = load_node('dgx-1')
    assert [node.ranks_on_link(n) for n in (1, 2, 4, 5, 8)] == [1, 1, 1, 2, 2]


def test_a_node_that_is_not_there() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'dgx-1'"):
        load_node('dgx1')


def test_gradients_go_around_a_ring() -> None:
    profile = toys.with_persistent(toys.random_network(1, 6), 1)
    nbytes = parameter_bytes(profile)
    assert nbytes > 0
    assert all_reduce_bytes(profile, 1) == 0
    assert all_reduce_bytes(profile, 2) == nbytes
    assert all_reduce_bytes(profile, 4) == 3 * nbytes // 2
    shared = share_links(profile, 4)
    rate = shared.link.d2h_bytes_per_second
    more = with_all_reduce(shared, 4)
    assert more.compute_seconds - profile.compute_seconds == pytest.approx(
        all_reduce_bytes(profile, 4) / rate
    )
    assert with_all_reduce(more, 4) == more
    assert with_all_reduce(profile, 1).compute_seconds == profile.compute_seconds


@pytest.mark.parametrize('crossing', [False, 'states', 'all'])
@pytest.mark.parametrize('seed', range(6))
def test_the_sum_of_gradients_has_the_link_to_itself(crossing: Any, seed: int) -> None:
    profile = toys.with_persistent(toys.random_network(seed, 8), 3)
    before = make_problem(profile, crossing)
    problem = make_problem(with_all_reduce(profile, 4), crossing)
    assert problem.in_core_peak_bytes == before.in_core_peak_bytes
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    assert least == least_memory(before)[0]
    plan = make_plan(problem, (least + most) // 2, 'swap-all')
    timeline = simulate(problem, plan)
    (summed,) = (i for i in timeline.intervals if i.kind == 'all-reduce')
    assert summed.end_seconds - summed.start_seconds == pytest.approx(
        problem.profile.all_reduce_seconds
    )
    for copy in timeline.intervals:
        if copy.lane != 'compute':
            assert copy.end_seconds <= summed.start_seconds + 1e-9
