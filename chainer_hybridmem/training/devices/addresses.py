"""Addresses that cost nothing until they are used.

Note: [forks]
    A fork accounts for every private writable mapping of its process once more. Where
    the system looks at each mapping by itself (``vm.overcommit_memory`` 0, the usual
    one), one that is larger than the machine lets every fork fail, however little of
    it is in use; neighbours that are alike count as one. What is mapped with
    ``MAP_NORESERVE`` is not accounted for, at its making and in forks. A system that
    never overcommits (2) ignores the flag: mappings are refused or count in full.

    Children get all of it (no ``MADV_DONTFORK``): they read what lies there, such as
    the data set, the model, or a parameter that is away. What lies nowhere has no
    pages, and a child gives back those of holes.
"""

from __future__ import annotations

import mmap
import platform
import sys

_OTHERS = {'ppc': 0x40, 'sparc': 0x40, 'mips': 0x400, 'alpha': 0x10000, 'xtensa': 0x400}
_USUAL = 0x4000


def find_noreserve(system: str, machine: str) -> int:
    """``MAP_NORESERVE``, which Python knows since 3.13; 0 where there is none.

    Args:
        system: As ``sys.platform`` says.
        machine: As ``platform.machine()`` says.
    """
    known: int | None = getattr(mmap, 'MAP_NORESERVE', None)
    if known is not None or not system.startswith('linux'):
        return known or 0
    others = (flag for name, flag in _OTHERS.items() if machine.startswith(name))
    return next(others, _USUAL)


MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
RESERVED = MAPPED | find_noreserve(sys.platform, platform.machine())
