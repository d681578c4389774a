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
    Each block starts 64 bytes after a header with its id, its size and the
    address the C library knows. So the id of any live array is one read away,
    and nothing has to be looked up when it dies.

Note: [kept blocks]
    A new large block costs a page fault for every page, up to a fifth of an
    iteration. Freed large blocks are therefore kept for the next request of
    exactly their size, as training makes the same ones again and again. They
    count: blocks in use and kept ones together never exceed the limit, and the
    oldest go back to the system when space is short.

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
import os
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import llvmlite.ir
import numba
import numpy
from numba import types
from numba.extending import intrinsic

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
_MADV_HUGEPAGE = 14
_FIRST_LOG_ENTRIES = 1 << 14

# Fields of a counter, 8 bytes each.
_LIMIT, _USED, _PEAK, _WINDOW, _NEXT_ID = 0, 8, 16, 24, 32
_LOGGING, _LOG, _LOG_LENGTH, _LOG_CAPACITY = 40, 48, 56, 64
_RECLAIMING, _FAILED_BYTES, _FAILED_USED, _LIMITED = 72, 80, 88, 96
_KEPT_BYTES, _KEPT_COUNT, _KEPT = 104, 112, 120
_FIELDS = 16
_LEAST_KEPT_BYTES = 1 << 20
_MOST_KEPT = 256  # blocks
_ID_BITS = 40  # of an id; the counter's number is above them
_UNLIMITED = 2**62


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
_c_madvise = types.ExternalFunction('madvise', types.int32(_i64, _i64, types.int32))
_reclaim = types.ExternalFunction('chainer_hybridmem_reclaim', _i64(_i64, _i64))


@numba.njit(types.void(_i64, _i64, _i64), cache=True)
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


@numba.njit(types.void(_i64, _i64), cache=True)
def _remove_kept(counter: int, index: int) -> None:
    """Takes one kept block out of the list, which stays in order of age."""
    kept, count = _load(counter + _KEPT), _load(counter + _KEPT_COUNT)
    size = _load(_load(kept + 8 * index) - _HEADER + 8)
    _store(counter + _KEPT_BYTES, _load(counter + _KEPT_BYTES) - size)
    for i in range(index, count - 1):
        _store(kept + 8 * i, _load(kept + 8 * (i + 1)))
    _store(counter + _KEPT_COUNT, count - 1)


@numba.njit(types.void(_i64, _i64), cache=True)
def _shrink_kept(counter: int, most: int) -> None:
    """Gives the oldest kept blocks back until at most so many bytes stay."""
    while _load(counter + _KEPT_COUNT) > 0 and _load(counter + _KEPT_BYTES) > most:
        base = _load(_load(_load(counter + _KEPT)) - _HEADER + 16)
        _remove_kept(counter, 0)
        _c_free(base)


@numba.njit(_i64(_i64, _i64), cache=True)
def _reuse(counter: int, size: int) -> int:
    """A kept block of exactly this size, the youngest first; else 0."""
    kept = _load(counter + _KEPT)
    for i in range(_load(counter + _KEPT_COUNT) - 1, -1, -1):
        address = _load(kept + 8 * i)
        if _load(address - _HEADER + 8) == size:
            _remove_kept(counter, i)
            return address
    return 0


@numba.njit(types.boolean(_i64, _i64), cache=True)
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


@numba.njit(_i64(_i64, _i64, types.boolean), cache=True)
def _new_block(counter: int, size: int, zeroed: bool) -> int:
    """Memory with room for a header; see Note: [headers] and [kept blocks]."""
    if size >= _LEAST_KEPT_BYTES:
        address = _reuse(counter, size)
        if address != 0:
            if zeroed:
                _c_memset(address, 0, size)
            return address
    if _load(counter + _LIMITED) != 0:
        _shrink_kept(counter, _load(counter + _LIMIT) - _load(counter + _USED) - size)
    total = size + _HEADER + _ALIGNMENT
    base = _c_calloc(1, total) if zeroed else _c_malloc(total)
    if base == 0 and _load(counter + _KEPT_COUNT) > 0:
        _shrink_kept(counter, 0)
        base = _c_calloc(1, total) if zeroed else _c_malloc(total)
    if base == 0:
        return 0
    address = (base + _HEADER + _ALIGNMENT - 1) & -_ALIGNMENT
    if size >= _HUGE_BYTES:
        start = (base + 4095) & -4096
        _c_madvise(start, base + total - start, _MADV_HUGEPAGE)
    _store(address - _HEADER + 16, base)
    return address


@numba.njit(_i64(_i64, _i64), cache=True)
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
    return ident


@numba.njit(types.void(_i64, _i64, _i64), cache=True)
def _uncount(counter: int, ident: int, size: int) -> None:
    """Takes counted bytes back."""
    _store(counter + _USED, _load(counter + _USED) - size)
    if _load(counter + _LOGGING) != 0:
        _log(counter, -ident, size)


@numba.njit(_i64(_i64, _i64, types.boolean), cache=True)
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


@numba.njit(types.void(_i64, _i64), cache=True)
def _give(counter: int, address: int) -> None:
    """Takes a block back, to be kept or freed."""
    ident, size = _load(address - _HEADER), _load(address - _HEADER + 8)
    _uncount(counter, ident, size)
    count = _load(counter + _KEPT_COUNT)
    if size < _LEAST_KEPT_BYTES or _load(counter + _LIMITED) == 0:
        _c_free(_load(address - _HEADER + 16))
        return
    if count == _MOST_KEPT:
        base = _load(_load(_load(counter + _KEPT)) - _HEADER + 16)
        _remove_kept(counter, 0)
        _c_free(base)
        count -= 1
    _store(_load(counter + _KEPT) + 8 * count, address)
    _store(counter + _KEPT_COUNT, count + 1)
    _store(counter + _KEPT_BYTES, _load(counter + _KEPT_BYTES) + size)


@numba.cfunc(_i64(_i64, _i64), cache=True)
def _on_malloc(counter: int, size: int) -> int:
    return _take(counter, size, False)


@numba.cfunc(_i64(_i64, _i64, _i64), cache=True)
def _on_calloc(counter: int, count: int, size: int) -> int:
    return _take(counter, count * size, True)


@numba.cfunc(_i64(_i64, _i64, _i64), cache=True)
def _on_realloc(counter: int, address: int, size: int) -> int:
    if address == 0:
        return _take(counter, size, False)
    moved = _take(counter, size, False)
    if moved != 0:
        _c_memcpy(moved, address, min(size, _load(address - _HEADER + 8)))
        _give(counter, address)
    return moved


@numba.cfunc(types.void(_i64, _i64, _i64), cache=True)
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
        self._set(_KEPT, _immortal(8 * _MOST_KEPT))
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
        self._set(_LIMITED, 1)
        self._previous = _set_handler(self._capsule)

    def uninstall(self) -> None:
        """Restores the handler that :meth:`install` replaced."""
        self._set(_LIMITED, 0)
        _shrink_kept(self._address, 0)
        _set_handler(self._previous)
        self._previous = None

    def pause_reclaim(self, paused: bool) -> None:
        """Refuses blocks that do not fit without asking for space first."""
        self._set(_RECLAIMING, int(paused))

    def ident_at(self, address: int) -> int:
        """Id of a block one of our handlers has given out; 0 if another did."""
        ident = ctypes.c_int64.from_address(address - _HEADER).value
        return ident if ident >> _ID_BITS == self._number else 0


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
