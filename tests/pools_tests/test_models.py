"""Pool models: each one's rule, and what holds for all."""

from __future__ import annotations

import numpy as np
import problems
import pytest
from hypothesis import given, settings
from support import toys

from chainer_hybridmem.errors import OptionError, UnknownNameError
from chainer_hybridmem.lab.pools.catalogue import POOLS, round_multiple, round_power
from chainer_hybridmem.lab.pools.replay import compare, recommend, replay
from chainer_hybridmem.planning.layouts import Trace, from_log, in_core_trace

MIB = 2**20


def arrays_one_after_the_other(count=100):
    """``x = ones((10000 + i, 10000 + i))`` in a loop: the old x dies after the new."""
    log = []
    for i in range(count):
        log.append((i, 4 * (10000 + i) ** 2))
        if i:
            log.append((i - 1, -1))
    return from_log([*log, (count - 1, -1)])


@pytest.mark.parametrize('pool', POOLS)
@settings(deadline=None, max_examples=60)
@given(problems.traces())
def test_what_holds_for_every_pool(pool, trace):
    result = replay(trace, pool, iterations=3)
    series = result.series
    assert result.peak_load_bytes == trace.peak_load_bytes
    assert result.footprint_bytes >= result.peak_load_bytes
    assert np.all(series.held_bytes >= series.occupied_bytes)
    assert np.all(series.occupied_bytes >= series.load_bytes)
    assert np.all(series.free_bytes >= 0)
    assert np.all((series.fragmentation >= 0) & (series.fragmentation <= 1))
    born = {e - 1 for e in trace.events if e > 0}
    gone = {-e - 1 for e in trace.events if e < 0}
    carried = {taken for _, taken in trace.carried}
    asked = 0
    for i, nbytes in enumerate(trace.sizes):
        if i in born or (i in gone and i not in carried):
            asked += 3 * nbytes
        else:
            asked += nbytes  # once, before the first iteration
    assert result.pool_bytes + result.device_bytes == asked
    assert result.figures() == replay(trace, pool, iterations=3).figures()


@pytest.mark.parametrize('pool', POOLS)
def test_a_warm_iteration_of_training_asks_the_device_for_nothing(pool):
    trace = in_core_trace(toys.random_network(3, 20))
    result = replay(trace, pool, iterations=3)
    if pool != 'cudamalloc':
        assert result.warm_device_calls == 0


def test_cudamalloc_holds_the_load():
    trace = from_log([('a', 100), ('b', 50), ('a', -1), ('b', -1)])
    result = replay(trace, 'cudamalloc', 1)
    assert (result.footprint_bytes, result.device_calls) == (150, 4)
    assert list(result.series.held_bytes) == [100, 150, 50, 0]


def test_cupy_rounds_splits_and_merges():
    trace = from_log(
        [
            ('a', 2000),  # 2048 from the device
            ('a', -1),
            ('b', 1),  # 512 of it
            ('c', 1024),
            ('d', 600),  # 1024: the 512 left are too few
            ('b', -1),
            ('c', -1),  # merged with what b and the rest were
            ('e', 2048),
        ]
    )
    result = replay(trace, 'cupy', 1)
    assert result.footprint_bytes == 2048 + 1024
    assert result.device_calls == 2
    assert list(result.series.occupied_bytes) == [
        *(2048, 0, 512, 1536, 2560, 2048, 1024, 3072)
    ]


def test_cupy_does_not_merge_over_segments():
    trace = from_log([('a', 512), ('b', 512), ('a', -1), ('b', -1), ('c', 1024)])
    assert replay(trace, 'cupy', 1).footprint_bytes == 2048


def test_cnmem_merges_inside_its_slab():
    trace = from_log([('a', 512), ('b', 512), ('a', -1), ('b', -1), ('c', 1024)])
    assert replay(trace, 'cnmem', 1).footprint_bytes == 1024
    grown = replay(trace, 'cnmem', 1, reserve_bytes=512)
    assert (grown.footprint_bytes, grown.device_calls) == (2048, 3)


@pytest.mark.parametrize(
    'nbytes, naive, rounded',
    [
        (1, 4096, 4096),
        (4096, 4096, 4096),
        (4097, 8192, 8192),
        (8193, 12288, 16384),
        (2 * MIB, 2 * MIB, 2 * MIB),
        (2 * MIB + 1, 4 * MIB, 4 * MIB),
        (16 * MIB, 16 * MIB, 16 * MIB),
        (16 * MIB + 1, 18 * MIB, 32 * MIB),
        (33 * MIB, 34 * MIB, 48 * MIB),
    ],
)
def test_the_sizes_of_mxnet(nbytes, naive, rounded):
    assert round_multiple(nbytes, 4096, 2 * MIB) == naive
    assert round_power(nbytes, 4096, 24) == rounded


def test_the_example_of_mxnet():
    trace = arrays_one_after_the_other()
    assert round(sum(trace.sizes) / 1e9) == 40
    served = {
        pool: round(replay(trace, pool, 1).pool_bytes / 1e9)
        for pool in ('round', 'naive')
    }
    assert served == {'round': 39, 'naive': 36}


def test_mxnet_gives_back_what_is_free_when_the_device_is_short():
    trace = from_log([('a', 10 * MIB), ('a', -1), ('b', 12 * MIB), ('b', -1)])
    short = replay(trace, 'naive', 1, device_memory_bytes=20 * MIB, reserve_percent=10)
    assert (short.footprint_bytes, short.device_calls) == (12 * MIB, 3)
    large = replay(trace, 'naive', 1, device_memory_bytes=30 * MIB, reserve_percent=10)
    assert (large.footprint_bytes, large.device_calls) == (22 * MIB, 2)


def test_the_exact_layout_is_recommended():
    trace = in_core_trace(toys.random_network(5, 20))
    replays = compare(trace)
    assert [r.pool for r in replays] == list(POOLS)
    assert recommend(replays).pool == 'exact'
    assert recommend(replays[:1]).pool == 'cudamalloc'
    assert recommend(replays[:2]).pool == 'cnmem'


def test_unknown_names_and_options():
    trace = Trace((1,), (1,))
    with pytest.raises(UnknownNameError, match="Did you mean 'cnmem'"):
        replay(trace, 'cnmen')
    with pytest.raises(OptionError, match='no option'):
        replay(trace, 'cupy', linear_cutoff=24)
    with pytest.raises(OptionError, match='linear_cutoff'):
        replay(trace, 'round', linear_cutoff=12)
    with pytest.raises(OptionError, match='reserve_percent'):
        replay(trace, 'naive', reserve_percent=101)
    with pytest.raises(OptionError, match='iterations'):
        replay(trace, 'cupy', 0)
