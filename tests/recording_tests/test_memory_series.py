"""The four series of the memory pool, planned or not."""

from __future__ import annotations

import json
import types

import chainer
import chainer.functions as F
import numpy as np
import pytest
from support import networks, trace_format

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.extras import memory_pools
from chainer_hybridmem.extras.memory_series import SERIES, MemoryProfiler
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.protocol import PoolFigures

MIB = 1 << 20


class FakePool:
    """Occupies one byte more at each look; its peak is ten times that."""

    name, unknown = 'fake', ('nothing',)

    def __init__(self):
        self.looks = 0
        self.opened = self.closed = 0

    def open(self):
        self.opened += 1

    def close(self):
        self.closed += 1

    def figures(self):
        self.looks += 1
        n = self.looks
        return PoolFigures(n, 100 - n, 1000 + n, 2000 + 2 * n, 10 * n)


class Function:
    label = 'F'


def test_a_bounded_log_spans_the_whole_run_and_keeps_peaks():
    pool = FakePool()
    with MemoryProfiler(lambda: pool, 8, share=0) as memory:
        for _ in range(100):
            memory.forward_preprocess(Function(), ())
    samples = memory.samples
    assert memory.operations == 100 and memory.stride >= 16
    assert len(samples) <= 8
    assert samples[-1].label == 'end'
    assert samples[-1].occupied_bytes == pool.looks
    assert samples[-1].pool_allocated_bytes == pool.looks - 1
    assert samples[-1].device_allocated_bytes == 2 * (pool.looks - 1)
    seconds = [s.seconds for s in samples]
    assert seconds == sorted(seconds)
    assert [s.peak_bytes for s in samples] == sorted(s.peak_bytes for s in samples)
    assert memory.summary()['peak_bytes'] == 10 * pool.looks
    assert (pool.opened, pool.closed) == (1, 1)


def test_more_labels_than_are_kept():
    with MemoryProfiler(FakePool, 1 << 14, share=0) as memory:
        for k in range(5000):
            memory.forward_preprocess(types.SimpleNamespace(label=str(k)), ())
    labels = [s.label for s in memory.samples]
    assert labels[:3] == ['start', '0', '1']
    assert labels[-3:] == ['other', 'other', 'other']


def test_short_operations_are_sampled_as_time_allows():
    """The share is so small that nothing but the ends is sampled."""
    pool = FakePool()
    with MemoryProfiler(lambda: pool, 64, share=1e-12) as memory:
        for _ in range(1000):
            memory.forward_preprocess(Function(), ())
    assert memory.operations == 1000
    assert len(memory.samples) == 3  # start, one, end
    assert memory.summary()['peak_bytes'] == 10 * pool.looks


@pytest.mark.parametrize('capacity', [1, 0, -5, 2.5, True, 'many'])
def test_capacities_that_make_no_sense(capacity):
    with pytest.raises(OptionError, match='capacity'):
        hybridmem.profile_memory(capacity=capacity)


@pytest.mark.parametrize('share', [-0.1, 1.5, 'all'])
def test_a_share_that_is_none(share):
    with pytest.raises(OptionError, match='from 0 to 1'):
        hybridmem.profile_memory(share=share)


def test_with_share_zero_every_operation_is_sampled():
    with hybridmem.profile_memory(share=0) as memory:
        for _ in range(50):
            F.relu(np.ones(4, np.float32))
    assert memory.operations == 50
    assert len(memory.samples) == 50 + 2  # start and end


def test_other_bad_options():
    with pytest.raises(OptionError, match='chainer.Link'):
        hybridmem.profile_memory(3)
    with pytest.raises(hybridmem.HybridMemoryError, match='tpu'):
        hybridmem.profile_memory(device='tpu')


def test_numpy_without_a_session():
    """From the system once, from the pool after that."""
    with hybridmem.profile_memory() as memory:
        a = np.empty(8 * MIB, np.uint8)
        memory._sample('a')
        del a
        memory._sample('free')
        b = np.empty(6 * MIB, np.uint8)
        memory._sample('b')
    assert not numpy_memory.installed()
    start, a, free, second, _end = memory.samples
    assert a.occupied_bytes - start.occupied_bytes == 8 * MIB
    assert a.pool_allocated_bytes == 0
    assert 8 * MIB <= a.device_allocated_bytes < 9 * MIB
    assert free.occupied_bytes == start.occupied_bytes
    assert free.free_bytes - start.free_bytes == a.device_allocated_bytes
    assert free.peak_bytes == a.occupied_bytes
    assert 6 * MIB <= second.pool_allocated_bytes < 7 * MIB
    assert second.device_allocated_bytes == a.device_allocated_bytes
    assert second.occupied_bytes + second.free_bytes <= (
        a.occupied_bytes + a.free_bytes + 4096
    )
    assert b.nbytes == 6 * MIB  # it outlives the profiler
    del b
    assert any('64 KiB' in text for text in memory.unknown)
    assert set(memory.series()) == {'seconds', 'peak_bytes', *SERIES}


def trained(inside):
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    (x, t), *_ = networks.batches(1)
    with inside(model) as memory:
        for _ in range(4):
            networks.iterate(model, optimizer, x, t)
    return memory, [p.array for p in model.params()]


class Plain:
    def __init__(self, model):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def unhurried(model):
    """Samples every operation, however long that takes."""
    memory = hybridmem.profile_memory(model)
    memory._pause = 0.0
    return memory


def test_training_is_not_changed():
    _, plain = trained(Plain)
    memory, watched = trained(unhurried)
    for one, two in zip(plain, watched, strict=True):
        np.testing.assert_array_equal(one, two)
    labels = {s.label for s in memory.samples}
    assert 'Convolution2DFunction' in labels
    assert 'backward of Convolution2DFunction' in labels
    assert 'hybridmem-memory' not in chainer.get_function_hooks()


def test_inside_a_session_its_pool_is_watched():
    np.random.seed(0)
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    (x, t), *_ = networks.batches(1)
    with hybridmem.optimize(model, 4_000_000) as session:
        with hybridmem.profile_memory() as memory:
            for _ in range(5):
                networks.iterate(model, optimizer, x, t)
    assert memory.pool == 'host pool of the session'
    assert session.state == 'guided'
    summary = memory.summary()
    assert summary['peak_bytes'] == session.statistics()['peak_bytes']
    assert summary['pool_allocated_bytes'] > summary['device_allocated_bytes'] > 0


def test_a_session_inside_is_refused_with_the_right_order():
    model = networks.Everything()
    with hybridmem.profile_memory(model):
        with pytest.raises(SessionError, match='inside the session'):
            with hybridmem.optimize(model, 4_000_000):
                pass
    assert not numpy_memory.installed()


def test_entered_twice():
    memory = hybridmem.profile_memory()
    with memory, pytest.raises(SessionError, match='entered already'):
        memory.__enter__()
    assert not numpy_memory.installed()


class MemoryHook:
    """CuPy's, as far as it is used."""

    hooks = []

    def __enter__(self):
        self.hooks.append(self)

    def __exit__(self, *error):
        self.hooks.remove(self)


class MemoryPool:
    def __init__(self):
        self.used, self.held = 512, 1024

    def malloc(self, size):
        raise NotImplementedError

    def used_bytes(self):
        return self.used

    def total_bytes(self):
        return self.held


def fake_cupy(pool):
    allocator = pool.malloc
    cuda = types.SimpleNamespace(
        MemoryPool=MemoryPool, MemoryHook=MemoryHook, get_allocator=lambda: allocator
    )
    return types.SimpleNamespace(cuda=cuda)


def test_the_pool_of_cupy_by_its_hook():
    pool = MemoryPool()
    watched = memory_pools.CupyPool(fake_cupy(pool))
    watched.open()
    (hook,) = MemoryHook.hooks
    pool.held += 4096
    hook.alloc_postprocess(device_id=0, mem_size=4096, mem_ptr=1)
    hook.malloc_postprocess(device_id=0, size=4000, mem_size=4096, mem_ptr=1, pmem_id=1)
    hook.malloc_postprocess(device_id=0, size=500, mem_size=512, mem_ptr=2, pmem_id=2)
    hook.free_postprocess(device_id=0, mem_size=4096, mem_ptr=1, pmem_id=1)
    hook.malloc_postprocess(device_id=0, size=9999, mem_size=10240, mem_ptr=0)
    assert watched.figures() == (1024, 4096, 512, 4096, 5120)
    assert watched.figures().peak_bytes == 1024
    watched.close()
    assert not MemoryHook.hooks


def test_an_allocator_that_is_no_pool():
    cupy = fake_cupy(MemoryPool())
    cupy.cuda.get_allocator = lambda: print
    with pytest.raises(OptionError, match='not a pool of CuPy'):
        memory_pools.CupyPool(cupy)


def test_the_log_as_a_trace(tmp_path):
    path = tmp_path / 'memory.json'
    with MemoryProfiler(FakePool, 8, share=0) as memory:
        for _ in range(20):
            memory.forward_preprocess(Function(), ())
    memory.save(str(path))
    trace = json.loads(path.read_text())
    trace_format.check_trace(trace)
    counters = [e for e in trace['traceEvents'] if e['ph'] == 'C']
    names = {e['name'] for e in counters}
    assert len(names) == 5
    assert len(counters) == 5 * len(memory.samples) - 1
