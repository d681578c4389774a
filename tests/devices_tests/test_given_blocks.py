"""Blocks that CuPy takes and gives back in native code."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading

import pytest

import chainer_hybridmem
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.planning.layouts.arena import Arena
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.training.devices.cuda import native_blocks as native
from chainer_hybridmem.training.devices.cuda.mapping import LEAST_GRANULES

pytestmark = pytest.mark.gpu
PACKAGE = os.path.join(os.path.dirname(chainer_hybridmem.__file__), '')


class Opened:
    """A device with room for some granules, and arrays that give way."""

    def __init__(self, native_code=True):
        from chainer_hybridmem.training.devices.cuda.device import CudaDevice
        from chainer_hybridmem.training.devices.cuda.gpu import Gpu
        from chainer_hybridmem.training.devices.cuda.mapping import find_mapper

        self.granule = find_mapper(Gpu(None), 1 << 40).granule_bytes
        self.device = CudaDevice(8 * LEAST_GRANULES * self.granule)
        self.memory, self.counter = self.device.memory, self.device.memory.counter
        self.kept = []
        self.memory.install(self.give_way)
        self.is_native = native_code
        if not native_code:
            self.counter._set(native.OPEN, 0)

    def give_way(self, nbytes):
        goal = self.memory.used_bytes - nbytes
        while self.kept and self.memory.used_bytes > goal:
            self.kept.pop(0)

    def map(self, nbytes, count=4):
        """Puts memory where the next blocks of a size will lie."""
        import cupy

        for _ in range(2):
            arrays = [cupy.ndarray(nbytes, 'u1') for _ in range(count)]
            del arrays

    def given(self):
        return self.counter._get(native.GIVEN)

    def close(self):
        self.memory.uninstall()
        self.device.close()


@pytest.fixture
def open_device(monkeypatch):
    """Opens devices one after the other."""
    monkeypatch.setenv('HYBRIDMEM_MAP', '1')
    with contextlib.ExitStack() as stack:

        def open_one(*args):
            stack.close()
            opened = Opened(*args)
            stack.callback(opened.close)
            return opened

        yield open_one


def an_arena(granule, sizes):
    """Blocks one behind the other; every fourth is expected beside."""
    offsets, top = [], 0
    for i, nbytes in enumerate(sizes):
        offsets.append(top if i % 4 else -1)
        top += nbytes if i % 4 else 0
    layout = Layout(tuple(offsets), top, top, top, 512, 'by hand')
    return Arena(tuple(zip(sizes, offsets, strict=True)), (0, len(sizes)), 0, layout)


def calls_of_the_package(act):
    """The functions of the package that an action has called."""
    calls = []

    def see(frame, event, arg):
        if event == 'call' and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def test_what_fits_takes_one_call_of_python_and_none_to_be_freed(open_device):
    import cupy

    opened, arrays = open_device(), []
    opened.map(1 << 18)
    assert calls_of_the_package(lambda: arrays.append(cupy.ndarray(1 << 18, 'u1'))) == [
        '_take_pointer'
    ]
    assert opened.memory.used_bytes == 1 << 18 and opened.given() == 1
    assert calls_of_the_package(arrays.clear) == []
    assert opened.memory.used_bytes == 0 == opened.given()


@pytest.mark.parametrize('seed', range(12))
def test_native_code_does_what_python_does(open_device, seed):
    """The same events, places, peaks and refusals; memory is short now and then."""
    import cupy

    def run(opened):
        rng, found, arrays = random.Random(seed), [], opened.kept
        memory, granule = opened.memory, opened.granule
        sizes = [rng.randint(1, 99 * granule // 512) * 512 for _ in range(40)]
        large = rng.randint(1, 600) * granule
        assert opened.device.offsets.follow(an_arena(granule, [*sizes, large]))
        memory.start_events()
        memory.watch_pool(True)
        base = opened.device.memory.pool.arena._base
        for step in range(300):
            if step % 50 == 0:
                opened.device.offsets.seek(0 if step % 100 == 0 else -1)
                expected = iter([*sizes, large])
            nbytes = next(expected, 0) if rng.random() < 0.9 else 0
            nbytes = nbytes or int(rng.choice([0.1, 1, 500]) * granule)
            try:
                arrays.append(cupy.ndarray(nbytes, 'u1'))
            except OutOfMemoryError as error:
                found.append(str(error))
                arrays.clear()
            else:
                found.append(arrays[-1].data.ptr - base)
            for _ in range(rng.randrange(3)):
                if arrays:
                    arrays.pop(rng.randrange(len(arrays)))
            found.append((memory.used_bytes, memory.peak_bytes))
            assert memory.pool.footprint_bytes <= memory.limit_bytes
        arrays.clear()
        served = memory.pool_figures()
        served_bytes = served.pool_allocated_bytes + served.device_allocated_bytes
        memory.watch_pool(False)
        events = memory.take_events()
        first = next(ident for ident, _ in events if ident > 0)
        shifted = [(i - first if i > 0 else i + first, n) for i, n in events]
        assert found.count(0) and bool(opened.counter.from_pool) == opened.is_native
        assert memory.used_bytes == 0 == opened.given()
        return found, shifted, served_bytes, opened.device.offsets.figures()

    one, other = run(open_device()), run(open_device(False))
    inside = 2 * open_device().memory.limit_bytes  # slabs beside it lie anywhere
    for mine, theirs in zip(one[0], other[0], strict=True):
        if type(mine) is int and not 0 <= mine < inside:
            assert not 0 <= theirs < inside
        else:
            assert mine == theirs
    assert one[1:] == other[1:]


def test_a_table_that_is_full_leaves_blocks_to_python(open_device):
    import cupy

    opened, rng = open_device(), random.Random(1)
    opened.map(512, native.SLOTS)
    arrays = [cupy.ndarray(512, 'u1') for _ in range(native.SLOTS)]
    assert opened.given() == native.SLOTS // 2
    idents = {opened.device.arrays.allocation_id(array) for array in arrays}
    assert len(idents) == len(arrays) and 0 not in idents
    while arrays:
        arrays[rng.randrange(len(arrays))] = arrays[-1]
        arrays.pop()
        if len(arrays) % 1000 == 0:
            identified = map(opened.device.arrays.allocation_id, arrays)
            assert idents.issuperset(identified)
            assert opened.memory.used_bytes == 512 * len(arrays)
    assert opened.given() == 0


def test_an_owner_keeps_a_block_that_cupy_has_let_go(open_device):
    import cupy

    opened = open_device()
    opened.map(4096)
    arrays, seen = opened.device.arrays, []
    array = cupy.ndarray(4096, 'u1')
    assert opened.given() == 1
    find, look = arrays.track(array), arrays.last_look(array.data.mem, seen.append)
    address, ident = array.data.ptr, arrays.allocation_id(array)
    root = find()
    del array
    assert opened.memory.used_bytes == 4096 and seen == []
    assert opened.memory.ident_of(root) == ident and find().ptr == address
    del root
    assert opened.memory.used_bytes == 0 == opened.given() and seen == [address]
    assert find() is None and look is not None
    again = cupy.ndarray(4096, 'u1')
    assert again.data.ptr == address and find() is None


def test_an_owner_that_was_never_made_known_frees_nothing(open_device):
    """As if Ctrl-C had come in between."""
    import cupy

    from chainer_hybridmem.training.devices.cuda.allocator import GivenAllocation

    opened = open_device()
    opened.map(4096)
    array = cupy.ndarray(4096, 'u1')
    _, ident, nbytes, *_ = opened.counter.block_at(array.data.ptr)
    allocator = opened.memory.allocator
    owner = GivenAllocation(allocator, ident, nbytes, array.data.ptr, None)
    del owner
    assert opened.memory.used_bytes == 4096 and opened.given() == 1


def test_other_threads_streams_and_gpus_get_no_block_in_native_code(open_device):
    import cupy

    opened, arrays = open_device(), []
    opened.map(4096)
    arrays.append(cupy.ndarray(4096, 'u1'))
    thread = threading.Thread(target=lambda: arrays.append(cupy.ndarray(4096, 'u1')))
    thread.start()
    thread.join()
    with cupy.cuda.Stream():
        arrays.append(cupy.ndarray(4096, 'u1'))
    with cupy.cuda.Device(1):
        arrays.append(cupy.ndarray(4096, 'u1'))
    assert opened.given() == 1 and opened.memory.used_bytes == 2 * 4096
    assert [opened.device.arrays.allocation_id(a) != 0 for a in arrays] == [
        *(True, False, True, False)
    ]


AT_EXIT = """
import sys, builtins
import chainer_hybridmem, cupy
from chainer_hybridmem.training.devices.cuda.device import CudaDevice
device = CudaDevice(1 << 28)
device.memory.install(lambda nbytes: None)
class Ring: pass
ring = Ring()
arrays = [cupy.ndarray(4096, 'u1') for _ in range(64)]
del arrays
ring.ring, ring.array = ring, cupy.ndarray(4096, 'u1')
sys.modules['kept'] = cupy.ndarray(4096, 'u1')
builtins.kept = cupy.ndarray(4096, 'u1')
given = device.memory.counter.addresses()
print(len(given))
if sys.argv[1:]:
    device.memory.uninstall()
    device.close()
"""


@pytest.mark.parametrize('closed', [[], ['closed']])
def test_arrays_outlive_everything_at_exit(closed):
    ran = subprocess.run(
        [sys.executable, '-c', AT_EXIT, *closed],
        env={**os.environ, 'HYBRIDMEM_MAP': '1'},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, '')
    assert int(ran.stdout) > 0
