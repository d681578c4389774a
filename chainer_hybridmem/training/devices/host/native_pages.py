"""The slabs that large blocks are cut from, and the pages in them, in native code.

Note: [slabs]
    A new large block from the system costs a page fault for every page, up to a
    fifth of an iteration, and the C library's heap keeps freed ones in pieces.
    Large blocks are therefore cut from two slabs, each as large as the limit: the
    arena for those with a planned offset, the side slab for all others, with best fit.
    Addresses cost nothing (:mod:`..addresses`), pages are kept: before one more is
    touched than the limit allows, pages of holes, the largest first, go back to the
    system, as few as will do. So physical memory follows the load, not its history.
"""

from __future__ import annotations

import functools
import mmap

from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.training.devices import addresses, counting, slab
from chainer_hybridmem.training.devices.host import counter_words as words
from chainer_hybridmem.training.devices.slab import add, load, store

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_HUGE_BYTES = 1 << 22  # from this size on NumPy asks for huge pages, so do we
_PIECE_BYTES = 1 << 16  # of pages that are given back at least; a call costs something
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAPPED_FLAGS, _RESERVED_FLAGS = addresses.MAPPED, addresses.RESERVED

_native = functools.partial(compiled, uses=(slab, counting, words))
_i64 = types.int64
_c_mmap = types.ExternalFunction(
    'mmap', _i64(_i64, _i64, types.int32, types.int32, types.int32, _i64)
)
_c_munmap = types.ExternalFunction('munmap', types.int32(_i64, _i64))
_c_madvise = types.ExternalFunction('madvise', types.int32(_i64, _i64, types.int32))


@_native()
def release_pages(start: int, end: int) -> None:
    """Gives the whole pages between two addresses back; they read as zero."""
    first, last = (start + 4095) & -4096, end & -4096
    if last > first:
        _c_madvise(first, last - first, _MADV_DONTNEED)


@_native()
def count_held(counter: int) -> int:
    """Free bytes that have pages."""
    return load(counter + words.SIDE + slab.HELD) + load(
        counter + words.ARENA + slab.HELD
    )


@_native()
def _release_tail(place: int, nbytes: int) -> int:
    """Gives pages above the top of a slab back, from the end; returns their bytes."""
    base, top = load(place + slab.BASE), load(place + slab.TOP)
    touched = load(place + slab.TOUCHED)
    if touched <= top:
        return 0
    kept = touched - min(touched - top, max(nbytes, _PIECE_BYTES))
    kept = max(top, kept & -4096)
    release_pages(base + kept, base + touched)
    store(place + slab.TOUCHED, kept)
    add(place + slab.HELD, kept - touched)
    return touched - kept


@_native()
def _release_largest(place: int, nbytes: int) -> int:
    """Gives pages of the hole with the most of them back; returns their bytes.

    As many as asked for, or a piece if that is more: those at its end, for blocks are
    cut from its beginning.
    """
    index = slab.largest_held(place)
    if index < 0:
        return 0
    hole = load(place + slab.HOLES) + slab.HOLE_BYTES * index
    start, pages = load(hole + slab.HOLE_AT), load(hole + slab.HOLE_HELD)
    kept = pages - min(pages, max(nbytes, _PIECE_BYTES))
    # Where its pages lie is not known: beyond as many as it keeps, all of them go.
    first = max(start, (start + kept) & -4096)
    kept = first - start
    release_pages(first, start + load(hole + slab.HOLE_SIZE))
    store(hole + slab.HOLE_HELD, kept)
    add(place + slab.HELD, kept - pages)
    return pages - kept


@_native(types.void(_i64, _i64), apart=True)
def release_holes(counter: int, most: int) -> None:
    """Gives unused pages back until at most so many bytes are in use and held.

    Holes of the arena go last: they will be needed again.
    """
    excess = load(counter + counting.USED) + count_held(counter) - most
    for place in (counter + words.SIDE, counter + words.ARENA):
        if excess > 0:
            excess -= _release_tail(place, excess)
        while excess > 0:
            nbytes = _release_largest(place, excess)
            if nbytes == 0:
                break
            excess -= nbytes


@_native(types.void(_i64), apart=True)
def keep_limit(counter: int) -> None:
    """What is in use and what is held never exceed the limit together."""
    limit = load(counter + counting.LIMIT)
    if load(counter + counting.USED) + count_held(counter) > limit:
        release_holes(counter, limit)


@_native(types.void(_i64, _i64), apart=True)
def drop_slab(counter: int, field: int) -> None:
    """Gives a slab back once no block is in it any more."""
    base, nbytes = load(counter + field + slab.BASE), load(counter + field + slab.SIZE)
    if base != 0 and load(counter + field + slab.BLOCKS) == 0:
        _c_munmap(base, nbytes)
        slab.begin(counter + field, 0, 0)


@_native(types.void(_i64, _i64, _i64))
def make_slab(counter: int, field: int, nbytes: int) -> None:
    """Reserves addresses for a slab; memory comes as it is touched.

    Blocks that are mapped by themselves are accounted for, as NumPy's are: one that
    is larger than the machine is an error and not the end of the process.
    """
    if load(counter + field + slab.BASE) == 0:
        base = _c_mmap(0, nbytes, _PROTECTION, _RESERVED_FLAGS, -1, 0)
        if base != -1:
            _c_madvise(base, nbytes, _MADV_HUGEPAGE)
            slab.begin(counter + field, base, nbytes)


@_native(_i64(_i64, _i64), apart=True)
def map_block(counter: int, total: int) -> int:
    """Maps a block by itself; 0 if the system refuses."""
    base = _c_mmap(0, total, _PROTECTION, _MAPPED_FLAGS, -1, 0)
    if base == -1:
        return 0
    if total >= _HUGE_BYTES:
        _c_madvise(base, total, _MADV_HUGEPAGE)
    add(counter + words.FROM_SYSTEM, total)
    add(counter + words.MAPPED_BYTES, total)
    store(base + words.EXTENT, total)
    store(base + words.PLACE, words.MAPPED)
    return base


@_native(types.void(_i64, _i64, _i64), apart=True)
def unmap_block(counter: int, base: int, extent: int) -> None:
    """Gives a block of :func:`map_block` back to the system."""
    _c_munmap(base, extent)
    add(counter + words.MAPPED_BYTES, -extent)


@_native(types.void(_i64, _i64, _i64))
def write_figures(counter: int, out: int, new_peak: int) -> None:
    """Writes what :meth:`.Counter.pool_figures` returns."""
    used = load(counter + counting.USED)
    store(out, used)
    store(out + 8, count_held(counter))
    store(out + 16, load(counter + words.FROM_POOL))
    store(out + 24, load(counter + words.FROM_SYSTEM))
    store(out + 32, max(used, load(counter + counting.SAMPLE_PEAK)))
    if new_peak != 0:
        store(counter + counting.SAMPLE_PEAK, used)
