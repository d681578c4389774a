"""Memory that is left: the machine's, and that of the groups around the process."""

from __future__ import annotations

import pytest

from chainer_hybridmem.training.devices import ram
from chainer_hybridmem.training.devices.swap_store import blocks

KIB = 1024
UNLIMITED_1 = 9223372036854771712
CGROUP2 = '29 23 0:26 {inside} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate'
CGROUP1 = '34 31 0:32 {inside} {point} rw,relatime - cgroup cgroup rw,{controllers}'


class System:
    """A folder like ``/proc``, and one like ``/sys/fs/cgroup``."""

    def __init__(self, folder):
        self.proc = folder / 'proc'
        self.groups = folder / 'sys fs'
        (self.proc / 'self').mkdir(parents=True)
        self.groups.mkdir()
        self.write(self.proc / 'meminfo', 'MemFree: 1 kB\nMemAvailable: 1000 kB\n')
        self.write(self.proc / 'self/mountinfo', '1 1 0:1 / / rw - ext4 /dev/x rw\n')

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, line, folder='', inside='/', **words):
        point = str(self.groups / folder).replace(' ', r'\040')
        with open(self.proc / 'self/mountinfo', 'a') as file:
            file.write(line.format(inside=inside, point=point, **words) + '\n')

    def inside(self, *lines):
        self.write(self.proc / 'self/cgroup', '\n'.join(lines) + '\n')

    def group2(self, path, limit, taken, file_pages=0):
        folder = self.groups / path
        self.write(folder / 'memory.max', f'{limit}\n')
        self.write(folder / 'memory.current', f'{taken}\n')
        text = f'anon {taken - file_pages}\ninactive_file {file_pages}\n'
        self.write(folder / 'memory.stat', text)

    def group1(self, path, limit, taken, file_pages=0):
        folder = self.groups / path
        self.write(folder / 'memory.limit_in_bytes', f'{limit}\n')
        self.write(folder / 'memory.usage_in_bytes', f'{taken}\n')
        text = f'inactive_file 0\ntotal_inactive_file {file_pages}\n'
        self.write(folder / 'memory.stat', text)

    def available(self):
        return ram.available_ram(str(self.proc))


@pytest.fixture
def system(tmp_path):
    yield System(tmp_path)
    ram._groups.cache_clear()


def test_without_groups_it_is_what_the_machine_has(system):
    assert system.available() == 1000 * KIB
    system.inside('0::/not/mounted')
    assert system.available() == 1000 * KIB


def test_all_the_ram_is_what_a_container_may_have(system):
    machine = ram.physical_ram()
    assert ram.total_ram(str(system.proc)) == machine
    system.mount(CGROUP2)
    system.inside('0::/pod/task')
    system.group2('pod', 500 * KIB, 300 * KIB)
    system.group2('pod/task', 'max', 300 * KIB)
    ram._groups.cache_clear()
    assert ram.total_ram(str(system.proc)) == 500 * KIB
    system.group2('pod', 2 * machine, 300 * KIB)
    assert ram.total_ram(str(system.proc)) == machine


def test_nothing_is_known(tmp_path):
    assert ram.available_ram(str(tmp_path / 'nothing')) is None


def test_the_least_of_all_groups_around_the_process(system):
    system.mount(CGROUP2)
    system.inside('0::/outer/inner')
    system.group2('outer/inner', 'max', 10)
    system.group2('outer', 500 * KIB, 300 * KIB, 100 * KIB)
    assert system.available() == 300 * KIB
    system.group2('outer', 500 * KIB, 450 * KIB, 0)
    assert system.available() == 50 * KIB
    system.group2('outer', 500 * KIB, 501 * KIB, 0)
    assert system.available() == 0
    system.group2('outer', 5000 * KIB, 0)
    assert system.available() == 1000 * KIB


def test_a_group_within_that_has_less(system):
    system.mount(CGROUP2)
    system.inside('0::/outer/inner')
    system.group2('outer/inner', 40 * KIB, 10 * KIB)
    system.group2('outer', 500 * KIB, 10 * KIB)
    assert system.available() == 30 * KIB


def test_inside_a_container_its_group_is_the_root(system):
    """With a namespace of its own, or with its folder mounted under its path."""
    system.mount(CGROUP2)
    system.inside('0::/')
    system.group2('', 70 * KIB, 10 * KIB)
    assert system.available() == 60 * KIB


@pytest.mark.parametrize('inside', ['/docker/1', '/docker/1/sub', '/elsewhere'])
def test_a_mounted_part_of_the_groups(system, inside):
    system.mount(CGROUP1, 'memory', '/docker/1', controllers='memory')
    system.mount(CGROUP1, 'cpu', '/docker/1', controllers='cpu,cpuacct')
    system.inside(f'4:memory:{inside}', '3:cpu,cpuacct:/docker/1', '0::/')
    system.group1('memory', 90 * KIB, 70 * KIB, 5 * KIB)
    system.group1('cpu', 1, 1)
    assert system.available() == 25 * KIB


def test_the_first_version_without_a_limit(system):
    system.mount(CGROUP1, 'memory', controllers='memory')
    system.inside('4:memory:/a')
    system.group1('memory/a', UNLIMITED_1, 70 * KIB)
    system.group1('memory', UNLIMITED_1, 70 * KIB)
    assert system.available() == 1000 * KIB


def test_files_that_go_or_say_something_else(system):
    system.mount(CGROUP2)
    system.inside('0::/a/b')
    system.group2('a', 500 * KIB, 300 * KIB)
    system.group2('a/b', 50 * KIB, 30 * KIB)
    assert system.available() == 20 * KIB
    (system.groups / 'a/b/memory.current').unlink()
    assert system.available() == 200 * KIB
    system.write(system.groups / 'a/memory.max', '')
    assert system.available() == 1000 * KIB


def test_a_block_that_the_group_has_no_room_for_is_refused(system, monkeypatch):
    system.mount(CGROUP2)
    system.inside('0::/a')
    system.group2('a', 500 * KIB, 300 * KIB)
    monkeypatch.setattr(blocks, 'available_ram', system.available)
    blocks.RamBlock(200 * KIB).close()
    with pytest.raises(MemoryError, match='204800 bytes are available'):
        blocks.RamBlock(200 * KIB + 1)
