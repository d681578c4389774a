"""The allocator that CuPy calls.

Note: [block owners]
    CuPy's memory hooks do not fire for foreign allocators. Most blocks are given and
    taken back in native code (:mod:`.native_blocks`). For the others the allocator
    hands out :class:`cupy.cuda.UnownedMemory` whose owner is an
    :class:`Allocation`. It holds the pool's block, and its ``__del__`` learns
    when the last array has let go. CuPy's pool does not give back what is free when it
    dies itself: what outlives a session does so, array by array. And a block that dies
    with its pool, in one run of Python's collector, is lost: the pool lives longer.

Note: [other threads]
    CuPy has one allocator for all threads, and room is made by changing a graph, which
    only its own thread may do. So another thread, such as one that loads data, gets its
    memory from the allocator before, as it does for another GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from chainer_hybridmem.errors import OutOfMemoryError, without_frames
from chainer_hybridmem.training.devices import counting
from chainer_hybridmem.training.devices.counting import WordsCounter
from chainer_hybridmem.training.devices.cuda import native_blocks as native
from chainer_hybridmem.training.devices.cuda.block_pool import (
    BlockPool,
    Slab,
    count_other_pools,
)
from chainer_hybridmem.training.devices.cuda.gpu import Gpu, import_cupy, round_up
from chainer_hybridmem.training.devices.slab import immortal
from chainer_hybridmem.training.devices.values import Root


class Allocator:
    """Serves blocks within the limit, and asks for space where there is none.

    Args:
        gpu: Whose memory it is.
        pool: Where blocks come from.
        counter: Counts them.
        others: What other pools hold beside them.
        recount: Counts that anew.

    Attributes:
        pointer: The function that CuPy calls; one object, to be recognised.
        previous: The one before, while CuPy calls this one.
        wanted_bytes (int): See :class:`.Memory`.
        last_failure (tuple or None): Bytes asked for and bytes in use when an
            allocation was last refused.
        reclaim_error (BaseException or None): What ``reclaim`` raised last.
    """

    def __init__(
        self,
        gpu: Gpu,
        pool: BlockPool,
        counter: AllocationCounter,
        others: OtherPools,
        recount: Callable[[], None],
    ) -> None:
        self._gpu = gpu
        self._pool = pool
        self._counter = counter
        self._others = others
        self._recount = recount
        # Looked up once, for each allocation calls them.
        self._gpu_now: Callable[[], int] = gpu.runtime.getDevice
        self._new_memory: Callable[..., Any] = gpu.cuda.UnownedMemory
        self._new_pointer: Callable[..., Any] = gpu.cuda.MemoryPointer
        memory = gpu.cuda.memory
        self._given_kind: Any = memory.CFunctionAllocatorMemory
        self._give: Callable[[int], Any] = memory.CFunctionAllocator(
            counter.address,
            native.on_malloc.address,
            native.on_free.address,
            counter,
        ).malloc
        self._streams: dict[int, Any] = {}  # on which native code has given blocks
        pool.tell_changed = self._follow_slabs
        self._reclaim: Callable[[int], None] | None = None
        self._reclaiming = False
        self._thread = 0
        self.previous: Any = None
        self._closed = False
        self.wanted_bytes = 0
        self.last_failure: tuple[int, int] | None = None
        self.reclaim_error: BaseException | None = None
        self.pointer = self._take_pointer

    def begin(self, reclaim: Callable[[int], None], previous: Any) -> None:
        """CuPy calls this allocator from now on.

        Args:
            reclaim: See :meth:`.Memory.install`.
            previous: The allocator before, which serves other GPUs and threads.
        """
        self._thread = threading.get_ident()
        self._reclaim, self.previous = reclaim, previous
        self._counter.open(self._gpu, self._pool.whole_bytes)
        self._follow_slabs()

    def end(self) -> Any:
        """CuPy shall not call this allocator any more; returns the one before."""
        self._counter.shut()
        previous, self.previous, self._reclaim = self.previous, None, None
        return previous

    def close(self) -> None:
        """From now on what is freed goes back to the driver at once."""
        self._closed = True
        for address in self._counter.addresses():
            self._own(address)
        self._pool.give_back()

    def forget_failure(self) -> None:
        """Resets :attr:`last_failure`: it has been dealt with."""
        self.last_failure = None

    @contextmanager
    def without_reclaim(self) -> Iterator[None]:
        former, self._reclaiming = self._reclaiming, True
        try:
            with self._gpu.current():
                yield
        finally:
            self._reclaiming = former

    def find_owner(self, root: Root) -> Allocation | None:
        """The owner of memory that this allocator has given; None for other memory."""
        if type(root) is self._given_kind:
            return self._own(root.ptr)
        owner = getattr(root, '_owner', None)
        if isinstance(owner, Allocation) and owner.allocator is self:
            return owner
        return None

    def track(self, root: Root) -> Callable[[], Allocation | None] | None:
        """Finds the owner of memory for as long as it lives; None for other memory.

        Makes one when it is asked for.
        """
        if type(root) is not self._given_kind:
            owner = self.find_owner(root)
            return None if owner is None else weakref.ref(owner)
        address, ident = root.ptr, self._counter.ident_at(root.ptr)

        def find_owner() -> Allocation | None:
            alive = self._counter.ident_at(address) == ident
            return self._own(address) if alive else None

        return find_owner if ident else None

    def find_stream(self, root: Root) -> Any:
        """The stream on which memory is used again; None for other memory."""
        if type(root) is not self._given_kind:
            return getattr(self.find_owner(root), 'stream', None)
        block = self._counter.block_at(root.ptr)
        return self._streams[block[native.OF_STREAM // 8]] if block else None

    def ident_of(self, root: Root) -> int:
        """Id of memory that this allocator has given; 0 for other memory."""
        if type(root) is self._given_kind:  # in one step: it is asked very often
            return native.ident_at(self._counter.address, root.ptr)
        owner = self.find_owner(root)
        return 0 if owner is None else owner.ident

    def _own(self, address: int) -> Allocation | None:
        """The owner of a block that native code has given; made when first needed."""
        block = self._counter.block_at(address)
        if not block:
            return None
        _, ident, nbytes, _, _, _, stream, owner = block
        if owner:
            return _object_at(owner)
        made = GivenAllocation(self, ident, nbytes, address, self._streams[stream])
        self._counter.give_to(made)
        return made

    def _follow_slabs(self) -> None:
        """Native code cuts blocks from the slabs that the pool has now."""
        if self._reclaim is None:
            return
        counter, pool = self._counter, self._pool
        current, arena = self._gpu.compute(), pool.arena
        self._streams[current.ptr] = current
        stream = current.ptr if arena is None else arena.stream
        counter.serve(-1)
        counter.cut_from(native.SMALL, pool.slab_for(True, stream))
        counter.cut_from(native.LARGE, pool.slab_for(False, stream))
        counter.cut_from(native.ARENA, arena)
        if stream in self._streams:
            counter.serve(stream)

    def let_go(self, ident: int, nbytes: int) -> None:
        """A block has been given back; see [block owners]."""
        self._counter.uncount(ident, nbytes)
        if self._closed:
            self._pool.give_back()

    def take_back(self, owner: GivenAllocation) -> None:
        """The same for a block that native code has given."""
        self._counter.free_of(owner)
        if self._closed:
            self._pool.give_back()

    def _take_pointer(self, size: int) -> Any:
        """The allocator: a ``MemoryPointer`` to ``size`` bytes."""
        pointer = self._give(size)
        return pointer if pointer.ptr else self._make_pointer(size)

    def _make_pointer(self, size: int) -> Any:
        """The same, where native code gives no block."""
        gpu, pool, counter = self._gpu, self._pool, self._counter
        if self._gpu_now() != gpu.number or self._thread != threading.get_ident():
            return self._other_pointer(size)
        if size == 0:
            return pool.empty_pointer()
        if counter.recounts:
            self._recount()
        nbytes = round_up(size)
        if counter.used_bytes + nbytes > pool.limit_bytes:
            self._make_room(nbytes)
        stream = gpu.compute()
        block = pool.find(nbytes, stream.ptr)
        if block is None:
            block = self._find_among_pieces(nbytes, stream.ptr)
        if block is None:
            self._refuse(size)
        owner = Allocation(self, counter.count(nbytes), nbytes, block, stream)
        memory = self._new_memory(block.ptr, nbytes, owner, gpu.number)
        return self._new_pointer(memory, 0)

    def _other_pointer(self, size: int) -> Any:
        """Asks the allocator that was installed before: see [other threads]."""
        previous = self.previous or self._gpu.cuda.get_allocator()
        if previous is self.pointer:
            previous = self._gpu.cupy.get_default_memory_pool().malloc
        return previous(size)

    def _make_room(self, nbytes: int) -> None:
        """Sees to it that a block fits by count."""
        if self._reclaim is None:
            return
        missing_bytes = self._find_missing_bytes(nbytes)
        if missing_bytes <= 0:
            return
        self._call_reclaim(missing_bytes, nbytes)
        if self._find_missing_bytes(nbytes) > 0:
            self._refuse(nbytes)

    def _find_missing_bytes(self, nbytes: int) -> int:
        """Bytes that the limit lacks for so many more; see [other pools]."""
        if self._others.nbytes:
            self._recount()
        return self._counter.used_bytes + nbytes - self._pool.limit_bytes

    def _find_among_pieces(self, nbytes: int, stream: int) -> Any:
        """A block that fits by count, while what is free may lie in pieces; or None."""
        pool, wanted_bytes, block = self._pool, 0, None
        while block is None:
            wanted_bytes = min(max(2 * wanted_bytes, pool.lacking_bytes), nbytes)
            if not self._frees(wanted_bytes):
                break
            block = pool.find(nbytes, stream)
        if block is None:
            pool.give_back()
            block = pool.find(nbytes, stream)
        if block is None and self._gives_way(nbytes):
            block = pool.find(nbytes, stream)
        return block

    def _frees(self, missing_bytes: int) -> bool:
        """Whether asking for memory once more has freed any."""
        before = self._counter.used_bytes
        return self._call_reclaim(missing_bytes) and self._counter.used_bytes < before

    def _gives_way(self, nbytes: int) -> bool:
        """Whether the limit gives way to what fits by count and finds no place."""
        pool, limit_bytes = self._pool, self._pool.limit_bytes
        self._call_reclaim(pool.missing_bytes(nbytes), nbytes)
        return pool.limit_bytes > limit_bytes

    def _call_reclaim(self, missing_bytes: int, wanted_bytes: int = 0) -> bool:
        if self._reclaim is None or self._reclaiming:
            return False
        self.reclaim_error, self.wanted_bytes = None, wanted_bytes
        with self.without_reclaim():
            try:
                self._reclaim(missing_bytes)
            except Exception as error:
                self.reclaim_error = without_frames(error)
            finally:
                self.wanted_bytes = 0
        self._pool.note_reclaimed()
        return True

    def _refuse(self, nbytes: int) -> NoReturn:
        used_bytes, limit_bytes = self._counter.used_bytes, self._pool.limit_bytes
        self.last_failure = (nbytes, used_bytes)
        kept = ''
        if self._others.nbytes >= self._pool.whole_bytes:
            kept = (
                f' {self._others.nbytes} of them are kept by other pools for arrays '
                'from before the session; let go of them, or begin it earlier.'
            )
        raise make_out_of_memory_error(
            f'{nbytes} bytes do not fit: {used_bytes} of {limit_bytes} bytes '
            f'are in use, and the pool takes {self._pool.footprint_bytes}.{kept} Raise '
            'the memory limit or use smaller batches.',
            nbytes,
            limit_bytes,
            used_bytes,
        ) from self.reclaim_error


class Allocation:
    """Owner of one block; see Note: [block owners].

    Attributes:
        allocator (Allocator): Which has given it.
        ident (int): Its id.
        nbytes (int): Its size.
        ptr (int): Its address.
        block: Of the pool or of the arena; given back when it dies.
        stream: On which the block is used again.
    """

    __slots__ = (
        '__weakref__', '_looks', 'allocator', 'block', 'ident', 'nbytes', 'ptr',
        'stream',
    )  # fmt: skip

    def __init__(
        self, allocator: Allocator, ident: int, nbytes: int, block: Any, stream: Any
    ) -> None:
        self.allocator = allocator
        self.ident = ident
        self.nbytes = nbytes
        self.block = block
        self.ptr: int = block.ptr
        self.stream = stream
        self._looks: weakref.WeakSet[_LastLook] | None = None

    def call_last(self, look: Callable[[int], None]) -> object:
        """Has a function called with the address before the block is given back.

        Returns:
            What keeps it so.
        """
        kept = _LastLook(look)
        if self._looks is None:
            self._looks = weakref.WeakSet()
        self._looks.add(kept)
        return kept

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():
            return
        self._look_last()
        self.block = None
        self.allocator.let_go(self.ident, self.nbytes)

    def _look_last(self) -> None:
        for kept in self._looks or ():
            kept.look(self.ptr)


class GivenAllocation(Allocation):
    """Owner of one block that native code has given; see [given blocks]."""

    __slots__ = ()

    def __init__(
        self, allocator: Allocator, ident: int, nbytes: int, ptr: int, stream: Any
    ) -> None:
        self.allocator = allocator
        self.ident = ident
        self.nbytes = nbytes
        self.ptr = ptr
        self.stream = stream
        self._looks = None

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._look_last()
            self.allocator.take_back(self)


def _object_at(address: int) -> Any:
    """The object of Python with an identity; it must be alive."""
    return ctypes.cast(address, ctypes.py_object).value


class _LastLook:
    """A function that is called before a block is given back."""

    __slots__ = ('__weakref__', 'look')

    def __init__(self, look: Callable[[int], None]) -> None:
        self.look = look


def make_out_of_memory_error(
    message: str, requested_bytes: int, limit_bytes: int, used_bytes: int
) -> OutOfMemoryError:
    """An error that is both ours and CuPy's."""
    error: OutOfMemoryError = _out_of_memory_class()(
        message, requested_bytes, limit_bytes, used_bytes
    )
    return error


@functools.cache
def _out_of_memory_class() -> Any:
    """Made when it is first needed, because its base is CuPy's."""
    cupy_error = import_cupy().cuda.memory.OutOfMemoryError

    class CudaOutOfMemoryError(OutOfMemoryError, cupy_error):  # type: ignore[misc,valid-type]
        """An allocation on the GPU does not fit."""

        def __init__(
            self, message: str, requested_bytes: int, limit_bytes: int, used_bytes: int
        ) -> None:
            # Neither base's __init__ can pass on to the other one.
            MemoryError.__init__(self, message)
            self.requested_bytes = self._size = requested_bytes
            self.limit_bytes = self._limit = limit_bytes
            self.used_bytes = self._total = used_bytes

        def __reduce__(self) -> tuple[Any, tuple[str, int, int, int]]:
            return make_out_of_memory_error, (
                str(self),
                self.requested_bytes,
                self.limit_bytes,
                self.used_bytes,
            )

    return CudaOutOfMemoryError


class OtherPools:
    """Counts what other pools take up beside a session.

    Note: [other pools]
        Arrays that were made before the session lie in CuPy's default pool, in one that
        the program has set, or in that of an earlier session. CuPy's pools keep
        whole chunks as long as one small array in them lives, so what they hold beyond
        the arrays that are known counts as in use: the driver's memory is what the
        limit is about. Nobody tells when such an array dies: what is held is counted
        anew where it may make room.

    Args:
        gpu: Whose memory it is.
        counter: Where it is counted.
        own: The session's pool.

    Attributes:
        nbytes (int): Counted now.
    """

    def __init__(self, gpu: Gpu, counter: AllocationCounter, own: BlockPool) -> None:
        self._gpu = gpu
        self._counter = counter
        self._own = own
        self._ident = 0
        self.nbytes = 0

    def count(self, known_bytes: int, previous: Any) -> None:
        """Counts anew what is held.

        Args:
            known_bytes: Of it, counted elsewhere.
            previous: The allocator that was installed before the session's.
        """
        self._counter.recounts = False
        held_bytes = count_other_pools(self._own)
        default = self._gpu.cupy.get_default_memory_pool()
        pools, set_before = [default], getattr(previous, '__self__', None)
        if set_before is not default and isinstance(set_before, type(default)):
            pools.append(set_before)
        with self._gpu.current():
            for pool in pools:
                pool.free_all_blocks()
                held_bytes += int(pool.total_bytes())
        nbytes = max(0, held_bytes - known_bytes)
        if nbytes == self.nbytes:
            return
        self.forget()
        if nbytes:
            self._ident, self.nbytes = self._counter.count(nbytes), nbytes

    def forget(self) -> None:
        """Counts nothing any more."""
        if self.nbytes:
            nbytes, self.nbytes = self.nbytes, 0
            self._counter.uncount(self._ident, nbytes)


_numbers = itertools.count()
_libc = ctypes.PyDLL(None)
_libc.free.argtypes = (ctypes.c_void_p,)
_Words = ctypes.c_int64 * native.FIELDS
_Blocks = ctypes.c_int64 * (native.BLOCK_BYTES // 8 * native.SLOTS)


class AllocationCounter(WordsCounter):
    """What is in use, its peaks, and a log of mallocs and frees; for all threads.

    And the blocks that native code has given: each of them keeps this object.
    """

    def __init__(self) -> None:
        super().__init__(_Words())
        self._blocks = _Blocks()
        self._set(native.BLOCKS, ctypes.addressof(self._blocks))
        self._set(native.SELF, id(self))
        # Over all devices, so that no id is used twice.
        self._set(counting.NEXT_ID, (next(_numbers) << counting.ID_BITS) + 1)
        log = immortal(16 * counting.FIRST_LOG_ENTRIES)
        self._set(counting.LOG, log)
        self._set(counting.LOG_CAPACITY, counting.FIRST_LOG_ENTRIES)
        self._slabs: dict[int, Slab] = {}  # keeps what native code cuts from

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            _libc.free(self._get(counting.LOG))

    def count(self, nbytes: int) -> int:
        """Counts an allocation; returns its id."""
        return int(counting.count_malloc(self.address, nbytes))

    def uncount(self, ident: int, nbytes: int) -> None:
        """Takes back what :meth:`count` has counted."""
        counting.uncount(self.address, ident, nbytes)

    def sample(self, new_peak: bool) -> tuple[int, int]:
        """The load and its peak since the last sample that began a new one."""
        used = self.used_bytes
        peak = max(self._get(counting.SAMPLE_PEAK), used)
        if new_peak:
            self._set(counting.SAMPLE_PEAK, used)
        return used, peak

    @property
    def recounts(self) -> bool:
        """Whether Python counts others anew before the next block is given."""
        return self._get(native.RECOUNT) != 0

    @recounts.setter
    def recounts(self, wanted: bool) -> None:
        self._set(native.RECOUNT, int(wanted))

    # -- blocks that native code gives ------------------------------------------
    @property
    def from_pool(self) -> int:
        """Bytes that native code has given, while watched."""
        return self._get(native.FROM_POOL)

    def watch(self, watched: bool) -> None:
        """Begins or ends counting them."""
        self._set(native.WATCHED, self._get(native.WATCHED) + (1 if watched else -1))

    def open(self, gpu: Gpu, whole_bytes: int) -> None:
        """Native code gives blocks to this thread from now on, where it can."""
        stream_now = find_stream_function(gpu)
        self._set(native.NUMBER, gpu.number)
        self._set(native.THREAD, threading.get_ident())
        self._set(native.WHOLE, whole_bytes)
        self._set(native.STREAM_NOW, stream_now)
        self._set(native.OPEN, int(stream_now != 0))

    def shut(self) -> None:
        """Native code gives no blocks any more; it takes them back."""
        self._set(native.OPEN, 0)
        for place in (native.SMALL, native.LARGE, native.ARENA):
            self.cut_from(place, None)

    def serve(self, stream: int) -> None:
        """Blocks are given where a stream is the current one."""
        self._set(native.STREAM, stream)

    def cut_from(self, place: int, slab: Slab | None) -> None:
        """Has native code cut blocks from a slab, which is kept until the next one.

        Args:
            place: One of those in :mod:`.native_blocks`.
            slab: Of mapped memory; None: from none.
        """
        if self._slabs.get(place) is slab:
            return
        self._set(place + native.PLACE_SLAB, 0)  # Ctrl-C may come between any two
        if slab is None:
            del self._slabs[place]
            return
        self._slabs[place] = slab
        address, *others = slab.words_of_place
        for k, word in enumerate(others, 1):
            self._set(place + 8 * k, word)
        self._set(place + native.PLACE_SLAB, address)

    def ident_at(self, address: int) -> int:
        """Id of the block at an address; 0 if native code has given none there."""
        return int(native.ident_at(self.address, address))

    def block_at(self, address: int) -> list[int]:
        """Words of the block at an address; empty if native code has given none."""
        block = native.find(self.address, address)
        if not block:
            return []
        first = (block - self._get(native.BLOCKS)) // 8
        return self._blocks[first : first + native.BLOCK_BYTES // 8]

    def addresses(self) -> list[int]:
        """Of all blocks that native code has given."""
        return [
            address for address in self._blocks[:: native.BLOCK_BYTES // 8] if address
        ]

    def give_to(self, owner: GivenAllocation) -> None:
        """The death of an owner frees its block from now on."""
        native.own(self.address, owner.ptr, id(owner))

    def free_of(self, owner: GivenAllocation) -> None:
        """Frees the block of an owner that is dying."""
        native.free_of(self.address, owner.ptr, id(owner))


def find_stream_function(gpu: Gpu) -> int:
    """Address of the C function that tells CuPy's current stream; 0: it has none."""
    functions = getattr(getattr(gpu.cuda, 'stream', None), '__pyx_capi__', {})
    capsule, kind = functions.get('get_current_stream_ptr'), b'intptr_t (void)'
    arguments = ctypes.py_object, ctypes.c_char_p
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(
        ('PyCapsule_IsValid', ctypes.pythonapi)
    )
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, *arguments)(
        ('PyCapsule_GetPointer', ctypes.pythonapi)
    )
    return get(capsule, kind) if is_valid(capsule, kind) else 0
