"""Where blocks of GPU memory come from: the arena, and what lies beside it.

Beside the arena, blocks are cut from slabs whose memory is mapped as it is needed
(:mod:`.mapping`). Where the driver maps none, or a limit has too few granules, they are
whole blocks of the driver's, and small ones pieces of CuPy's pool.
"""

from __future__ import annotations

import abc
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from chainer_hybridmem.training.devices import slab as native
from chainer_hybridmem.training.devices.cuda.gpu import UNIT_BYTES, Gpu
from chainer_hybridmem.training.devices.cuda.mapping import (
    MappedMemory,
    Mapper,
    find_mapper,
)
from chainer_hybridmem.training.devices.offset_table import OffsetTable

_WHOLE_BYTES = 1 << 20  # from this size on blocks are not split, or from
WHOLE_SHARE = 256  # such a part of the limit on; small ones share pieces of memory
MOST_PIECES = 1024  # of mapped memory; two per block may be of no use to others
SPARE_GRANULES = 16  # at the ends of what lies beside an arena, and of the arena
CROWDED_HOLES = native.MOST_HOLES // 2  # of a slab, which then gets a successor
SPARE_ADDRESSES = 2  # times the memory; holes without memory take addresses, too


_all_pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()


class BlockPool(abc.ABC):
    """Takes memory from the driver, up to the limit, and cuts blocks from it.

    Args:
        gpu: Whose memory it is.
        limit_bytes: Most bytes; a smaller ``CUPY_GPU_MEMORY_LIMIT`` wins.

    Attributes:
        limit_bytes (int): The limit.
        enforces_limit (bool): Whether the limit holds, whatever it is.
        whole_bytes (int): From this size on blocks do not lie among small ones.
        tell_changed: Called when other slabs are cut from than before.
        maps (bool): Whether memory is mapped as it is needed.
        spare_bytes (int): See :class:`.Offsets`.
        footprint_bytes (int): GPU memory taken, whether in use or free.
        lacking_bytes (int): Of memory, for the block that could not be had last.
        from_pool (int): Bytes served from memory held already, while watched.
        from_driver (int): Bytes asked of the driver, while watched.
    """

    maps: bool
    footprint_bytes: int

    def __init__(self, gpu: Gpu, limit_bytes: int) -> None:
        self._gpu = gpu
        _all_pools.add(self)
        with gpu.current():
            of_environment = gpu.cuda.MemoryPool().get_limit()  # 0: none
        self.limit_bytes = min(limit_bytes, of_environment or limit_bytes)
        self._most_bytes = of_environment or sys.maxsize
        self.whole_bytes = min(_WHOLE_BYTES, self.limit_bytes // WHOLE_SHARE)
        self.from_pool = self.from_driver = 0
        self._elsewhere_bytes = 0
        self.enforces_limit = True
        self._watching = 0
        self._arena: ArenaMemory | None = None
        self.tell_changed: Callable[[], None] = lambda: None
        self.spare_bytes = self.lacking_bytes = 0
        self._asked = 0  # the driver, for memory

    @property
    def arena(self) -> ArenaMemory | None:
        """Where blocks with planned offsets lie."""
        return self._arena

    @arena.setter
    def arena(self, arena: ArenaMemory | None) -> None:
        self._arena = arena
        self.tell_changed()

    def slab_for(self, small: bool, stream: int) -> Slab | None:
        """The slab that blocks beside the arena are cut from now, if there is one."""
        del small, stream
        return None

    @property
    def room_bytes(self) -> int:
        """What the limit leaves for blocks from here."""
        return self.limit_bytes - self._elsewhere_bytes

    def raise_limit(self, nbytes: int) -> bool:
        """See :meth:`.Memory.raise_limit`; the driver must have so much."""
        if self.limit_bytes + nbytes > self._most_bytes:
            return False
        self.give_back()
        with self._gpu.current():
            free, _ = self._gpu.runtime.memGetInfo()
        if nbytes > free:
            return False
        self.limit_bytes += nbytes
        return True

    def set_limit(self, limit_bytes: int) -> None:
        """Refuses what goes beyond this many bytes from now on."""
        self.limit_bytes = limit_bytes

    def set_external_bytes(self, elsewhere_bytes: int) -> None:
        """So many bytes are in use that do not come from here."""
        self._elsewhere_bytes = elsewhere_bytes

    def is_beside(self, other: BlockPool) -> bool:
        """Whether it is another pool of the same GPU."""
        return self is not other and self._gpu.number == other._gpu.number

    def watch(self, watched: bool) -> None:
        """Begins or ends counting where blocks come from."""
        self._watching += 1 if watched else -1

    def find(self, nbytes: int, stream: int) -> Any:
        """Memory at its planned offset, beside the arena, or in a hole of it.

        Args:
            nbytes: A multiple of CuPy's unit.
            stream: Address of the stream that uses it.

        Returns:
            An object whose ``ptr`` is the address; None if there is none.
        """
        arena, asked = self.arena, self._asked
        held: Any
        if arena is None or stream != arena.stream:  # only there it is used again
            held = self.take(nbytes, stream)
        else:
            held = arena.place(nbytes)
            if held is None:
                held = self.take(nbytes, stream)
            if held is None:
                held = arena.cut(nbytes)
        if self._watching and held is not None:
            if self._asked > asked:
                self.from_driver += nbytes
            else:
                self.from_pool += nbytes
        return held

    @abc.abstractmethod
    def take(self, nbytes: int, stream: int) -> Any:
        """A block for a stream that has no planned offset, or None."""

    @abc.abstractmethod
    def make_arena(self, nbytes: int) -> ArenaMemory | None:
        """Memory for an arena, or addresses for it; None if there is none."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Gives the driver what is held and not in use."""

    def note_reclaimed(self) -> None:  # noqa: B027  maps what others lack
        """Blocks have left, so that others fit."""

    def excess_bytes(self, nbytes: int) -> int:
        """Bytes by which another block of this size would exceed the limit."""
        return self.footprint_bytes + nbytes - self.room_bytes

    def missing_bytes(self, nbytes: int) -> int:
        """By how much the limit must rise for a block that could not be had."""
        return max(self.excess_bytes(nbytes), UNIT_BYTES)

    def has_room(self, nbytes: int) -> bool:
        """Whether the limit leaves so much more, or does not hold."""
        return not self.enforces_limit or self.excess_bytes(nbytes) <= 0

    def empty_pointer(self) -> Any:
        """Makes a pointer to an allocation of no bytes."""
        cuda, number = self._gpu.cuda, self._gpu.number
        return cuda.MemoryPointer(cuda.UnownedMemory(0, 0, None, number), 0)


AnySlab = TypeVar('AnySlab', bound='Slab')


# -- mapped memory ------------------------------------------------------------
class MappedPool(BlockPool):
    """Slabs whose memory is mapped as it is needed.

    Each stream has its own, for only there what was issued before is over before what
    is issued next. Small blocks have one apart: among large ones they would keep the
    memory around them.

    Args:
        gpu: Whose memory it is.
        limit_bytes: Most bytes.
        mapper: Maps memory.
    """

    maps = True

    def __init__(self, gpu: Gpu, limit_bytes: int, mapper: Mapper) -> None:
        super().__init__(gpu, limit_bytes)
        self._mapper = mapper
        with gpu.current():
            _, total_bytes = gpu.runtime.memGetInfo()
        self._slab_bytes = min(self.limit_bytes, total_bytes)
        self.footprint_bytes = 0
        self.spare_bytes = SPARE_GRANULES * mapper.granule_bytes
        self._slabs: dict[tuple[bool, int], Slab] = {}  # those that blocks are cut from
        self._all: weakref.WeakSet[Slab] = weakref.WeakSet()

    def take(self, nbytes: int, stream: int) -> SlabBlock | None:
        self.lacking_bytes = nbytes  # unless it is known better
        key = nbytes < self.whole_bytes, stream
        slab = self._slabs.get(key)
        if slab is None or slab.is_crowded:
            slab = self._renew(key, 0)
        found = slab.find(nbytes)
        if not found:
            slab = self._renew(key, nbytes)
            found = slab.find(nbytes)
        return slab.take(found, nbytes)

    def _renew(self, key: tuple[bool, int], nbytes: int) -> Slab:
        slab = self._slabs[key] = self._make(Slab, nbytes, key)
        self.tell_changed()
        return slab

    def slab_for(self, small: bool, stream: int) -> Slab | None:
        return self._slabs.get((small, stream))

    def make_arena(self, nbytes: int) -> ArenaMemory:
        return self._make(ArenaMemory, nbytes, (False, self._gpu.compute().ptr))

    def _make(
        self, kind: type[AnySlab], least_bytes: int, key: tuple[bool, int]
    ) -> AnySlab:
        small, stream = key
        granule = self._mapper.granule_bytes
        nbytes = max(SPARE_ADDRESSES * self._slab_bytes, least_bytes)
        nbytes = -(-nbytes // granule) * granule
        # A large piece is one call, and goes when all of it is free.
        piece_bytes = granule if small else self._slab_bytes // MOST_PIECES
        memory = MappedMemory(
            self._mapper, nbytes, piece_bytes, self._find_room, self._count
        )
        slab = kind(memory, nbytes, stream)
        self._all.add(slab)
        return slab

    def _count(self, nbytes: int) -> None:
        self.footprint_bytes += nbytes
        self._asked += nbytes > 0

    def _find_room(self, nbytes: int) -> int:
        """Bytes that lack for so many more, once what is free has been unmapped."""
        if not self.has_room(nbytes):
            self._unmap(self.excess_bytes(nbytes))
        if self.has_room(nbytes):
            return 0
        self.lacking_bytes = self.excess_bytes(nbytes)
        return self.lacking_bytes

    def missing_bytes(self, nbytes: int) -> int:
        return max(self.lacking_bytes, UNIT_BYTES)

    def give_back(self) -> None:
        with self._gpu.current():
            self._unmap(sys.maxsize)

    def _unmap(self, wanted_bytes: int) -> None:
        """Unmaps so much of what is free, if there is; the arena's last."""
        waited = False
        for slab in sorted(self._all, key=lambda one: one is self.arena):
            for piece in slab.free_pieces():
                if wanted_bytes <= 0:
                    return
                if not waited:
                    self._mapper.synchronize()
                    waited = True
                if slab.unmap(*piece):
                    wanted_bytes -= piece[1]


# -- whole blocks -------------------------------------------------------------
class DriverPool(BlockPool):
    """Whole blocks of the driver's, and CuPy's pool for small ones."""

    maps = False

    def __init__(self, gpu: Gpu, limit_bytes: int) -> None:
        super().__init__(gpu, limit_bytes)
        with gpu.current():
            self._pool = gpu.cuda.MemoryPool()
            # What outlives the session does not keep what is free.
            weakref.finalize(self, self._pool.free_all_blocks).atexit = False
        self._whole = WholeBlocks()
        self._pool_bytes = -1  # limit of CuPy's pool: what nothing else takes

    @property
    def footprint_bytes(self) -> int:  # type: ignore[override]
        with self._gpu.current():
            return int(self._pool.total_bytes()) + self._whole.total_bytes

    def take(self, nbytes: int, stream: int) -> Any:
        self.lacking_bytes = nbytes
        if nbytes < self.whole_bytes:
            return self._pool_pointer(nbytes)
        return self._whole.take(nbytes, stream) or self._new_block(nbytes)

    def make_arena(self, nbytes: int) -> ArenaMemory | None:
        block = self._new_block(nbytes)
        if block is None:
            return None
        return ArenaMemory(block, nbytes, self._gpu.compute().ptr)

    def _new_block(self, nbytes: int) -> Block | None:
        """A block of its own from the driver, or None if there is no memory."""
        if self.excess_bytes(nbytes) > 0:
            self.give_back()
        if not self.has_room(nbytes):
            return None
        try:
            with self._gpu.current():
                memory = self._gpu.cuda.Memory(nbytes)
        except (
            self._gpu.runtime.CUDARuntimeError,
            self._gpu.cuda.memory.OutOfMemoryError,
        ):
            return None
        self._asked += 1
        return self._whole.add(memory, nbytes, self._gpu.compute().ptr)

    def give_back(self) -> None:
        with self._gpu.current():
            self._pool.free_all_blocks()
            self._whole.free_all()

    def note_reclaimed(self) -> None:
        self.give_back()

    def _pool_pointer(self, nbytes: int) -> Any:
        """Memory of the pool, or None if the pool cannot give it."""
        before = self._pool.total_bytes() if self._watching else 0
        pointer = self._ask_pool(nbytes)
        if pointer is None and self._whole.total_bytes:
            self.give_back()
            pointer = self._ask_pool(nbytes)
        # What it held may have shrunk meanwhile: it gives back before it asks.
        self._asked += self._watching and self._pool.total_bytes() > before
        return pointer

    def _ask_pool(self, nbytes: int) -> Any:
        left = max(self.room_bytes - self._whole.total_bytes, 1)
        limit_bytes = left if self.enforces_limit else 0  # 0: none
        if limit_bytes != self._pool_bytes:
            self._pool.set_limit(limit_bytes)
            self._pool_bytes = limit_bytes
        try:
            return self._pool.malloc(nbytes)
        except self._gpu.cuda.memory.OutOfMemoryError:
            return None


class WholeBlocks:
    """Free blocks by their size and stream, which are never split.

    So free memory can always be given back. A pool that cuts blocks for small arrays
    out of large free ones keeps the large ones as long as a small one lives: memory for
    an arena is then free and not to be had. A block is used again on the stream that it
    was made on: only there what was issued before is over before what is issued next.

    Attributes:
        total_bytes (int): Of all blocks, free or in use.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._free: dict[tuple[int, int], list[Any]] = {}

    def take(self, nbytes: int, stream: int) -> Block | None:
        """A free block of exactly this size."""
        free = self._free.get((nbytes, stream))
        return Block(self, free.pop(), nbytes, stream) if free else None

    def add(self, memory: Any, nbytes: int, stream: int) -> Block:
        """Counts memory as a new block.

        Args:
            memory: With its address ``ptr``; given back with the last reference.
            nbytes: Its size.
            stream: Address of the stream that will use it.
        """
        self.total_bytes += nbytes
        return Block(self, memory, nbytes, stream)

    def give(self, memory: Any, nbytes: int, stream: int) -> None:
        """Keeps the memory of a block that is free, for the next of its size."""
        self._free.setdefault((nbytes, stream), []).append(memory)

    def free_all(self) -> None:
        """Gives back what is free."""
        for (nbytes, _), blocks in self._free.items():
            self.total_bytes -= nbytes * len(blocks)
        self._free.clear()


class Block:
    """A block in use; free when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_blocks', '_memory', '_nbytes', '_stream', 'ptr')

    def __init__(
        self, blocks: WholeBlocks, memory: Any, nbytes: int, stream: int
    ) -> None:
        self._blocks = blocks
        self._memory = memory
        self._nbytes = nbytes
        self._stream = stream
        self.ptr = memory.ptr

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._blocks.give(self._memory, self._nbytes, self._stream)


def count_other_pools(own: BlockPool) -> int:
    """GPU memory that arrays keep in pools of devices that have been closed."""
    others = [pool for pool in _all_pools if pool.is_beside(own)]
    return sum(pool.footprint_bytes for pool in others)


def open_pool(gpu: Gpu, limit_bytes: int) -> BlockPool:
    """The pool of a GPU: it maps memory where the driver and the limit allow it."""
    mapper = find_mapper(gpu, limit_bytes)
    if mapper is None:
        return DriverPool(gpu, limit_bytes)
    return MappedPool(gpu, limit_bytes, mapper)


# -- slabs --------------------------------------------------------------------
class Backing(Protocol):
    """Addresses of a slab, and GPU memory behind them.

    Attributes:
        ptr (int): The first address.
    """

    ptr: int


class Slab:
    """Addresses from which blocks are cut, in native code that never looks there.

    Args:
        memory: Owns the memory; its ``ptr`` is the first address. It may be mapped.
        nbytes: Addresses.
        stream: Address of the stream on which its parts are used again.

    Attributes:
        nbytes (int): As given.
        stream (int): As given.
    """

    def __init__(self, memory: Backing, nbytes: int, stream: int = 0) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self._memory = memory
        self._base = memory.ptr
        self._mapped = memory if isinstance(memory, MappedMemory) else None
        fields = ctypes.c_int64 * ((native.SLAB_BYTES + native.TABLE_BYTES) // 8)
        self._words = fields()
        self._slab = ctypes.addressof(self._words)
        self._holes = (ctypes.c_int64 * (native.HOLE_BYTES // 8 * native.MOST_HOLES))()
        self._words[native.HOLES // 8] = ctypes.addressof(self._holes)
        native.begin(self._slab, memory.ptr, nbytes)

    @property
    def words_of_place(self) -> tuple[int, ...]:
        """For native code that cuts blocks from it; see :mod:`.native_blocks`."""
        mapped = self._mapped
        if mapped is None:
            return self._slab, id(self), CROWDED_HOLES, 0, 0
        granules = mapped.mapped_address, mapped.granule_bytes
        return self._slab, id(self), CROWDED_HOLES, *granules

    @property
    def is_crowded(self) -> bool:
        """Whether there are so many holes that the next ones may be lost."""
        return self._words[native.HOLE_COUNT // 8] > CROWDED_HOLES

    def find(self, nbytes: int) -> int:
        """Takes space in a hole, or above all blocks, for :meth:`take`; 0: none."""
        return native.cut_units(self._slab, nbytes)

    def take(self, found: int, nbytes: int) -> SlabBlock | None:
        """The block for which space has been found, if there is memory behind it."""
        units = (found - self._base) % UNIT_BYTES
        return self._hold(found - units, nbytes + units * UNIT_BYTES)

    def _hold(self, address: int, extent: int) -> SlabBlock | None:
        if self._mapped is None or self._mapped.cover(address, extent):
            return SlabBlock(self, address, extent)
        native.join(self._slab, address, extent)
        return None

    def cut(self, nbytes: int) -> SlabBlock | None:
        """A block with no planned place; None if there are no addresses or memory."""
        found = self.find(nbytes)
        return self.take(found, nbytes) if found else None

    def join(self, address: int, extent: int) -> None:
        """Makes the space of a block free."""
        native.join(self._slab, address, extent)

    # -- memory that is mapped ------------------------------------------------
    def free_pieces(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of what is mapped and in no block, the highest first."""
        if self._mapped is None:
            return
        words = self._words
        holes = np.array(self._holes[: 3 * words[native.HOLE_COUNT // 8]], np.int64)
        starts, nbytes = holes[0::3], holes[1::3]
        top = self._base + words[native.TOP // 8]
        starts = np.append(starts, top)
        ends = np.append(starts[:-1] + nbytes, self._base + self.nbytes)
        yield from self._mapped.pieces_inside(starts, ends)

    def take_refused(self) -> int:
        """Most bytes that memory has lacked since this was last asked."""
        return 0 if self._mapped is None else self._mapped.take_refused()

    def unmap(self, address: int, nbytes: int) -> bool:
        """Unmaps a piece unless something lies there by now; whether it has."""
        if self._mapped is None or not native.cut_at(self._slab, address, nbytes):
            return False
        self._mapped.unmap(address, nbytes)
        native.join(self._slab, address, nbytes)
        native.lose_pages(self._slab, address, nbytes)
        return True


class SlabBlock:
    """A block of a slab; given back when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_extent', '_slab', 'ptr')

    def __init__(self, slab: Slab, address: int, extent: int) -> None:
        self._slab = slab  # which keeps the memory
        self.ptr = address
        self._extent = extent

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._slab.join(self.ptr, self._extent)


class ArenaMemory(Slab):
    """A slab with offsets for the blocks of an iteration; arguments as there.

    Attributes:
        table (OffsetTable): What is expected to lie where.
    """

    def __init__(self, memory: Backing, nbytes: int, stream: int = 0) -> None:
        super().__init__(memory, nbytes, stream)
        self.table = OffsetTable(self._slab + native.SLAB_BYTES)

    def place(self, nbytes: int) -> SlabBlock | None:
        """The planned space of the next malloc, if it has some that is free."""
        if not self.table.is_sought:
            return None
        address = native.place(self.table.address, self._slab, nbytes)
        if not address:
            return None
        held = self._hold(address, nbytes)
        if held is None:
            self.table.lose_place()
        return held
