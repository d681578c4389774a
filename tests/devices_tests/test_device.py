"""What every device must do, whichever it is."""

import gc

import numpy
import pytest

from chainer_hybridmem.devices.link import measure_link
from chainer_hybridmem.devices.protocol import View
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.pools import IterationLog, lay_out
from chainer_hybridmem.records.plan import Tier

_MIB = 1 << 20


def _views(xp):
    base = xp.arange(2 * 3 * 4 * 5, dtype='f4').reshape(2, 3, 4, 5)
    return {
        'whole': base,
        'transposed': base.transpose(0, 3, 1, 2),
        'offset': base[1, 1:],
        'stepped': base[:, ::2, ::3],
        'reversed': base[:, ::-1, :, ::-1],
        'broadcast': xp.broadcast_to(base[0, 0], (7, 4, 5)),
        'empty': base[:, 3:],
        'no-rows': xp.empty((0, 3), 'f4'),
        'scalar': xp.array(3.5, 'f8'),
        'half': base.astype('f2'),
        'bool': base > 3,
        'fortran': xp.asfortranarray(base),
    }


def _bytes(device, root):
    nbytes = device.arrays.root_bytes(root)
    return device.arrays.restore(root, View(0, (nbytes,), (1,), '|u1'))


VIEWS = list(_views(numpy))


@pytest.mark.parametrize('name', VIEWS)
def test_view_survives_swap(opened, name):
    device, xp = opened.device, opened.xp
    array = _views(xp)[name]
    expected = array.copy()
    view, root = device.arrays.capture(array), device.arrays.root(array)
    strides, nbytes = array.strides, device.arrays.root_bytes(root)
    copy, out = device.copies.swap_out(root, None)
    device.copies.wait(out)
    del array, root, out
    target = device.memory.allocate(nbytes)
    _bytes(device, target)[...] = 255
    device.copies.wait(device.copies.swap_in(copy, target))
    restored = device.arrays.restore(target, view)
    assert restored.shape == expected.shape
    assert restored.dtype == expected.dtype
    assert restored.strides == strides
    assert device.arrays.same_bits(restored, expected)
    assert device.arrays.root(restored) is target
    whole = device.arrays.allocation_id(_bytes(device, target))
    assert device.arrays.allocation_id(restored) == whole
    copy.close()


@pytest.mark.parametrize('name', VIEWS)
def test_capture_and_restore_on_same_root(opened, name):
    array = _views(opened.xp)[name]
    device = opened.device
    again = device.arrays.restore(
        device.arrays.root(array), device.arrays.capture(array)
    )
    assert device.arrays.same_bits(again, array)
    assert device.arrays.allocation_id(again) == device.arrays.allocation_id(array)
    assert device.arrays.capture(again) == device.arrays.capture(array)


def test_counts_what_is_live(opened):
    device, xp = opened.device, opened.xp
    before = device.memory.used_bytes
    array = xp.zeros(_MIB, 'u1')
    assert device.memory.used_bytes == before + _MIB
    view = array[5:].reshape(1, -1)
    del array
    assert device.memory.used_bytes == before + _MIB
    del view
    assert device.memory.used_bytes == before


def test_peaks(opened):
    device, xp = opened.device, opened.xp
    first = xp.empty(4 * _MIB, 'u1')
    del first
    device.memory.reset_window()
    second = xp.empty(_MIB, 'u1')
    assert device.memory.peak_bytes >= 4 * _MIB
    assert _MIB <= device.memory.window_peak_bytes < 4 * _MIB
    device.memory.reset_peak()
    assert device.memory.peak_bytes == device.memory.used_bytes
    del second


def test_views_share_an_id_that_is_never_used_twice(opened):
    device, xp = opened.device, opened.xp
    seen = set()
    for _ in range(20):
        array = xp.empty(_MIB, 'u1')
        ident = device.arrays.allocation_id(array)
        assert ident and ident not in seen
        assert device.arrays.allocation_id(array[7:].T) == ident
        seen.add(ident)
        del array


def test_events(opened):
    device, xp = opened.device, opened.xp
    device.memory.start_events()
    first = xp.empty(_MIB, 'u1')
    second = xp.empty(2 * _MIB, 'u1')
    one, two = device.arrays.allocation_id(first), device.arrays.allocation_id(second)
    del first
    assert device.memory.event_count == 3
    sizes = [(one, _MIB), (two, 2 * _MIB), (-one, _MIB)]
    assert device.memory.take_events() == sizes
    del second
    assert device.memory.event_count == 0


def test_refuses_what_does_not_fit(opened):
    device, xp = opened.device, opened.xp
    kept = xp.empty(10 * _MIB, 'u1')
    with pytest.raises(MemoryError):
        xp.empty(7 * _MIB, 'u1')
    assert opened.asked == [
        device.memory.used_bytes + 7 * _MIB - device.memory.limit_bytes
    ]
    assert device.memory.last_failure == (7 * _MIB, device.memory.used_bytes)
    with pytest.raises(OutOfMemoryError) as caught:
        device.memory.allocate(7 * _MIB)
    assert caught.value.requested_bytes == 7 * _MIB
    assert str(device.memory.limit_bytes) in str(caught.value)
    assert xp.empty(5 * _MIB, 'u1').nbytes == 5 * _MIB
    del kept


def test_reclaim_makes_room(opened):
    xp = opened.xp
    kept = [xp.empty(10 * _MIB, 'u1')]
    opened.give_up = kept.clear
    assert xp.empty(12 * _MIB, 'u1').nbytes == 12 * _MIB
    assert len(opened.asked) == 1


def test_reclaim_is_not_called_from_reclaim(opened):
    xp = opened.xp
    kept = [xp.empty(10 * _MIB, 'u1')]

    def allocate_too_much():
        with pytest.raises(MemoryError):
            xp.empty(8 * _MIB, 'u1')
        kept.clear()

    opened.give_up = allocate_too_much
    xp.empty(8 * _MIB, 'u1')
    assert len(opened.asked) == 1


def test_reclaim_error_is_kept(opened):
    xp = opened.xp
    kept = xp.empty(10 * _MIB, 'u1')

    def fail():
        raise RuntimeError('lost')

    opened.give_up = fail
    with pytest.raises(MemoryError):
        xp.empty(8 * _MIB, 'u1')
    assert str(opened.device.memory.reclaim_error) == 'lost'
    del kept


def test_arrays_outlive_uninstall(opened):
    device, xp = opened.device, opened.xp
    array = xp.ones(_MIB, 'u1')
    device.memory.uninstall()
    xp.empty(64 * _MIB, 'u1')  # no limit any more
    assert int(array.sum()) == _MIB
    del array
    assert device.memory.used_bytes == 0


def test_adopted_arrays_count_until_they_die(opened):
    device, xp = opened.device, opened.xp
    device.memory.uninstall()
    array = xp.zeros((4, _MIB // 16), 'f4')
    other = xp.zeros(8, 'f4')
    device.memory.install(opened.reclaim)
    before = device.memory.used_bytes
    device.memory.adopt([array, array[1:], array.T])
    assert device.memory.used_bytes == before + _MIB
    assert device.arrays.allocation_id(array.T) != 0
    assert device.arrays.allocation_id(other) == 0
    ident = device.arrays.allocation_id(array)
    device.memory.start_events()
    del array
    gc.collect()
    assert device.memory.used_bytes == before
    assert device.memory.take_events() == [(-ident, _MIB)]


def test_host_bytes_follow_copies(opened):
    device = opened.device
    opened.reserve(3 * _MIB)
    assert opened.host_bytes == 3 * _MIB
    roots = [device.memory.allocate(_MIB) for _ in range(4)]
    pairs = [device.copies.swap_out(root, None) for root in roots]
    for _, transfer in pairs:
        device.copies.wait(transfer)
    grows = device.kind == 'cuda'  # pinned memory does, by more than is asked for
    assert opened.host_bytes == (4.5 if grows else 4) * _MIB
    device.clock.synchronize()
    for copy, _ in pairs:
        copy.close()
        copy.close()
    assert opened.host_bytes == (4.5 if grows else 3) * _MIB
    opened.reserve(3 * _MIB)
    assert opened.host_bytes == 3 * _MIB


def test_copy_is_written_again(opened):
    device = opened.device
    root = device.memory.allocate(1024)
    array = _bytes(device, root)
    copy = None
    for value in (3, 4):
        array[...] = value
        copy, transfer = device.copies.swap_out(root, copy)
        device.copies.wait(transfer)
    array[...] = 0
    transfer = device.copies.swap_in(copy, root)
    device.copies.wait(transfer)
    device.clock.synchronize()
    assert transfer.done() and transfer.seconds() >= 0
    assert int(array.sum()) == 4096
    copy.close()


def test_swap_in_waits_for_its_swap_out(opened):
    device = opened.device
    root, target = device.memory.allocate(4 * _MIB), device.memory.allocate(4 * _MIB)
    _bytes(device, root)[...] = 9
    _bytes(device, target)[...] = 0
    copy, out = device.copies.swap_out(root, None)
    inward = device.copies.swap_in(copy, target)
    device.copies.wait(inward)
    device.copies.wait(out)
    assert bool((_bytes(device, target) == 9).all())
    copy.close()


def test_freed_host_space_is_not_used_while_a_copy_reads_it(opened):
    device = opened.device
    opened.reserve(4 * _MIB)
    first, second = device.memory.allocate(4 * _MIB), device.memory.allocate(4 * _MIB)
    _bytes(device, first)[...] = 1
    _bytes(device, second)[...] = 2
    copy, out = device.copies.swap_out(first, None)
    device.copies.wait(out)
    _bytes(device, first)[...] = 0
    inward = device.copies.swap_in(copy, first)
    copy.close()
    copy, out = device.copies.swap_out(second, None)
    device.copies.wait(inward)
    device.copies.wait(out)
    assert bool((_bytes(device, first) == 1).all())
    copy.close()


def test_copy_of_another_size_is_refused(opened):
    device = opened.device
    copy, transfer = device.copies.swap_out(device.memory.allocate(1024), None)
    device.copies.wait(transfer)
    with pytest.raises(ValueError, match='1024'):
        device.copies.swap_in(copy, device.memory.allocate(2048))
    copy.close()


def test_same_bits(opened):
    device, xp = opened.device, opened.xp
    nan = xp.full((3, 5), numpy.nan, 'f4')
    assert device.arrays.same_bits(nan, nan.copy())
    assert not device.arrays.same_bits(xp.zeros(3), -xp.zeros(3))
    assert not device.arrays.same_bits(xp.zeros(3), xp.zeros(4))
    assert not device.arrays.same_bits(xp.zeros(3, 'f4'), xp.zeros(3, 'i4'))
    for shape in ((1, 700_000), (700_000, 1), (3, 1, 300_000)):
        left = xp.arange(numpy.prod(shape), dtype='f4').reshape(shape)
        right = left.copy()
        assert device.arrays.same_bits(left, right)
        assert device.arrays.same_bits(left.T, right.T)
        right[..., -1] = -1
        assert not device.arrays.same_bits(left, right)


def test_owns(opened):
    assert opened.device.arrays.owns(opened.xp.zeros(3))
    assert not opened.device.arrays.owns([1.0])
    assert not opened.device.arrays.owns(None)


def test_stalls_and_marks(opened):
    device = opened.device
    root = device.memory.allocate(8 * _MIB)
    start = device.clock.mark()
    copy, transfer = device.copies.swap_out(root, None)
    device.copies.wait(transfer)
    end = device.clock.mark()
    device.clock.synchronize()
    assert (
        0
        <= device.copies.take_stall_seconds()
        <= device.clock.elapsed(start, end) + 1e-3
    )
    assert device.copies.take_stall_seconds() == 0
    copy.close()


def test_measured_link_leaves_nothing_behind(opened):
    device = opened.device
    before = device.memory.used_bytes
    tier = Tier.RAM if device.copies.host_room(Tier.RAM) else Tier.DISK
    link = measure_link(device, _MIB, tier)
    assert 0 <= link.latency_seconds < 0.1
    assert link.d2h_bytes_per_second > 1e6 and link.h2d_bytes_per_second > 1e6
    assert 0 < link.duplex_share <= 1
    assert 0 < link.d2h_compute_share <= 1 and 0 < link.h2d_compute_share <= 1
    assert (link.issue_seconds > 0) == device.clock.asynchronous
    assert device.memory.used_bytes == before
    opened.reserve(0)
    assert opened.host_bytes == 0
    assert not opened.asked


def test_description_is_plain(opened):
    import json

    described = opened.device.describe()
    assert described['kind'] == opened.device.kind
    json.dumps(described)


def _address(root):
    return root.ctypes.data if isinstance(root, numpy.ndarray) else root.ptr


def test_allocations_lie_where_an_arena_says(opened):
    """The second one is not there in time for the third one to move down."""
    device = opened.device
    sizes = [1 << 16, 3 << 16, 1 << 17]
    events = [(1, sizes[0]), (2, sizes[1]), (-1, sizes[0]), (3, sizes[2])]
    log = IterationLog((*events, (-2, sizes[1]), (-3, sizes[2])), (0, 3), 0)
    arena = lay_out(
        (log, log), device.offsets.block_bytes, device.offsets.alignment_bytes
    )
    assert device.offsets.follow(arena)
    addresses = []
    for _ in range(2):
        device.offsets.seek(0)
        first, second = (
            device.memory.allocate(sizes[0]),
            device.memory.allocate(sizes[1]),
        )
        device.offsets.seek(1)
        addresses.append([_address(first), _address(second)])
        del first
        third = device.memory.allocate(sizes[2])
        addresses[-1].append(_address(third))
        del second, third
    assert addresses[0] == addresses[1]
    base = addresses[0][0] - arena.entries[0][1]
    assert [a - base for a in addresses[0]] == [o for _, o in arena.entries]
    device.offsets.seek(-1)
    assert device.offsets.figures() == (6, 0, 0)
    assert _address(device.memory.allocate(sizes[0])) != addresses[0][0]
