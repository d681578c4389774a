"""Blocks that CuPy takes and gives back in native code.

CuPy has an allocator that calls C functions (``cupy.cuda.memory.CFunctionAllocator``).
They serve what needs no Python: a block for the thread, GPU and stream of the session
that fits by count, and finds its planned place, or one beside the arena, with memory
behind it. Everything else gets address 0, and the caller goes the long way.

Note: [given blocks]
    CuPy's memory object has nothing but an address, so what is given stands in a table,
    by address, until it is free. A block holds a reference to its slab and to the
    counter, as an object of Python would. Where Python has to know when a block is free
    it gets an owner, whose death frees it. The table holds the reference to the owner
    that CuPy's object would hold, and lets go of it when that object dies.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir
from numba import types
from numba.extending import intrinsic

from chainer_hybridmem.jit import callback, compiled
from chainer_hybridmem.training.devices import counting, slab
from chainer_hybridmem.training.devices.counting import COUNTING_BYTES, LIMIT, USED
from chainer_hybridmem.training.devices.slab import UNIT_BYTES, add, load, store

# Words of a counter behind those of every device.
OPEN = COUNTING_BYTES  # whether blocks are given
THREAD, NUMBER, STREAM, STREAM_NOW, SELF = range(OPEN + 8, OPEN + 48, 8)
WATCHED, FROM_POOL, WHOLE, GIVEN, BLOCKS = range(SELF + 8, SELF + 48, 8)
RECOUNT = BLOCKS + 8  # whether others may have left room, which Python looks for first
SMALL = RECOUNT + 8  # places to cut blocks from
# Words of a place: its slab and that as an object of Python; from how many holes on it
# gets a successor; a byte for each granule (0: there is no memory behind it), and the
# bytes of a granule.
PLACE_SLAB, PLACE_OBJECT, PLACE_CROWDED, PLACE_MAPPED, PLACE_GRANULE = range(0, 40, 8)
PLACE_BYTES = 40
LARGE, ARENA = SMALL + PLACE_BYTES, SMALL + 2 * PLACE_BYTES
FIELDS = (ARENA + PLACE_BYTES) // 8

# Words of a block.
ADDRESS, IDENT, NBYTES, EXTENT, OF_SLAB, OF_OBJECT, OF_STREAM, OWNER = range(0, 64, 8)
BLOCK_BYTES = 64
SLOTS = 1 << 14  # of the table, of which half are used at most

_native = functools.partial(compiled, uses=(slab, counting))
_i64 = types.int64
_c_thread = types.ExternalFunction('pthread_self', _i64())
_c_memchr = types.ExternalFunction('memchr', _i64(_i64, types.int32, _i64))
_hold = types.ExternalFunction('Py_IncRef', types.void(_i64))
_let_go = types.ExternalFunction('Py_DecRef', types.void(_i64))


@intrinsic
def _call(typing_context: Any, address: Any) -> Any:
    """What the C function at an address returns."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = llvmlite.ir.FunctionType(llvmlite.ir.IntType(64), ())
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), ())

    return types.int64(types.int64), build


# -- the table of blocks, by address, with open addressing ------------------------
@_native()
def _first_slot(address: int) -> int:
    """Where the table is first looked at; neighbours in memory are far apart there."""
    return (address // UNIT_BYTES * 0x9E3779B1 >> 16) & (SLOTS - 1)


@_native(_i64(_i64, _i64), apart=True)
def find(counter: int, address: int) -> int:
    """Where the words of a block are; 0 if no such block is given."""
    blocks = load(counter + BLOCKS)
    slot = _first_slot(address)
    while load(blocks + BLOCK_BYTES * slot) != 0:
        block = blocks + BLOCK_BYTES * slot
        if load(block) == address:
            return block
        slot = (slot + 1) & (SLOTS - 1)
    return 0


@_native(_i64(_i64, _i64))
def ident_at(counter: int, address: int) -> int:
    """Id of the block at an address; 0 if no such block is given."""
    block = find(counter, address)
    return load(block + IDENT) if block != 0 else 0


@_native(types.void(_i64, _i64), apart=True)
def _remove(counter: int, block: int) -> None:
    """Takes a block out of the table; others move up to where they are sought."""
    blocks = load(counter + BLOCKS)
    add(counter + GIVEN, -1)
    empty = (block - blocks) // BLOCK_BYTES
    slot = empty
    while True:
        slot = (slot + 1) & (SLOTS - 1)
        moved = blocks + BLOCK_BYTES * slot
        if load(moved) == 0:
            break
        wanted = _first_slot(load(moved))
        if ((slot - wanted) & (SLOTS - 1)) >= ((slot - empty) & (SLOTS - 1)):
            for word in range(0, BLOCK_BYTES, 8):
                store(blocks + BLOCK_BYTES * empty + word, load(moved + word))
            empty = slot
    store(blocks + BLOCK_BYTES * empty, 0)


@_native()
def _enter(counter: int, place: int, address: int, nbytes: int, extent: int) -> None:
    """Counts a block and writes it into the table."""
    blocks = load(counter + BLOCKS)
    slot = _first_slot(address)
    while load(blocks + BLOCK_BYTES * slot) != 0:
        slot = (slot + 1) & (SLOTS - 1)
    block = blocks + BLOCK_BYTES * slot
    store(block + ADDRESS, address)
    store(block + IDENT, counting.count_malloc(counter, nbytes))
    store(block + NBYTES, nbytes)
    store(block + EXTENT, extent)
    store(block + OF_SLAB, load(place + PLACE_SLAB))
    store(block + OF_OBJECT, load(place + PLACE_OBJECT))
    store(block + OF_STREAM, load(counter + STREAM))
    store(block + OWNER, 0)
    _hold(load(place + PLACE_OBJECT))
    _hold(load(counter + SELF))
    add(counter + GIVEN, 1)
    if load(counter + WATCHED) > 0:
        add(counter + FROM_POOL, nbytes)


# -- giving and taking back --------------------------------------------------------
@_native()
def _has_memory(place: int, address: int, extent: int) -> bool:
    """Whether there is memory behind all of a block."""
    mapped, granule = load(place + PLACE_MAPPED), load(place + PLACE_GRANULE)
    if mapped == 0:
        return True
    offset = address - load(load(place + PLACE_SLAB) + slab.BASE)
    first, last = offset // granule, (offset + extent - 1) // granule
    return _c_memchr(mapped + first, 0, last - first + 1) == 0


@_native()
def _give_from(counter: int, place: int, address: int, nbytes: int) -> bool:
    """Gives space that has been cut, if there is memory behind it."""
    cut_from = load(place + PLACE_SLAB)
    extent = load(cut_from + slab.EXTENT)
    if not _has_memory(place, address, extent):
        slab.join(cut_from, address, extent)
        return False
    _enter(counter, place, address, nbytes, extent)
    return True


@_native(_i64(_i64, _i64), apart=True)
def _give_planned(counter: int, nbytes: int) -> int:
    """The planned space of the next malloc; 0: it has none, -1: Python is needed."""
    arena = load(counter + ARENA + PLACE_SLAB)
    table = arena + slab.SLAB_BYTES
    if arena == 0 or load(table + slab.STOP) == 0:
        return 0
    address = slab.place(table, arena, nbytes)
    if address != 0 and not _give_from(counter, counter + ARENA, address, nbytes):
        add(table + slab.PLACED, -1)
        return -1
    return address


@_native(_i64(_i64, _i64), apart=True)
def _give_beside(counter: int, nbytes: int) -> int:
    """Space beside the arena; 0 if Python is needed."""
    place = counter + (SMALL if nbytes < load(counter + WHOLE) else LARGE)
    cut_from = load(place + PLACE_SLAB)
    if cut_from == 0 or load(cut_from + slab.HOLE_COUNT) > load(place + PLACE_CROWDED):
        return 0
    address = slab.cut(cut_from, nbytes)
    if address != 0 and not _give_from(counter, place, address, nbytes):
        return 0
    return address


@_native()
def _is_simple(counter: int, nbytes: int) -> bool:
    """Whether a block may be given without Python, as far as can be told."""
    return (
        load(counter + OPEN) != 0
        and load(counter + RECOUNT) == 0
        and load(counter + USED) + nbytes <= load(counter + LIMIT)
        and load(counter + GIVEN) < SLOTS // 2
        and load(counter + THREAD) == _c_thread()
        and load(counter + STREAM) == _call(load(counter + STREAM_NOW))
    )


@_native(_i64(_i64, _i64), apart=True)
def give(counter: int, size: int) -> int:
    """Address of a new block; 0 if Python is needed, and nothing has happened."""
    nbytes = (size + UNIT_BYTES - 1) // UNIT_BYTES * UNIT_BYTES
    if not _is_simple(counter, nbytes):
        return 0
    table = load(counter + ARENA + PLACE_SLAB) + slab.SLAB_BYTES
    planned = load(counter + ARENA + PLACE_SLAB) != 0
    sought = load(table + slab.NEXT) if planned else 0
    missed = load(table + slab.MISSED) if planned else 0
    taken = load(table + slab.TAKEN) if planned else 0
    address = _give_planned(counter, nbytes)
    if address == 0:
        address = _give_beside(counter, nbytes)
    if address > 0:
        return address
    if planned:  # the same place is sought once more
        store(table + slab.NEXT, sought)
        store(table + slab.MISSED, missed)
        store(table + slab.TAKEN, taken)
    return 0


@_native(types.void(_i64, _i64), apart=True)
def _free(counter: int, block: int) -> None:
    """Uncounts a block, and makes its space free; what it has held may go."""
    held, slab_words = load(block + OF_OBJECT), load(block + OF_SLAB)
    address, extent = load(block), load(block + EXTENT)
    ident, nbytes = load(block + IDENT), load(block + NBYTES)
    _remove(counter, block)
    counting.uncount(counter, ident, nbytes)
    slab.join(slab_words, address, extent)
    _let_go(held)
    _let_go(load(counter + SELF))  # the last reference of all, perhaps


@_native(types.void(_i64, _i64), apart=True)
def take_back(counter: int, address: int) -> None:
    """CuPy's object for a block has died."""
    block = find(counter, address)
    if block == 0:
        return
    owner = load(block + OWNER)
    if owner != 0:
        _let_go(owner)
    else:
        _free(counter, block)


@_native(types.void(_i64, _i64, _i64))
def free_of(counter: int, address: int, owner: int) -> None:
    """The owner of a block has died; nothing happens if it never became that."""
    block = find(counter, address)
    if block != 0 and load(block + OWNER) == owner:
        _free(counter, block)


@_native(types.void(_i64, _i64, _i64))
def own(counter: int, address: int, owner: int) -> None:
    """From now on an object of Python gives a block back; see [given blocks]."""
    store(find(counter, address) + OWNER, owner)
    _hold(owner)


_USED = slab, counting


@callback(_i64(_i64, _i64, types.int32), uses=_USED)
def on_malloc(counter: int, size: int, device: int) -> int:
    return give(counter, size) if device == load(counter + NUMBER) else 0


@callback(types.void(_i64, _i64, types.int32), uses=_USED)
def on_free(counter: int, address: int, device: int) -> None:
    take_back(counter, address)
