"""vDNN's offload and prefetch on the running example."""

from __future__ import annotations

import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.simulation import simulate

LIMIT = '1GiB'


def test_all_of_them_leave():
    plan = make_plan(toys.chain(6), LIMIT, 'vdnn-all')
    assert plan.count(Action.SWAP) == 6


def test_only_what_convolutions_read_leaves():
    profile = toys.chain(6)
    assert make_plan(profile, LIMIT, 'vdnn-conv').count(Action.SWAP) == 0
    convolutions = toys.chain(6, function='Convolution2DFunction')
    plan = make_plan(convolutions, LIMIT, 'vdnn-conv')
    assert plan.count(Action.SWAP) == 6


def test_compute_and_copy_meet_after_the_operation_beside_it():
    profile = toys.chain(6, bandwidth=5.0 * toys.MIB)  # a copy takes two operations
    plan = make_plan(profile, LIMIT, 'vdnn-all')
    b0 = profile.first_backward
    for entry in plan.maps:
        assert entry.release_before == min(entry.swap_out_before + 1, b0)
    stalls = [i for i in simulate(profile, plan).intervals if i.kind == 'stall']
    waits = [i for i in stalls if 'swap-out' in i.label]
    assert len(waits) == 6


def test_each_layer_fetches_for_the_next_one_that_lacks_something():
    profile = toys.chain(6)
    plan = make_plan(profile, LIMIT, 'vdnn-all')
    b0 = profile.first_backward
    entries = sorted(plan.maps, key=lambda entry: entry.needed_before)
    # The first backward operation reads two maps that nobody has fetched.
    assert [e.swap_in_before for e in entries] == [b0, b0, b0, b0 + 1, b0 + 2, b0 + 3]
    # They meet at the end of the operation that fetches.
    assert [e.needed_before for e in entries[2:]] == [b0 + 1, b0 + 2, b0 + 3, b0 + 4]


def test_nobody_fetches_for_what_lies_behind_a_convolution():
    """Of layers that lack nothing only those up to a convolution are passed."""
    profile = toys.chain(4, function='Convolution2DFunction')
    plan = make_plan(profile, LIMIT, 'vdnn-all')
    for entry in plan.maps:
        first = min(profile.storages[entry.storage].backward_uses)
        assert first - 1 <= entry.swap_in_before <= first


@pytest.mark.parametrize('planner', ['vdnn-all', 'vdnn-conv'])
def test_memory_is_not_looked_at(planner):
    """The same plan for every limit it fits."""
    profile = toys.chain(6, function='Convolution2DFunction')
    large = make_plan(profile, LIMIT, planner)
    least = make_plan(profile, large.predicted_peak_bytes, planner)
    assert least.maps == large.maps
