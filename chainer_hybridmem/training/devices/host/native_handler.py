"""The memory handler that NumPy calls, in native code.

Note: [pending exceptions]
    NumPy frees arrays while an exception is on its way. A Python callback that
    is entered then loses the exception and fails itself, so the handler is
    native code, compiled once and cached. Only an allocation that does not fit
    calls back into Python.

Note: [copied contexts]
    A thread that runs in a copy of the session's context, as with
    ``asyncio.to_thread``, has its handler. It must not make room, which changes a graph
    that is not its own; so what it allocates counts, and is not limited.

The interpreter lock is held in all of these functions; it orders the counters.
"""

from __future__ import annotations

import functools

from numba import types

from chainer_hybridmem.jit import callback, compiled
from chainer_hybridmem.training.devices import counting, slab
from chainer_hybridmem.training.devices.counting import count_malloc, uncount
from chainer_hybridmem.training.devices.host import counter_words as words
from chainer_hybridmem.training.devices.host import native_pages, reclaimer
from chainer_hybridmem.training.devices.host.native_pages import (
    drop_slab,
    keep_limit,
    map_block,
    release_pages,
    unmap_block,
)
from chainer_hybridmem.training.devices.slab import add, load, store

_RECLAIM_TRIES = 8
_USED = slab, counting, words, native_pages
_native = functools.partial(compiled, uses=_USED)
_i64 = types.int64
_c_malloc = types.ExternalFunction('malloc', _i64(_i64))
_c_calloc = types.ExternalFunction('calloc', _i64(_i64, _i64))
_c_free = types.ExternalFunction('free', types.void(_i64))
_c_memset = types.ExternalFunction('memset', _i64(_i64, types.int32, _i64))
_c_memcpy = types.ExternalFunction('memcpy', _i64(_i64, _i64, _i64))
_python_reclaim = types.ExternalFunction(reclaimer.SYMBOL, _i64(_i64, _i64))
_c_thread = types.ExternalFunction('pthread_self', _i64())
_raise_again = types.ExternalFunction('PyErr_SetInterruptEx', types.int32(types.int32))


@_native(types.void(_i64, _i64), apart=True)
def reclaim(counter: int, missing_bytes: int) -> None:
    """Asks for space; not while that is being done already."""
    store(counter + words.RECLAIMING, 1)
    signal_number = _python_reclaim(counter, missing_bytes)
    store(counter + words.RECLAIMING, 0)
    if signal_number != 0:
        _raise_again(signal_number)


@_native()
def _served(counter: int, field: int, base: int, place: int) -> None:
    """Counts a block that a slab has given."""
    fresh, extent = (
        load(counter + field + slab.FRESH),
        load(counter + field + slab.EXTENT),
    )
    add(counter + words.FROM_SYSTEM, fresh)
    add(counter + words.FROM_POOL, extent - fresh)
    store(base + words.EXTENT, extent)
    store(base + words.PLACE, place)


@_native(_i64(_i64, _i64), apart=True)
def _find_space(counter: int, total: int) -> int:
    """Space for a large block; 0 if there is none.

    Where it is planned to lie, else beside the arena, else in a hole of it, else
    mapped by itself.
    """
    base = 0
    if load(counter + words.TABLE + slab.STOP) > 0:
        base = slab.place(counter + words.TABLE, counter + words.ARENA, total)
        if base != 0:
            _served(counter, words.ARENA, base, words.IN_ARENA)
            return base
    base = slab.cut(counter + words.SIDE, total)
    if base != 0:
        _served(counter, words.SIDE, base, words.IN_SIDE)
        return base
    base = slab.cut(counter + words.ARENA, total)
    if base != 0:
        _served(counter, words.ARENA, base, words.IN_ARENA)
        return base
    return map_block(counter, total)


@_native()
def _may_reclaim(counter: int) -> bool:
    """Whether Python may be asked for space."""
    own = _c_thread() == load(counter + words.THREAD)
    return own and load(counter + words.RECLAIMING) == 0


@_native()
def _large_block(counter: int, size: int, zeroed: bool) -> int:
    """A block from the slab, or one mapped by itself; see Note: [slabs].

    Where the system refuses to map, others must leave the slab to make room.
    """
    total = (size + words.HEADER + words.ALIGNMENT - 1) & -words.ALIGNMENT
    base = _find_space(counter, total)
    if load(counter + words.LIMITED) != 0 and _may_reclaim(counter):
        tries = 0
        while base == 0 and tries < _RECLAIM_TRIES:
            used = load(counter + counting.USED)
            reclaim(counter, total)
            if load(counter + counting.USED) == used:
                break
            base = _find_space(counter, total)
            tries += 1
    if base == 0:
        return 0
    if zeroed:
        _c_memset(base + words.HEADER, 0, size)
    return base + words.HEADER


@_native(types.void(_i64, _i64), apart=True)
def _free_block(counter: int, address: int) -> None:
    """Gives a block back to where it came from."""
    base, place = address - words.HEADER, load(address - words.HEADER + words.PLACE)
    extent = load(base + words.EXTENT)
    if place == words.IN_HEAP:
        _c_free(extent)
    elif place == words.MAPPED:
        unmap_block(counter, base, extent)
    else:
        field = words.SIDE if place == words.IN_SIDE else words.ARENA
        slab.join(counter + field, base, extent)
        if load(counter + words.LIMITED) == 0:
            release_pages(base, base + extent)
            drop_slab(counter, field)


@_native(types.boolean(_i64, _i64), apart=True)
def _admit(counter: int, size: int) -> bool:
    """Whether a block fits, after asking for space if need be."""
    if load(counter + words.LIMITED) == 0:
        return True
    used, limit = load(counter + counting.USED), load(counter + counting.LIMIT)
    if used + size > limit and _c_thread() != load(counter + words.THREAD):
        return True  # see Note: [copied contexts]
    if used + size > limit and _may_reclaim(counter):
        store(counter + words.WANTED, size)
        reclaim(counter, used + size - limit)
        store(counter + words.WANTED, 0)
        used, limit = load(counter + counting.USED), load(counter + counting.LIMIT)
    if used + size > limit:
        store(counter + words.FAILED_BYTES, size)
        store(counter + words.FAILED_USED, used)
        return False
    return True


@_native(_i64(_i64, _i64, types.boolean), apart=True)
def _new_block(counter: int, size: int, zeroed: bool) -> int:
    """Memory behind a header; see Note: [headers] and [slabs]."""
    if size >= words.LARGE_BYTES:
        return _large_block(counter, size, zeroed)
    total = size + words.HEADER + words.ALIGNMENT
    base = _c_calloc(1, total) if zeroed else _c_malloc(total)
    if base == 0:
        return 0
    address = (base + words.HEADER + words.ALIGNMENT - 1) & -words.ALIGNMENT
    store(address - words.HEADER + words.EXTENT, base)
    store(address - words.HEADER + words.PLACE, words.IN_HEAP)
    return address


@_native(_i64(_i64, _i64, types.boolean), apart=True)
def _take(counter: int, size: int, zeroed: bool) -> int:
    """Address of a new block; 0 if it does not fit."""
    if not _admit(counter, size):
        return 0
    address = _new_block(counter, size, zeroed)
    if address == 0:
        return 0
    ident = count_malloc(counter, size)
    keep_limit(counter)  # nothing of the block has been touched yet
    store(address - words.HEADER, ident)
    store(address - words.HEADER + words.SIZE, size)
    return address


@_native(types.void(_i64, _i64), apart=True)
def _give(counter: int, address: int) -> None:
    """Takes a block back."""
    ident, size = (
        load(address - words.HEADER),
        load(address - words.HEADER + words.SIZE),
    )
    uncount(counter, ident, size)
    _free_block(counter, address)
    keep_limit(counter)


@callback(_i64(_i64, _i64), uses=_USED)
def on_malloc(counter: int, size: int) -> int:
    return _take(counter, size, False)


@callback(_i64(_i64, _i64, _i64), uses=_USED)
def on_calloc(counter: int, count: int, size: int) -> int:
    return _take(counter, count * size, True)


@callback(_i64(_i64, _i64, _i64), uses=_USED)
def on_realloc(counter: int, address: int, size: int) -> int:
    if address == 0:
        return _take(counter, size, False)
    moved = _take(counter, size, False)
    if moved != 0:
        _c_memcpy(moved, address, min(size, load(address - words.HEADER + words.SIZE)))
        _give(counter, address)
    return moved


@callback(types.void(_i64, _i64, _i64), uses=_USED)
def on_free(counter: int, address: int, size: int) -> None:
    if address != 0:
        _give(counter, address)
