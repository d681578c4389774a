"""GPU memory that is mapped as blocks need it."""

from __future__ import annotations

import gc
import itertools
import os
import random

import pytest

from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.planning.layouts.arena import Arena
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.training.devices.cuda import block_pool
from chainer_hybridmem.training.devices.cuda.mapping import LEAST_GRANULES

pytestmark = pytest.mark.gpu
GRANULES = LEAST_GRANULES + 88  # of the limit


def free_bytes():
    import cupy

    cupy.cuda.Device().synchronize()
    return cupy.cuda.runtime.memGetInfo()[0]


class Opened:
    """A device whose limit is some granules."""

    def __init__(self):
        from chainer_hybridmem.training.devices.cuda.device import CudaDevice
        from chainer_hybridmem.training.devices.cuda.gpu import Gpu
        from chainer_hybridmem.training.devices.cuda.mapping import find_mapper

        mapper = find_mapper(Gpu(None), 1 << 40)
        assert mapper is not None
        self.granule = mapper.granule_bytes
        self.before = free_bytes()
        self.device = CudaDevice(GRANULES * self.granule)
        self.memory, self.pool = self.device.memory, self.device.memory.pool
        assert self.pool.maps
        self.asked = []
        self.memory.install(self.asked.append)

    def allocate(self, granules, share=1.0):
        """So many granules, or a share of one."""
        import cupy

        return cupy.zeros(int(granules * self.granule * share), 'u1')

    def arena(self, *granules):
        """Blocks of one operation, one behind the other."""
        sizes = [n * self.granule for n in granules]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        layout = Layout(tuple(offsets), *[sum(sizes)] * 3, 512, 'by hand')
        entries = tuple(zip(sizes, offsets, strict=True))
        return Arena(entries, (0, len(sizes)), 0, layout)

    def taken(self):
        """What the driver has given since the device was opened."""
        return self.before - free_bytes()


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setenv('HYBRIDMEM_MAP', '1')
    opened = Opened()
    yield opened
    opened.memory.uninstall()
    opened.device.close()


def test_an_arena_takes_over_what_lies_elsewhere(opened):
    """Both together are more than the limit; each of them fits."""
    offsets, limit = opened.device.offsets, opened.memory.limit_bytes
    gradient = opened.allocate(GRANULES * 0.6)
    arena = opened.arena(int(GRANULES * 0.3), int(GRANULES * 0.3))
    assert offsets.moves_in and offsets.follow(arena)
    offsets.seek(0)
    first = opened.allocate(int(GRANULES * 0.3))
    del gradient
    second = opened.allocate(int(GRANULES * 0.3))
    assert offsets.figures() == (2, 0, 0)
    assert opened.memory.pool.footprint_bytes <= limit and opened.taken() <= limit
    assert opened.asked == []
    assert second.data.ptr - first.data.ptr == first.nbytes
    del first, second
    assert offsets.follow(arena, False)  # the memory is there by now
    taken = opened.taken()
    offsets.seek(0)
    again = opened.allocate(int(GRANULES * 0.3))
    assert opened.taken() == taken
    del again


def test_an_arena_without_memory_once_it_has_settled(opened):
    """In its first iteration it may lack memory: what lies elsewhere is to move in."""
    offsets = opened.device.offsets
    kept = [opened.allocate(1.5) for _ in range(200)]
    del kept[1::2]  # granules that are half in use stay
    opened.pool.give_back()
    wasted = opened.memory.pool.footprint_bytes - opened.memory.used_bytes
    most = opened.memory.limit_bytes - opened.memory.used_bytes
    arena = opened.arena((most - wasted // 2) // opened.granule)
    for settled in (False, True):
        assert offsets.follow(arena, not settled)
        offsets.seek(0)
        with pytest.raises(OutOfMemoryError):
            opened.allocate(arena.slab_bytes // opened.granule)
        assert offsets.figures().placed == 0
    assert not offsets.follow(arena, False)
    assert wasted // 4 < offsets.missing_bytes < wasted
    offsets.release()
    assert opened.memory.pool.footprint_bytes - opened.memory.used_bytes == wasted


@pytest.mark.parametrize('seed', range(6))
def test_blocks_keep_what_is_written_inside_the_limit(opened, seed):
    """Large and small ones of all sizes, close to the limit, in any order."""
    chance, kept = random.Random(seed), {}
    limit, refused = opened.memory.limit_bytes, 0
    assert opened.pool.whole_bytes < 8 * opened.granule
    for number in range(300):
        granules = chance.choice([0.001, 0.3, 1, 2.5, 40, 150])
        try:
            array = opened.allocate(granules, chance.uniform(0.2, 1.0))
        except OutOfMemoryError:
            refused += 1
            for _ in range(chance.randrange(1, 5)):
                kept.pop(chance.choice(list(kept)), None)
            continue
        array[...] = number % 251
        kept[number] = array
        if chance.random() < 0.3:
            kept.pop(chance.choice(list(kept)))
        assert opened.memory.pool.footprint_bytes <= limit
        if number % 50 == 0:
            assert opened.taken() == opened.memory.pool.footprint_bytes
    assert refused > 5
    for number, array in kept.items():
        assert (array.get() == number % 251).all()
    kept.clear()
    del array
    opened.pool.give_back()
    assert opened.memory.pool.footprint_bytes == opened.taken() == 0


def test_what_is_free_is_not_given_back_without_need(opened):
    def work():
        kept = [opened.allocate(n) for n in (30, 0.01, 7, 50)]
        del kept[::2]
        return opened.allocate(20)

    work()
    held, asked = opened.memory.pool.footprint_bytes, opened.pool._asked
    work()
    assert (opened.memory.pool.footprint_bytes, opened.pool._asked) == (held, asked)


def test_small_blocks_keep_no_large_ones_memory(opened):
    """Of each pair the large one goes, and the small one stays."""
    whole = opened.pool.whole_bytes
    stay = []
    for _ in range(20):
        large = opened.allocate(25)
        stay.append(opened.allocate(0.01))
        del large
    opened.pool.give_back()
    assert all(array.nbytes < whole for array in stay)
    most = opened.memory.used_bytes + 2 * opened.granule
    assert opened.memory.pool.footprint_bytes <= most
    del stay


def test_a_slab_with_many_holes_gets_a_successor(opened, monkeypatch):
    monkeypatch.setattr(block_pool, 'CROWDED_HOLES', 32)
    kept = [opened.allocate(0.02) for _ in range(400)]
    del kept[::2]
    kept += [opened.allocate(0.03) for _ in range(100)]
    assert len(opened.pool._all) > 1
    addresses = sorted((a.data.ptr, a.nbytes) for a in kept)
    for (one, nbytes), (other, _) in itertools.pairwise(addresses):
        assert one + nbytes <= other
    del kept
    opened.pool.give_back()
    assert opened.memory.pool.footprint_bytes == 0


def test_arrays_outlive_the_device(opened):
    array = opened.allocate(40)
    array[...] = 7
    opened.memory.uninstall()
    opened.device.close()
    assert opened.taken() <= array.nbytes + opened.granule
    assert (array.get() == 7).all()
    del array
    gc.collect()
    assert opened.taken() == 0


def test_a_limit_of_few_granules_maps_nothing(opened):
    from chainer_hybridmem.training.devices.cuda.device import CudaDevice

    device = CudaDevice(opened.granule * LEAST_GRANULES - 1)
    assert not device.memory.pool.maps and not device.offsets.moves_in
    device.close()


def test_a_process_that_sees_several_gpus_maps_nothing_by_itself(monkeypatch):
    from chainer_hybridmem.training.devices.cuda.gpu import Gpu
    from chainer_hybridmem.training.devices.cuda.mapping import find_mapper

    gpu = Gpu(None)
    monkeypatch.delenv('HYBRIDMEM_MAP', raising=False)
    mapper = find_mapper(gpu, 1 << 40)
    assert (mapper is None) == (gpu.runtime.getDeviceCount() > 1)
    for wish, maps in (('0', False), ('1', True)):
        monkeypatch.setenv('HYBRIDMEM_MAP', wish)
        assert (find_mapper(gpu, 1 << 40) is not None) == maps


# -- what only the emulator can show -------------------------------------------
emulated = pytest.mark.skipif(
    'EMU_LIBRARY' not in os.environ, reason='needs the emulator: make test-cuda'
)


@pytest.fixture
def control():
    from cuda_emulator import control

    yield control
    control.schedule('random', 0)


@emulated
def test_memory_is_unmapped_after_its_last_use(opened, control):
    """The emulator ends the process otherwise."""
    control.schedule('lazy')
    for _ in range(5):
        array = opened.allocate(GRANULES * 0.7)
        array += 1
        del array  # the addition has not run
        other = opened.allocate(GRANULES * 0.4)
        more = opened.allocate(GRANULES * 0.4)
        other += 1
        del other, more


@emulated
@pytest.mark.parametrize('call', [1, 2, 50])
def test_what_the_driver_refuses_once_is_asked_for_again(opened, control, call):
    control.fail('malloc', call)
    array = opened.allocate(GRANULES * 0.7)
    control.fail('malloc', 0)
    assert opened.memory.pool.footprint_bytes == opened.taken() >= array.nbytes
    del array
    opened.pool.give_back()
    assert opened.memory.pool.footprint_bytes == opened.taken() == 0
