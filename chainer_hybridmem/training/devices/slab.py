"""Cuts one piece of memory into blocks, and finds planned blocks their offset.

All of this is native code that works with addresses and never looks at what is
behind them, so the memory may be a GPU's. A slab and a table are structures of
8-byte words in C memory that is never freed, because arrays may outlive every
Python object.

=========  ================================================================
word       meaning
=========  ================================================================
slab       one piece of memory; blocks are cut from holes, else from above
           the top, which sinks again when the last block goes
hole       free bytes below the top
held       free bytes that may have physical pages: of holes, and above the
           top as far up as it has ever been
arena      a slab whose blocks have planned offsets
table      the mallocs a plan expects, in order: size and offset of each; the
           offset is negative for those that have none
segment    the part of the table that belongs to one operation
=========  ================================================================

Note: [offsets]
    A malloc is looked up by its position in the segment of the operation that
    runs: the next entry, or one of the next few if something planned did not
    come. It gets its offset if its size is the planned one and nothing
    lies there. Every other block is the caller's to put somewhere else, so that
    an iteration which leaves its plan loses speed and nothing more.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.ir
from numba import types
from numba.extending import intrinsic

from chainer_hybridmem.jit import compiled

# Words of a slab.
BASE, SIZE, TOP, TOUCHED, BLOCKS = range(0, 40, 8)
HOLES, HOLE_COUNT, FRESH, EXTENT, HELD = range(40, 80, 8)
SLAB_BYTES = 80
# Words of a hole: where it begins, its bytes, and how many may have pages at most.
HOLE_AT, HOLE_SIZE, HOLE_HELD, HOLE_BYTES = 0, 8, 16, 24
MOST_HOLES = 1 << 13
UNIT_BYTES = 512  # CuPy hands out multiples of this
LEAST_HOLE = 4096  # smaller remainders go with the block, unless it is planned

# Words of a table.
ENTRIES, NEXT, STOP, PLACED, MISSED, TAKEN = range(0, 48, 8)
TABLE_BYTES = 48
LOOK_AHEAD = 64  # entries; of what a plan expects and does not come

_libc = ctypes.PyDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)


def immortal(nbytes: int) -> int:
    """Address of zeroed C memory that is never freed."""
    address: int | None = _libc.calloc(1, nbytes)
    if address is None:
        raise MemoryError(f'no {nbytes} bytes for the allocator')
    return address


# -- words ----------------------------------------------------------------------
@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """The 8-byte integer at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = llvmlite.ir.IntType(64)
        return builder.load(builder.inttoptr(args[0], word.as_pointer()))

    return types.int64(types.int64), build


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes an 8-byte integer to an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = llvmlite.ir.IntType(64)
        builder.store(args[1], builder.inttoptr(args[0], word.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


_i64 = types.int64


@compiled()
def add(address: int, value: int) -> None:
    """Adds to the integer at an address."""
    store(address, load(address) + value)


# -- slab -----------------------------------------------------------------------
@compiled()
def begin(slab: int, base: int, nbytes: int) -> None:
    """Makes a slab of free memory that has no pages yet."""
    store(slab + BASE, base)
    store(slab + SIZE, nbytes)
    for word in (TOP, TOUCHED, BLOCKS, HOLE_COUNT, FRESH, EXTENT, HELD):
        store(slab + word, 0)


@compiled()
def _copy_hole(holes: int, source: int, target: int) -> None:
    for word in (HOLE_AT, HOLE_SIZE, HOLE_HELD):
        value = load(holes + HOLE_BYTES * source + word)
        store(holes + HOLE_BYTES * target + word, value)


@compiled()
def _remove_hole(slab: int, index: int) -> None:
    holes, count = load(slab + HOLES), load(slab + HOLE_COUNT) - 1
    for i in range(index, count):
        _copy_hole(holes, i + 1, i)
    store(slab + HOLE_COUNT, count)


@compiled()
def _set_hole(slab: int, index: int, address: int, nbytes: int, pages: int) -> None:
    hole = load(slab + HOLES) + HOLE_BYTES * index
    store(hole + HOLE_AT, address)
    store(hole + HOLE_SIZE, nbytes)
    store(hole + HOLE_HELD, pages)


@compiled(types.void(_i64, _i64, _i64, _i64, _i64), apart=True)
def _insert_hole(slab: int, index: int, address: int, nbytes: int, pages: int) -> None:
    """Adds a hole; lost until the slab goes if there are far too many."""
    holes, count = load(slab + HOLES), load(slab + HOLE_COUNT)
    if count == MOST_HOLES:
        return
    for i in range(count, index, -1):
        _copy_hole(holes, i - 1, i)
    _set_hole(slab, index, address, nbytes, pages)
    store(slab + HOLE_COUNT, count + 1)


@compiled()
def _hole_behind(slab: int, address: int) -> int:
    """Index of the first hole that begins at or behind an address."""
    holes = load(slab + HOLES)
    low, high = 0, load(slab + HOLE_COUNT)
    while low < high:
        middle = (low + high) // 2
        if load(holes + HOLE_BYTES * middle) < address:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(types.void(_i64, _i64, _i64, _i64), apart=True)
def _cut_hole(slab: int, index: int, before: int, total: int) -> None:
    """Takes ``total`` bytes out of a hole, ``before`` bytes behind its beginning.

    Which of its bytes have pages is not known: each remainder may have all of them.
    """
    hole = load(slab + HOLES) + HOLE_BYTES * index
    start, nbytes = load(hole + HOLE_AT), load(hole + HOLE_SIZE)
    pages = load(hole + HOLE_HELD)
    behind = nbytes - before - total
    left, right = min(pages, before), min(pages, behind)
    if before > 0 and behind > 0:
        _set_hole(slab, index, start, before, left)
        _insert_hole(slab, index + 1, start + before + total, behind, right)
    elif before > 0:
        _set_hole(slab, index, start, before, left)
    elif behind > 0:
        _set_hole(slab, index, start + total, behind, right)
    else:
        _remove_hole(slab, index)
    add(slab + HELD, left + right - pages)
    store(slab + FRESH, total - min(total, pages))


@compiled()
def _raise_top(slab: int, top: int) -> None:
    """Moves the top up; what was never touched below it is fresh."""
    touched, below = load(slab + TOUCHED), load(slab + TOP)
    store(slab + FRESH, max(0, top - max(touched, below)))
    add(slab + HELD, -max(0, min(touched, top) - below))
    store(slab + TOP, top)
    store(slab + TOUCHED, max(touched, top))


@compiled(_i64(_i64, _i64), apart=True)
def cut(slab: int, total: int) -> int:
    """Takes space: the smallest hole that has pages, else the smallest, else the top.

    Returns:
        int: Its address, 0 if there is none. EXTENT says how much it really
        is, FRESH for how much of it the system has to give pages.
    """
    holes, count = load(slab + HOLES), load(slab + HOLE_COUNT)
    best, best_bytes, best_fresh = -1, 0, 1
    for i in range(count):
        nbytes = load(holes + HOLE_BYTES * i + HOLE_SIZE)
        if nbytes < total:
            continue
        fresh = load(holes + HOLE_BYTES * i + HOLE_HELD) < nbytes
        if best < 0 or (fresh, nbytes) < (best_fresh, best_bytes):
            best, best_bytes, best_fresh = i, nbytes, fresh
            if nbytes == total and not fresh:
                break
    if best >= 0:
        address = load(holes + HOLE_BYTES * best)
        if best_bytes - total < LEAST_HOLE:
            total = best_bytes
        _cut_hole(slab, best, 0, total)
    else:
        top = load(slab + TOP)
        if top + total > load(slab + SIZE):
            return 0
        address = load(slab + BASE) + top
        _raise_top(slab, top + total)
    add(slab + BLOCKS, 1)
    store(slab + EXTENT, total)
    return address


@compiled(_i64(_i64, _i64))
def cut_units(slab: int, total: int) -> int:
    """Takes space like :func:`cut`, in units: all blocks are multiples of them.

    Returns:
        int: Its address, 0 if there is none; in its last digits, how many units more
        it really is.
    """
    address = cut(slab, total)
    return address + (load(slab + EXTENT) - total) // UNIT_BYTES if address else 0


@compiled(types.boolean(_i64, _i64, _i64), apart=True)
def cut_at(slab: int, address: int, total: int) -> bool:
    """Takes exactly this space if nothing lies there; see :func:`cut`."""
    base, top = load(slab + BASE), load(slab + TOP)
    if address + total > base + load(slab + SIZE):
        return False
    if address >= base + top:
        touched = load(slab + TOUCHED)
        if address > base + top:
            count, gap = load(slab + HOLE_COUNT), address - base - top
            pages = max(0, min(touched - top, gap))
            _insert_hole(slab, count, base + top, gap, pages)
            _raise_top(slab, address - base)
            add(slab + HELD, pages)
        _raise_top(slab, address + total - base)
        store(slab + FRESH, total - max(0, min(total, touched - (address - base))))
    else:
        index = _hole_behind(slab, address + 1) - 1
        if index < 0:
            return False
        hole = load(slab + HOLES) + HOLE_BYTES * index
        before = address - load(hole + HOLE_AT)
        if before + total > load(hole + HOLE_SIZE):
            return False
        _cut_hole(slab, index, before, total)
    add(slab + BLOCKS, 1)
    store(slab + EXTENT, total)
    return True


@compiled(types.void(_i64, _i64, _i64), apart=True)
def join(slab: int, address: int, total: int) -> None:
    """Puts space back and joins it with its neighbours."""
    holes, count = load(slab + HOLES), load(slab + HOLE_COUNT)
    add(slab + BLOCKS, -1)
    add(slab + HELD, total)
    pages = total
    index = _hole_behind(slab, address)
    behind = holes + HOLE_BYTES * index
    if index < count and load(behind + HOLE_AT) == address + total:
        total += load(behind + HOLE_SIZE)
        pages += load(behind + HOLE_HELD)
        _remove_hole(slab, index)
    if index > 0:
        before = holes + HOLE_BYTES * (index - 1)
        if load(before + HOLE_AT) + load(before + HOLE_SIZE) == address:
            address = load(before + HOLE_AT)
            total += load(before + HOLE_SIZE)
            pages += load(before + HOLE_HELD)
            index -= 1
            _remove_hole(slab, index)
    base, top = load(slab + BASE), load(slab + TOP)
    if address + total < base + top:
        _insert_hole(slab, index, address, total, pages)
        return
    # Above the top all that has ever been touched is held.
    store(slab + TOP, address - base)
    add(slab + HELD, total - pages)


@compiled(types.void(_i64, _i64, _i64))
def lose_pages(slab: int, address: int, nbytes: int) -> None:
    """Free space has lost its pages."""
    index = _hole_behind(slab, address + 1) - 1
    hole = load(slab + HOLES) + HOLE_BYTES * index
    if index < 0 or load(hole + HOLE_AT) + load(hole + HOLE_SIZE) <= address:
        return  # it lies above the top
    pages = min(load(hole + HOLE_HELD), nbytes)
    add(hole + HOLE_HELD, -pages)
    add(slab + HELD, -pages)


@compiled()
def largest_held(slab: int) -> int:
    """Index of the hole with the most pages; -1 if none has any."""
    holes = load(slab + HOLES)
    largest, most = -1, 0
    for i in range(load(slab + HOLE_COUNT)):
        pages = load(holes + HOLE_BYTES * i + HOLE_HELD)
        if pages > most:
            largest, most = i, pages
    return largest


# -- table ----------------------------------------------------------------------
@compiled(_i64(_i64, _i64, _i64), apart=True)
def place(table: int, slab: int, total: int) -> int:
    """The planned space of the next malloc; 0 if it has none. See [offsets]."""
    index, stop = load(table + NEXT), load(table + STOP)
    entries = load(table + ENTRIES)
    for i in range(index, min(stop, index + LOOK_AHEAD)):
        if load(entries + 16 * i) == total:
            store(table + NEXT, i + 1)
            offset = load(entries + 16 * i + 8)
            if offset < 0:
                return 0
            address = load(slab + BASE) + offset
            if cut_at(slab, address, total):
                add(table + PLACED, 1)
                return address
            add(table + TAKEN, 1)
            return 0
    add(table + MISSED, 1)
    return 0
