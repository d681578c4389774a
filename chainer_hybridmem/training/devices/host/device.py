"""Training with NumPy inside a memory limit."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.training.devices.bits import same_bits
from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.devices.host import counter_words
from chainer_hybridmem.training.devices.host.array_data import (
    address_of,
    bytes_of,
    root_of,
)
from chainer_hybridmem.training.devices.host.copies import HostCopyEngine
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.training.devices.host.shared_link import SharedLink
from chainer_hybridmem.training.devices.offset_table import OffsetTable
from chainer_hybridmem.training.devices.ports import Arrays, Clock, Offsets
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.devices.references import held_by_none_but
from chainer_hybridmem.training.devices.swap_store.store import FileStore, RamStore
from chainer_hybridmem.training.devices.values import (
    Array,
    Mark,
    PlaceFigures,
    Root,
    View,
    find_view,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.layouts.arena import Arena


class HostDevice(Device):
    """NumPy behind the ports of a device.

    Args:
        limit_bytes: Most bytes of array data that may be in use.
        link_bandwidth: Bytes per second and direction that copies to and from
            the swap store take at most; None for as fast as the machine can.
        swap_dir: Folder for a temporary file that holds swapped feature maps;
            None keeps them in memory outside the limit.
        host_limit_bytes: Most bytes of memory outside the limit for swapped feature
            maps; the rest goes to ``swap_dir``. None is no limit or, with
            ``swap_dir``, no memory.
        disk_bandwidth: Like ``link_bandwidth``, for copies to and from the file.
        shared_link: Name of a link with this ``link_bandwidth``: devices that give the
            same name share it, also those of other processes. None for an own link.

    Raises:
        OptionError: If a number is out of range, or the link cannot be shared.
        SwapStoreError: If no file can be made in ``swap_dir``.
    """

    kind = 'host'
    memory: HostMemory

    def __init__(
        self,
        limit_bytes: int,
        link_bandwidth: float | None = None,
        swap_dir: str | None = None,
        host_limit_bytes: int | None = None,
        disk_bandwidth: float | None = None,
        shared_link: str | None = None,
    ) -> None:
        _check_options(limit_bytes, link_bandwidth)
        _check_host_options(host_limit_bytes, swap_dir, disk_bandwidth)
        disk = None if swap_dir is None else FileStore(swap_dir)
        if disk is not None and host_limit_bytes is None:
            host_limit_bytes = 0
        link = _open_link(shared_link, link_bandwidth)
        self._engine = HostCopyEngine(link_bandwidth, disk_bandwidth, link)
        self.memory = HostMemory(limit_bytes)
        self.arrays = HostArrays(self.memory)
        ram = RamStore(host_limit_bytes)
        self.copies = Copies(ram, disk, self._engine, self.arrays)
        self.clock = HostClock(self._engine.finish)
        self.offsets = HostOffsets(self.memory)
        self.late_checks = None

    def describe(self) -> dict[str, Any]:
        return {
            'kind': self.kind,
            'name': processor_name(),
            'cores': _usable_cores(),
            'numpy': numpy.__version__,
            'python': platform.python_version(),
            'link_bandwidth': self._engine.bandwidth,
            'link_is_shared': self._engine.shared_link is not None,
            'swap_dir': self.copies.describe(),
        }


def _check_options(limit_bytes: int, link_bandwidth: float | None) -> None:
    if limit_bytes <= 0:
        raise OptionError(f'limit_bytes is {limit_bytes}; it must be above zero.')
    if link_bandwidth is not None and not link_bandwidth > 0:
        raise OptionError(
            f'link_bandwidth is {link_bandwidth}; it must be above zero bytes per '
            'second, or None for no throttle.'
        )


def _open_link(name: str | None, bandwidth: float | None) -> SharedLink | None:
    if name is None:
        return None
    if bandwidth is None:
        raise OptionError(
            f'shared_link is {name!r}, but there is no link_bandwidth to share; leave '
            f'it out, or give link_bandwidth a number of bytes per second.'
        )
    return SharedLink(name, bandwidth)


def _check_host_options(
    host_limit_bytes: int | None, swap_dir: str | None, disk_bandwidth: float | None
) -> None:
    if host_limit_bytes is not None and host_limit_bytes < 0:
        raise OptionError(
            f'host_limit_bytes is {host_limit_bytes}; it must be zero or more.'
        )
    if disk_bandwidth is not None and not disk_bandwidth > 0:
        raise OptionError(
            f'disk_bandwidth is {disk_bandwidth}; it must be above zero bytes per '
            'second, or None for no throttle.'
        )
    if disk_bandwidth is not None and swap_dir is None:
        raise OptionError(
            f'disk_bandwidth is {disk_bandwidth}, but there is no swap_dir; leave it '
            'out, or give swap_dir a folder.'
        )


def processor_name() -> str:
    """What the machine calls its processor."""
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as lines:
            for line in lines:
                if line.startswith('model name'):
                    return line.split(':', 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HostClock(Clock):
    """Marks are seconds of ``perf_counter``.

    Args:
        finish_copies: Waits for all copies.
    """

    asynchronous = False

    def __init__(self, finish_copies: Callable[[], None]) -> None:
        self._finish_copies = finish_copies

    def mark(self) -> Mark:
        return timing.now()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def synchronize(self) -> None:
        self._finish_copies()


_NUMBERS = '?biufcmM'  # kinds of types
# In NumPy's flags: `flags.writeable` warns about what broadcast_arrays returns.
_WRITEABLE = 0x0400
_COMPARED_ELEMENTS = 1 << 18  # at a time; one byte each is allocated for them


class HostArrays(Arrays):
    """Roots are the arrays that own their memory.

    Args:
        memory: Knows the ids of allocations.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def owns(self, array: Any) -> bool:
        """Arrays of numbers; subclasses, objects and records cannot be made again."""
        if type(array) is not numpy.ndarray:
            return False
        return array.dtype.kind in _NUMBERS

    def allocation_id(self, array: Array) -> int:
        return self._memory.ident_of(root_of(array))

    def root(self, array: Array) -> Root:
        return root_of(array)

    def root_bytes(self, root: Root) -> int:
        return int(root.nbytes)

    def capture(self, array: Array) -> View:
        offset = address_of(array) - address_of(root_of(array))
        return find_view(
            offset if array.size else 0,
            array.shape,
            array.strides,
            array.dtype.str,
            array.flags.num & _WRITEABLE > 0,
        )

    def restore(self, root: Root, view: View) -> Array:
        if not isinstance(root, numpy.ndarray):
            raise TypeError(f'not a NumPy array: {type(root).__name__}')
        array: Array = numpy.ndarray(
            view.shape,
            view.dtype,
            buffer=bytes_of(root),
            offset=view.offset_bytes,
            strides=view.strides,
        )
        if not view.writeable:
            array.setflags(write=False)
        return array

    def memory_at(self, address: int, nbytes: int) -> Root:
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return numpy.frombuffer(memory, numpy.uint8)

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        address = address_of(root)
        # NumPy calls back before it frees the memory.
        return weakref.ref(root, lambda _: look(address))

    def held_by_none_but(
        self, arrays: dict[int, Array], holders: dict[int, set[object]]
    ) -> bool:
        return held_by_none_but(arrays, holders, root_of)


class HostOffsets(Offsets):
    """The arena is a range of addresses as large as the limit.

    Pages follow the load, so an arena that needs more than the limit keeps it all the
    same: pages of its holes go back to the system, and blocks behind its end lie beside
    it.

    Args:
        memory: Which reserves it.
    """

    alignment_bytes = counter_words.ALIGNMENT
    needed = False
    moves_in = True  # it takes addresses first, and memory as it is touched

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    @functools.cached_property
    def _table(self) -> OffsetTable:
        return OffsetTable(self._memory.counter.table_address)

    def block_bytes(self, nbytes: int) -> int:
        return counter_words.block_bytes(nbytes)

    def follow(self, arena: Arena, moves_in: bool = True) -> bool:
        """See :meth:`.Offsets.follow`; the system may have refused the addresses."""
        counter = self._memory.counter
        if self._table.expect(arena):
            counter.release_side()  # the arena takes its memory over
        return counter.arena_bytes > 0

    def seek(self, k: int) -> None:
        self._table.seek(k)

    def figures(self) -> PlaceFigures:
        return self._table.figures()
