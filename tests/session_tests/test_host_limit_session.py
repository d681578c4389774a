"""Training with little RAM for host copies: same bits, predicted bytes, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer

from chainer_hybridmem.errors import OptionError, OutOfMemoryError
from chainer_hybridmem.planning.records.plan import Action, Tier
from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.swap_store.store import Store
from chainer_hybridmem.training.execution.live_map import LiveMap

ITERATIONS = 6
SHARE = 0.72  # of the in-core peak: what the others tests train in


@pytest.fixture(scope='module')
def swapped(data: Any, peak: int) -> int:
    """Bytes that swap-all swaps."""
    _, session = networks.train(
        networks.Everything,
        data[:4],
        memory_limit=int(peak * SHARE),
        planner='swap-all',
    )
    return int(session.plan.action_bytes(session.profile, Action.SWAP))


@pytest.fixture
def most_ram(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Highest number of bytes that host copies have held in RAM."""
    most = [0]
    new_slab = Store._new_slab

    def watched(self: Store, nbytes: int, retired: bool) -> Any:
        slab = new_slab(self, nbytes, retired)
        if self.tier is Tier.RAM:
            most[0] = max(most[0], self.host_bytes)
        return slab

    monkeypatch.setattr(Store, '_new_slab', watched)
    return most


@pytest.mark.matrix
@pytest.mark.parametrize('planner', ['swap-all', 'capuchin', 'hybrid'])
@pytest.mark.parametrize('percent', [0, 30, 100])
def test_same_bits_with_a_disk(
    planner, percent, data, in_core, peak, swapped, tmp_path, most_ram
):
    host_limit = swapped * percent // 100
    result, session = networks.train(
        networks.Everything,
        data,
        memory_limit=int(peak * SHARE),
        planner=planner,
        host_limit=host_limit,
        swap_dir=str(tmp_path),
        link_bandwidth='2GB/s',
        disk_bandwidth='500MB/s',
    )
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['evictions'] == figures['restores'] == 0
    assert figures['host_limit_bytes'] == host_limit
    assert figures['host_bytes'] == figures['predicted_host_bytes']
    assert figures['disk_bytes'] == figures['predicted_disk_bytes']
    total = session.plan.action_bytes(session.profile, Action.SWAP)
    assert figures['host_bytes'] + figures['disk_bytes'] == total
    assert most_ram[0] <= host_limit
    if planner == 'swap-all':
        assert (figures['disk_bytes'] > 0) == (percent < 100)
        assert (figures['host_bytes'] > 0) == (percent > 0)
    assert session.profile.disk_link is not None
    report = session.report()
    if percent:
        assert 'host limit' in report
        assert 'host memory for swapped maps, predicted / measured' in report
    if figures['disk_bytes']:
        assert 'disk for swapped maps, predicted / measured' in report


@pytest.mark.parametrize('percent', [60, 90])
def test_same_bits_without_a_disk(percent, data, in_core, peak, swapped, most_ram):
    """Profiling, too, swaps no more than the host takes."""
    host_limit = swapped * percent // 100
    result, session = networks.train(
        networks.Everything,
        data,
        memory_limit=int(peak * 0.85),
        host_limit=host_limit,
        planner='hybrid',
        link_bandwidth='50MB/s',
    )
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['evictions'] == figures['restores'] == 0
    assert figures['host_bytes'] == figures['predicted_host_bytes'] <= host_limit
    assert figures['disk_bytes'] == 0
    assert most_ram[0] <= host_limit


def test_ram_that_is_full_is_out_of_memory_as_ever(data, peak):
    """Passive mode has nowhere to go: an error with the next step, nothing lost."""
    np.random.seed(0)
    model = networks.Everything()
    x, t = data[0]
    with (
        pytest.raises(OutOfMemoryError) as caught,
        hybridmem.optimize(model, int(peak * 0.5), host_limit='64KiB'),
    ):
        loss = model(x, t)
        model.cleargrads()
        loss.backward()
    message = str(caught.value)
    for word in ('host_limit', 'swap_dir', 'memory_limit'):
        assert word in message
    # What was swapped before is not lost, and the model trains on.
    loss = None
    expected, _ = networks.train(networks.Everything, data[:2])
    result, _ = networks.train(
        networks.Everything, data[:2], memory_limit='1GB', host_limit='1MB'
    )
    networks.assert_same(expected, result)


def test_a_swap_out_without_room_leaves_the_map_where_it_is(open_host_device):
    device = open_host_device
    variable = chainer.Variable(device.memory.allocate(8192))
    variable.retain_data()
    node, array = variable.node, variable.array
    live = LiveMap(device, device.arrays.allocation_id(array), 8192)
    assert live.slots.find_root() is None
    slot = Slot(0, SlotKind.INPUT, 0)
    live.add(graph.refer(slot, node, device.arrays.capture(array)))
    del variable, array
    assert live.start_swap_out() == 0
    assert live.state.value == 'resident' and live.host.copy is None
    live.release()
    assert live.state.value == 'resident'


@pytest.fixture
def open_host_device():
    from chainer_hybridmem.training.devices.host.device import HostDevice

    device = HostDevice(1 << 20, host_limit_bytes=4096)
    device.memory.install(lambda nbytes: None)
    yield device
    device.memory.uninstall()
    device.close()


def test_shapes_that_alternate_share_the_host_memory(peak, swapped, tmp_path, most_ram):
    """What one kind of iteration held is free for the other one."""
    long, short = networks.batches(1), networks.batches(1, size=6)
    order = [long[0], short[0]] * 6
    expected, _ = networks.train(networks.Everything, order)
    host_limit = swapped
    result, session = networks.train(
        networks.Everything,
        order,
        memory_limit=int(peak * SHARE),
        planner='swap-all',
        host_limit=host_limit,
        swap_dir=str(tmp_path),
    )
    networks.assert_same(expected, result)
    assert session.statistics()['state'] == 'guided'
    assert most_ram[0] <= host_limit
    last = session.last_iteration()
    assert last['guided'] and last['disk_bytes'] == 0
    assert last['host_bytes'] == session.plan.tier_bytes(session.profile, Tier.RAM)


def test_a_kind_of_iteration_that_is_forgotten_holds_no_host_memory(
    peak, swapped, monkeypatch
):
    monkeypatch.setattr(
        'chainer_hybridmem.training.session.guides.guidebook.LARGEST_GUIDE_COUNT', 1
    )
    long, short = networks.batches(1), networks.batches(1, size=6)
    held = []
    for rounds in (2, 5):
        _, session = networks.train(
            networks.Everything,
            [long[0], long[0], short[0]] * rounds,
            memory_limit=int(peak * SHARE),
        )
        held.append(session.last_iteration()['host_bytes'])
    assert held[0] == held[1]


def test_profiling_finds_out_about_maps_that_the_host_has_no_room_for(
    data, peak, swapped
):
    """They are planned for like those that went to the host and came back."""
    _, limited = networks.train(
        networks.Everything, data[:4], memory_limit='1GB', host_limit=swapped // 3
    )
    _, free = networks.train(networks.Everything, data[:4], memory_limit='1GB')
    maps = [
        [(m.nbytes, m.releasable_from) for m in session.profile.feature_maps()]
        for session in (limited, free)
    ]
    assert maps[0] == maps[1]


def test_the_extension_takes_the_options(tmp_path):
    hybridmem.HybridMemory('1GB', host_limit='1MB', swap_dir=str(tmp_path))
    for options in (
        {'host_limit': 0},
        {'host_limit': 'much'},
        {'disk_bandwidth': 'slow', 'swap_dir': '.'},
    ):
        with pytest.raises(OptionError):
            hybridmem.HybridMemory('1GB', **options)


def test_a_graph_that_is_held_leaves_no_room_to_measure_the_link():
    """Copies of the first iteration still fill the host memory when it has ended."""
    model = networks.Everything()
    with hybridmem.optimize(model, 5_400_000, host_limit='20KB') as session:
        held = []
        for batch in networks.batches(6):
            held[:] = [model(*batch)]
            model.cleargrads()
            held[0].backward()
    assert session.iterations == 6
