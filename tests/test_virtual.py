"""The virtual machine notices what must never happen, with any copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from support.virtual import Conditions, Machine

from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.devices.host.device import HostDevice

NBYTES = 1 << 16


@pytest.fixture
def machine() -> Machine:
    return Machine(Conditions(lateness=3.0))


@pytest.fixture
def device(machine: Machine) -> Iterator[HostDevice]:
    with machine.running():
        device = HostDevice(1 << 24)
        device.memory.install(lambda nbytes: None)
        yield device
        device.memory.uninstall()
        device.close()


def full(device: HostDevice, value: int = 7) -> np.ndarray:
    root = device.memory.allocate(NBYTES)
    root[...] = value
    return root


def swapped(device: HostDevice) -> tuple[np.ndarray, object]:
    """Memory, and its host copy."""
    root = full(device)
    copy, transfer = device.copies.swap_out(root, None)
    device.copies.wait(transfer)
    return root, copy


def test_what_is_right_is_no_fault(machine, device):
    root, copy = swapped(device)
    root[...] = 0
    device.copies.wait(device.copies.swap_in(copy, root))
    assert (root == 7).all()
    assert machine.under_way == 0
    machine.check()


@pytest.mark.parametrize('outward', [True, False])
def test_memory_is_freed_while_it_is_copied(machine, device, outward):
    root, copy = swapped(device)
    if outward:
        _, transfer = device.copies.swap_out(root, copy)
    else:
        transfer = device.copies.swap_in(copy, root)
    transfer.root = None
    del root
    gc.collect()
    device.copies.wait(transfer)
    assert machine.take_faults() == [f'{NBYTES} bytes were freed in their copy']


def test_memory_is_written_while_it_comes_in(machine, device):
    root, copy = swapped(device)
    transfer = device.copies.swap_in(copy, root)
    root[5] = 1
    device.copies.wait(transfer)
    assert 'were written while they were copied in' in machine.take_faults()[0]


def test_memory_is_read_before_it_has_come_in(machine, device):
    """What nobody may use yet is poison."""
    root, copy = swapped(device)
    transfer = device.copies.swap_in(copy, root)
    assert not (root == 7).any()
    device.copies.wait(transfer)
    assert (root == 7).all()


def test_two_copies_have_the_same_memory(machine, device):
    root, copy = swapped(device)
    _, out = device.copies.swap_out(root, None)
    back = device.copies.swap_in(copy, root)
    for transfer in (out, back):
        device.copies.wait(transfer)
    assert machine.take_faults()[0] == f'{NBYTES} bytes are copied by two at once'


def test_something_else_comes_in_than_has_left(machine, device):
    root, copy = swapped(device)
    other = full(device, 8)
    copy.block.write(copy.offset, other.ctypes.data, NBYTES)
    device.copies.wait(device.copies.swap_in(copy, root))
    assert machine.take_faults() == [f'{NBYTES} bytes came in that had not left so']


def test_a_copy_outlives_its_session(machine, monkeypatch):
    monkeypatch.setattr(Copies, 'close', lambda self: None)
    with pytest.raises(AssertionError, match='1 copies outlive their session'):
        with machine.running():
            device = HostDevice(1 << 24)
            device.memory.install(lambda nbytes: None)
            _, transfer = device.copies.swap_out(full(device), None)
            device.memory.uninstall()
            device.close()
    del transfer
