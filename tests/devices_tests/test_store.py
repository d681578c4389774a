"""Space management of host copies, and what happens when there is none."""

import errno
import mmap
import os
import stat

import hypothesis
import numpy
import pytest
from hypothesis import strategies

from chainer_hybridmem.errors import HostFullError, SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.swap_store import store
from chainer_hybridmem.training.devices.swap_store.blocks import RamBlock
from chainer_hybridmem.training.devices.swap_store.space import FreeList

_MIB = 1 << 20


@hypothesis.given(
    strategies.lists(
        strategies.tuples(strategies.booleans(), strategies.integers(1, 40))
    )
)
def test_free_list_never_hands_out_a_byte_twice(steps):
    free = FreeList(100)
    taken = []
    for take, number in steps:
        if take:
            offset = free.take(number)
            if offset is not None:
                new = range(offset, offset + number)
                assert new.stop <= 100
                assert all(new.start >= r.stop or new.stop <= r.start for r in taken)
                taken.append(new)
        elif taken:
            old = taken.pop(number % len(taken))
            free.give(old.start, len(old))
    for old in taken:
        free.give(old.start, len(old))
    assert free.take(100) == 0


@pytest.fixture(params=['ram', 'file'])
def opened(request, tmp_path):
    made = (
        store.Store(RamBlock, Tier.RAM)
        if request.param == 'ram'
        else store.FileStore(str(tmp_path))
    )
    yield made
    made.close()


@pytest.fixture
def grown():
    made = store.RamStore()
    yield made
    made.close()


def test_what_becomes_free_is_taken_again(grown):
    sizes = [10, store.GROWN_BYTES // 8, 3 * store.GROWN_BYTES, store.GROWN_BYTES]

    def iterate():
        spaces = [grown.take(size) for size in sizes * 3]
        for space in spaces:
            space.close()
        return grown.host_bytes, list(grown._slabs)

    held = iterate()
    assert held[0] >= 3 * sum(sizes)
    assert [iterate() for _ in range(3)] == [held] * 3


def test_many_sizes_keep_no_blocks_for_each(grown):
    sizes = [store.GROWN_BYTES * k // 2 for k in range(3, 20)]
    for size in [*sizes, *reversed(sizes), *sizes]:
        spaces = [grown.take(size) for _ in range(5)]
        assert grown.host_bytes <= 5 * max(sizes)
        for space in spaces:
            space.close()


def test_a_plan_ends_what_has_grown(grown):
    space = grown.take(10)
    grown.reserve(1000)
    assert grown.host_bytes == store.GROWN_BYTES + 1000
    space.close()
    assert grown.host_bytes == 1000
    within, beyond = grown.take(1000), grown.take(1000)
    assert grown.host_bytes == store.GROWN_BYTES + 1000
    beyond.close()
    grown.reserve(1000)
    assert grown.host_bytes == 1000
    within.close()


def test_host_memory_within_a_limit_comes_as_it_is_asked_for():
    limited = store.RamStore(1000)
    first = limited.take(600)
    assert limited.host_bytes == 600
    with pytest.raises(HostFullError):
        limited.take(600)
    first.close()
    assert limited.host_bytes == 0
    limited.close()


def test_as_much_as_is_needed_where_more_cannot_be_had(monkeypatch):
    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.swap_store.blocks.available_ram',
        lambda: 5000,
    )
    short = store.RamStore()
    short.take(4096)
    assert short.host_bytes == 4096
    with pytest.raises(SwapStoreError, match='5000 bytes are available'):
        short.take(5001)
    short.close()


def test_slab_is_shared_and_the_rest_gets_blocks(opened):
    opened.reserve(1000)
    first, second = opened.take(600), opened.take(400)
    assert opened.host_bytes == 1000
    third = opened.take(300)
    assert opened.host_bytes == 1300
    third.close()
    assert opened.host_bytes == 1000
    first.close()
    opened.take(500)
    assert opened.host_bytes == 1000
    second.close()


def test_new_slab_replaces_the_old_one_when_that_is_empty(opened):
    opened.reserve(1000)
    space = opened.take(10)
    opened.reserve(1000)
    assert opened.host_bytes == 1000
    opened.reserve(500)
    assert opened.host_bytes == 1500
    space.close()
    fits = opened.take(500)
    assert opened.host_bytes <= 1500
    fits.close()
    opened.reserve(0)
    assert opened.host_bytes == 0


def test_contents_are_kept_apart(opened):
    opened.reserve(3000)
    data = [numpy.full(1500, value, 'u1') for value in range(4)]
    spaces = [opened.take(1500) for _ in data]
    for space, array in zip(spaces, data, strict=True):
        space.block.write(space.offset, array.ctypes.data, 1500)
    for value, space in enumerate(spaces):
        back = numpy.empty(1500, 'u1')
        space.block.read(space.offset, back.ctypes.data, 1500)
        assert (back == value).all()


def test_closed_space_cannot_be_used(opened):
    space = opened.take(10)
    space.close()
    with pytest.raises(SwapStoreError, match='closed'):
        assert space.block


@pytest.mark.parametrize(
    'error', [OSError(errno.ENOMEM, 'no'), MemoryError('no'), ValueError('no')]
)
def test_refused_memory_is_a_store_error(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(mmap, 'mmap', refuse)
    with pytest.raises(SwapStoreError, match='12345') as caught:
        store.RamStore().reserve(12345)
    assert isinstance(caught.value, OSError)


def test_more_than_the_machine_has_is_refused():
    with pytest.raises(SwapStoreError, match='available'):
        store.RamStore().reserve(1 << 50)


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(SwapStoreError, match='missing'):
        HostDevice(_MIB, swap_dir=str(tmp_path / 'missing'))


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(SwapStoreError, match='cannot be used'):
        HostDevice(_MIB, swap_dir=str(tmp_path))


def test_folder_that_is_a_file(tmp_path):
    path = tmp_path / 'file'
    path.write_text('')
    with pytest.raises(SwapStoreError, match='cannot be used'):
        HostDevice(_MIB, swap_dir=str(path))


def test_a_relative_folder_stays_the_same_one(tmp_path, monkeypatch):
    """Programs change their folder."""
    (tmp_path / 'swap').mkdir()
    monkeypatch.chdir(tmp_path)
    opened = store.FileStore('swap')
    monkeypatch.chdir('/')
    opened.reserve(_MIB)
    assert opened.take(_MIB).nbytes == _MIB
    opened.close()


def test_nothing_is_left_in_the_folder(tmp_path):
    opened = store.FileStore(str(tmp_path))
    opened.reserve(_MIB)
    assert list(tmp_path.iterdir()) == []
    opened.close()


def test_full_disk_is_found_before_copying(monkeypatch, tmp_path):
    def full(fd, offset, length):
        os.ftruncate(fd, offset + 100)  # some of it was taken
        raise OSError(errno.ENOSPC, 'No space left on device')

    opened = store.FileStore(str(tmp_path))
    opened.reserve(1000)
    monkeypatch.setattr(os, 'posix_fallocate', full)
    with pytest.raises(SwapStoreError) as caught:
        opened.take(5000)
    assert str(tmp_path) in str(caught.value)
    assert '5000' in str(caught.value) and 'free' in str(caught.value)
    assert opened.host_bytes == 1000
    assert opened.take(1000).nbytes == 1000
    opened.close()


@pytest.mark.parametrize('broken', ['pwrite', 'preadv'])
@pytest.mark.parametrize('how', ['error', 'short'])
def test_broken_disk_is_reported_by_wait(host_on_disk, monkeypatch, broken, how):
    def break_down(*args):
        if how == 'short':
            return 0
        raise OSError(errno.EIO, 'Input/output error')

    root = host_on_disk.memory.allocate(1000)
    copy, transfer = host_on_disk.copies.swap_out(root, None)
    host_on_disk.copies.wait(transfer)
    monkeypatch.setattr(os, broken, break_down)
    if broken == 'pwrite':
        copy, transfer = host_on_disk.copies.swap_out(root, copy)
    else:
        transfer = host_on_disk.copies.swap_in(copy, root)
    with pytest.raises(SwapStoreError, match='1000'):
        host_on_disk.copies.wait(transfer)
    del root, transfer
    assert host_on_disk.memory.used_bytes == 0
    copy.close()


def test_copy_whose_swap_out_failed_cannot_come_back(host_on_disk, monkeypatch):
    def break_down(*args):
        raise OSError(errno.EIO, 'Input/output error')

    root = host_on_disk.memory.allocate(1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'pwrite', break_down)
        copy, transfer = host_on_disk.copies.swap_out(root, None)
        with pytest.raises(SwapStoreError):
            host_on_disk.copies.wait(transfer)
    with pytest.raises(SwapStoreError):
        host_on_disk.copies.wait(host_on_disk.copies.swap_in(copy, root))


def test_short_writes_and_reads_are_continued(host_on_disk, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, 'pwrite', lambda f, d, at: pwrite(f, d[:7], at))
    monkeypatch.setattr(os, 'preadv', lambda f, d, at: preadv(f, [d[0][:7]], at))
    root = host_on_disk.memory.allocate(100)
    root[...] = numpy.arange(100)
    copy, transfer = host_on_disk.copies.swap_out(root, None)
    host_on_disk.copies.wait(transfer)
    root[...] = 0
    host_on_disk.copies.wait(host_on_disk.copies.swap_in(copy, root))
    assert (root == numpy.arange(100)).all()


@pytest.fixture
def host_on_disk(open_host, tmp_path):
    return open_host(swap_dir=str(tmp_path))


def make_growing(limit_bytes=None, refuse_above=1 << 40):
    """A store that grows by 1,000 bytes at least, and the sizes of its blocks."""
    sizes = []

    def make_block(nbytes):
        if nbytes > refuse_above:
            raise MemoryError('no more')
        sizes.append(nbytes)
        return RamBlock(nbytes)

    return store.Store(make_block, Tier.RAM, limit_bytes, 1000, pinned=True), sizes


def test_a_store_that_grows_takes_larger_blocks_and_keeps_them():
    grown, sizes = make_growing()
    spaces = [grown.take(400) for _ in range(5)]
    assert sizes == [1000, 1000, 1000]
    for space in spaces:
        space.close()
    assert grown.host_bytes == 3000
    assert [grown.take(n).nbytes for n in (900, 1000, 700)] and sizes == [1000] * 3
    grown.take(2000)
    assert sizes[3:] == [2000]
    grown.take(10)
    grown.take(5000)
    assert sizes[4:] == [5000]  # ten bytes have found a hole
    grown.close()


def test_a_plan_reserves_what_a_store_that_grows_lacks():
    grown, sizes = make_growing()
    spaces = [grown.take(1000) for _ in range(3)]
    grown.reserve(4500)
    assert sizes == [1000, 1000, 1000, 1500] and grown.host_bytes == 4500
    for space in spaces[:2]:
        space.close()
    grown.reserve(2600)
    assert grown.host_bytes == 3000  # neither what is in use nor what is needed goes
    grown.close()


def test_a_store_that_grows_keeps_its_limit_and_takes_what_there_is():
    grown, sizes = make_growing(limit_bytes=1700)
    grown.take(900), grown.take(650)
    assert sizes == [1000, 700]
    with pytest.raises(HostFullError, match='host_limit'):
        grown.take(200)
    grown.close()
    grown, sizes = make_growing(refuse_above=900)
    grown.take(600)
    assert sizes == [600]
    with pytest.raises(SwapStoreError, match='no more'):
        grown.take(950)
    grown.close()
