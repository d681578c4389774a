"""RAM up to a limit, then the disk: counted, private, and gone with the process."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time

import hypothesis
import pytest
from hypothesis import strategies

from chainer_hybridmem.errors import HostFullError, OptionError, SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices import host_limit_bytes
from chainer_hybridmem.training.devices.host import device as host_device
from chainer_hybridmem.training.devices.host.device import HostDevice, HostOffsets
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.training.devices.link import LEAST_ROOM_BYTES, measure_link
from chainer_hybridmem.training.devices.swap_store import blocks
from chainer_hybridmem.training.devices.swap_store.store import (
    FileStore,
    RamStore,
    TieredStore,
)
from chainer_hybridmem.training.devices.swap_store.swap_file import SwapFile

_MIB = 1 << 20
LIMIT = 1000


@pytest.fixture
def tiers(tmp_path):
    store = TieredStore(RamStore(LIMIT), FileStore(str(tmp_path)))
    yield store
    store.close()


@pytest.fixture
def ram_only():
    store = TieredStore(RamStore(LIMIT), None)
    yield store
    store.close()


def test_ram_first_and_then_the_disk(tiers):
    first, second = tiers.host_copy(600, None), tiers.host_copy(500, None)
    third = tiers.host_copy(400, None)
    assert [s.tier for s in (first, second, third)] == [Tier.RAM, Tier.DISK, Tier.RAM]
    assert (tiers.host_bytes, tiers.disk_bytes) == (1000, 500)
    assert tiers.host_room(Tier.RAM) == 0
    first.close()
    assert tiers.host_copy(600, None).tier is Tier.RAM


def test_a_tier_that_is_asked_for(tiers):
    assert tiers.host_copy(600, Tier.DISK).tier is Tier.DISK
    assert tiers.host_copy(600, Tier.RAM).tier is Tier.RAM
    assert tiers.host_copy(600, Tier.RAM).tier is Tier.DISK  # it is full


def test_slabs_of_both_tiers_take_what_they_are_for(tiers):
    tiers.reserve(900, 700)
    assert (tiers.host_bytes, tiers.disk_bytes) == (900, 700)
    spaces = [tiers.host_copy(450, Tier.RAM) for _ in range(2)]
    spaces += [tiers.host_copy(350, Tier.DISK) for _ in range(2)]
    assert (tiers.host_bytes, tiers.disk_bytes) == (900, 700)
    assert [s.tier for s in spaces] == [Tier.RAM] * 2 + [Tier.DISK] * 2


def test_a_new_slab_waits_for_what_the_former_one_still_holds(tiers):
    tiers.reserve(800, 0)
    held = tiers.host_copy(100, Tier.RAM)
    tiers.reserve(900, 0)
    assert tiers.host_bytes == LIMIT
    held.close()
    tiers.reserve(900, 0)
    assert tiers.host_bytes == 900


def test_nowhere_to_go_is_refused_with_the_next_step(ram_only):
    kept = ram_only.host_copy(600, None)
    for tier in (None, Tier.RAM, Tier.DISK):
        with pytest.raises(HostFullError, match=r'401.*600 of 1000') as caught:
            ram_only.host_copy(401, tier)
        for option in ('host_limit', 'swap_dir'):
            assert option in str(caught.value)
    assert ram_only.host_refusal == str(caught.value)
    assert ram_only.host_bytes == 600
    kept.close()
    assert ram_only.host_refusal is None
    assert ram_only.host_copy(1000, None).nbytes == 1000


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    strategies.lists(
        strategies.tuples(strategies.integers(0, 4), strategies.integers(1, 700))
    )
)
def test_the_limit_is_kept_at_all_times(steps):
    """By what is held, whatever is reserved, taken and given back in between."""
    store = RamStore(LIMIT)
    taken = []
    for what, number in steps:
        if what == 0:
            store.reserve(number)
        elif what == 1 and taken:
            taken.pop(number % len(taken)).close()
        else:
            try:
                taken.append(store.take(number))
            except HostFullError:
                assert number > store.room_bytes
        assert 0 <= store.host_bytes <= LIMIT
    store.close()


def test_contents_come_back_from_both_tiers(open_host, tmp_path):
    host = open_host(swap_dir=str(tmp_path), host_limit_bytes=_MIB)
    roots = [host.memory.allocate(_MIB) for _ in range(3)]
    copies = []
    for value, root in enumerate(roots):
        root[...] = value + 1
        copy, transfer = host.copies.swap_out(root, None)
        host.copies.wait(transfer)
        root[...] = 0
        copies.append(copy)
    assert [c.tier for c in copies] == [Tier.RAM, Tier.DISK, Tier.DISK]
    assert (host.copies.host_bytes, host.copies.disk_bytes) == (_MIB, 2 * _MIB)
    for value, (copy, root) in enumerate(zip(copies, roots, strict=True)):
        host.copies.wait(host.copies.swap_in(copy, root))
        assert (root == value + 1).all()


@pytest.mark.parametrize(
    ('options', 'ram_seconds', 'disk_seconds'),
    [
        ({'disk_bandwidth': 40 * _MIB}, 0.0, 0.1),
        ({'disk_bandwidth': 40 * _MIB, 'link_bandwidth': 20 * _MIB}, 0.2, 0.2),
        ({'disk_bandwidth': 20 * _MIB, 'link_bandwidth': 40 * _MIB}, 0.1, 0.2),
    ],
)
def test_each_tier_has_its_throttle(
    open_host, tmp_path, options, ram_seconds, disk_seconds
):
    host = open_host(swap_dir=str(tmp_path), host_limit_bytes=4 * _MIB, **options)
    root = host.memory.allocate(4 * _MIB)
    for tier, seconds in ((Tier.RAM, ram_seconds), (Tier.DISK, disk_seconds)):
        copy, transfer = host.copies.swap_out(
            root, host.copies.host_copy(4 * _MIB, tier)
        )
        host.copies.wait(transfer)
        assert seconds * 0.95 <= transfer.seconds() < seconds + 0.09
        copy.close()


def test_each_tier_has_its_link(open_host, tmp_path):
    host = open_host(
        swap_dir=str(tmp_path),
        host_limit_bytes=4 * _MIB,
        link_bandwidth=200 * _MIB,
        disk_bandwidth=5 * _MIB,
    )
    ram, disk = (measure_link(host, tier=tier) for tier in Tier)
    assert host.copies.host_bytes == host.copies.disk_bytes == 0
    for link, rate in ((ram, 200 * _MIB), (disk, 5 * _MIB)):
        assert rate / 10 < link.d2h_bytes_per_second < rate * 1.1
        assert rate / 10 < link.h2d_bytes_per_second < rate * 1.1
    # A busy machine is slower, but not so much.
    assert ram.d2h_bytes_per_second > 2 * disk.d2h_bytes_per_second
    assert ram.h2d_bytes_per_second > 2 * disk.h2d_bytes_per_second


def test_measuring_keeps_the_host_limit(open_host):
    host = open_host(host_limit_bytes=_MIB, link_bandwidth=200 * _MIB)
    host.copies.host_copy(_MIB // 2)
    link = measure_link(host)
    assert 0 < link.d2h_bytes_per_second < 220 * _MIB
    assert host.copies.host_refusal is None
    assert measure_link(host, tier=Tier.DISK) is None
    host.copies.host_copy(_MIB // 2)
    assert measure_link(host) is None


class _Rounding(HostMemory):
    """Gives more than it is asked for, as CUDA does."""

    def allocate(self, nbytes):
        return super().allocate(-(-nbytes // 512) * 512)


@pytest.mark.parametrize('limit', [LEAST_ROOM_BYTES, 54321, 100_001, 3 * _MIB + 1])
def test_a_link_is_measured_with_allocations_that_are_rounded_up(limit, monkeypatch):
    monkeypatch.setattr(host_device, 'HostMemory', _Rounding)
    monkeypatch.setattr(HostOffsets, 'alignment_bytes', 512)
    device = HostDevice(16 * _MIB, host_limit_bytes=limit)
    device.memory.install(lambda missing: None)
    try:
        assert measure_link(device).d2h_bytes_per_second > 0
        assert device.copies.host_refusal is None
        assert device.copies.host_bytes == 0
    finally:
        device.memory.uninstall()
        device.close()


def test_a_link_is_measured_with_what_the_host_has(open_host, monkeypatch):
    host = open_host()
    monkeypatch.setattr(blocks, 'available_ram', lambda: 100_000)
    assert measure_link(host).d2h_bytes_per_second > 0


def test_swap_dir_alone_takes_no_ram(open_host, tmp_path):
    host = open_host(swap_dir=str(tmp_path))
    assert host.copies.host_copy(1000).tier is Tier.DISK
    assert host.describe()['swap_dir'] == 'file'


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        ({'host_limit_bytes': -1}, 'zero or more'),
        ({'disk_bandwidth': 1.0}, 'no swap_dir'),
        ({'disk_bandwidth': 0.0, 'swap_dir': '.'}, 'above zero'),
    ],
)
def test_options_that_cannot_be(options, match):
    with pytest.raises(OptionError, match=match):
        HostDevice(_MIB, **options)


def test_the_option_host_limit():
    assert host_limit_bytes(None, None) is None
    assert host_limit_bytes(None, '/scratch') == 0
    assert host_limit_bytes('1MiB', None) == _MIB
    assert host_limit_bytes(0, '/scratch') == 0
    with pytest.raises(OptionError, match='swap_dir'):
        host_limit_bytes(0, None)
    with pytest.raises(OptionError, match='zero or more'):
        host_limit_bytes(-1, '/scratch')


def test_the_disk_that_is_full_is_one_error(tiers, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'posix_fallocate', full)
    kept = tiers.host_copy(800, None)
    with pytest.raises(SwapStoreError, match=r'no room for 800 more.*No space left'):
        tiers.host_copy(800, None)
    assert (tiers.host_bytes, tiers.disk_bytes) == (800, 0)
    kept.close()


def test_the_file_is_private(tmp_path):
    file = SwapFile(str(tmp_path))
    file.make_block(8)
    status = os.fstat(file._fd)
    assert stat.S_IMODE(status.st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert status.st_nlink == 0
    file.close()


VICTIM = """
import sys, time
from chainer_hybridmem.training.devices.swap_store import blocks
from chainer_hybridmem.training.devices.host.device import HostDevice
device = HostDevice(1 << 24, swap_dir=sys.argv[1], host_limit_bytes=0)
device.memory.install(lambda nbytes: None)
copy, transfer = device.copies.swap_out(device.memory.allocate(1 << 23), None)
device.copies.wait(transfer)
print(device.copies.disk_bytes, flush=True)
time.sleep(3600)
"""


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    """Neither a name in the folder nor, once it is gone, its space."""
    victim = subprocess.Popen(
        [sys.executable, '-c', VICTIM, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert int(victim.stdout.readline()) == 1 << 23
        assert list(tmp_path.iterdir()) == []
        open_files = f'/proc/{victim.pid}/fd'
        targets = [os.readlink(f'{open_files}/{fd}') for fd in os.listdir(open_files)]
        swapped = [t for t in targets if t.startswith(str(tmp_path))]
        assert len(swapped) == 1 and swapped[0].endswith('(deleted)')
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.stdout.close()
        assert victim.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while os.path.exists(open_files) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(open_files)
    assert list(tmp_path.iterdir()) == []
