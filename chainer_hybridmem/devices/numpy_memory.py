"""Counts and limits NumPy's data allocations of one context, in native code.

NumPy asks the handler of the current context for every block of array data
(NEP 49) and remembers it in the array, which frees its block through the same
handler, perhaps much later and in another thread.

Note: [pending exceptions]
    NumPy frees arrays while an exception is on its way. A Python callback that
    is entered then loses the exception and fails itself, so the handler is
    native code, compiled once and cached. Only an allocation that does not fit
    calls back into Python.

Note: [headers]
    Each block starts 64 bytes after a header: its id, its size, the address the
    C library knows or the bytes it takes up, and where it lies. So the id of any
    live array is one read away, and nothing has to be looked up when it dies.

Note: [slab]
    A new large block from the system costs a page fault for every page, up to a
    fifth of an iteration, and the C library's heap keeps freed ones in pieces.
    Large blocks are therefore cut from one slab as large as the limit: best
    fit, neighbours joined when freed, pages kept. A block for which no hole is
    large enough is mapped by itself; then pages of holes, the largest first, go
    back to the system as far as the limit wants it, so that physical memory
    follows the load, not its history.

Note: [immortal handler]
    An array may outlive every Python object, so the handler's structure, its
    counters and the name of its capsule live in C memory that is never freed.
    At exit the compiled code goes away before the last arrays do: an ``atexit``
    function points the structure to C functions instead, with NULL as their
    first argument. ``labs(NULL)`` returns NULL: as ``free`` it leaks, as
    ``calloc`` and ``realloc`` it refuses. ``realloc(NULL, size)`` is ``malloc``.

The interpreter lock is held in all of these functions; it orders the counters.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import llvmlite.ir
import numpy
from numba import types
from numba.extending import intrinsic

from chainer_hybridmem.jit import callback, compiled

try:
    from numpy._core import (  # type: ignore[attr-defined,unused-ignore]
        _multiarray_umath,
        multiarray,
    )
except ImportError:  # NumPy 1.x
    from numpy.core import (  # type: ignore[attr-defined,no-redef,unused-ignore]
        _multiarray_umath,
        multiarray,
    )

NAME = 'chainer_hybridmem'
_SET_HANDLER_SLOT = 304  # PyDataMem_SetHandler in numpy/_core/code_generators
_HEADER = 64  # bytes before each block: id, size, base address
_ALIGNMENT = 64
_HUGE_BYTES = 1 << 22  # from this size on NumPy asks for huge pages, so do we
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_FIRST_LOG_ENTRIES = 1 << 14

# Fields of a counter, 8 bytes each.
_LIMIT, _USED, _PEAK, _WINDOW, _NEXT_ID = 0, 8, 16, 24, 32
_LOGGING, _LOG, _LOG_LENGTH, _LOG_CAPACITY = 40, 48, 56, 64
_RECLAIMING, _FAILED_BYTES, _FAILED_USED, _LIMITED = 72, 80, 88, 96
_SLAB, _SLAB_SIZE, _SLAB_TOP, _SLAB_TOUCHED, _SLAB_BLOCKS = 104, 112, 120, 128, 136
_HOLES, _HOLE_COUNT = 144, 152  # (address, bytes) pairs by address
_FROM_POOL, _FROM_SYSTEM, _MAPPED_BYTES, _SAMPLE_PEAK = 160, 168, 176, 184
_RELEASED = 1  # in the bytes of a hole, which are a multiple of 64: no pages
_FIELDS = 24
_LARGE_BYTES = 1 << 16  # from this size on blocks come from the slab
_MOST_HOLES = 1 << 13
_LEAST_HOLE = 4096
_EVERYTHING = 1 << 60  # bytes
_RECLAIM_TRIES = 8
_IN_HEAP, _IN_SLAB, _MAPPED = 0, 1, 2  # where a block lies
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, 'MAP_NORESERVE', 0)
_ID_BITS = 40  # of an id; the counter's number is above them


# -- the way back into Python ---
_counters: dict[int, weakref.ref[Counter]] = {}


def _call_reclaim(address: int, missing_bytes: int) -> int:
    """Entered from native code; nothing may be raised from here."""
    reference = _counters.get(address)
    counter = reference() if reference is not None else None
    if counter is not None:
        try:
            counter._reclaim(missing_bytes)
        except BaseException as error:
            counter.error = error
    return 0


_callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
    _call_reclaim
)
llvmlite.binding.add_symbol(
    'chainer_hybridmem_reclaim', ctypes.cast(_callback, ctypes.c_void_p).value
)


# -- native code --------------------------------------------------------------
@intrinsic
def _load(typing_context: Any, address: Any) -> Any:
    """The 8-byte integer at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = llvmlite.ir.IntType(64)
        return builder.load(builder.inttoptr(args[0], word.as_pointer()))

    return types.int64(types.int64), build


@intrinsic
def _store(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes an 8-byte integer to an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = llvmlite.ir.IntType(64)
        builder.store(args[1], builder.inttoptr(args[0], word.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


_i64 = types.int64
_c_malloc = types.ExternalFunction('malloc', _i64(_i64))
_c_calloc = types.ExternalFunction('calloc', _i64(_i64, _i64))
_c_realloc = types.ExternalFunction('realloc', _i64(_i64, _i64))
_c_free = types.ExternalFunction('free', types.void(_i64))
_c_memset = types.ExternalFunction('memset', _i64(_i64, types.int32, _i64))
_c_memcpy = types.ExternalFunction('memcpy', _i64(_i64, _i64, _i64))
_c_mmap = types.ExternalFunction(
    'mmap', _i64(_i64, _i64, types.int32, types.int32, types.int32, _i64)
)
_c_munmap = types.ExternalFunction('munmap', types.int32(_i64, _i64))
_c_madvise = types.ExternalFunction('madvise', types.int32(_i64, _i64, types.int32))
_reclaim = types.ExternalFunction('chainer_hybridmem_reclaim', _i64(_i64, _i64))


@compiled(types.void(_i64, _i64))
def _add(address: int, value: int) -> None:
    _store(address, _load(address) + value)


@compiled(types.void(_i64, _i64, _i64))
def _log(counter: int, ident: int, size: int) -> None:
    length, capacity = _load(counter + _LOG_LENGTH), _load(counter + _LOG_CAPACITY)
    if length == capacity:
        grown = _c_realloc(_load(counter + _LOG), capacity * 32)
        if grown == 0:
            _store(counter + _LOGGING, 0)
            return
        _store(counter + _LOG, grown)
        _store(counter + _LOG_CAPACITY, capacity * 2)
    entry = _load(counter + _LOG) + length * 16
    _store(entry, ident)
    _store(entry + 8, size)
    _store(counter + _LOG_LENGTH, length + 1)


@compiled(types.void(_i64, _i64))
def _release_pages(start: int, end: int) -> None:
    """Gives the whole pages between two addresses back; they read as zero."""
    first, last = (start + 4095) & -4096, end & -4096
    if last > first:
        _c_madvise(first, last - first, _MADV_DONTNEED)


@compiled(types.void(_i64, _i64))
def _remove_hole(counter: int, index: int) -> None:
    holes, count = _load(counter + _HOLES), _load(counter + _HOLE_COUNT) - 1
    for i in range(index, count):
        _store(holes + 16 * i, _load(holes + 16 * i + 16))
        _store(holes + 16 * i + 8, _load(holes + 16 * i + 24))
    _store(counter + _HOLE_COUNT, count)


@compiled(_i64(_i64, _i64))
def _cut(counter: int, total: int) -> int:
    """Takes space from the slab: the smallest hole, else above the top."""
    holes, count = _load(counter + _HOLES), _load(counter + _HOLE_COUNT)
    best, best_bytes = -1, 0
    for i in range(count):
        nbytes = _load(holes + 16 * i + 8) & ~_RELEASED
        if nbytes >= total and (best < 0 or nbytes < best_bytes):
            best, best_bytes = i, nbytes
    fresh = 0  # bytes whose pages the system has to give
    if best >= 0:
        address = _load(holes + 16 * best)
        if _load(holes + 16 * best + 8) & _RELEASED:
            fresh = total
        if best_bytes - total >= _LEAST_HOLE:
            _store(holes + 16 * best, address + total)
            released = _load(holes + 16 * best + 8) & _RELEASED
            _store(holes + 16 * best + 8, (best_bytes - total) | released)
        else:
            total = best_bytes
            _remove_hole(counter, best)
    else:
        top = _load(counter + _SLAB_TOP)
        if top + total > _load(counter + _SLAB_SIZE):
            return 0
        address = _load(counter + _SLAB) + top
        _store(counter + _SLAB_TOP, top + total)
        touched = _load(counter + _SLAB_TOUCHED)
        fresh = max(0, top + total - touched)
        _store(counter + _SLAB_TOUCHED, touched + fresh)
    _add(counter + _FROM_SYSTEM, fresh)
    _add(counter + _FROM_POOL, total - fresh)
    _store(counter + _SLAB_BLOCKS, _load(counter + _SLAB_BLOCKS) + 1)
    _store(address + 16, total)
    return address


@compiled(types.void(_i64, _i64, _i64))
def _join(counter: int, address: int, total: int) -> None:
    """Puts space back into the slab and joins it with its neighbours."""
    holes, count = _load(counter + _HOLES), _load(counter + _HOLE_COUNT)
    _store(counter + _SLAB_BLOCKS, _load(counter + _SLAB_BLOCKS) - 1)
    low, high = 0, count  # the first hole behind the address
    while low < high:
        middle = (low + high) // 2
        if _load(holes + 16 * middle) < address:
            low = middle + 1
        else:
            high = middle
    if low < count and _load(holes + 16 * low) == address + total:
        total += _load(holes + 16 * low + 8) & ~_RELEASED
        _remove_hole(counter, low)
        count -= 1
    if low > 0:
        before = holes + 16 * (low - 1)
        nbytes = _load(before + 8) & ~_RELEASED
        if _load(before) + nbytes == address:
            address = _load(before)
            total += nbytes
            low -= 1
            _remove_hole(counter, low)
            count -= 1
    slab = _load(counter + _SLAB)
    if address + total == slab + _load(counter + _SLAB_TOP):
        _store(counter + _SLAB_TOP, address - slab)
        return
    if count == _MOST_HOLES:
        return  # lost until the slab goes; far more holes than arrays ever live
    for i in range(count, low, -1):
        _store(holes + 16 * i, _load(holes + 16 * i - 16))
        _store(holes + 16 * i + 8, _load(holes + 16 * i - 8))
    _store(holes + 16 * low, address)
    _store(holes + 16 * low + 8, total)
    _store(counter + _HOLE_COUNT, count + 1)


@compiled(types.void(_i64, _i64))
def _release_holes(counter: int, size: int) -> None:
    """Gives unused pages of the slab back until ``size`` more bytes fit.

    The limit is then kept by what is in use, what holes still hold and the new
    bytes together.
    """
    holes, count = _load(counter + _HOLES), _load(counter + _HOLE_COUNT)
    slab, top = _load(counter + _SLAB), _load(counter + _SLAB_TOP)
    excess = _load(counter + _USED) + size - _load(counter + _LIMIT)
    for i in range(count):
        nbytes = _load(holes + 16 * i + 8)
        if nbytes & _RELEASED == 0:
            excess += nbytes
    if excess + _load(counter + _SLAB_TOUCHED) - top > 0:
        _release_pages(slab + top, slab + _load(counter + _SLAB_TOUCHED))
        _store(counter + _SLAB_TOUCHED, top)
    while excess > 0:
        largest, most = -1, 0
        for i in range(count):
            nbytes = _load(holes + 16 * i + 8)
            if nbytes & _RELEASED == 0 and nbytes > most:
                largest, most = i, nbytes
        if largest < 0:
            return
        start = _load(holes + 16 * largest)
        _release_pages(start, start + most)
        _store(holes + 16 * largest + 8, most | _RELEASED)
        excess -= most


@compiled(types.void(_i64))
def _drop_slab(counter: int) -> None:
    """Gives the slab back once no block is in it any more."""
    if _load(counter + _SLAB) != 0 and _load(counter + _SLAB_BLOCKS) == 0:
        _c_munmap(_load(counter + _SLAB), _load(counter + _SLAB_SIZE))
        for field in (_SLAB, _SLAB_SIZE, _SLAB_TOP, _SLAB_TOUCHED, _HOLE_COUNT):
            _store(counter + field, 0)


@compiled(types.void(_i64, _i64))
def _make_slab(counter: int, nbytes: int) -> None:
    """Reserves addresses for the slab; memory comes as it is touched."""
    if _load(counter + _SLAB) == 0:
        base = _c_mmap(0, nbytes, _PROTECTION, _MAP_FLAGS, -1, 0)
        if base != -1:
            _c_madvise(base, nbytes, _MADV_HUGEPAGE)
            _store(counter + _SLAB, base)
            _store(counter + _SLAB_SIZE, nbytes)


@compiled(_i64(_i64, _i64))
def _find_space(counter: int, total: int) -> int:
    """Space for a large block: in the slab, else mapped; 0 if there is none."""
    base = _cut(counter, total)
    if base != 0:
        _store(base + 24, _IN_SLAB)
        return base
    _release_holes(counter, total)
    base = _c_mmap(0, total, _PROTECTION, _MAP_FLAGS, -1, 0)
    if base == -1:
        return 0
    if total >= _HUGE_BYTES:
        _c_madvise(base, total, _MADV_HUGEPAGE)
    _add(counter + _FROM_SYSTEM, total)
    _add(counter + _MAPPED_BYTES, total)
    _store(base + 16, total)
    _store(base + 24, _MAPPED)
    return base


@compiled(_i64(_i64, _i64, types.boolean))
def _large_block(counter: int, size: int, zeroed: bool) -> int:
    """A block from the slab, or one mapped by itself; see Note: [slab].

    Where the system refuses to map, others must leave the slab to make room.
    """
    total = (size + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT
    base = _find_space(counter, total)
    if _load(counter + _LIMITED) != 0 and _load(counter + _RECLAIMING) == 0:
        tries = 0
        while base == 0 and tries < _RECLAIM_TRIES:
            used = _load(counter + _USED)
            _store(counter + _RECLAIMING, 1)
            _reclaim(counter, total)
            _store(counter + _RECLAIMING, 0)
            if _load(counter + _USED) == used:
                break
            base = _find_space(counter, total)
            tries += 1
    if base == 0:
        return 0
    if zeroed:
        _c_memset(base + _HEADER, 0, size)
    return base + _HEADER


@compiled(types.void(_i64, _i64))
def _free_block(counter: int, address: int) -> None:
    """Gives a block back to where it came from."""
    base, place = address - _HEADER, _load(address - _HEADER + 24)
    extent = _load(base + 16)
    if place == _IN_HEAP:
        _c_free(extent)
    elif place == _MAPPED:
        _c_munmap(base, extent)
        _add(counter + _MAPPED_BYTES, -extent)
    else:
        _join(counter, base, extent)
        if _load(counter + _LIMITED) == 0:
            _release_pages(base, base + extent)
            _drop_slab(counter)


@compiled(types.boolean(_i64, _i64))
def _admit(counter: int, size: int) -> bool:
    """Whether a block fits, after asking for space if need be."""
    used, limit = _load(counter + _USED), _load(counter + _LIMIT)
    if _load(counter + _LIMITED) == 0:
        return True
    if used + size > limit and _load(counter + _RECLAIMING) == 0:
        _store(counter + _RECLAIMING, 1)
        _reclaim(counter, used + size - limit)
        _store(counter + _RECLAIMING, 0)
        used = _load(counter + _USED)
    if used + size > limit:
        _store(counter + _FAILED_BYTES, size)
        _store(counter + _FAILED_USED, used)
        return False
    return True


@compiled(_i64(_i64, _i64, types.boolean))
def _new_block(counter: int, size: int, zeroed: bool) -> int:
    """Memory behind a header; see Note: [headers] and [slab]."""
    if size >= _LARGE_BYTES:
        return _large_block(counter, size, zeroed)
    total = size + _HEADER + _ALIGNMENT
    base = _c_calloc(1, total) if zeroed else _c_malloc(total)
    if base == 0:
        return 0
    address = (base + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT
    _store(address - _HEADER + 16, base)
    _store(address - _HEADER + 24, _IN_HEAP)
    return address


@compiled(_i64(_i64, _i64))
def _count(counter: int, size: int) -> int:
    """Counts bytes in use; returns a new id."""
    ident = _load(counter + _NEXT_ID)
    _store(counter + _NEXT_ID, ident + 1)
    used = _load(counter + _USED) + size
    _store(counter + _USED, used)
    if used > _load(counter + _PEAK):
        _store(counter + _PEAK, used)
    if used > _load(counter + _WINDOW):
        _store(counter + _WINDOW, used)
    if used > _load(counter + _SAMPLE_PEAK):
        _store(counter + _SAMPLE_PEAK, used)
    return ident


@compiled(types.void(_i64, _i64, _i64))
def _uncount(counter: int, ident: int, size: int) -> None:
    """Takes counted bytes back."""
    _store(counter + _USED, _load(counter + _USED) - size)
    if _load(counter + _LOGGING) != 0:
        _log(counter, -ident, size)


@compiled(_i64(_i64, _i64, types.boolean))
def _take(counter: int, size: int, zeroed: bool) -> int:
    """Address of a new block; 0 if it does not fit."""
    if not _admit(counter, size):
        return 0
    address = _new_block(counter, size, zeroed)
    if address == 0:
        return 0
    ident = _count(counter, size)
    _store(address - _HEADER, ident)
    _store(address - _HEADER + 8, size)
    if _load(counter + _LOGGING) != 0:
        _log(counter, ident, size)
    return address


@compiled(types.void(_i64, _i64))
def _give(counter: int, address: int) -> None:
    """Takes a block back."""
    ident, size = _load(address - _HEADER), _load(address - _HEADER + 8)
    _uncount(counter, ident, size)
    _free_block(counter, address)


@compiled(types.void(_i64, _i64, _i64))
def _write_figures(counter: int, out: int, new_peak: int) -> None:
    """Writes what :meth:`Counter.pool_figures` returns."""
    holes = _load(counter + _HOLES)
    free = _load(counter + _SLAB_TOUCHED) - _load(counter + _SLAB_TOP)
    for i in range(_load(counter + _HOLE_COUNT)):
        nbytes = _load(holes + 16 * i + 8)
        if nbytes & _RELEASED == 0:
            free += nbytes
    used = _load(counter + _USED)
    _store(out, used)
    _store(out + 8, free)
    _store(out + 16, _load(counter + _FROM_POOL))
    _store(out + 24, _load(counter + _FROM_SYSTEM))
    _store(out + 32, max(used, _load(counter + _SAMPLE_PEAK)))
    if new_peak != 0:
        _store(counter + _SAMPLE_PEAK, used)


@callback(_i64(_i64, _i64))
def _on_malloc(counter: int, size: int) -> int:
    return _take(counter, size, False)


@callback(_i64(_i64, _i64, _i64))
def _on_calloc(counter: int, count: int, size: int) -> int:
    return _take(counter, count * size, True)


@callback(_i64(_i64, _i64, _i64))
def _on_realloc(counter: int, address: int, size: int) -> int:
    if address == 0:
        return _take(counter, size, False)
    moved = _take(counter, size, False)
    if moved != 0:
        _c_memcpy(moved, address, min(size, _load(address - _HEADER + 8)))
        _give(counter, address)
    return moved


@callback(types.void(_i64, _i64, _i64))
def _on_free(counter: int, address: int, size: int) -> None:
    if address != 0:
        _give(counter, address)


# -- counters -----------------------------------------------------------------
class _Allocator(ctypes.Structure):
    _fields_ = (
        ('ctx', ctypes.c_void_p),
        ('malloc', ctypes.c_void_p),
        ('calloc', ctypes.c_void_p),
        ('realloc', ctypes.c_void_p),
        ('free', ctypes.c_void_p),
    )


class _Handler(ctypes.Structure):
    _fields_ = (
        ('name', ctypes.c_char * 127),
        ('version', ctypes.c_uint8),
        ('allocator', _Allocator),
    )


_libc = ctypes.PyDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_handlers: list[_Handler] = []


def _immortal(nbytes: int) -> int:
    address: int | None = _libc.calloc(1, nbytes)
    if address is None:
        raise MemoryError(f'no {nbytes} bytes for the NumPy memory handler')
    return address


class Counter:
    """A handler of its own, with a limit and counters.

    Args:
        limit_bytes: Most bytes in use; more is refused while installed.
        reclaim: Called with the bytes missing when a block does not fit. What
            it raises is kept in ``error`` and the block is refused.

    Attributes:
        error (BaseException or None): What ``reclaim`` has raised last.
    """

    def __init__(self, limit_bytes: int, reclaim: Callable[[int], None]) -> None:
        self.error: BaseException | None = None
        self._reclaim = reclaim
        address = _immortal(8 * _FIELDS)
        self._words = (ctypes.c_int64 * _FIELDS).from_address(address)
        self._address = address
        self._set(_LIMIT, limit_bytes)
        self._number = len(_handlers)
        self._set(_NEXT_ID, (self._number << _ID_BITS) + 1)  # never used twice
        self._set(_LOG_CAPACITY, _FIRST_LOG_ENTRIES)
        self._set(_LOG, _immortal(16 * _FIRST_LOG_ENTRIES))
        self._set(_HOLES, _immortal(16 * _MOST_HOLES))
        self._figures = (ctypes.c_int64 * 5)()
        self._figures_address = ctypes.addressof(self._figures)
        self._previous: Any = None
        self._capsule = _make_capsule(_make_handler(address))
        _counters[address] = weakref.ref(self)

    def _get(self, field: int) -> int:
        return self._words[field // 8]

    def _set(self, field: int, value: int) -> None:
        self._words[field // 8] = value

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return self._get(_USED)

    @property
    def peak_bytes(self) -> int:
        """Highest load since it was set last."""
        return self._get(_PEAK)

    @peak_bytes.setter
    def peak_bytes(self, value: int) -> None:
        self._set(_PEAK, value)

    @property
    def window_peak_bytes(self) -> int:
        """Highest load since it was set last."""
        return self._get(_WINDOW)

    @window_peak_bytes.setter
    def window_peak_bytes(self, value: int) -> None:
        self._set(_WINDOW, value)

    @property
    def last_failure(self) -> tuple[int, int] | None:
        """Bytes asked for and in use when a block was last refused."""
        nbytes = self._get(_FAILED_BYTES)
        return (nbytes, self._get(_FAILED_USED)) if nbytes else None

    def count_foreign(self, nbytes: int) -> int:
        """Counts memory the handler has not given out; returns its id.

        In one native step: between two Python statements a garbage collection
        may free arrays.
        """
        return int(_count(self._address, nbytes))

    def uncount_foreign(self, ident: int, nbytes: int) -> None:
        """Takes back what :meth:`count_foreign` has counted."""
        _uncount(self._address, ident, nbytes)

    def pool_figures(self, new_peak: bool) -> tuple[int, ...]:
        """Bytes in use, held but free, served from held pages, asked of the system
        so far, and the highest load since this was last asked with ``new_peak``.

        Small blocks come from the C library's heap, which tells nothing: they are
        in use but neither served from here nor asked of the system. Pages that a
        hole shares with blocks count as the hole's.
        """
        _write_figures(self._address, self._figures_address, int(new_peak))
        return tuple(self._figures)

    # -- events ---------------------------------------------------------------
    def start_events(self) -> None:
        """Starts a new event log."""
        self._set(_LOG_LENGTH, 0)
        self._set(_LOGGING, 1)

    @property
    def event_count(self) -> int:
        """Events logged so far."""
        return self._get(_LOG_LENGTH)

    def take_events(self) -> list[tuple[int, int]]:
        """Ends the log: ``(+id or -id, bytes)`` for each malloc and free."""
        self._set(_LOGGING, 0)
        length = self._get(_LOG_LENGTH)
        self._set(_LOG_LENGTH, 0)
        words = (ctypes.c_int64 * (2 * length)).from_address(self._get(_LOG))
        return list(zip(words[::2], words[1::2], strict=True))

    # -- installing -----------------------------------------------------------
    def install(self) -> None:
        """Sends NumPy's allocations of the current context to this counter."""
        _make_slab(self._address, _slab_bytes(self._get(_LIMIT)))
        self._set(_LIMITED, 1)
        self._previous = _set_handler(self._capsule)

    def uninstall(self) -> None:
        """Restores the handler that :meth:`install` replaced."""
        self._set(_LIMITED, 0)
        _release_holes(self._address, _EVERYTHING)
        _drop_slab(self._address)
        _set_handler(self._previous)
        self._previous = None

    def pause_reclaim(self, paused: bool) -> None:
        """Refuses blocks that do not fit without asking for space first."""
        self._set(_RECLAIMING, int(paused))

    def ident_at(self, address: int) -> int:
        """Id of a block one of our handlers has given out; 0 if another did."""
        ident = ctypes.c_int64.from_address(address - _HEADER).value
        return ident if ident >> _ID_BITS == self._number else 0


def _slab_bytes(limit_bytes: int) -> int:
    """Whole pages for the limit, and no more than the machine has."""
    pages = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return (min(limit_bytes, pages) + 4095) & -4096


def counted(array: numpy.ndarray) -> bool:
    """Whether an array that owns its data got it from one of our handlers."""
    return multiarray.get_handler_name(array) == NAME


def installed() -> bool:
    """Whether one of our handlers serves the current context."""
    return multiarray.get_handler_name() == NAME


def _make_handler(counter: int) -> _Handler:
    handler = _Handler.from_address(_immortal(ctypes.sizeof(_Handler)))
    handler.name = NAME.encode()
    handler.version = 1
    allocator = handler.allocator
    allocator.ctx = counter
    allocator.malloc = _on_malloc.address
    allocator.calloc = _on_calloc.address
    allocator.realloc = _on_realloc.address
    allocator.free = _on_free.address
    _handlers.append(handler)
    return handler


def _make_capsule(handler: _Handler) -> Any:
    name = _immortal(16)
    ctypes.memmove(name, b'mem_handler', 11)
    new = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )(('PyCapsule_New', ctypes.pythonapi))
    return new(ctypes.addressof(handler), name, None)


def _find_set_handler() -> Callable[[Any], Any]:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ('PyCapsule_GetPointer', ctypes.pythonapi)
    )
    table = ctypes.cast(
        get(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    return prototype(table[_SET_HANDLER_SLOT])


_set_handler = _find_set_handler()


def _make_harmless() -> None:
    """At exit; see Note: [immortal handler]."""
    if installed():
        _set_handler(ctypes.py_object())  # NULL: NumPy's own
    leak = ctypes.cast(_libc.labs, ctypes.c_void_p).value
    for handler in _handlers:
        allocator = handler.allocator
        allocator.ctx = None
        allocator.free = allocator.calloc = allocator.realloc = leak
        allocator.malloc = ctypes.cast(_libc.realloc, ctypes.c_void_p).value


def _forget_parent() -> None:
    """A forked child has no copy threads: it goes back to NumPy's handler."""
    if installed():
        _set_handler(ctypes.py_object())
    for reference in _counters.values():
        counter = reference()
        if counter is not None:
            counter._set(_LIMITED, 0)


atexit.register(_make_harmless)
os.register_at_fork(after_in_child=_forget_parent)
