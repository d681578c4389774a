"""What is particular to NumPy: threads, throttle, exit and foreign memory."""

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
import warnings

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import forks
from support.own_time import own_time

from chainer_hybridmem.errors import OptionError, OutOfMemoryError, SessionError
from chainer_hybridmem.training.devices import addresses, slab
from chainer_hybridmem.training.devices.host import counter_words, numpy_memory
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.link import measure_link

_MIB = 1 << 20


def _overcommit():
    try:
        with open('/proc/sys/vm/overcommit_memory', encoding='ascii') as file:
            return file.read().strip()
    except OSError:
        return None


def _nothing(nbytes):
    pass


def test_second_device_in_the_same_thread_is_refused(host, open_host):
    other = open_host(install=False)
    with pytest.raises(SessionError):
        other.memory.install(_nothing)
    with pytest.raises(SessionError):
        host.memory.install(_nothing)


def test_uninstall_in_another_thread_is_refused(host):
    caught = []

    def uninstall():
        try:
            host.memory.uninstall()
        except SessionError as error:
            caught.append(error)

    thread = threading.Thread(target=uninstall)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert numpy.empty(_MIB, 'u1').nbytes and host.memory.peak_bytes >= _MIB


def test_later_device_counts_what_an_earlier_one_gave_out(open_host):
    first, second = open_host(), open_host(install=False)
    array = numpy.zeros(_MIB, 'u1')
    old = first.arrays.allocation_id(array)
    first.memory.uninstall()
    second.memory.install(_nothing)
    assert second.arrays.allocation_id(array) == 0
    second.memory.adopt([array])
    assert second.memory.used_bytes == _MIB
    assert second.arrays.allocation_id(array) not in (0, old)
    del array
    assert first.memory.used_bytes == second.memory.used_bytes == 0


def test_frees_from_another_thread_are_counted(host):
    arrays = [numpy.empty(_MIB, 'u1') for _ in range(4)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert host.memory.used_bytes == 0


def test_other_threads_are_not_limited(host):
    sizes = []
    thread = threading.Thread(
        target=lambda: sizes.append(numpy.empty(64 * _MIB, 'u1').nbytes)
    )
    thread.start()
    thread.join()
    assert sizes == [64 * _MIB]
    assert host.memory.peak_bytes < _MIB


def test_adoption_during_collection_keeps_the_count(host):
    """Frees between two steps of counting must not be lost."""
    host.memory.uninstall()
    arrays = [numpy.zeros(1000, 'u1') for _ in range(200)]
    host.memory.install(_nothing)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20):
            cycle = [numpy.empty(1000, 'u1')]
            cycle.append(cycle)
            del cycle
            host.memory.adopt(arrays[:10])
            del arrays[:10]
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert host.memory.used_bytes == 0


def test_frees_while_an_exception_is_on_its_way(host):
    def fail():
        kept = numpy.empty(_MIB, 'u1')
        raise KeyError(kept.nbytes)

    for _ in range(100):
        with pytest.raises(KeyError) as caught:
            fail()
        assert caught.value.args == (_MIB,)
        del caught
    gc.collect()
    assert host.memory.used_bytes == 0


def test_exceptions_of_signal_handlers_leave_the_count_whole(host):
    """An interrupt may come at any moment, during allocations too."""
    import signal

    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    data = numpy.ones(1 << 14)
    before = host.memory.used_bytes
    interrupted = 0
    start = time.monotonic()
    least, most = start + 0.5, start + 120  # on a busy machine it takes longer
    try:
        while time.monotonic() < (least if interrupted > 10 else most):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                for _ in range(300):
                    data * data
            except Interrupted:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert interrupted > 10
    assert host.memory.used_bytes == before


@pytest.mark.parametrize('size', [0, 1, 100, 4097, 5 * _MIB])
def test_memory_is_aligned_and_zeroed(host, size):
    numpy.full(size, 7, 'u1')
    zeros = numpy.zeros(size, 'u1')
    assert not zeros.any()
    assert zeros.ctypes.data % 64 == 0
    assert numpy.empty(size, 'u1').ctypes.data % 64 == 0


def test_resized_array_keeps_its_contents_and_count(host):
    array = numpy.arange(1000, dtype='i4')
    array.resize(5000, refcheck=False)
    assert array[:1000].tolist() == list(range(1000))
    assert not array[1000:].any()
    assert host.memory.used_bytes == 20000
    with pytest.raises(MemoryError):
        array.resize(10**8, refcheck=False)
    del array
    assert host.memory.used_bytes == 0


@pytest.mark.parametrize('kind', ['bytes', 'mmap', 'file'])
def test_foreign_memory_is_not_counted(host, kind, tmp_path):
    if kind == 'bytes':
        array = numpy.frombuffer(b'x' * 64, 'u1')
    elif kind == 'mmap':
        array = numpy.frombuffer(mmap.mmap(-1, 4096), 'u1')
    else:
        array = numpy.memmap(tmp_path / 'a', 'u1', 'w+', shape=(64,))
    host.memory.adopt([array])
    assert host.memory.used_bytes == 0
    assert host.arrays.allocation_id(array[3:]) == 0


def test_unowned_allocation_is_refused_with_all_figures(host):
    with pytest.raises(OutOfMemoryError) as caught:
        host.memory.allocate(1 << 30)
    assert caught.value.limit_bytes == host.memory.limit_bytes
    assert caught.value.requested_bytes == 1 << 30


@pytest.mark.parametrize(
    ('limit', 'bandwidth'), [(0, None), (-1, None), (1, 0.0), (1, -1.0)]
)
def test_impossible_options(limit, bandwidth):
    with pytest.raises(OptionError):
        HostDevice(limit, bandwidth)


# -- copies -----------------------------------------------------------------
@pytest.fixture
def clocks():
    """What else the machine does makes no copy slower."""
    with own_time() as clocks:
        yield clocks


@pytest.mark.parametrize('nbytes', [_MIB, 4 * _MIB])
def test_throttle(clocks, open_host, nbytes):
    device = open_host(64 * _MIB, link_bandwidth=100e6)
    root = device.memory.allocate(nbytes)
    copy, transfer = device.copies.swap_out(root, None)
    device.copies.wait(transfer)
    seconds = []
    for _ in range(3):
        transfer = device.copies.swap_in(copy, root)
        device.copies.wait(transfer)
        seconds.append(transfer.seconds())
    expected = nbytes / 100e6
    assert min(seconds) >= expected * 0.99
    assert min(seconds) <= expected * 1.15


def test_queued_copies_take_the_link_one_after_the_other(clocks, open_host):
    device = open_host(64 * _MIB, link_bandwidth=100e6)
    roots = [device.memory.allocate(_MIB) for _ in range(8)]
    start = clocks.now()
    pairs = [device.copies.swap_out(root, None) for root in roots]
    for _, transfer in pairs:
        device.copies.wait(transfer)
    seconds = clocks.now() - start
    stalled = device.copies.take_stall_seconds()
    expected = 8 * _MIB / 100e6
    assert expected * 0.97 <= seconds <= expected * 1.25
    assert stalled == pytest.approx(seconds, rel=0.1)


def test_both_directions_run_at_once(clocks, open_host):
    device = open_host(64 * _MIB, link_bandwidth=100e6)
    first, second = device.memory.allocate(4 * _MIB), device.memory.allocate(4 * _MIB)
    copy, transfer = device.copies.swap_out(first, None)
    device.copies.wait(transfer)
    start = clocks.now()
    _, out = device.copies.swap_out(second, None)
    inward = device.copies.swap_in(copy, first)
    device.copies.wait(out)
    device.copies.wait(inward)
    seconds = clocks.now() - start
    assert seconds < 1.6 * 4 * _MIB / 100e6


def test_throttled_link_is_measured(open_host):
    device = open_host(64 * _MIB, link_bandwidth=50e6)
    with own_time(tick_seconds=2e-4):  # one for each piece of work beside the copies
        link = measure_link(device)
    assert link.d2h_bytes_per_second == pytest.approx(50e6, rel=0.15)
    assert link.h2d_bytes_per_second == pytest.approx(50e6, rel=0.15)
    assert link.duplex_share > 0.8  # each direction has a throttle of its own
    assert link.issue_seconds == 0


def test_link_is_measured_with_what_fits(open_host):
    device = open_host(_MIB)
    kept = device.memory.allocate(_MIB - 40_000)
    link = measure_link(device)
    assert link.d2h_bytes_per_second > 0 and link.h2d_bytes_per_second > 0
    del kept


def test_a_view_of_what_is_broadcast_is_taken_without_a_warning(open_host):
    """NumPy warns where it is asked whether one may write into such an array."""
    device = open_host(_MIB)
    both = numpy.broadcast_arrays(numpy.zeros((3, 1)), numpy.zeros((1, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        views = [device.arrays.capture(array) for array in both]
    assert all(view.writeable for view in views)
    both[0].flags.writeable = False
    assert not device.arrays.capture(both[0]).writeable


def test_memory_of_a_slow_copy_is_not_reused_before_wait(open_host):
    """Hazard 1: poisoned memory must not reach the host copy."""
    device = open_host(64 * _MIB, link_bandwidth=50e6)
    root = device.memory.allocate(2 * _MIB)
    root[...] = 5
    address = root.ctypes.data
    copy, transfer = device.copies.swap_out(root, None)
    del root  # the transfer alone keeps it now
    poison = [numpy.full(2 * _MIB, 255, 'u1') for _ in range(8)]
    assert address not in [array.ctypes.data for array in poison]
    device.copies.wait(transfer)
    del poison
    target = numpy.full(2 * _MIB, 255, 'u1')
    device.copies.wait(device.copies.swap_in(copy, target))
    assert bool((target == 5).all())
    del transfer


def test_worker_does_not_keep_a_finished_copy_alive(host):
    for _ in range(50):
        root = host.memory.allocate(_MIB)
        copy, transfer = host.copies.swap_out(root, None)
        host.copies.wait(transfer)
        del root, transfer
        assert host.memory.used_bytes == 0
        copy.close()


# -- processes --------------------------------------------------------------
_EXIT = """
import threading, weakref
import numpy
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.device import HostDevice
device = HostDevice(1 << 26)
device.memory.install(lambda nbytes: None)
kept = [numpy.ones(n, 'u1') for n in (1, 1000, 1 << 20, 1 << 23)]
cycle = [numpy.ones(1 << 20, 'u1')]
cycle.append(cycle)
class Late:
    array = numpy.ones(1000)
    def __del__(self):
        numpy.zeros(100000).sum()
        self.array * 2
late = Late()
numpy.kept_for_ever = [numpy.ones(5000), late]
threading.kept_for_ever = numpy.ones(5000)
copy, transfer = device.copies.swap_out(device.memory.allocate(1 << 22), None)
{end}
print('alive', device.memory.used_bytes > 0)
"""


@pytest.mark.parametrize(
    'end', ['', 'device.memory.uninstall()', 'raise SystemExit(0)']
)
def test_exit_with_live_arrays(end):
    finished = forks.run('-c', _EXIT.format(end=end))
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ''


_SMALL = """
import resource
import numpy
from chainer_hybridmem.training.devices.host.device import HostDevice

def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.ones(4000) for _ in range(100)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

device = HostDevice(1 << 30)
device.memory.install(lambda nbytes: None)
print([use() for _ in range(6)][-3:])
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='counts page faults')
def test_the_pages_of_small_blocks_stay_between_iterations():
    """In iterations of plain Chainer they do: its large arrays see to it."""
    faults = json.loads(forks.run('-c', _SMALL).stdout)
    assert max(faults) < 100


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork')
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_forked_child_is_not_limited(host):
    kept = numpy.ones(_MIB)
    root = host.memory.allocate(1000)
    _, transfer = host.copies.swap_out(root, None)
    host.copies.wait(transfer)
    child = os.fork()
    if not child:
        status = 1
        try:
            large = numpy.zeros(64 * _MIB, 'u1')
            del large, kept
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert host.memory.used_bytes >= 8 * _MIB


def _flags_at(address):
    """What the system says of the mapping that an address is in."""
    inside = False
    with open('/proc/self/smaps', encoding='ascii') as lines:
        for line in lines:
            first = line.split()[0]
            if '-' in first:
                start, end = (int(x, 16) for x in first.split('-'))
                inside = start <= address < end
            elif inside and first == 'VmFlags:':
                return line.split()[1:]
    raise AssertionError(f'nothing is mapped at {address:#x}')


@pytest.mark.skipif(
    _overcommit() not in ('0', '1'), reason='needs a Linux that overcommits'
)
def test_addresses_are_not_accounted_for(open_host):
    """Else a fork fails as soon as there are more of them than the machine has."""
    device = open_host(1 << 30)
    array = numpy.empty(_MIB, 'u1')
    counter = device.memory.counter
    for place in (counter_words.SIDE, counter_words.ARENA):
        flags = _flags_at(counter._get(place + slab.BASE))
        assert 'nr' in flags and 'ac' not in flags
        assert 'dc' not in flags  # children read what lies there
    assert 'nr' in _flags_at(array.ctypes.data)
    copy, transfer = device.copies.swap_out(device.memory.allocate(5 * _MIB), None)
    device.copies.wait(transfer)
    assert 'nr' in _flags_at(copy.address)


@pytest.mark.parametrize(
    ('system', 'machine', 'flag'),
    [
        ('linux', 'x86_64', 0x4000),
        ('linux', 'aarch64', 0x4000),
        ('linux', 'ppc64le', 0x40),
        ('win32', 'AMD64', 0),
    ],
)
def test_the_flag_of_addresses_where_python_does_not_know_it(
    monkeypatch, system, machine, flag
):
    monkeypatch.delattr(mmap, 'MAP_NORESERVE', raising=False)
    assert addresses.find_noreserve(system, machine) == flag


def test_a_block_larger_than_the_machine_is_refused_without_a_limit(open_host):
    """As NumPy's own: the end of the process would be worse."""
    open_host(1 << 60)
    with pytest.raises(MemoryError):
        numpy.empty(2 * os.sysconf('SC_PHYS_PAGES') * mmap.PAGESIZE, 'u1')


def _memories():
    return len(numpy_memory._memories)


def test_a_device_that_is_never_installed_leaves_nothing(tmp_path):
    before = _memories(), set(os.listdir('/proc/self/fd'))
    devices = [HostDevice(_MIB, swap_dir=str(tmp_path)) for _ in range(5)]
    assert (_memories(), set(os.listdir('/proc/self/fd'))) == before
    assert not list(tmp_path.iterdir())
    for device in devices:
        device.close()


def _use_once(limit_bytes=_MIB):
    """A device that has had its time, and an array that it has counted."""
    device = HostDevice(limit_bytes)
    device.memory.install(_nothing)
    array = device.memory.allocate(100_000)
    device.memory.uninstall()
    device.close()
    return device, array


def test_devices_one_after_the_other_share_their_memory():
    _use_once()
    before = _memories()
    for _ in range(5):
        _use_once()
    assert _memories() == before


def test_memory_is_not_shared_while_an_array_needs_it():
    first, array = _use_once()
    before = first.arrays.allocation_id(array)
    second, other = _use_once()
    assert (
        first.arrays.allocation_id(array)
        == before
        != second.arrays.allocation_id(other)
    )
    assert (first.memory.used_bytes, second.memory.used_bytes) == (100_000, 100_000)
    del array
    assert (first.memory.used_bytes, second.memory.used_bytes) == (0, 100_000)


def test_a_device_keeps_its_figures_when_its_memory_is_taken_over():
    first, array = _use_once()
    del array
    address, peak = first.memory.counter.address, first.memory.peak_bytes
    others = [_use_once(2 * _MIB) for _ in range(_memories())]
    assert first.memory.counter.address != address
    assert first.memory.peak_bytes == peak >= 100_000
    first.memory.reset_peak()  # its own business now
    assert first.memory.peak_bytes == 0
    assert all(device.memory.peak_bytes >= 100_000 for device, _ in others)


def test_what_was_set_for_one_device_is_not_left_to_the_next():
    first, array = _use_once()
    first.memory.start_events()
    number = first.memory.counter._number
    del array
    used = dict(_use_once() for _ in range(_memories()))
    device = next(device for device in used if device.memory.counter._number == number)
    assert (device.memory.event_count, device.memory.used_bytes) == (0, 100_000)
    assert device.arrays.allocation_id(used[device]) & 0xFFFF > 1, (
        'ids are never used twice'
    )


# -- pages ----------------------------------------------------------------------
def _resident_bytes(device):
    """Bytes of the device's slabs that the system has pages for."""
    libc, total = ctypes.CDLL(None), 0
    for place in (counter_words.SIDE, counter_words.ARENA):
        base, touched = (
            device.memory.counter._get(place + word)
            for word in (slab.BASE, slab.TOUCHED)
        )
        if base:
            pages = (ctypes.c_ubyte * (touched // mmap.PAGESIZE + 1))()
            error = libc.mincore(ctypes.c_void_p(base), ctypes.c_size_t(touched), pages)
            assert not error
            total += mmap.PAGESIZE * sum(page & 1 for page in pages)
    return total


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(16, 400)), max_size=60))
def test_pages_never_exceed_the_limit(steps):
    device = HostDevice(4 * _MIB)
    device.memory.install(lambda nbytes: None)
    try:
        arrays = []
        for takes, size in steps:
            if arrays and not takes:
                arrays.pop(size % len(arrays))
                continue
            try:
                arrays.append(numpy.ones(size << 12, 'u1'))
            except MemoryError:
                arrays.pop(0)
            ends = 2 * mmap.PAGESIZE * (len(arrays) + 1)  # pages of two neighbours
            assert _resident_bytes(device) <= 4 * _MIB + ends
        del arrays
    finally:
        device.memory.uninstall()
        device.close()


def test_as_few_pages_go_back_as_will_do(open_host):
    """Else all of a hole is faulted in again, for a block that lies elsewhere."""
    device = open_host(8 * _MIB)
    hole, others = numpy.ones(4 * _MIB, 'u1'), [numpy.ones(_MIB, 'u1')]
    del hole
    others.append(numpy.ones(9 * _MIB // 2, 'u1'))  # 1.5 MiB more than the limit
    assert 7 * _MIB < _resident_bytes(device) <= 8 * _MIB + 8 * mmap.PAGESIZE
