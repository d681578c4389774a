"""Profiles taken apart and put together again."""

import dataclasses
import subprocess
import sys

import pytest
from support import networks, recordings, toys

from chainer_hybridmem.forecasting.estimation.structure import (
    GRAPH_END,
    assemble,
    events_by_operation,
)
from chainer_hybridmem.planning.records.profile import Category, Storage
from chainer_hybridmem.planning.records.profile_file import check_profile


def again(profile, groups=None, storages=None):
    return assemble(
        profile,
        events_by_operation(profile) if groups is None else groups,
        profile.storages if storages is None else storages,
        profile.recipes,
        profile.initial_bytes,
    )


def test_nothing_is_lost():
    profile = recordings.recorded(networks.Everything, 4)
    assert again(profile) == profile


@pytest.mark.parametrize('early', [False, True])
def test_the_graph_dies_where_it_did(early):
    nodes = [toys.Node(()), toys.Node(((0, 0),))]
    profile = toys.network(nodes, graph_dies_early=early)
    groups = events_by_operation(profile)
    assert [GRAPH_END in events for events in groups].count(True) == 1
    assert GRAPH_END in groups[-1]
    assert again(profile).graph_end_event == profile.graph_end_event
    # In the middle of an operation, too.
    middle = dataclasses.replace(
        profile, graph_end_event=profile.operations[2].first_event + 1
    )
    assert again(middle).graph_end_event == middle.graph_end_event


def test_a_storage_less_and_one_more():
    profile = toys.chain(3)
    groups = events_by_operation(profile)
    storages = [*profile.storages]
    gone = profile.operations[1].writes[0]
    groups = [[e for e in events if abs(e) != gone + 1] for events in groups]
    storages[gone] = None
    new = len(storages)
    storages.append(Storage(new, 77, Category.WORKSPACE, 'new', 1, -1, -1))
    groups[1][:0] = [new + 1, -new - 1]
    result = again(profile, groups, storages)
    check_profile(result)
    assert len(result.storages) == len(profile.storages)
    assert result.storages[-1].nbytes == 77
    op = result.operations[1]
    assert (op.writes, op.workspace_bytes) == ((), 77)
    assert result.recipes[1].products == ()
    assert result.recipes[2].inputs == ()
    assert result.operations[2].reads == ()
    assert result.storages[-1].allocated_at == op.first_event


def test_estimation_is_pure():
    code = (
        'import sys; import chainer_hybridmem.forecasting.estimation; '
        'sys.exit("chainer" in sys.modules or "cupy" in sys.modules)'
    )
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
