"""The suite for devices notices a device that breaks any of its rules."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
from support.device_suite import MIB, DeviceConformance, Opened

from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.host.memory import HostMemory

Break = Callable[[Opened, pytest.MonkeyPatch], object]


@pytest.fixture
def opened() -> Iterator[Opened]:
    device = HostDevice(DeviceConformance.limit_bytes)
    opened = Opened(device, numpy)
    device.memory.install(opened.reclaim)
    yield opened
    device.memory.uninstall()
    device.close()


# -- what is broken --------------------------------------------------------------
def method(port: str, name: str, other: Callable[..., Any]) -> Break:
    """One method does something else."""

    def break_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = getattr(opened.device, port) if port else opened.device
        monkeypatch.setattr(owner, name, other)

    return break_it


def figure(name: str, other: Callable[[HostMemory], Any]) -> Break:
    """One figure of the memory is another one."""
    return lambda opened, monkeypatch: monkeypatch.setattr(
        HostMemory, name, property(other)
    )


def copies_the_wrong_way(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = opened.device.copies
    monkeypatch.setattr(
        copies, 'swap_in', lambda copy, root: copies.swap_out(root, copy)[1]
    )


def forgets_strides(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = opened.device.arrays.restore
    monkeypatch.setattr(
        opened.device.arrays, 'restore', lambda root, view: restore(root, view).copy()
    )


def events_backwards(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    take = opened.device.memory.take_events
    monkeypatch.setattr(opened.device.memory, 'take_events', lambda: take()[::-1])


def lets_more_in(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened.device.memory.raise_limit(64 * MIB)


def never_asks(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> object:
    refusing = opened.device.memory.without_reclaim()
    refusing.__enter__()
    return refusing  # ends with it


def asks_while_it_asks(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(nbytes: int, dtype: str) -> numpy.ndarray:
        try:
            return numpy.empty(nbytes, dtype)
        except MemoryError:
            opened.asked.append(nbytes)
            raise

    opened.xp = types.SimpleNamespace(empty=empty)


def takes_new_space_each_time(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = opened.device.copies
    swap_out = copies.swap_out

    def out(root: Any, copy: Any) -> Any:
        other, transfer = swap_out(root, None)
        return copy or other, transfer

    monkeypatch.setattr(copies, 'swap_out', out)


def late(outward: bool) -> Break:
    """Copies in one direction take place when they are waited for, others at once."""

    def break_it(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
        copies = opened.device.copies
        wait, swap_out = copies.wait, copies.swap_out

        def out_late(root: Any, copy: Any) -> Any:
            copy = copy or copies.host_copy(opened.device.arrays.root_bytes(root))
            return copy, lambda: wait(swap_out(root, copy)[1])

        def out_at_once(root: Any, copy: Any) -> Any:
            copy, transfer = swap_out(root, copy)
            wait(transfer)
            return copy, transfer

        def back_late(copy: Any, root: Any) -> Any:
            block, offset, address = copy.block, copy.offset, opened.address_of(root)
            return lambda: block.read(offset, address, copy.nbytes)

        def wait_for(transfer: Any) -> None:
            transfer() if callable(transfer) else wait(transfer)

        monkeypatch.setattr(copies, 'wait', wait_for)
        monkeypatch.setattr(copies, 'swap_out', out_late if outward else out_at_once)
        if not outward:
            monkeypatch.setattr(copies, 'swap_in', back_late)

    return break_it


def asks_in_other_threads(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = opened.xp.ones

    def ask(*args: Any) -> Any:
        opened.reclaim(1)
        return ones(*args)

    monkeypatch.setattr(opened, 'xp', types.SimpleNamespace(empty=ones, ones=ask))


def never_frees(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> object:
    kept: list[Any] = []
    allocate = opened.device.memory.allocate

    def keep(nbytes: int) -> Any:
        kept.append(allocate(nbytes))
        return kept[-1]

    monkeypatch.setattr(opened.device.memory, 'allocate', keep)
    return kept


def does_nothing(*args: Any) -> None:
    """What a device must not do here."""


# What is broken, by the test that fails.
BROKEN: dict[str, Break] = {
    'test_view_survives_swap': copies_the_wrong_way,
    'test_capture_and_restore_on_same_root': forgets_strides,
    'test_counts_what_is_live': figure('used_bytes', lambda memory: 0),
    'test_peaks': figure('peak_bytes', lambda memory: memory.used_bytes),
    'test_views_share_an_id_that_is_never_used_twice': method(
        'arrays', 'allocation_id', lambda array: array.ctypes.data
    ),
    'test_events': events_backwards,
    'test_refuses_what_does_not_fit': lets_more_in,
    'test_reclaim_makes_room': never_asks,
    'test_reclaim_is_not_called_from_reclaim': asks_while_it_asks,
    'test_reclaim_error_is_that_of_the_last_call': figure(
        'reclaim_error', lambda memory: None
    ),
    'test_another_thread_makes_no_room': asks_in_other_threads,
    'test_arrays_outlive_uninstall': method('memory', 'uninstall', does_nothing),
    'test_memory_is_found_while_any_array_is_there': method(
        'arrays', 'track', lambda array: lambda: array
    ),
    'test_each_last_look_sees_memory_before_it_is_free': method(
        'arrays', 'last_look', lambda root, look: look(root.ctypes.data)
    ),
    'test_adopted_arrays_count_until_they_die': method('memory', 'adopt', does_nothing),
    'test_host_bytes_follow_copies': method('copies', 'reserve', does_nothing),
    'test_copy_is_written_again': takes_new_space_each_time,
    'test_swap_in_waits_for_its_swap_out': late(outward=True),
    'test_freed_host_space_is_not_used_while_a_copy_reads_it': (late(outward=False)),
    'test_copy_of_another_size_is_refused': method('copies', 'swap_in', does_nothing),
    'test_closing_leaves_nothing': method('copies', 'close', does_nothing),
    'test_same_bits': method('arrays', 'same_bits', numpy.array_equal),
    'test_owns': method('arrays', 'owns', lambda array: True),
    'test_stalls_and_marks': method('copies', 'take_stall_seconds', lambda: 1e-9),
    'test_measured_link_leaves_nothing_behind': never_frees,
    'test_description_is_plain': method(
        '', 'describe', lambda: {'kind': 'host', 'name': object()}
    ),
    'test_allocations_lie_where_an_arena_says': method('offsets', 'seek', does_nothing),
}
FAILURES = (AssertionError, MemoryError, TypeError, pytest.fail.Exception)


@pytest.mark.parametrize('test', BROKEN)
def test_a_check_fails(
    test: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = getattr(DeviceConformance(), test)
    takes_view = 'name' in inspect.signature(check).parameters
    broken = BROKEN[test](opened, monkeypatch)
    with pytest.raises(FAILURES):
        check(opened, **({'name': 'transposed'} if takes_view else {}))
    del broken


def test_each_check_has_failed() -> None:
    tests = {name for name in vars(DeviceConformance) if name.startswith('test_')}
    assert BROKEN.keys() == tests
