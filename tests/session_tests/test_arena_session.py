"""Guided iterations that allocate at places laid out beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.training.devices.host.device import HostDevice

ITERATIONS = 12
LIMIT = 4_400_000  # bytes; Everything needs 5.2 MB in-core


def run(data, **options):
    return networks.train(
        networks.Everything, data, **{'memory_limit': LIMIT, **options}
    )


def last(session):
    return session.last_iteration()


def test_every_allocation_gets_its_place(data, in_core):
    result, session = run(data)
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['footprint_bytes'] <= LIMIT
    assert last(session)['placed'] > 50 and last(session)['unplaced'] == 0
    assert figures['evictions'] == figures['deviations'] == 0
    assert 'arena + beside it' in session.report()


def test_without_it_nothing_is_placed(data, in_core):
    result, session = run(data, arena=False)
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['arena_bytes'] is None and figures['placed'] == 0
    assert 'arena' not in session.report()


@pytest.mark.parametrize('planner', ['swap-all', 'swap-opt', 'superneurons', 'hybrid'])
def test_poisoned_memory_and_late_copies_change_nothing(
    hostile, planner, data, in_core
):
    result, session = run(data, planner=planner)
    networks.assert_same(in_core, result)
    assert last(session)['placed'] > 50 and last(session)['unplaced'] == 0


def test_poison_reaches_who_reads_freed_memory(hostile):
    """The tests above would notice."""
    device = HostDevice(1 << 22)
    device.memory.install(lambda nbytes: None)
    array = np.ones(1 << 16, np.float32)
    stale = device.arrays.restore(
        array, device.arrays.capture(array)
    ).__array_interface__['data'][0]
    view = np.frombuffer(
        (np.ctypeslib.ctypes.c_char * 64).from_address(stale), np.float32
    )
    assert (view == 1).all()
    del array
    assert np.isnan(view).all()
    device.memory.uninstall()
    device.close()


def test_a_copy_that_is_not_waited_for_is_noticed(hostile, hasty, data, in_core):
    """Memory handed out while the copy of its contents still runs."""
    result, _ = run(data, planner='swap-all')
    with pytest.raises(AssertionError):
        networks.assert_same(in_core, result)


@pytest.mark.parametrize('count', [4, 6])
def test_a_session_that_ends_early_logs_and_places_no_more(count):
    """In the first logged iteration, and in the first one with places."""
    np.random.seed(0)
    model = networks.Everything()
    with hybridmem.optimize(model, 2 * LIMIT, planner='hybrid') as session:
        for x, t in networks.batches(count):
            loss = model(x, t)
            model.cleargrads()
            loss.backward()
        assert session.plan is not None
        assert (session.device.memory.event_count > 0) == (count == 4)
    figures = session.device.offsets.figures()
    del loss
    model.cleargrads()
    assert session.device.memory.event_count == 0
    np.ones(1 << 20)
    assert session.device.offsets.figures() == figures


def test_iterations_that_differ_are_survived(data, in_core):
    """A smaller batch in between, an array that stays, a map somebody holds."""
    kept = []
    small = [(x[:5], t[:5]) for x, t in networks.batches(1)]
    mixed = [*data[:8], *small, *data[8:], *data[:2]]
    expected, _ = networks.train(networks.Everything, mixed)

    class Holding(networks.Everything):
        def forward(self, x, t):
            kept.append(np.zeros(40_000, np.float32))  # never freed
            return super().forward(x, t)

    result, session = networks.train(Holding, mixed, memory_limit=LIMIT + 3_000_000)
    networks.assert_same(expected, result)
    assert session.statistics()['footprint_bytes'] <= LIMIT + 3_000_000
    assert last(session)['placed'] > 50


def test_what_comes_unexpectedly_lies_beside(data, in_core):
    """Evaluation-like work in guided iterations: noticed, counted, not harmful."""
    calls = []

    class Busy(networks.Everything):
        def forward(self, x, t):
            calls.append(1)
            loss = super().forward(x, t)
            if len(calls) >= ITERATIONS - 1:
                np.ones(50_000, np.float32).sum()
            return loss

    result, session = networks.train(Busy, data, memory_limit=LIMIT)
    networks.assert_same(in_core, result)
    assert last(session)['unplaced'] == 1
    assert session.statistics()['footprint_bytes'] <= LIMIT


@pytest.mark.parametrize('limit', [3_600_000, 4_000_000])
def test_an_arena_beyond_the_limit_keeps_it(limit, data, in_core):
    """Pages follow the load, so plans are made for the whole limit."""
    result, session = run(data, memory_limit=limit, planner='hybrid')
    networks.assert_same(in_core, result)
    figures = session.statistics()
    assert figures['arena_bytes'] + figures['side_bytes'] > limit
    assert last(session)['placed'] > 50
    assert figures['footprint_bytes'] <= limit
    assert session.plan.memory_limit_bytes == limit
