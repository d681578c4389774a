"""The CUDA device without a GPU, and without memory that is mapped.

CuPy's own memory classes and allocator hooks are real; the pool, streams,
events and copies are stand-ins over host memory. Copies are late on purpose:
a stream runs its work only when somebody waits for it.
"""

import ctypes
import pickle
import types

import numpy
import pytest
from support.empty_pools import empty_pools

from chainer_hybridmem.errors import (
    HostFullError,
    OptionError,
    OutOfMemoryError,
    SessionError,
    SwapStoreError,
)
from chainer_hybridmem.planning.layouts.arena import Arena
from chainer_hybridmem.training.devices import bits
from chainer_hybridmem.training.devices.cuda import block_pool, copies, gpu
from chainer_hybridmem.training.devices.cuda import device as cuda

cupy = pytest.importorskip('cupy')
pytest.importorskip('cupy.cuda.memory')
pytestmark = pytest.mark.gpu  # it needs CuPy

_MIB = 1 << 20
_LIMIT = 8 * _MIB
_PINNED = _LIMIT // 256  # what a store of pinned memory grows by, at least


class _CudaError(RuntimeError):
    pass


class _Event:
    def __init__(self, block=False, disable_timing=False):
        self.done = True
        self.timed = False
        self.has_timing = not disable_timing

    def record(self, stream):
        self.done = False
        self.timed = self.has_timing
        self.stream = stream
        stream.work.append(lambda: setattr(self, 'done', True))


def _elapsed_time(start, end):
    """As CUDA does: both must have been recorded with a time, and be done."""
    for event in (start, end):
        if not event.timed:
            raise _CudaError('cudaErrorInvalidResourceHandle')
        if not event.done:
            raise _CudaError('cudaErrorNotReady')
    return 2.0


class _Stream:
    streams = []

    def __init__(self, non_blocking=False):
        self.work = []
        self.ptr = len(self.streams)
        self.streams.append(self)

    def record(self):
        event = _Event()
        event.record(self)
        return event

    def wait_event(self, event):
        if not event.done:
            self.work.append(lambda: event.stream.run_until(event))

    def run_until(self, event=None):
        while self.work and not (event is not None and event.done):
            self.work.pop(0)()


class _Pool:
    """Exact blocks of host memory with CuPy's limit."""

    def __init__(self):
        self.limit = self.held = 0
        self.fragmented = 0  # bytes lost until free_all_blocks

    def malloc(self, size):
        if size == 0:
            return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)
        if self.limit and self.held + size + self.fragmented > self.limit:
            raise cupy.cuda.memory.OutOfMemoryError(size, self.held, self.limit)
        block = _PoolBlock(self, size)
        memory = cupy.cuda.UnownedMemory(block.address, size, block, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def set_limit(self, size=None, fraction=None):
        self.limit = size

    def get_limit(self):
        return self.limit

    def total_bytes(self):
        return self.held

    def free_all_blocks(self, stream=None):
        self.fragmented = 0


class _PoolBlock:
    def __init__(self, pool, size):
        self.pool, self.size = pool, size
        self.memory = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.memory)
        pool.held += size

    def __del__(self):
        ctypes.memset(self.address, 255, self.size)  # poison
        self.pool.held -= self.size


class _Memory:
    """A block of its own, of the driver."""

    refused = False

    def __init__(self, size):
        self.memory, self.size = ctypes.create_string_buffer(size), size
        self.ptr = ctypes.addressof(self.memory)
        if self.refused:
            raise _CudaError('cudaErrorMemoryAllocation')

    def __del__(self):
        ctypes.memset(self.ptr, 255, self.size)  # poison


class _Pinned:
    def __init__(self, size):
        if size > 1 << 40:
            raise _CudaError('cudaErrorMemoryAllocation')
        self.memory = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self.memory)


class _Device:
    def __init__(self, number):
        assert number == 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def synchronize(self):
        for _ in range(3):
            for stream in _Stream.streams:
                stream.run_until()


def _memcpy_async(target, source, size, kind, stream):
    _Stream.streams[stream].work.append(lambda: ctypes.memmove(target, source, size))


def _make_cupy():
    _Stream.streams = []
    compute = _Stream()
    runtime = types.SimpleNamespace(
        memcpyDeviceToHost=cupy.cuda.runtime.memcpyDeviceToHost,
        memcpyHostToDevice=cupy.cuda.runtime.memcpyHostToDevice,
        memcpyAsync=_memcpy_async,
        CUDARuntimeError=_CudaError,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
    )
    fake = types.SimpleNamespace(
        Device=_Device,
        Event=_Event,
        Stream=_Stream,
        MemoryPool=_Pool,
        Memory=_Memory,
        PinnedMemory=_Pinned,
        runtime=runtime,
        get_current_stream=lambda: compute,
        get_elapsed_time=_elapsed_time,
        UnownedMemory=cupy.cuda.UnownedMemory,
        MemoryPointer=cupy.cuda.MemoryPointer,
        set_allocator=cupy.cuda.set_allocator,
        get_allocator=cupy.cuda.get_allocator,
        memory=cupy.cuda.memory,
    )
    return types.SimpleNamespace(
        cuda=fake, ndarray=cupy.ndarray, get_default_memory_pool=_Pool
    ), compute


@pytest.fixture
def opened(monkeypatch):
    """The device, its compute stream and what ``reclaim`` shall do."""
    fake, compute = _make_cupy()
    empty_pools()  # what lies there would be on the stand-in
    monkeypatch.setattr(gpu, 'import_cupy', lambda: fake)
    monkeypatch.setattr(block_pool, 'find_mapper', lambda gpu, limit_bytes: None)
    opened = types.SimpleNamespace(compute=compute, asked=[], give_up=lambda: None)

    def reclaim(nbytes):
        opened.asked.append(nbytes)
        opened.give_up()

    opened.reclaim = reclaim
    before = cupy.cuda.get_allocator()
    opened.device = cuda.CudaDevice(_LIMIT)
    opened.device.memory.install(reclaim)
    yield opened
    opened.device.memory.uninstall()
    opened.device.close()
    cupy.cuda.set_allocator(before)  # whatever the test has installed


def _contents(array):
    return ctypes.string_at(array.data.ptr, array.nbytes)


def _fill(root, value):
    ctypes.memset(root.ptr, value, root.size)


def test_counts_and_identifies(opened):
    device = opened.device
    device.memory.start_events()
    array = cupy.ndarray((3, 100), 'f4')
    assert device.memory.used_bytes == 1536
    ident = device.arrays.allocation_id(array)
    assert ident and device.arrays.allocation_id(array[1].T) == ident
    view = array[1:]
    del array
    assert device.memory.used_bytes == 1536
    del view
    assert device.memory.used_bytes == 0
    assert device.memory.take_events() == [(ident, 1536), (-ident, 1536)]
    assert device.memory.peak_bytes == 1536


@pytest.mark.parametrize(
    'make',
    [
        lambda a: a,
        lambda a: a.transpose(2, 0, 1),
        lambda a: a[1:, ::2],
        lambda a: a[:, ::-1, ::-1],
        lambda a: cupy.broadcast_to(a[0], (5, 3, 4)),
        lambda a: a[:, 3:],
        lambda a: a[1, 1, 1],
        lambda a: cupy.ndarray((0, 3), 'f2'),
        lambda a: cupy.ndarray((), 'f8'),
    ],
)
def test_restored_views_are_the_same(opened, make):
    device = opened.device
    array = make(cupy.ndarray((2, 3, 4), 'f4'))
    again = device.arrays.restore(
        device.arrays.root(array), device.arrays.capture(array)
    )
    for name in ('shape', 'strides', 'dtype', 'size', 'nbytes'):
        assert getattr(again, name) == getattr(array, name)
    assert again.flags.c_contiguous == array.flags.c_contiguous
    assert again.flags.f_contiguous == array.flags.f_contiguous
    assert not array.size or again.data.ptr == array.data.ptr
    assert device.arrays.root(again) is device.arrays.root(array)
    assert device.arrays.allocation_id(again) == device.arrays.allocation_id(array)


def test_swap_reaches_the_host_and_comes_back(opened):
    device = opened.device
    root = device.memory.allocate(1000)
    _fill(root, 7)
    copy, out = device.copies.swap_out(root, None)
    assert not out.done()
    device.copies.wait(out)
    assert not out.done()  # the host does not wait
    del root, out  # freed now, overwritten by the next work
    device.clock.synchronize()
    assert device.copies.host_bytes == _PINNED
    target = device.memory.allocate(1000)
    inward = device.copies.swap_in(copy, target)
    device.copies.wait(inward)
    device.clock.synchronize()
    assert inward.done() and inward.seconds() == 0.002
    assert device.copies.take_stall_seconds() == 0.004
    assert device.copies.take_stall_seconds() == 0
    copy.close()


def test_waits_that_are_not_over_are_counted_by_the_next_call(opened):
    """A training loop never synchronises of itself."""
    device = opened.device
    copy, out = device.copies.swap_out(device.memory.allocate(1000), None)
    device.copies.wait(out)
    assert device.copies.take_stall_seconds() == 0
    device.clock.synchronize()
    inward = device.copies.swap_in(copy, device.memory.allocate(1000))
    device.copies.wait(inward)
    assert device.copies.take_stall_seconds() == 0.002
    device.clock.synchronize()
    assert device.copies.take_stall_seconds() == 0.002
    assert device.copies.take_stall_seconds() == 0
    copy.close()


def test_order_of_copies_and_compute(opened):
    device, compute = opened.device, opened.compute
    root, target = device.memory.allocate(1000), device.memory.allocate(1000)
    # Kernels that run late: write the source, use the target's old contents.
    compute.work.append(lambda: _fill(root, 5))
    seen = []
    compute.work.append(lambda: seen.append(ctypes.string_at(target.ptr, 1)))
    copy, out = device.copies.swap_out(root, None)
    inward = device.copies.swap_in(copy, target)
    device.copies.wait(out)
    compute.work.append(lambda: _fill(root, 9))  # after the copy has read it
    device.copies.wait(inward)
    compute.work.append(lambda: seen.append(ctypes.string_at(target.ptr, 1)))
    _Stream.streams[2].run_until()  # the swap-in's stream first
    device.clock.synchronize()
    assert seen == [b'\0', b'\5']
    copy.close()


def test_compute_waits_for_the_copy(opened):
    device, compute = opened.device, opened.compute
    root = device.memory.allocate(1000)
    _fill(root, 5)
    copy, out = device.copies.swap_out(root, None)
    device.copies.wait(out)
    compute.work.append(lambda: _fill(root, 9))
    compute.run_until()
    device.clock.synchronize()
    assert ctypes.string_at(copy.address, copy.nbytes) == b'\5' * 1024
    copy.close()


def test_dropped_transfer_keeps_compute_behind_its_copy(opened):
    device, compute = opened.device, opened.compute
    root = device.memory.allocate(1000)
    copy, out = device.copies.swap_out(root, None)
    waiting = len(compute.work)
    del out
    assert len(compute.work) == waiting + 1
    device.clock.synchronize()
    copy.close()


def test_space_is_not_reused_before_its_copy_is_over(opened):
    device = opened.device
    device.copies.reserve(1024)
    first, second = device.memory.allocate(1024), device.memory.allocate(1024)
    copy, out = device.copies.swap_out(first, None)
    copy.close()
    other, out_other = device.copies.swap_out(second, None)
    assert device.copies.host_bytes == 1024 + _PINNED
    device.copies.wait(out)
    device.copies.wait(out_other)
    device.clock.synchronize()
    other.close()
    assert device.copies.host_bytes == 1024 + _PINNED  # it keeps what is free


def test_refusal_is_both_errors_and_pickles(opened):
    device = opened.device
    kept = cupy.ndarray(6 * _MIB, 'u1')
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupy.ndarray(3 * _MIB, 'u1')
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.requested_bytes == 3 * _MIB
    assert caught.value.limit_bytes == _LIMIT
    assert caught.value.used_bytes == 6 * _MIB
    assert opened.asked == [_MIB]
    assert device.memory.last_failure == (3 * _MIB, 6 * _MIB)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.requested_bytes == 3 * _MIB
    del kept


def test_reclaim_makes_room(opened):
    kept = [cupy.ndarray(6 * _MIB, 'u1')]
    opened.give_up = kept.clear
    assert cupy.ndarray(7 * _MIB, 'u1').nbytes == 7 * _MIB
    assert opened.asked == [5 * _MIB]


def test_fragmented_pool_is_a_reason_to_reclaim(opened):
    device = opened.device
    device.memory.pool.whole_bytes = _LIMIT  # everything from the pool
    device.memory.pool._pool.fragmented = 4 * _MIB
    kept = [cupy.ndarray(512, 'u1')]
    opened.give_up = kept.clear
    assert cupy.ndarray(6 * _MIB, 'u1').nbytes == 6 * _MIB
    assert opened.asked == [6 * _MIB]


def test_it_is_asked_for_memory_until_nothing_helps(opened):
    device = opened.device
    device.memory.pool.whole_bytes = _LIMIT
    device.memory.pool._ask_pool = lambda nbytes: None
    parts = [device.memory.counter.count(512) for _ in range(3)]
    opened.give_up = lambda: parts and device.memory.counter.uncount(parts.pop(), 512)
    with pytest.raises(MemoryError):
        cupy.ndarray(6 * _MIB, 'u1')
    assert opened.asked == [*[6 * _MIB] * 4, 512]  # the last time for a higher limit


def test_reclaim_error_is_the_cause(opened):
    kept = cupy.ndarray(6 * _MIB, 'u1')

    def fail():
        raise RuntimeError('lost')

    opened.give_up = fail
    with pytest.raises(MemoryError) as caught:
        cupy.ndarray(6 * _MIB, 'u1')
    assert str(caught.value.__cause__) == 'lost'
    del kept


def test_adopted_arrays_take_from_the_pool(opened):
    device = opened.device
    device.memory.uninstall()
    other = _Pool()
    cupy.cuda.set_allocator(other.malloc)
    array = cupy.ndarray(2 * _MIB, 'u1')
    device.memory.install(opened.reclaim)
    device.memory.adopt([array, array[5:]])
    assert device.memory.used_bytes == 2 * _MIB
    assert device.arrays.allocation_id(array[7:]) != 0
    assert device.memory.pool.room_bytes == 6 * _MIB
    device.memory.start_events()
    del array
    assert device.memory.used_bytes == 0
    assert device.memory.event_count == 1
    assert device.memory.pool.room_bytes == _LIMIT


def test_allocator_is_restored(opened):
    device = opened.device
    before = cupy.cuda.get_allocator()
    assert before is device.memory.allocator.pointer
    device.memory.uninstall()
    assert cupy.cuda.get_allocator() is not before
    device.memory.install(opened.reclaim)
    with pytest.raises(SessionError):
        cuda.CudaDevice(_LIMIT).memory.install(opened.reclaim)


def test_limit_of_the_environment_wins(opened, monkeypatch):
    monkeypatch.setattr(_Pool, 'get_limit', lambda self: 12345)
    assert cuda.CudaDevice(_LIMIT).memory.limit_bytes == 12345
    assert cuda.CudaDevice(1000).memory.limit_bytes == 1000


def test_pinned_memory_that_is_refused(opened, monkeypatch):
    with pytest.raises(SwapStoreError, match='available'):
        opened.device.copies.reserve(1 << 50)
    monkeypatch.setattr(copies, 'check_available', lambda nbytes: None)
    with pytest.raises(SwapStoreError, match='refuses'):
        opened.device.copies.reserve(1 << 50)


def test_zero_bytes(opened):
    device = opened.device
    root = device.memory.allocate(0)
    copy, out = device.copies.swap_out(root, None)
    device.copies.wait(out)
    device.copies.wait(device.copies.swap_in(copy, root))
    device.clock.synchronize()
    assert device.memory.used_bytes == 0
    copy.close()


@pytest.mark.parametrize('link_bandwidth', [1e9])
def test_options_that_a_gpu_does_not_have(link_bandwidth, tmp_path):
    with pytest.raises(OptionError, match='link_bandwidth'):
        cuda.CudaDevice(_LIMIT, link_bandwidth=link_bandwidth)
    with pytest.raises(OptionError, match='swap_dir'):
        cuda.CudaDevice(_LIMIT, swap_dir=str(tmp_path))
    with pytest.raises(OptionError, match='disk_bandwidth'):
        cuda.CudaDevice(_LIMIT, disk_bandwidth=1e9)
    with pytest.raises(OptionError, match='limit_bytes'):
        cuda.CudaDevice(0)


def test_pinned_memory_has_a_limit_too(opened):
    device = cuda.CudaDevice(_LIMIT, host_limit_bytes=2048)
    device.copies.reserve(4096)
    assert device.copies.host_bytes == 2048 and device.copies.disk_bytes == 0
    copies = [device.copies.host_copy(1024) for _ in range(2)]
    with pytest.raises(HostFullError, match='swap_dir'):
        device.copies.host_copy(512)
    assert device.copies.host_refusal is not None
    copies[0].close()
    device.copies.host_copy(512).close()
    device.close()


def test_gpu_that_does_not_exist(opened):
    with pytest.raises(OptionError, match='number 3'):
        cuda.CudaDevice(_LIMIT, 3)


def test_compared_by_bits():
    # The device's comparison is shared with the host's; see test_device.
    assert bits.same_bits(numpy.float32([numpy.nan]), numpy.float32([numpy.nan]), 1)


def test_pool_figures(opened):
    device = opened.device
    device.memory.pool.whole_bytes = _LIMIT  # everything from the pool
    device.memory.watch_pool(True)
    array = device.memory.allocate(3 * _MIB)
    figures = device.memory.pool_figures(new_peak=True)
    assert figures == (3 * _MIB, 0, 0, 3 * _MIB, 3 * _MIB)
    del array
    assert device.memory.pool_figures(new_peak=True).peak_bytes == 3 * _MIB
    assert device.memory.pool_figures().peak_bytes == 0
    held, device.memory.pool._pool.total_bytes = 3 * _MIB, lambda: held
    array = device.memory.allocate(_MIB)  # from what a pool still holds
    figures = device.memory.pool_figures()
    assert figures == (_MIB, 2 * _MIB, _MIB, 3 * _MIB, _MIB)
    device.memory.watch_pool(False)
    del array


def _arena(*entries, side=0):
    ends = [offset + nbytes for nbytes, offset in entries]
    layout = types.SimpleNamespace(footprint_bytes=max(ends))
    return Arena(entries, (0, len(entries)), side, layout)


def test_arrays_get_their_places(opened):
    device = opened.device
    assert device.offsets.follow(_arena((1024, 512), (512, 0), (512, 1536)))
    assert device.memory.pool.footprint_bytes == 2048 and device.memory.used_bytes == 0
    beside = cupy.ndarray(100, 'u1')
    device.offsets.seek(0)
    first, second = cupy.ndarray(1000, 'u1'), cupy.ndarray(500, 'u1')
    assert first.data.ptr - second.data.ptr == 512
    assert (
        device.arrays.allocation_id(first[3:])
        == device.arrays.allocation_id(first)
        != 0
    )
    assert device.memory.used_bytes == 2048
    assert device.memory.pool.footprint_bytes == 2560
    device.offsets.seek(-1)
    other = cupy.ndarray(100, 'u1')
    assert device.offsets.figures() == (2, 0, 0)
    del first, second, beside, other
    assert device.memory.used_bytes == 0
    assert device.memory.pool.footprint_bytes == 2048


def test_a_place_is_reused_behind_the_copy_that_reads_it(opened):
    """Hazard 1: the new array's kernel comes after the swap-out of the old one."""
    device, compute = opened.device, opened.compute
    device.offsets.follow(_arena((1024, 0), (1024, 0)))
    device.offsets.seek(0)
    root = device.memory.allocate(1024)
    _fill(root, 5)
    address = root.ptr
    copy, out = device.copies.swap_out(root, None)
    device.copies.wait(out)
    del root, out
    again = device.memory.allocate(1024)
    assert again.ptr == address
    compute.work.append(lambda: _fill(again, 255))
    compute.run_until()  # the device runs this as soon as it may
    device.clock.synchronize()
    assert ctypes.string_at(copy.address, copy.nbytes) == b'\5' * 1024
    assert _contents_of(again) == b'\xff' * 1024
    copy.close()


def _contents_of(root):
    return ctypes.string_at(root.ptr, root.size)


def test_an_arena_for_which_there_is_no_memory(opened):
    device = opened.device
    kept = cupy.ndarray(5 * _MIB, 'u1')
    assert not device.offsets.follow(_arena((4 * _MIB, 0)))
    device.offsets.seek(0)
    assert cupy.ndarray(2 * _MIB, 'u1').size  # as without
    assert device.offsets.figures() == (0, 0, 0)
    del kept


def test_a_larger_arena_takes_the_place_of_a_smaller_one(opened):
    device = opened.device
    device.offsets.follow(_arena((_MIB, 0)))
    device.offsets.seek(0)
    old = cupy.ndarray(_MIB, 'u1')
    assert device.offsets.follow(_arena((2 * _MIB, 0)))
    device.offsets.seek(0)
    new = cupy.ndarray(2 * _MIB, 'u1')
    assert (
        device.memory.pool.footprint_bytes == 3 * _MIB
    )  # the old one as long as it is used
    del old
    other = cupy.ndarray(6 * _MIB, 'u1')  # until somebody wants its memory
    assert opened.asked == [] and device.memory.pool.footprint_bytes == 8 * _MIB
    assert device.offsets.follow(_arena((_MIB, 0)))  # a smaller one lies inside
    assert device.memory.pool.footprint_bytes == 8 * _MIB
    del new, other


def test_holes_of_the_arena_serve_what_else_would_not_fit(opened):
    device = opened.device
    device.offsets.follow(_arena((6 * _MIB, 0)))
    array = cupy.ndarray(5 * _MIB, 'u1')
    assert opened.asked == [] and device.memory.pool.footprint_bytes == 6 * _MIB
    device.offsets.seek(0)
    with pytest.raises(MemoryError):
        cupy.ndarray(6 * _MIB, 'u1')
    del array
    device.offsets.seek(0)
    assert cupy.ndarray(6 * _MIB, 'u1').size
    assert device.offsets.figures().placed == 1


def test_whole_blocks_are_used_again_and_given_back(opened):
    device = opened.device
    array = cupy.ndarray(2 * _MIB, 'u1')
    address = array.data.ptr
    small = cupy.ndarray(1000, 'u1')  # of the pool
    assert device.memory.pool.footprint_bytes == 2 * _MIB + 1024
    del array
    assert (
        device.memory.used_bytes == 1024
        and device.memory.pool.footprint_bytes == 2 * _MIB + 1024
    )
    again = cupy.ndarray(2 * _MIB, 'u1')
    assert again.data.ptr == address
    del again
    # One of another size: the free one is given back where the limit wants it.
    other = cupy.ndarray(7 * _MIB, 'u1')
    assert opened.asked == [] and device.memory.pool.footprint_bytes == 7 * _MIB + 1024
    assert device.memory.limit_bytes >= device.memory.pool.footprint_bytes
    more = cupy.ndarray(512, 'u1')
    assert device.memory.pool._pool.get_limit() == _MIB
    del other, small, more


def test_the_pool_gets_what_whole_blocks_leave(opened):
    device = opened.device
    array = cupy.ndarray(6 * _MIB, 'u1')
    del array  # free, and still held
    kept = [cupy.ndarray(16384, 'u1') for _ in range(320)]
    assert opened.asked == [] and device.memory.pool.footprint_bytes == 5 * _MIB
    del kept


def test_an_arena_finds_memory_after_whole_blocks(opened):
    """A small array that stays does not keep a large piece from it."""
    device = opened.device
    large = cupy.ndarray(6 * _MIB, 'u1')
    del large
    stays = cupy.ndarray(_MIB, 'u1')
    assert device.offsets.follow(_arena((7 * _MIB - 512, 0)))
    assert device.memory.pool.footprint_bytes == 8 * _MIB - 512
    del stays


def test_blocks_of_the_driver_that_are_refused(opened, monkeypatch):
    device = opened.device
    monkeypatch.setattr(_Memory, 'refused', True)
    assert not device.offsets.follow(_arena((_MIB, 0)))
    with pytest.raises(MemoryError):
        cupy.ndarray(2 * _MIB, 'u1')
