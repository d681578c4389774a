"""Training with NumPy inside a memory budget.

All array data allocated in the context where the device is installed counts
against the limit, whoever asks for it: Chainer, NumPy temporaries, the user's
own code. Memory that libraries take for themselves (BLAS buffers, Python
objects) is not seen.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy

from chainer_hybridmem.devices.bits import same_bits
from chainer_hybridmem.devices.host import numpy_memory
from chainer_hybridmem.devices.host.copies import CopyThread, HostTransfer
from chainer_hybridmem.devices.host.counter import Counter
from chainer_hybridmem.devices.host.counter_words import block_bytes
from chainer_hybridmem.devices.places import Table
from chainer_hybridmem.devices.protocol import (
    Array,
    HostCopy,
    Mark,
    PlaceFigures,
    PoolFigures,
    Root,
    Transfer,
    View,
)
from chainer_hybridmem.devices.swap_store.space import Space
from chainer_hybridmem.devices.swap_store.store import FileStore, RamStore
from chainer_hybridmem.devices.swap_store.tiers import StoringDevice, TieredStore
from chainer_hybridmem.errors import (
    OptionError,
    OutOfMemoryError,
    SessionError,
    SwapStoreError,
)

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena

_NUMBERS = '?biufcmM'  # kinds of types
_COMPARED_ELEMENTS = 1 << 18  # at a time; one byte each is allocated for them


class HostDevice(StoringDevice):
    """NumPy behind the device protocol.

    Args:
        limit_bytes: Most bytes of array data that may be in use.
        link_bandwidth: Bytes per second and direction that copies to and from
            the swap store take at most; None for as fast as the machine can.
        swap_dir: Folder for a temporary file that holds swapped feature maps;
            None keeps them in memory outside the limit.
        link_latency_seconds: Time every copy takes on top.
        host_limit_bytes: Most bytes of memory outside the limit for swapped feature
            maps; the rest goes to ``swap_dir``. None is no limit or, with
            ``swap_dir``, no memory.
        disk_bandwidth: Like ``link_bandwidth``, for copies to and from the file.

    Attributes:
        reclaim_error (BaseException or None): What ``reclaim`` raised last.

    Raises:
        OptionError: If a number is out of range.
        SwapStoreError: If no file can be made in ``swap_dir``.
    """

    kind = 'host'
    asynchronous = False
    alignment_bytes = 64
    moves_in = True  # it takes addresses first, and memory as it is touched

    def __init__(
        self,
        limit_bytes: int,
        link_bandwidth: float | None = None,
        swap_dir: str | None = None,
        link_latency_seconds: float = 0.0,
        host_limit_bytes: int | None = None,
        disk_bandwidth: float | None = None,
    ) -> None:
        _check_options(limit_bytes, link_bandwidth, link_latency_seconds)
        _check_host_options(host_limit_bytes, swap_dir, disk_bandwidth)
        self.limit_bytes = limit_bytes
        self._reclaim: Callable[[int], None] | None = None
        self._installed = False
        self._adopted: dict[int, tuple[int, int, Any]] = {}  # id, bytes, reference
        self._bandwidth = link_bandwidth
        disk = None if swap_dir is None else FileStore(swap_dir)
        if disk is not None and host_limit_bytes is None:
            host_limit_bytes = 0
        self._store = TieredStore(RamStore(host_limit_bytes), disk)
        self._d2h, self._h2d = (
            CopyThread(name, link_bandwidth, link_latency_seconds, disk_bandwidth)
            for name in ('hybridmem-d2h', 'hybridmem-h2d')
        )
        self._stall_seconds = 0.0

    @functools.cached_property
    def _counter(self) -> Counter:
        """Made when it is needed: it takes memory that outlives the device."""
        return Counter(self.limit_bytes, self._call_reclaim)

    @functools.cached_property
    def _table(self) -> Table:
        return Table(self._counter.table_address)

    # -- life ---------------------------------------------------------------
    def install(self, reclaim: Callable[[int], None]) -> None:
        """See :meth:`Device.install`.

        Raises:
            SessionError: If a host device is installed in this context.
        """
        if self._installed or numpy_memory.installed():
            raise SessionError(
                'a host device already counts the NumPy allocations of this thread; '
                'leave the first session before entering another one, and enter '
                'profile_memory() inside the session.'
            )
        self._reclaim = reclaim
        self._counter.install()
        self._installed = True

    def uninstall(self) -> None:
        """See :meth:`Device.uninstall`.

        Raises:
            SessionError: If called in another context than :meth:`install`.
        """
        if not self._installed:
            return
        if not numpy_memory.installed():
            raise SessionError(
                'a host device must be uninstalled in the thread and context that '
                'installed it.'
            )
        self._counter.uninstall()
        self._reclaim = None
        self._installed = False

    def close(self) -> None:
        self._d2h.close()
        self._h2d.close()
        self._store.close()
        self._adopted.clear()
        if '_counter' in vars(self):
            self._counter.close()

    def adopt(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            root = self.root(array)
            if root.flags.owndata and not self.allocation_id(root):
                self._adopt_root(root)

    def describe(self) -> dict[str, Any]:
        return {
            'kind': self.kind,
            'name': processor_name(),
            'cores': _usable_cores(),
            'numpy': numpy.__version__,
            'python': platform.python_version(),
            'link_bandwidth': self._bandwidth,
            'swap_dir': self._store.describe(),
        }

    # -- counting -----------------------------------------------------------
    @property
    def used_bytes(self) -> int:  # type: ignore[override]
        """See :class:`Device`."""
        return self._counter.used_bytes

    @property
    def peak_bytes(self) -> int:  # type: ignore[override]
        """See :class:`Device`."""
        return self._counter.peak_bytes

    @property
    def window_peak_bytes(self) -> int:  # type: ignore[override]
        """See :class:`Device`."""
        return self._counter.window_peak_bytes

    def reset_peak(self) -> None:
        self._counter.reset_peak()

    def reset_window(self) -> None:
        self._counter.reset_window()

    @property
    def last_failure(self) -> tuple[int, int] | None:  # type: ignore[override]
        """See :class:`Device`."""
        return self._counter.last_failure

    def forget_failure(self) -> None:
        self._counter.forget_failure()

    @property
    def reclaim_error(self) -> BaseException | None:  # type: ignore[override]
        """See :class:`Device`."""
        return self._counter.error

    def start_events(self) -> None:
        self._counter.start_events()

    @property
    def event_count(self) -> int:
        return self._counter.event_count

    def take_events(self) -> list[tuple[int, int]]:
        return self._counter.take_events()

    def watch_pool(self, watched: bool) -> None:
        """See :class:`Device`; the native handler always counts."""

    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        return PoolFigures(*self._counter.pool_figures(new_peak))

    def _call_reclaim(self, missing_bytes: int) -> None:
        if self._reclaim is not None:
            self._reclaim(missing_bytes)

    @contextmanager
    def without_reclaim(self) -> Iterator[None]:
        self._counter.pause_reclaim(True)
        try:
            yield
        finally:
            self._counter.pause_reclaim(False)

    def _adopt_root(self, root: numpy.ndarray) -> None:
        address = _address(root)
        nbytes = root.nbytes
        counter = self._counter

        def died(_: Any) -> None:
            # Runs before the memory is freed, so the address is not in use.
            adopted = self._adopted.pop(address, None)
            if adopted is not None:
                counter.uncount_foreign(adopted[0], nbytes)

        ident = counter.count_foreign(nbytes)
        self._adopted[address] = (ident, nbytes, weakref.ref(root, died))

    # -- memory -------------------------------------------------------------
    def owns(self, array: Any) -> bool:
        """Arrays of numbers; subclasses, objects and records cannot be made again."""
        if type(array) is not numpy.ndarray:
            return False
        return array.dtype.kind in _NUMBERS

    def allocation_id(self, array: Array) -> int:
        root = self.root(array)
        address = _address(root)
        if numpy_memory.counted(root):  # never for memory it does not own
            ident = self._counter.ident_at(address)
            if ident:
                return ident
        adopted = self._adopted.get(address)
        return 0 if adopted is None else adopted[0]

    def root(self, array: Array) -> Root:
        """The array that owns the memory, or the last one before it.

        Arrays over foreign memory (a file, bytes, another library) end in an
        array that does not own its data; they are never counted.
        """
        base = array.base
        while base is not None and isinstance(base, numpy.ndarray):
            array, base = base, base.base
        return array

    def root_bytes(self, root: Root) -> int:
        return int(root.nbytes)

    def capture(self, array: Array) -> View:
        root = self.root(array)
        offset = _address(array) - _address(root)
        return View(
            offset_bytes=offset if array.size else 0,
            shape=array.shape,
            strides=array.strides,
            dtype=array.dtype.str,
            writeable=array.flags.writeable,
        )

    def restore(self, root: Root, view: View) -> Array:
        if not isinstance(root, numpy.ndarray):
            raise TypeError(f'not a NumPy array: {type(root).__name__}')
        array: Array = numpy.ndarray(
            view.shape,
            view.dtype,
            buffer=_flat(root),
            offset=view.offset_bytes,
            strides=view.strides,
        )
        if not view.writeable:
            array.setflags(write=False)
        return array

    def allocate(self, nbytes: int) -> Root:
        try:
            return numpy.empty(nbytes, numpy.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(
                f'{nbytes} bytes do not fit: {self.used_bytes} of {self.limit_bytes} '
                'bytes are in use. Raise the memory limit or use smaller batches.',
                nbytes,
                self.limit_bytes,
                self.used_bytes,
            ) from (self.reclaim_error or error)

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        address = _address(root)
        # NumPy calls back before it frees the memory.
        return weakref.ref(root, lambda _: look(address))

    def memory_at(self, address: int, nbytes: int) -> Root:
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return numpy.frombuffer(memory, numpy.uint8)

    def same_contents(self, copy: HostCopy, root: Root) -> bool:
        return _space(copy, self.root_bytes(root)).has(_address(root))

    def contents(self, copy: HostCopy) -> Array:
        return numpy.frombuffer(_space(copy, copy.nbytes).contents(), numpy.uint8)

    def fill(self, copy: HostCopy, root: Root) -> None:
        _space(copy, self.root_bytes(root)).fill(_address(root))

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    # -- places -------------------------------------------------------------
    def block_bytes(self, nbytes: int) -> int:
        return block_bytes(nbytes)

    def set_places(self, arena: Arena) -> bool:
        """See :class:`Device`; there are addresses, unless the system refused them."""
        if self._table.expect(arena):
            self._counter.release_side()  # what it takes over, nobody else needs
        return self._counter.arena_bytes >= arena.slab_bytes

    def seek(self, k: int) -> None:
        self._table.seek(k)

    def place_figures(self) -> PlaceFigures:
        return self._table.figures()

    # -- copies -------------------------------------------------------------
    def swap_out(self, root: Root, copy: HostCopy | None) -> tuple[HostCopy, Transfer]:
        nbytes = self.root_bytes(root)
        space = _space(copy or self.host_copy(nbytes), nbytes)
        return space, self._d2h.submit(root, space, _address(root), outward=True)

    def swap_in(self, copy: HostCopy, root: Root) -> Transfer:
        space = _space(copy, self.root_bytes(root))
        return self._h2d.submit(root, space, _address(root), outward=False)

    def throttle(self, link_bandwidth: float | None) -> None:
        """Makes the link another one, from the next copy on.

        Args:
            link_bandwidth: Bytes per second and direction; None for as fast as the
                machine can.

        Raises:
            OptionError: If the number is out of range.
        """
        _check_options(self.limit_bytes, link_bandwidth, 0.0)
        self._bandwidth = link_bandwidth
        self._d2h.throttle(link_bandwidth)
        self._h2d.throttle(link_bandwidth)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, HostTransfer)
        completion = transfer.completion
        if not completion.done():
            start = time.perf_counter()
            completion.wait()
            self._stall_seconds += time.perf_counter() - start
        if completion.error is not None:
            # A new error each time: the kept one would hold its own traceback,
            # and with it the array, until the next garbage collection.
            raise SwapStoreError(str(completion.error))

    # -- time ---------------------------------------------------------------
    def mark(self) -> Mark:
        return time.perf_counter()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def synchronize(self) -> None:
        self._d2h.drain()
        self._h2d.drain()

    def take_stall_seconds(self) -> float:
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds


def _check_options(
    limit_bytes: int, link_bandwidth: float | None, link_latency_seconds: float
) -> None:
    if limit_bytes <= 0:
        raise OptionError(f'limit_bytes is {limit_bytes}; it must be above zero.')
    if link_bandwidth is not None and not link_bandwidth > 0:
        raise OptionError(
            f'link_bandwidth is {link_bandwidth}; it must be above zero bytes per '
            'second, or None for no throttle.'
        )
    if not 0 <= link_latency_seconds < 3600:
        raise OptionError(
            f'link_latency_seconds is {link_latency_seconds}; it must be zero or more.'
        )


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


_pointer_at = ctypes.c_size_t.from_address
_DATA_FIELD = object.__basicsize__  # of PyArrayObject in NumPy's C interface


def _address(array: numpy.ndarray) -> int:
    """Of the first element."""
    return _pointer_at(id(array) + _DATA_FIELD).value


def _check_layout() -> None:
    """Reading the field is ten times faster than the array interface."""
    probe = numpy.empty(1)
    if _address(probe) != probe.__array_interface__['data'][0]:
        raise ImportError(
            f'NumPy {numpy.__version__} on this Python has arrays of a layout that is '
            'not known; the host device needs CPython.'
        )


_check_layout()


def _flat(root: numpy.ndarray) -> numpy.ndarray:
    """All bytes of an owning array in memory order, without a copy."""
    return root if root.dtype == numpy.uint8 and root.ndim == 1 else _bytes_of(root)


def _bytes_of(root: numpy.ndarray) -> numpy.ndarray:
    return root.ravel(order='K').view(numpy.uint8)


def _space(copy: HostCopy, nbytes: int) -> Space:
    if not isinstance(copy, Space) or copy.nbytes != nbytes:
        raise ValueError(
            f'a host copy of {copy.nbytes} bytes cannot hold an allocation of '
            f'{nbytes} bytes'
        )
    return copy


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
