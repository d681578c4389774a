"""Devices that share a throttled link: rates, shares, ends of processes, wrong use."""

import itertools
import os
import signal
import stat
import statistics
import subprocess
import sys
import textwrap
import time

import pytest

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError, SwapStoreError
from chainer_hybridmem.training.devices.cuda.device import CudaDevice
from chainer_hybridmem.training.devices.host import shared_link
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.devices.host.shared_link import LATE_SECONDS, SharedLink

_MIB = 1 << 20
RATE = 40 * _MIB
LIMIT = 64 * _MIB

_counter = itertools.count()

BEGIN = """
    import os, sys, time
    from chainer_hybridmem.training.devices.host.device import HostDevice
    from chainer_hybridmem.training.devices.host.shared_link import SharedLink
    from chainer_hybridmem.errors import OptionError
    name, rate = sys.argv[1], float(sys.argv[2])
"""
COPIER = """
    def copy(pairs):
        begin = time.perf_counter()
        transfers = [device.copies.swap_out(root, space)[1] for root, space in pairs]
        for transfer in transfers:
            device.copies.wait(transfer)
        return begin, *(t.completion.after(0.0)[1] for t in transfers)

    device = HostDevice(1 << 26, rate, shared_link=name)
    device.memory.install(lambda nbytes: None)
    roots = [device.memory.allocate(1 << 20) for _ in range(int(sys.argv[3]))]
    pairs = [(root, device.copies.host_copy(1 << 20)) for root in roots]
    print('ready', flush=True)
    for line in sys.stdin:
        print(*copy(pairs), flush=True)
    device.memory.uninstall()
    device.close()
"""


@pytest.fixture
def name():
    """Of a link that no other test uses; no file is left of it."""
    name = f'test-{os.getpid()}-{next(_counter)}'
    yield name
    assert not os.path.exists(shared_link._path_of(name))


@pytest.fixture
def start(name):
    """Starts processes; kills them afterwards."""
    processes = []

    def start_one(*texts, arguments=()):
        script = ''.join(textwrap.dedent(text) for text in texts)
        processes.append(
            subprocess.Popen(
                [sys.executable, '-c', script, name, str(RATE), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _path(name):
    return shared_link._path_of(name)


def _tell(process):
    process.stdin.write('copy\n')
    process.stdin.flush()


def _times(process):
    return [float(word) for word in process.stdout.readline().split()]


def _open_pair(open_host, name):
    return [
        open_host(LIMIT, install=k == 0, link_bandwidth=RATE, shared_link=name)
        for k in range(2)
    ]


def _copy_out(device, root):
    copy, transfer = device.copies.swap_out(root, None)
    device.copies.wait(transfer)
    copy.close()
    return transfer.seconds()


# -- rates and shares ---------------------------------------------------------------
def test_processes_share_the_rate_evenly(start):
    """Medians of five runs: other work may delay any of them."""
    n, maps = 3, 4
    processes = [start(BEGIN, COPIER, arguments=[maps]) for _ in range(n)]
    for process in processes:
        assert process.stdout.readline() == 'ready\n'
    totals, ratios, alone = [], [], []
    for _ in range(5):
        for process in processes:
            _tell(process)
        times = [_times(process) for process in processes]
        ends = [line[-1] - line[0] for line in times]
        begin = min(line[0] for line in times)
        end = max(line[-1] for line in times)
        totals.append(n * maps * _MIB / RATE / (end - begin))
        ratios.append(max(ends) / min(ends))
        _tell(processes[0])
        times = _times(processes[0])
        alone.append(maps * _MIB / RATE / (times[-1] - times[0]))
    assert max(totals) < 1.03  # never faster than the throttle
    assert statistics.median(totals) > 0.85
    assert statistics.median(ratios) < 1.2
    assert max(alone) < 1.11  # what an idle link makes up for
    assert statistics.median(alone) > 0.8
    for process in processes:
        process.stdin.close()
        assert process.wait(20) == 0


def test_waking_is_rare(name, open_host, monkeypatch):
    pauses = []
    sleep = timing.sleep
    monkeypatch.setattr(timing, 'sleep', lambda seconds: pauses.append(sleep(seconds)))
    first, second = _open_pair(open_host, name)
    root, other = (first.memory.allocate(8 * _MIB) for _ in range(2))
    begin = time.perf_counter()
    transfers = [
        device.copies.swap_out(array, None)[1]
        for device, array in ((first, root), (second, other))
    ]
    for device, transfer in zip((first, second), transfers, strict=True):
        device.copies.wait(transfer)
    assert time.perf_counter() - begin > 0.9 * 16 * _MIB / RATE
    assert len(pauses) < 20


def test_devices_of_one_process_share_and_directions_do_not(name, open_host):
    first, second = _open_pair(open_host, name)
    root, other, third = (first.memory.allocate(4 * _MIB) for _ in range(3))
    copy, transfer = first.copies.swap_out(third, None)
    first.copies.wait(transfer)
    alone = 4 * _MIB / RATE
    _, out = first.copies.swap_out(root, None)
    _, also_out = second.copies.swap_out(other, None)
    inward = first.copies.swap_in(copy, third)
    for device, transfer in ((first, out), (second, also_out), (first, inward)):
        device.copies.wait(transfer)
    last = max(out.seconds(), also_out.seconds())
    assert 1.7 * alone < last < 3 * alone
    assert 0.85 * alone < inward.seconds() < 0.8 * last
    assert (first.describe()['link_is_shared'], second.kind) == (True, 'host')


def test_a_disk_has_its_own_throttle_beside(name, open_host, tmp_path):
    device = open_host(
        LIMIT,
        swap_dir=str(tmp_path),
        link_bandwidth=RATE,
        disk_bandwidth=RATE / 4,
        shared_link=name,
    )
    seconds = _copy_out(device, device.memory.allocate(_MIB))
    assert 0.95 * 4 * _MIB / RATE < seconds < 0.5


class _Clock:
    """A time that only sleeping moves."""

    def __init__(self):
        self.seconds = 1000.0

    def now(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(timing, 'now', clock.now)
    monkeypatch.setattr(timing, 'sleep', clock.sleep)
    return clock


@pytest.fixture
def links(name):
    links = [SharedLink(name, 100.0) for _ in range(3)]
    yield links
    for link in links:
        link.close()


def test_shares_follow_who_comes_and_goes(clock, links):
    first, second, third = (link.outward for link in links)
    begin = clock.seconds
    first.enter(100, begin)
    clock.seconds = begin + 0.5
    second.enter(100, clock.seconds)
    assert first.wait(0) == pytest.approx(begin + 1.5, abs=2e-3)
    third.enter(200, clock.seconds)
    assert second.wait(0) == pytest.approx(begin + 2.5, abs=2e-2)
    assert third.wait(0) == pytest.approx(begin + 4.0, abs=2e-2)


def test_an_idle_link_makes_up_for_little(clock, links):
    lane = links[0].inward
    lane.enter(100, clock.seconds)
    end = lane.wait(0)
    clock.seconds = end + LATE_SECONDS / 2
    lane.enter(100, end)
    assert lane.wait(0) == pytest.approx(end + 1)
    clock.seconds = end + 5
    lane.enter(100, end + 1)
    assert lane.wait(0) == pytest.approx(end + 6 - LATE_SECONDS)


def test_a_copy_that_fails_leaves_the_link(clock, links):
    first, second = links[0].outward, links[1].outward
    begin = clock.seconds
    first.enter(1000, begin)
    second.enter(100, begin)
    clock.seconds = begin + 1
    first.leave()
    assert second.wait(0) == pytest.approx(begin + 1.5)


def test_a_failed_copy_does_not_slow_others(name, open_host, monkeypatch):
    first, second = _open_pair(open_host, name)
    root = first.memory.allocate(32 * _MIB)
    copy, transfer = first.copies.swap_out(root[:_MIB].copy(), None)
    first.copies.wait(transfer)
    copy = first.copies.host_copy(32 * _MIB)

    def fail(*_):
        raise OSError('no')

    monkeypatch.setattr(type(copy.block), 'write', fail)
    _, transfer = first.copies.swap_out(root, copy)
    with pytest.raises(SwapStoreError, match='no'):
        first.copies.wait(transfer)
    monkeypatch.undo()
    assert _copy_out(second, root[: 4 * _MIB].copy()) < 0.4


# -- ends of processes --------------------------------------------------------------
def test_a_process_that_is_killed_leaves_the_link(name, start):
    victim = start(BEGIN, COPIER, arguments=[60])
    assert victim.stdout.readline() == 'ready\n'
    device = HostDevice(LIMIT, RATE, shared_link=name)
    device.memory.install(lambda missing: None)
    root = device.memory.allocate(4 * _MIB)
    _tell(victim)
    time.sleep(0.1)
    beside = _copy_out(device, root)
    victim.send_signal(signal.SIGKILL)  # and is not waited for
    time.sleep(0.1)
    alone = statistics.median(_copy_out(device, root) for _ in range(3))
    device.memory.uninstall()
    device.close()
    assert beside > 1.5 * 4 * _MIB / RATE
    assert alone < 1.4 * 4 * _MIB / RATE


def test_the_file_is_private_and_goes_with_its_last_user(name):
    first, second = (SharedLink(name, 1e6) for _ in range(2))
    status = os.stat(_path(name))
    assert stat.S_IMODE(status.st_mode) == 0o600
    first.close()
    first.close()
    assert os.path.exists(_path(name))
    second.close()
    assert not os.path.exists(_path(name))


def test_what_a_killed_process_has_left_is_used_again(name, start):
    victim = start(BEGIN, "link = SharedLink(name, rate); print('open', flush=True)\n"
                   'time.sleep(3600)')  # fmt: skip
    assert victim.stdout.readline() == 'open\n'
    with pytest.raises(OptionError, match='the same link_bandwidth'):
        SharedLink(name, 2 * RATE)
    victim.kill()
    victim.wait()
    SharedLink(name, 2 * RATE).close()


def test_what_a_killed_process_has_left_goes_with_the_next_link(name, start):
    victim = start(BEGIN, "link = SharedLink(name, rate); print('open', flush=True)\n"
                   'time.sleep(3600)')  # fmt: skip
    assert victim.stdout.readline() == 'open\n'
    SharedLink(f'{name}-other', 1e6).close()
    assert os.path.exists(_path(name))  # it is in use
    victim.kill()
    victim.wait()
    SharedLink(f'{name}-other', 1e6).close()
    assert not os.path.exists(_path(name))


def test_a_process_that_ends_without_closing_leaves_no_file(name, start):
    process = start(BEGIN, 'link = SharedLink(name, rate)')
    assert process.communicate(timeout=20) == ('', None)
    assert not os.path.exists(_path(name))


FORKING = """
    link = SharedLink(name, rate)
    child = os.fork()
    if not child:
        link.close()  # of the parent: nothing happens
        try:
            SharedLink(name, 2 * rate)
        except OptionError:
            own = SharedLink(name, rate)
            own.close()
            os._exit(7)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    link.outward.enter(1, time.perf_counter())
    link.outward.wait(0)
    link.close()
    print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_has_no_place(start):
    assert start(BEGIN, FORKING).communicate(timeout=20)[0] == '7\n'


def test_a_file_that_is_removed_meanwhile_is_made_again(name, monkeypatch):
    remove = iter([True, False])
    lockf = shared_link.fcntl.lockf

    def late(fd, kind, *where):
        if where == (1, 0) and kind == shared_link.fcntl.LOCK_EX and next(remove, 0):
            os.unlink(_path(name))
        lockf(fd, kind, *where)

    monkeypatch.setattr(shared_link.fcntl, 'lockf', late)
    link = SharedLink(name, 1e6)
    assert os.path.exists(_path(name))
    link.close()


# -- wrong use ----------------------------------------------------------------------
@pytest.mark.parametrize('wrong', ['', 'a/b', '..%', 'x' * 65, 'é', 5, True])
def test_names_that_cannot_be(wrong):
    with pytest.raises(OptionError, match=r"shared_link is .*such as 'bus0'"):
        HostDevice(LIMIT, RATE, shared_link=wrong)


def test_a_name_without_a_bandwidth():
    with pytest.raises(OptionError, match="'bus0', but there is no link_bandwidth"):
        HostDevice(LIMIT, shared_link='bus0')


def test_a_gpu():
    with pytest.raises(OptionError, match=r"'bus0', but GPUs.*use device='cpu'"):
        CudaDevice(LIMIT, shared_link='bus0')


def test_another_bandwidth(name):
    first = HostDevice(LIMIT, 1e6, shared_link=name)
    with pytest.raises(OptionError, match=r'2e\+06 bytes.*1e\+06; give all'):
        HostDevice(LIMIT, 2e6, shared_link=name)
    first.close()


def test_too_many_users(name, monkeypatch):
    monkeypatch.setattr(shared_link, 'MOST_USERS', 2)
    links = [SharedLink(name, 1e6) for _ in range(2)]
    with pytest.raises(OptionError, match='has 2 users'):
        SharedLink(name, 1e6)
    links[0].close()
    links.append(SharedLink(name, 1e6))
    for link in links:
        link.close()


def test_links_that_nobody_has_closed(name, monkeypatch):
    monkeypatch.setattr(shared_link, 'MOST_USERS', 2)
    for _ in range(4):
        link = SharedLink(name, 1e6)
        link.itself = link
    del link
    link = SharedLink(name, 2e6)
    link.close()
    again = SharedLink(name, 1e6)
    link.close()  # for the second time
    with pytest.raises(OptionError, match=r'2e\+06 bytes'):
        SharedLink(name, 2e6)
    again.close()


def test_a_file_that_cannot_be_used(name):
    os.symlink('/dev/null', _path(name))
    try:
        with pytest.raises(OptionError, match='give another name'):
            SharedLink(name, 1e6)
    finally:
        os.unlink(_path(name))
