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

Note: [slabs]
    A new large block from the system costs a page fault for every page, up to a
    fifth of an iteration, and the C library's heap keeps freed ones in pieces.
    Large blocks are therefore cut from two slabs, each as large as the limit: the
    arena for those with a planned place, the side slab for all others, with best fit.
    Addresses cost nothing (:mod:`.addresses`), pages are kept: before one more is
    touched than the limit allows, pages of holes, the largest first, go back to the
    system, so that physical memory follows the load, not its history.

Note: [immortal handler]
    An array may outlive every Python object, so the handler's structure, its
    counters and the name of its capsule live in C memory that is never freed.
    Each array holds a reference to the capsule: once there is none but our own, no
    array is left, and the next counter takes the memory over.
    At exit the compiled code goes away before the last arrays do: an ``atexit``
    function points the structure to C functions instead, with NULL as their
    first argument. ``labs(NULL)`` returns NULL: as ``free`` it leaks, as
    ``calloc`` and ``realloc`` it refuses. ``realloc(NULL, size)`` is ``malloc``.

The interpreter lock is held in all of these functions; it orders the counters.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy
from numba import types

from chainer_hybridmem.devices import addresses, slab
from chainer_hybridmem.devices.ram import physical_ram
from chainer_hybridmem.devices.slab import add, load, store
from chainer_hybridmem.errors import without_frames
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
_FROM_POOL, _FROM_SYSTEM, _MAPPED_BYTES, _SAMPLE_PEAK, _POISON = 104, 112, 120, 128, 136
_SIDE = 144  # a slab as large as the limit, for what has no planned place
_ARENA = _SIDE + slab.SLAB_BYTES  # a slab; empty as long as nothing is planned
_TABLE = _ARENA + slab.SLAB_BYTES
_REFUSED_ID = _TABLE + slab.TABLE_BYTES  # see Counter.refuse
_REFUSAL = _REFUSED_ID + 8
_FIELDS = (_REFUSAL + 8) // 8
_KEPT = (  # when memory is taken over
    _NEXT_ID,
    _LOG,
    _LOG_CAPACITY,
    _SIDE + slab.HOLES,
    _ARENA + slab.HOLES,
)
_LARGE_BYTES = 1 << 16  # from this size on blocks come from the slab
_RECLAIM_TRIES = 8
_IN_HEAP, _IN_SIDE, _MAPPED, _IN_ARENA = 0, 1, 2, 3  # where a block lies
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAPPED_FLAGS, _RESERVED_FLAGS = addresses.MAPPED, addresses.RESERVED
_PASSING, _FINAL, _LASTING = 0, 1, 2  # see Counter.refuse
_ID_BITS = 40  # of an id; the counter's number is above them


# -- the way back into Python ---
_counters: dict[int, weakref.ref[Counter]] = {}


def _call_reclaim(address: int, missing_bytes: int) -> int:
    """Entered from native code; nothing may be raised from here.

    Returns:
        int: A signal that is to come again once NumPy has its block, or 0: what
        Ctrl-C raises here would be lost.
    """
    signal_number = 0
    reference = _counters.get(address)
    counter = reference() if reference is not None else None
    while counter is not None:
        counter.error = None
        try:
            counter._reclaim(missing_bytes)
        except KeyboardInterrupt as error:
            counter.error = without_frames(error)
            if not signal_number:  # the second time it must be meant
                signal_number = signal.SIGINT
                continue
        except BaseException as error:
            counter.error = without_frames(error)
        break
    return signal_number


_callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
    _call_reclaim
)
llvmlite.binding.add_symbol(
    'chainer_hybridmem_reclaim', ctypes.cast(_callback, ctypes.c_void_p).value
)


# -- native code --------------------------------------------------------------
_native = functools.partial(compiled, uses=(slab,))
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
_python_reclaim = types.ExternalFunction('chainer_hybridmem_reclaim', _i64(_i64, _i64))
_raise_again = types.ExternalFunction('PyErr_SetInterruptEx', types.int32(types.int32))


@_native(types.void(_i64, _i64, _i64))
def _log(counter: int, ident: int, size: int) -> None:
    length, capacity = load(counter + _LOG_LENGTH), load(counter + _LOG_CAPACITY)
    if length == capacity:
        grown = _c_realloc(load(counter + _LOG), capacity * 32)
        if grown == 0:
            store(counter + _LOGGING, 0)
            return
        store(counter + _LOG, grown)
        store(counter + _LOG_CAPACITY, capacity * 2)
    entry = load(counter + _LOG) + length * 16
    store(entry, ident)
    store(entry + 8, size)
    store(counter + _LOG_LENGTH, length + 1)


@_native(types.void(_i64, _i64))
def _release_pages(start: int, end: int) -> None:
    """Gives the whole pages between two addresses back; they read as zero."""
    first, last = (start + 4095) & -4096, end & -4096
    if last > first:
        _c_madvise(first, last - first, _MADV_DONTNEED)


@_native(types.void(_i64, _i64))
def _reclaim(counter: int, missing_bytes: int) -> None:
    """Asks for space; not while that is being done already."""
    store(counter + _RECLAIMING, 1)
    signal_number = _python_reclaim(counter, missing_bytes)
    store(counter + _RECLAIMING, 0)
    if signal_number != 0:
        _raise_again(signal_number)


@_native(_i64(_i64))
def _held(counter: int) -> int:
    """Free bytes that have pages."""
    return load(counter + _SIDE + slab.HELD) + load(counter + _ARENA + slab.HELD)


@_native(_i64(_i64))
def _release_tail(place: int) -> int:
    """Gives the pages above the top of a slab back; returns their bytes."""
    base, top = load(place + slab.BASE), load(place + slab.TOP)
    touched = load(place + slab.TOUCHED)
    if touched <= top:
        return 0
    _release_pages(base + top, base + touched)
    store(place + slab.TOUCHED, top)
    add(place + slab.HELD, top - touched)
    return touched - top


@_native(_i64(_i64))
def _release_largest(place: int) -> int:
    """Gives the pages of the largest hole of a slab back; returns their bytes."""
    index = slab.largest_held(place)
    if index < 0:
        return 0
    hole = load(place + slab.HOLES) + slab.HOLE_BYTES * index
    start, pages = load(hole + slab.HOLE_AT), load(hole + slab.HOLE_HELD)
    _release_pages(start, start + load(hole + slab.HOLE_SIZE))
    store(hole + slab.HOLE_HELD, 0)
    add(place + slab.HELD, -pages)
    return pages


@_native(types.void(_i64, _i64))
def _release_holes(counter: int, most: int) -> None:
    """Gives unused pages back until at most so many bytes are in use and held.

    Holes of the arena go last: they will be needed again.
    """
    excess = load(counter + _USED) + _held(counter) - most
    for place in (counter + _SIDE, counter + _ARENA):
        if excess > 0:
            excess -= _release_tail(place)
        while excess > 0:
            nbytes = _release_largest(place)
            if nbytes == 0:
                break
            excess -= nbytes


@_native(types.void(_i64))
def _keep_limit(counter: int) -> None:
    """What is in use and what is held never exceed the limit together."""
    limit = load(counter + _LIMIT)
    if load(counter + _USED) + _held(counter) > limit:
        _release_holes(counter, limit)


@_native(types.void(_i64, _i64))
def _drop_slab(counter: int, field: int) -> None:
    """Gives a slab back once no block is in it any more."""
    base, nbytes = load(counter + field + slab.BASE), load(counter + field + slab.SIZE)
    if base != 0 and load(counter + field + slab.BLOCKS) == 0:
        _c_munmap(base, nbytes)
        slab.begin(counter + field, 0, 0)


@_native(types.void(_i64, _i64, _i64))
def _make_slab(counter: int, field: int, nbytes: int) -> None:
    """Reserves addresses for a slab; memory comes as it is touched.

    Blocks that are mapped by themselves are accounted for, as NumPy's are: one that
    is larger than the machine is an error and not the end of the process.
    """
    if load(counter + field + slab.BASE) == 0:
        base = _c_mmap(0, nbytes, _PROTECTION, _RESERVED_FLAGS, -1, 0)
        if base != -1:
            _c_madvise(base, nbytes, _MADV_HUGEPAGE)
            slab.begin(counter + field, base, nbytes)


@_native(types.void(_i64, _i64, _i64, _i64))
def _served(counter: int, field: int, base: int, place: int) -> None:
    """Counts a block that a slab has given."""
    fresh, extent = (
        load(counter + field + slab.FRESH),
        load(counter + field + slab.EXTENT),
    )
    add(counter + _FROM_SYSTEM, fresh)
    add(counter + _FROM_POOL, extent - fresh)
    store(base + 16, extent)
    store(base + 24, place)


@_native(_i64(_i64, _i64))
def _find_space(counter: int, total: int) -> int:
    """Space for a large block; 0 if there is none.

    Where it is planned to lie, else beside the arena, else in a hole of it, else
    mapped by itself.
    """
    base = 0
    if load(counter + _TABLE + slab.STOP) > 0:
        base = slab.place(counter + _TABLE, counter + _ARENA, total)
        if base != 0:
            _served(counter, _ARENA, base, _IN_ARENA)
            return base
    base = slab.cut(counter + _SIDE, total)
    if base != 0:
        _served(counter, _SIDE, base, _IN_SIDE)
        return base
    base = slab.cut(counter + _ARENA, total)
    if base != 0:
        _served(counter, _ARENA, base, _IN_ARENA)
        return base
    base = _c_mmap(0, total, _PROTECTION, _MAPPED_FLAGS, -1, 0)
    if base == -1:
        return 0
    if total >= _HUGE_BYTES:
        _c_madvise(base, total, _MADV_HUGEPAGE)
    add(counter + _FROM_SYSTEM, total)
    add(counter + _MAPPED_BYTES, total)
    store(base + 16, total)
    store(base + 24, _MAPPED)
    return base


@_native(_i64(_i64, _i64, types.boolean))
def _large_block(counter: int, size: int, zeroed: bool) -> int:
    """A block from the slab, or one mapped by itself; see Note: [slabs].

    Where the system refuses to map, others must leave the slab to make room.
    """
    total = (size + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT
    base = _find_space(counter, total)
    if load(counter + _LIMITED) != 0 and load(counter + _RECLAIMING) == 0:
        tries = 0
        while base == 0 and tries < _RECLAIM_TRIES:
            used = load(counter + _USED)
            _reclaim(counter, total)
            if load(counter + _USED) == used:
                break
            base = _find_space(counter, total)
            tries += 1
    if base == 0:
        return 0
    if zeroed:
        _c_memset(base + _HEADER, 0, size)
    return base + _HEADER


@_native(types.void(_i64, _i64))
def _free_block(counter: int, address: int) -> None:
    """Gives a block back to where it came from."""
    base, place = address - _HEADER, load(address - _HEADER + 24)
    extent = load(base + 16)
    if place == _IN_HEAP:
        _c_free(extent)
    elif place == _MAPPED:
        _c_munmap(base, extent)
        add(counter + _MAPPED_BYTES, -extent)
    else:
        field = _SIDE if place == _IN_SIDE else _ARENA
        if load(counter + _POISON) != 0:
            _c_memset(base, 255, extent)
        slab.join(counter + field, base, extent)
        if load(counter + _LIMITED) == 0:
            _release_pages(base, base + extent)
            _drop_slab(counter, field)


@_native(types.boolean(_i64, _i64))
def _admit(counter: int, size: int) -> bool:
    """Whether a block fits, after asking for space if need be."""
    used, limit = load(counter + _USED), load(counter + _LIMIT)
    if load(counter + _LIMITED) == 0:
        return True
    missing, refused = used + size - limit, False
    if load(counter + _NEXT_ID) == load(counter + _REFUSED_ID):
        missing, refused = max(missing, size), True
        if load(counter + _REFUSAL) != _LASTING:
            store(counter + _REFUSED_ID, 0)
    if (missing > 0 or refused) and load(counter + _RECLAIMING) == 0:
        _reclaim(counter, missing)
        used = load(counter + _USED)
        refused = refused and load(counter + _REFUSAL) != _PASSING
    if used + size > limit or refused:
        store(counter + _FAILED_BYTES, size)
        store(counter + _FAILED_USED, used)
        return False
    return True


@_native(_i64(_i64, _i64, types.boolean))
def _new_block(counter: int, size: int, zeroed: bool) -> int:
    """Memory behind a header; see Note: [headers] and [slabs]."""
    if size >= _LARGE_BYTES:
        return _large_block(counter, size, zeroed)
    total = size + _HEADER + _ALIGNMENT
    base = _c_calloc(1, total) if zeroed else _c_malloc(total)
    if base == 0:
        return 0
    address = (base + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT
    store(address - _HEADER + 16, base)
    store(address - _HEADER + 24, _IN_HEAP)
    return address


@_native(_i64(_i64, _i64))
def _count(counter: int, size: int) -> int:
    """Counts bytes in use; returns a new id."""
    ident = load(counter + _NEXT_ID)
    store(counter + _NEXT_ID, ident + 1)
    used = load(counter + _USED) + size
    store(counter + _USED, used)
    if used > load(counter + _PEAK):
        store(counter + _PEAK, used)
    if used > load(counter + _WINDOW):
        store(counter + _WINDOW, used)
    if used > load(counter + _SAMPLE_PEAK):
        store(counter + _SAMPLE_PEAK, used)
    return ident


@_native(types.void(_i64, _i64, _i64))
def _uncount(counter: int, ident: int, size: int) -> None:
    """Takes counted bytes back."""
    store(counter + _USED, load(counter + _USED) - size)
    if load(counter + _LOGGING) != 0:
        _log(counter, -ident, size)


@_native(_i64(_i64, _i64, types.boolean))
def _take(counter: int, size: int, zeroed: bool) -> int:
    """Address of a new block; 0 if it does not fit."""
    if not _admit(counter, size):
        return 0
    address = _new_block(counter, size, zeroed)
    if address == 0:
        return 0
    ident = _count(counter, size)
    _keep_limit(counter)  # nothing of the block has been touched yet
    store(address - _HEADER, ident)
    store(address - _HEADER + 8, size)
    if load(counter + _LOGGING) != 0:
        _log(counter, ident, size)
    return address


@_native(types.void(_i64, _i64))
def _give(counter: int, address: int) -> None:
    """Takes a block back."""
    ident, size = load(address - _HEADER), load(address - _HEADER + 8)
    _uncount(counter, ident, size)
    _free_block(counter, address)
    _keep_limit(counter)


@_native(types.void(_i64, _i64, _i64))
def _write_figures(counter: int, out: int, new_peak: int) -> None:
    """Writes what :meth:`Counter.pool_figures` returns."""
    free = _held(counter)
    used = load(counter + _USED)
    store(out, used)
    store(out + 8, free)
    store(out + 16, load(counter + _FROM_POOL))
    store(out + 24, load(counter + _FROM_SYSTEM))
    store(out + 32, max(used, load(counter + _SAMPLE_PEAK)))
    if new_peak != 0:
        store(counter + _SAMPLE_PEAK, used)


@callback(_i64(_i64, _i64), uses=(slab,))
def _on_malloc(counter: int, size: int) -> int:
    return _take(counter, size, False)


@callback(_i64(_i64, _i64, _i64), uses=(slab,))
def _on_calloc(counter: int, count: int, size: int) -> int:
    return _take(counter, count * size, True)


@callback(_i64(_i64, _i64, _i64), uses=(slab,))
def _on_realloc(counter: int, address: int, size: int) -> int:
    if address == 0:
        return _take(counter, size, False)
    moved = _take(counter, size, False)
    if moved != 0:
        _c_memcpy(moved, address, min(size, load(address - _HEADER + 8)))
        _give(counter, address)
    return moved


@callback(types.void(_i64, _i64, _i64), uses=(slab,))
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


class _Memory:
    """What arrays may still need of a counter; see Note: [immortal handler].

    Attributes:
        address (int): Of the counter's words.
        number (int): Of this memory; ids begin with it.
        handler (_Handler): Whose functions get the address.
        capsule: What NumPy takes a handler from.
        owner (weakref): The counter that reads and writes the words.
    """

    def __init__(self, number: int) -> None:
        self.address = slab.immortal(8 * _FIELDS)
        self.number = number
        self.words = (ctypes.c_int64 * _FIELDS).from_address(self.address)
        self.words[_NEXT_ID // 8] = (number << _ID_BITS) + 1  # never used twice
        self.words[_LOG_CAPACITY // 8] = _FIRST_LOG_ENTRIES
        self.words[_LOG // 8] = slab.immortal(16 * _FIRST_LOG_ENTRIES)
        for place in (_SIDE, _ARENA):
            holes = slab.immortal(slab.HOLE_BYTES * slab.MOST_HOLES)
            self.words[(place + slab.HOLES) // 8] = holes
        self.handler = _make_handler(self.address)
        self.capsule = _make_capsule(self.handler)
        self.owner: weakref.ref[Counter] | None = None
        self._unused = sys.getrefcount(self.capsule)

    @property
    def idle(self) -> bool:
        """Whether no array, context or open counter is left that needs it."""
        return sys.getrefcount(self.capsule) == self._unused

    def renew(self) -> None:
        """Everything as in the beginning, but ids go on."""
        for place in (_SIDE, _ARENA):
            _drop_slab(self.address, place)
        kept = {field: self.words[field // 8] for field in _KEPT}
        ctypes.memset(self.address, 0, 8 * _FIELDS)
        for field, value in kept.items():
            self.words[field // 8] = value


_memories: list[_Memory] = []


def _take_memory() -> _Memory:
    """Memory that no array needs any more, or new memory."""
    for memory in _memories:
        if memory.idle:
            former = memory.owner() if memory.owner is not None else None
            if former is not None:
                former._keep_figures()
            memory.renew()
            return memory
    memory = _Memory(len(_memories))
    _memories.append(memory)
    return memory


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
        memory = _take_memory()
        self._words: ctypes.Array[ctypes.c_int64] = memory.words
        self._address = memory.address
        self._set(_LIMIT, limit_bytes)
        self._number = memory.number
        self._figures = (ctypes.c_int64 * 5)()
        self._figures_address = ctypes.addressof(self._figures)
        self._previous: Any = None
        self._capsule: Any = memory.capsule
        memory.owner = _counters[memory.address] = weakref.ref(self)

    def close(self) -> None:
        """The last array that this counter has counted frees its memory for others.

        Until then, and afterwards, the figures can be read.
        """
        self._capsule = None

    def _keep_figures(self) -> None:
        """Another counter gets the memory: the last figures are kept elsewhere."""
        self._words = type(self._words).from_buffer_copy(self._words)
        self._address = ctypes.addressof(self._words)

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

    def forget_failure(self) -> None:
        """No block has been refused since."""
        self._set(_FAILED_BYTES, 0)

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

    # -- places ---------------------------------------------------------------
    @property
    def table_address(self) -> int:
        """Of the words that say where the next blocks are to lie."""
        return self._address + _TABLE

    def release_side(self) -> None:
        """Gives free pages outside of the arena back to the system."""
        arena_bytes = self._get(_ARENA + slab.HELD)
        _release_holes(self._address, self._get(_USED) + arena_bytes)

    @property
    def arena_bytes(self) -> int:
        """Addresses for blocks with planned places."""
        return self._get(_ARENA + slab.SIZE)

    def poison_freed(self, poisoned: bool) -> None:
        """Fills large blocks with ones when they are freed: NaN, as numbers."""
        self._set(_POISON, int(poisoned))

    def refuse(self, number: int, final: bool = False, lasting: bool = False) -> None:
        """Makes an allocation to come fail, for tests of what happens then.

        Args:
            number: Of the block among those to come; the next one is 0.
            final: Whether it is refused although space was made for it; else it is
                given after ``reclaim`` was called, if it then fits.
            lasting: Whether all that come after it are refused, too.
        """
        refusal = _LASTING if lasting else _FINAL if final else _PASSING
        self._set(_REFUSAL, refusal)
        self._set(_REFUSED_ID, self._get(_NEXT_ID) + number)

    @property
    def refuses(self) -> bool:
        """Whether the allocation that :meth:`refuse` named is still to come."""
        return self._get(_REFUSED_ID) != 0

    @property
    def next_id(self) -> int:
        """Of the next block; ids are given in order."""
        return self._get(_NEXT_ID)

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
        for place in (_SIDE, _ARENA):
            _make_slab(self._address, place, _slab_bytes(self._get(_LIMIT)))
        self._set(_LIMITED, 1)
        self._previous = _set_handler(self._capsule)

    def uninstall(self) -> None:
        """Restores the handler that :meth:`install` replaced."""
        self._set(_LIMITED, 0)
        _release_holes(self._address, 0)
        self._set(_TABLE + slab.STOP, 0)
        for place in (_SIDE, _ARENA):
            _drop_slab(self._address, place)
        _set_handler(self._previous)
        self._previous = None

    def pause_reclaim(self, paused: bool) -> None:
        """Refuses blocks that do not fit without asking for space first."""
        self._set(_RECLAIMING, int(paused))

    def ident_at(self, address: int) -> int:
        """Id of a block one of our handlers has given out; 0 if another did."""
        ident = ctypes.c_int64.from_address(address - _HEADER).value
        return ident if ident >> _ID_BITS == self._number else 0


def block_bytes(nbytes: int) -> int:
    """What a block takes up, its header included; 0 if it comes from the heap."""
    if nbytes < _LARGE_BYTES:
        return 0
    return (nbytes + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT


def _slab_bytes(limit_bytes: int) -> int:
    """Whole pages for the limit, and no more than the machine has."""
    return (min(limit_bytes, physical_ram()) + 4095) & -4096


def counted(array: numpy.ndarray) -> bool:
    """Whether an array that owns its data got it from one of our handlers."""
    return multiarray.get_handler_name(array) == NAME


def installed() -> bool:
    """Whether one of our handlers serves the current context."""
    return multiarray.get_handler_name() == NAME


def _make_handler(counter: int) -> _Handler:
    handler = _Handler.from_address(slab.immortal(ctypes.sizeof(_Handler)))
    handler.name = NAME.encode()
    handler.version = 1
    allocator = handler.allocator
    allocator.ctx = counter
    allocator.malloc = _on_malloc.address
    allocator.calloc = _on_calloc.address
    allocator.realloc = _on_realloc.address
    allocator.free = _on_free.address
    return handler


def _make_capsule(handler: _Handler) -> Any:
    name = slab.immortal(16)
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
    for memory in _memories:
        allocator = memory.handler.allocator
        allocator.ctx = None
        allocator.free = allocator.calloc = allocator.realloc = leak
        allocator.malloc = ctypes.cast(_libc.realloc, ctypes.c_void_p).value


def _forget_parent() -> None:
    """A forked child has no copy threads: it goes back to NumPy's handler.

    Arrays stay where they are. The pages of holes go: else the parent would get
    new ones for what it writes there, beyond its limit.
    """
    if installed():
        _set_handler(ctypes.py_object())
    for reference in _counters.values():
        counter = reference()
        if counter is not None:
            counter._set(_LIMITED, 0)
            _release_holes(counter._address, 0)


atexit.register(_make_harmless)
os.register_at_fork(after_in_child=_forget_parent)
