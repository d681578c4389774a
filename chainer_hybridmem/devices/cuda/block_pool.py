"""Where blocks of GPU memory come from: the arena, whole blocks, CuPy's pool."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices import slab as native
from chainer_hybridmem.devices.cuda.gpu import Gpu
from chainer_hybridmem.devices.offset_table import OffsetTable

_WHOLE_BYTES = 1 << 20  # from this size on blocks are not split, or from
WHOLE_SHARE = 256  # such a part of the limit on; small ones share pieces of the pool


class BlockPool:
    """Takes memory from the driver, up to the limit, and cuts blocks from it.

    Args:
        gpu: Whose memory it is.
        limit_bytes: Most bytes; a smaller ``CUPY_GPU_MEMORY_LIMIT`` wins.

    Attributes:
        limit_bytes (int): The limit.
        whole_bytes (int): From this size on blocks are not split.
        enforces_limit (bool): Whether the limit holds, whatever it is.
        arena (ArenaMemory or None): Where blocks with planned offsets lie.
        from_pool (int): Bytes served from memory held already, while watched.
        from_driver (int): Bytes asked of the driver, while watched.
    """

    def __init__(self, gpu: Gpu, limit_bytes: int) -> None:
        self._gpu = gpu
        with gpu.current():
            self._pool = gpu.cuda.MemoryPool()
            # What outlives the session does not keep what is free.
            weakref.finalize(self, self._pool.free_all_blocks).atexit = False
            self._whole = WholeBlocks()
            of_environment = self._pool.get_limit()  # 0: none
        self.limit_bytes = min(limit_bytes, of_environment or limit_bytes)
        self._most_bytes = of_environment or sys.maxsize
        self.whole_bytes = min(_WHOLE_BYTES, self.limit_bytes // WHOLE_SHARE)
        self.from_pool = self.from_driver = 0
        self._elsewhere_bytes = 0
        self.enforces_limit = True
        self._watching = 0
        self.arena: ArenaMemory | None = None
        self._set_pool_limit()

    @property
    def footprint_bytes(self) -> int:
        """GPU memory taken, whether in use or free."""
        with self._gpu.current():
            return int(self._pool.total_bytes()) + self._whole.total_bytes

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
        self._set_pool_limit()
        return True

    def set_limit(self, limit_bytes: int) -> None:
        """Refuses what goes beyond this many bytes from now on."""
        self.limit_bytes = limit_bytes
        self._set_pool_limit()

    def set_external_bytes(self, elsewhere_bytes: int) -> None:
        """So many bytes are in use that do not come from here."""
        self._elsewhere_bytes = elsewhere_bytes
        self._set_pool_limit()

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
        arena = self.arena
        if arena is not None and stream != arena.stream:
            arena = None  # only there its memory is used again
        held: Any = arena.place(nbytes) if arena is not None else None
        if held is not None and not self._watching:
            return held
        whole = nbytes >= self.whole_bytes
        if held is None and whole:
            held = self._whole.take(nbytes, stream)
        if held is None:
            new = self.new_block(nbytes) if whole else self._pool_pointer(nbytes)
            if new is not None or arena is None:
                return new
            held = arena.cut(nbytes)
        if held is not None and self._watching:
            self.from_pool += nbytes
        return held

    def new_block(self, nbytes: int) -> Any:
        """A block of its own from the driver, or None if there is no memory."""
        if self.excess_bytes(nbytes) > 0:
            self.give_back()
        if self.enforces_limit and self.excess_bytes(nbytes) > 0:
            return None
        try:
            with self._gpu.current():
                memory = self._gpu.cuda.Memory(nbytes)
        except (
            self._gpu.runtime.CUDARuntimeError,
            self._gpu.cuda.memory.OutOfMemoryError,
        ):
            return None
        if self._watching:
            self.from_driver += nbytes
        block = self._whole.add(memory, nbytes, self._gpu.compute().ptr)
        self._set_pool_limit()
        return block

    def excess_bytes(self, nbytes: int) -> int:
        """Bytes by which another block of this size would exceed the limit."""
        limit = self.limit_bytes - self._elsewhere_bytes
        return self.footprint_bytes + nbytes - limit

    def empty_pointer(self) -> Any:
        """Makes a pointer to an allocation of no bytes."""
        return self._pool.malloc(0)

    def give_back(self) -> None:
        """Gives the driver what is held and not in use."""
        with self._gpu.current():
            self._pool.free_all_blocks()
            self._whole.free_all()
            self._set_pool_limit()

    def _pool_pointer(self, nbytes: int) -> Any:
        """Memory of the pool, or None if the pool cannot give it."""
        before = self._pool.total_bytes() if self._watching else 0
        pointer = self._ask_pool(nbytes)
        if pointer is None and self._whole.total_bytes:
            self.give_back()
            pointer = self._ask_pool(nbytes)
        if pointer is None:
            return None
        if self._watching:
            # What it held may have shrunk meanwhile: it gives back before it asks.
            if self._pool.total_bytes() > before:
                self.from_driver += nbytes
            else:
                self.from_pool += nbytes
        return pointer

    def _ask_pool(self, nbytes: int) -> Any:
        try:
            return self._pool.malloc(nbytes)
        except self._gpu.cuda.memory.OutOfMemoryError:
            return None

    def _set_pool_limit(self) -> None:
        """Leaves the pool what nothing else takes; 0 is no limit."""
        others = self._elsewhere_bytes + self._whole.total_bytes
        left = max(self.limit_bytes - others, 1) if self.enforces_limit else 0
        with self._gpu.current():
            self._pool.set_limit(size=left)


# -- whole blocks -------------------------------------------------------------
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


# -- the arena ----------------------------------------------------------------
class ArenaMemory:
    """One piece of memory with offsets for the blocks of an iteration.

    Native code cuts it, which never looks at it.

    Args:
        pointer: Owns the memory; its ``ptr`` is the first address.
        nbytes: Its size.
        stream: Address of the stream on which its parts are used again.

    Attributes:
        nbytes (int): Its size.
        stream (int): As given.
        table (OffsetTable): What is expected to lie where.
    """

    def __init__(self, pointer: Any, nbytes: int, stream: int = 0) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self._pointer = pointer
        fields = ctypes.c_int64 * ((native.SLAB_BYTES + native.TABLE_BYTES) // 8)
        self._words = fields()
        self._slab = ctypes.addressof(self._words)
        self._holes = (ctypes.c_int64 * (native.HOLE_BYTES // 8 * native.MOST_HOLES))()
        self._words[native.HOLES // 8] = ctypes.addressof(self._holes)
        native.begin(self._slab, pointer.ptr, nbytes)
        self.table = OffsetTable(self._slab + native.SLAB_BYTES)

    def place(self, nbytes: int) -> ArenaBlock | None:
        """The planned space of the next malloc, if it has some that is free."""
        if not self.table.sought:
            return None
        address = native.place(self.table.address, self._slab, nbytes)
        return ArenaBlock(self, address) if address else None

    @property
    def extent(self) -> int:
        """Bytes of the block that was cut last."""
        return self._words[native.EXTENT // 8]

    def cut(self, nbytes: int) -> ArenaBlock | None:
        """Space in a hole, for what has no planned offset."""
        address = native.cut(self._slab, nbytes)
        return ArenaBlock(self, address) if address else None

    def join(self, address: int, extent: int) -> None:
        """Makes the space of a block free."""
        native.join(self._slab, address, extent)


class ArenaBlock:
    """A block of an arena; given back when it dies.

    Attributes:
        ptr (int): Its address.
    """

    __slots__ = ('_arena', '_extent', 'ptr')

    def __init__(self, arena: ArenaMemory, address: int) -> None:
        self._arena = arena  # which keeps the memory
        self.ptr = address
        self._extent = arena.extent

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._arena.join(self.ptr, self._extent)
