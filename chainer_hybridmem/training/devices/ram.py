"""How much memory the machine has, and how much of it this process may still take.

What a container may take is said by its control groups: each group that the process is
in, directly or through a group within it, has a limit, what its processes have taken
(pages of files included), and how many of these pages have not been used lately.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

_SYSTEM = '/proc'
_NO_LIMIT = 1 << 60  # version 1 says so with a number beyond this


class _Files(NamedTuple):
    """The files of a group, and a line of the last of them."""

    limit: str
    taken: str
    pages: str
    statistics: str = 'memory.stat'


_VERSIONS = {
    'cgroup2': _Files('memory.max', 'memory.current', 'inactive_file'),
    'cgroup': _Files(
        'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'
    ),
}  # by type of file system


def physical_ram() -> int:
    """Bytes the machine has."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def total_ram(system: str = _SYSTEM) -> int:
    """Most bytes this process may have: the machine's, or what its groups allow.

    Args:
        system: Folder of what the kernel says.
    """
    limits = [_limit(folder, files) for folder, files in _groups(system)]
    return min([physical_ram(), *(limit for limit in limits if limit is not None)])


def available_ram(system: str = _SYSTEM) -> int | None:
    """Bytes this process can take without swapping, if the machine says so.

    Args:
        system: Folder of what the kernel says.
    """
    rooms = [_number_in(f'{system}/meminfo', 'MemAvailable:', 1024)]
    rooms += [_room(folder, files) for folder, files in _groups(system)]
    return min((room for room in rooms if room is not None), default=None)


def _room(folder: str, files: _Files) -> int | None:
    """What a group may still take; None is no limit."""
    limit, taken = _limit(folder, files), _number_in(f'{folder}/{files.taken}')
    if limit is None or taken is None:
        return None
    pages = _number_in(f'{folder}/{files.statistics}', files.pages)
    return max(limit - taken + (pages or 0), 0)


def _limit(folder: str, files: _Files) -> int | None:
    limit = _number_in(f'{folder}/{files.limit}')
    return None if limit is None or limit >= _NO_LIMIT else limit


def _number_in(path: str, name: str = '', unit: int = 1) -> int | None:
    """The number of a file, or of its line that begins with a name."""
    try:
        with open(path, encoding='ascii') as lines:
            for line in lines:
                words = line.split()
                if not name:
                    return int(words[0])  # not of 'max'
                if words and words[0] == name:
                    return int(words[1]) * unit
    except (OSError, ValueError, IndexError):
        pass
    return None


@functools.lru_cache(maxsize=4)
def _groups(system: str) -> list[tuple[str, _Files]]:
    """Folders of those groups of this process that limit memory, when first asked."""
    try:
        with open(f'{system}/self/cgroup', encoding='utf-8') as file:
            groups = [line.rstrip('\n').split(':', 2) for line in file]
        with open(f'{system}/self/mountinfo', encoding='utf-8') as file:
            mounts = [_mount(line) for line in file]
    except (OSError, ValueError):
        return []
    found: list[tuple[str, _Files]] = []
    for kind, options, inside, point in mounts:
        if kind not in _VERSIONS:
            continue
        for _, controllers, path in (group for group in groups if len(group) == 3):
            one = 'memory' in controllers.split(',') and 'memory' in options
            if one if kind == 'cgroup' else not controllers:
                for folder in _outwards(point, os.path.relpath(path, inside)):
                    if _limit(folder, _VERSIONS[kind]) is not None:
                        found.append((folder, _VERSIONS[kind]))
    return found


def _mount(line: str) -> tuple[str, list[str], str, str]:
    """Type, options, the folder that is mounted, and where."""
    before, _, after = line.partition(' - ')
    inside, point = (
        word.replace(r'\040', ' ').replace(r'\134', '\\')
        for word in before.split(' ')[3:5]
    )
    kind, _, options = after.split()[:3]
    return kind, options.split(','), inside, point


def _outwards(point: str, path: str) -> Iterator[str]:
    """A folder below a mount and those around it; the mount alone if it is outside."""
    names = [name for name in path.split('/') if name != '.']
    if '..' in names:
        names = []
    for length in range(len(names), -1, -1):
        yield '/'.join([point, *names[:length]])
