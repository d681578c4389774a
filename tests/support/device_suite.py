"""What every device must do, as tests."""

from __future__ import annotations

import contextvars
import gc
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.planning.layouts import IterationLog, lay_out
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.link import measure_link
from chainer_hybridmem.training.devices.protocol import Array, Device, Root, View

MIB = 1 << 20


class Opened:
    """An installed device.

    Args:
        device: The device.
        xp: Its array module.

    Attributes:
        asked (list of int): Bytes that ``reclaim`` was asked for.
        give_up (callable): What ``reclaim`` does.
    """

    def __init__(self, device: Device, xp: Any) -> None:
        self.device = device
        self.xp = xp
        self.asked: list[int] = []
        self.give_up: Callable[[], object] = lambda: None

    @property
    def host_bytes(self) -> int:
        """What host copies hold in all tiers."""
        return self.device.copies.host_bytes + self.device.copies.disk_bytes

    def reserve(self, nbytes: int) -> None:
        """Takes slabs of so many bytes in all, in RAM first."""
        ram = min(nbytes, self.device.copies.host_room(Tier.RAM))
        self.device.copies.reserve(ram, nbytes - ram)

    def reclaim(self, nbytes: int) -> None:
        """What the device calls when memory is short."""
        self.asked.append(nbytes)
        self.give_up()

    def bytes_of(self, root: Root) -> Array:
        """An allocation as an array of bytes."""
        nbytes = self.device.arrays.root_bytes(root)
        return self.device.arrays.restore(root, View(0, (nbytes,), (1,), '|u1'))

    def address_of(self, root: Root) -> int:
        """Where an allocation begins."""
        array = self.bytes_of(root)
        if isinstance(array, numpy.ndarray):
            return int(array.ctypes.data)
        return int(array.data.ptr)


def make_views(xp: Any) -> dict[str, Array]:
    """Arrays that look at their memory in every way there is."""
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


VIEWS = list(make_views(numpy))


class DeviceConformance:
    """What every device must do: a class derived from this one gives the device.

    >>> class TestMine(DeviceConformance):
    ...     @pytest.fixture
    ...     def device(self):  # new, and not installed
    ...         return MyDevice(self.limit_bytes)

    A fixture ``xp`` gives its array module, where that is not NumPy.

    Attributes:
        limit_bytes (int): Memory limit of the device.
    """

    limit_bytes = 16 * MIB

    # -- what is tested ---------------------------------------------------------
    @pytest.fixture
    def device(self) -> Device:
        """A new device with :attr:`limit_bytes`, not installed."""
        raise NotImplementedError('a class derived from this one gives the device')

    @pytest.fixture
    def xp(self) -> Any:
        """The array module of the device."""
        return numpy

    @pytest.fixture
    def opened(self, device: Device, xp: Any) -> Iterator[Opened]:
        """The device installed; uninstalled and closed afterwards."""
        opened = Opened(device, xp)
        device.memory.install(opened.reclaim)
        yield opened
        device.memory.uninstall()
        device.close()

    # -- tests ------------------------------------------------------------------
    @pytest.mark.parametrize('name', VIEWS)
    def test_view_survives_swap(self, opened: Opened, name: str) -> None:
        device, xp = opened.device, opened.xp
        array = make_views(xp)[name]
        expected = array.copy()
        view, root = device.arrays.capture(array), device.arrays.root(array)
        strides, nbytes = array.strides, device.arrays.root_bytes(root)
        copy, out = device.copies.swap_out(root, None)
        device.copies.wait(out)
        del array, root, out
        target = device.memory.allocate(nbytes)
        opened.bytes_of(target)[...] = 255
        device.copies.wait(device.copies.swap_in(copy, target))
        restored = device.arrays.restore(target, view)
        assert restored.shape == expected.shape
        assert restored.dtype == expected.dtype
        assert restored.strides == strides
        assert device.arrays.same_bits(restored, expected)
        assert device.arrays.root(restored) is target
        whole = device.arrays.allocation_id(opened.bytes_of(target))
        assert device.arrays.allocation_id(restored) == whole
        copy.close()

    @pytest.mark.parametrize('name', VIEWS)
    def test_capture_and_restore_on_same_root(self, opened: Opened, name: str) -> None:
        array = make_views(opened.xp)[name]
        device = opened.device
        again = device.arrays.restore(
            device.arrays.root(array), device.arrays.capture(array)
        )
        assert device.arrays.same_bits(again, array)
        assert device.arrays.allocation_id(again) == device.arrays.allocation_id(array)
        assert device.arrays.capture(again) == device.arrays.capture(array)

    def test_counts_what_is_live(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        before = device.memory.used_bytes
        array = xp.zeros(MIB, 'u1')
        assert device.memory.used_bytes == before + MIB
        view = array[5:].reshape(1, -1)
        del array
        assert device.memory.used_bytes == before + MIB
        del view
        assert device.memory.used_bytes == before

    def test_peaks(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        first = xp.empty(4 * MIB, 'u1')
        del first
        device.memory.reset_window()
        second = xp.empty(MIB, 'u1')
        assert device.memory.peak_bytes >= 4 * MIB
        assert MIB <= device.memory.window_peak_bytes < 4 * MIB
        device.memory.reset_peak()
        assert device.memory.peak_bytes == device.memory.used_bytes
        with device.memory.peak_kept():
            third = xp.empty(8 * MIB, 'u1')
            del third
        assert device.memory.peak_bytes == device.memory.used_bytes
        assert device.memory.highest_bytes < 4 * MIB  # that was before the first one
        fourth = xp.empty(5 * MIB, 'u1')
        del fourth
        device.memory.reset_peak()
        assert 5 * MIB <= device.memory.highest_bytes < 8 * MIB
        del second

    def test_views_share_an_id_that_is_never_used_twice(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        seen = set()
        for _ in range(20):
            array = xp.empty(MIB, 'u1')
            ident = device.arrays.allocation_id(array)
            assert ident and ident not in seen
            assert device.arrays.allocation_id(array[7:].T) == ident
            seen.add(ident)
            del array

    def test_memory_is_found_while_any_array_is_there(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        array = xp.empty(MIB, 'u1')
        ident = device.arrays.allocation_id(array)
        view = device.arrays.capture(array)
        find = device.arrays.track(array)
        other = device.arrays.restore(device.arrays.root(array), view)
        del array
        root = find()
        assert root is not None
        again = device.arrays.restore(root, view)
        assert device.arrays.allocation_id(again) == ident
        del root, other
        assert find() is not None
        del again
        assert find() is None

    def test_each_last_look_sees_memory_before_it_is_free(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        array = xp.full(MIB, 7, 'u1')
        root = device.arrays.root(array)
        seen: list[tuple[str, int]] = []

        def look_as(name: str) -> Callable[[int], None]:
            def look(address: int) -> None:
                memory = device.arrays.memory_at(address, MIB)
                whole = device.arrays.restore(memory, View(0, (MIB,), (1,), '|u1'))
                seen.append((name, int(whole.sum(dtype='i8'))))

            return look

        kept = [device.arrays.last_look(root, look_as(name)) for name in ('a', 'b')]
        given_up = device.arrays.last_look(root, look_as('c'))
        del given_up
        view = array[5:]
        del array, root
        assert not seen
        view[:] = 9
        del view
        assert sorted(seen) == [(name, 9 * MIB - 10) for name in ('a', 'b')]
        del kept

    def test_events(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        device.memory.start_events()
        first = xp.empty(MIB, 'u1')
        second = xp.empty(2 * MIB, 'u1')
        one, two = (
            device.arrays.allocation_id(first),
            device.arrays.allocation_id(second),
        )
        del first
        assert device.memory.event_count == 3
        sizes = [(one, MIB), (two, 2 * MIB), (-one, MIB)]
        assert device.memory.take_events() == sizes
        del second
        assert device.memory.event_count == 0

    def test_refuses_what_does_not_fit(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        kept = xp.empty(10 * MIB, 'u1')
        with pytest.raises(MemoryError):
            xp.empty(7 * MIB, 'u1')
        assert opened.asked == [
            device.memory.used_bytes + 7 * MIB - device.memory.limit_bytes
        ]
        assert device.memory.last_failure == (7 * MIB, device.memory.used_bytes)
        with pytest.raises(OutOfMemoryError) as caught:
            device.memory.allocate(7 * MIB)
        assert caught.value.requested_bytes == 7 * MIB
        assert str(device.memory.limit_bytes) in str(caught.value)
        assert xp.empty(5 * MIB, 'u1').nbytes == 5 * MIB
        del kept

    def test_reclaim_makes_room(self, opened: Opened) -> None:
        xp = opened.xp
        kept = [xp.empty(10 * MIB, 'u1')]
        opened.give_up = kept.clear
        assert xp.empty(12 * MIB, 'u1').nbytes == 12 * MIB
        assert len(opened.asked) == 1

    def test_reclaim_is_not_called_from_reclaim(self, opened: Opened) -> None:
        xp = opened.xp
        kept = [xp.empty(10 * MIB, 'u1')]

        def allocate_too_much() -> None:
            with pytest.raises(MemoryError):
                xp.empty(8 * MIB, 'u1')
            kept.clear()

        opened.give_up = allocate_too_much
        xp.empty(8 * MIB, 'u1')
        assert len(opened.asked) == 1

    def test_reclaim_error_is_that_of_the_last_call(self, opened: Opened) -> None:
        xp = opened.xp
        kept = xp.empty(10 * MIB, 'u1')

        def fail() -> None:
            raise RuntimeError('lost')

        opened.give_up = fail
        with pytest.raises(MemoryError):
            xp.empty(8 * MIB, 'u1')
        memory = opened.device.memory
        assert str(memory.reclaim_error) == 'lost' and not memory.wanted_bytes

        def give_way() -> None:
            nonlocal kept
            kept = None

        opened.give_up = give_way
        xp.empty(8 * MIB, 'u1')
        assert memory.reclaim_error is None

    def test_another_thread_makes_no_room(self, opened: Opened) -> None:
        """Not even in a copy of this one's context: the graph is not its own."""
        xp, made = opened.xp, []
        kept = xp.empty(10 * MIB, 'u1')
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(lambda: made.append(xp.ones(8 * MIB, 'u1')),),
        )
        thread.start()
        thread.join()
        assert len(made) == 1 and not opened.asked
        del kept

    def test_arrays_outlive_uninstall(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        array = xp.ones(MIB, 'u1')
        device.memory.uninstall()
        xp.empty(64 * MIB, 'u1')  # no limit any more
        assert int(array.sum()) == MIB
        del array
        assert device.memory.used_bytes == 0

    def test_adopted_arrays_count_until_they_die(self, opened: Opened) -> None:
        device, xp = opened.device, opened.xp
        device.memory.uninstall()
        array = xp.zeros((4, MIB // 16), 'f4')
        other = xp.zeros(8, 'f4')
        device.memory.install(opened.reclaim)

        def known_bytes() -> int:
            return device.memory.used_bytes - device.memory.other_bytes

        before = known_bytes()
        device.memory.adopt([array, array[1:], array.T])
        assert known_bytes() == before + MIB
        assert device.arrays.allocation_id(array.T) != 0
        assert device.arrays.allocation_id(other) == 0
        ident = device.arrays.allocation_id(array)
        device.memory.start_events()
        del array
        gc.collect()
        assert known_bytes() == before
        assert device.memory.take_events() == [(-ident, MIB)]

    def test_host_bytes_follow_copies(self, opened: Opened) -> None:
        device = opened.device
        opened.reserve(3 * MIB)
        assert opened.host_bytes == 3 * MIB
        roots = [device.memory.allocate(MIB) for _ in range(4)]
        pairs = [device.copies.swap_out(root, None) for root in roots]
        for _, transfer in pairs:
            device.copies.wait(transfer)
        held_bytes = opened.host_bytes  # it may grow by more than is asked for
        assert held_bytes >= 4 * MIB
        device.clock.synchronize()
        for copy, _ in pairs:
            copy.close()
            copy.close()
        assert 3 * MIB <= opened.host_bytes <= held_bytes
        opened.reserve(3 * MIB)
        assert opened.host_bytes == 3 * MIB

    def test_copy_is_written_again(self, opened: Opened) -> None:
        device = opened.device
        root = device.memory.allocate(1024)
        array = opened.bytes_of(root)
        array[...] = 3
        copy, transfer = device.copies.swap_out(root, None)
        device.copies.wait(transfer)
        array[...] = 4
        copy, transfer = device.copies.swap_out(root, copy)
        device.copies.wait(transfer)
        array[...] = 0
        transfer = device.copies.swap_in(copy, root)
        device.copies.wait(transfer)
        device.clock.synchronize()
        assert transfer.done() and transfer.seconds() >= 0
        assert int(array.sum()) == 4096
        copy.close()

    def test_swap_in_waits_for_its_swap_out(self, opened: Opened) -> None:
        device = opened.device
        root, target = device.memory.allocate(4 * MIB), device.memory.allocate(4 * MIB)
        opened.bytes_of(root)[...] = 9
        opened.bytes_of(target)[...] = 0
        copy, out = device.copies.swap_out(root, None)
        inward = device.copies.swap_in(copy, target)
        device.copies.wait(inward)
        device.copies.wait(out)
        assert bool((opened.bytes_of(target) == 9).all())
        copy.close()

    def test_freed_host_space_is_not_used_while_a_copy_reads_it(
        self, opened: Opened
    ) -> None:
        device = opened.device
        opened.reserve(4 * MIB)
        first, second = device.memory.allocate(4 * MIB), device.memory.allocate(4 * MIB)
        opened.bytes_of(first)[...] = 1
        opened.bytes_of(second)[...] = 2
        copy, out = device.copies.swap_out(first, None)
        device.copies.wait(out)
        opened.bytes_of(first)[...] = 0
        inward = device.copies.swap_in(copy, first)
        copy.close()
        copy, out = device.copies.swap_out(second, None)
        device.copies.wait(inward)
        device.copies.wait(out)
        assert bool((opened.bytes_of(first) == 1).all())
        copy.close()

    def test_copy_of_another_size_is_refused(self, opened: Opened) -> None:
        device = opened.device
        copy, transfer = device.copies.swap_out(device.memory.allocate(1024), None)
        device.copies.wait(transfer)
        with pytest.raises(ValueError, match='1024'):
            device.copies.swap_in(copy, device.memory.allocate(2048))
        copy.close()

    def test_closing_leaves_nothing(self, opened: Opened) -> None:
        """What is under way ends first; what lies on the host goes."""
        device = opened.device
        opened.reserve(2 * MIB)
        root = device.memory.allocate(MIB)
        copy, transfer = device.copies.swap_out(root, None)
        device.memory.uninstall()
        device.close()
        assert transfer.done()
        assert opened.host_bytes == 0
        assert opened.device.memory.used_bytes >= MIB
        del root, transfer
        gc.collect()
        assert device.memory.used_bytes == 0
        copy.close()

    def test_same_bits(self, opened: Opened) -> None:
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

    def test_owns(self, opened: Opened) -> None:
        assert opened.device.arrays.owns(opened.xp.zeros(3))
        assert not opened.device.arrays.owns([1.0])
        assert not opened.device.arrays.owns(None)

    def test_stalls_and_marks(self, opened: Opened) -> None:
        device = opened.device
        root = device.memory.allocate(8 * MIB)
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

    def test_measured_link_leaves_nothing_behind(self, opened: Opened) -> None:
        device = opened.device
        before = device.memory.used_bytes
        tier = Tier.RAM if device.copies.host_room(Tier.RAM) else Tier.DISK
        link = measure_link(device, MIB, tier)
        assert link is not None
        assert 0 <= link.latency_seconds < 0.1
        assert link.d2h_bytes_per_second > 1e6 and link.h2d_bytes_per_second > 1e6
        assert 0 < link.duplex_share <= 1
        assert 0 < link.d2h_compute_share <= 1 and 0 < link.h2d_compute_share <= 1
        assert (link.issue_seconds > 0) == device.clock.asynchronous
        assert device.memory.used_bytes == before
        opened.reserve(0)
        assert opened.host_bytes == 0
        assert not opened.asked

    def test_description_is_plain(self, opened: Opened) -> None:
        described = opened.device.describe()
        assert described['kind'] == opened.device.kind
        json.dumps(described)

    def test_allocations_lie_where_an_arena_says(self, opened: Opened) -> None:
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
            addresses.append([opened.address_of(first), opened.address_of(second)])
            del first
            third = device.memory.allocate(sizes[2])
            addresses[-1].append(opened.address_of(third))
            del second, third
        assert addresses[0] == addresses[1]
        base = addresses[0][0] - arena.entries[0][1]
        assert [a - base for a in addresses[0]] == [o for _, o in arena.entries]
        device.offsets.seek(-1)
        assert device.offsets.figures() == (6, 0, 0)
        assert opened.address_of(device.memory.allocate(sizes[0])) != addresses[0][0]
