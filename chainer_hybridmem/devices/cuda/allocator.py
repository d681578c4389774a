"""The allocator that CuPy calls.

Note: [block owners]
    CuPy's memory hooks do not fire for foreign allocators, so the allocator
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

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from chainer_hybridmem.devices.cuda.block_pool import BlockPool, count_other_pools
from chainer_hybridmem.devices.cuda.gpu import Gpu, import_cupy, round_up
from chainer_hybridmem.devices.values import Root
from chainer_hybridmem.errors import OutOfMemoryError, without_frames


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

    def end(self) -> Any:
        """CuPy shall not call this allocator any more; returns the one before."""
        previous, self.previous, self._reclaim = self.previous, None, None
        return previous

    def close(self) -> None:
        """From now on what is freed goes back to the driver at once."""
        self._closed = True
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
        owner = getattr(root, '_owner', None)
        return owner if type(owner) is Allocation and owner.allocator is self else None

    def let_go(self, ident: int, nbytes: int) -> None:
        """A block has been given back; see [block owners]."""
        self._counter.uncount(ident, nbytes)
        if self._closed:
            self._pool.give_back()

    def _take_pointer(self, size: int) -> Any:
        """The allocator: a ``MemoryPointer`` to ``size`` bytes."""
        gpu, pool, counter = self._gpu, self._pool, self._counter
        if self._gpu_now() != gpu.number or self._thread != threading.get_ident():
            return self._other_pointer(size)
        if size == 0:
            return pool.empty_pointer()
        if self._others.shrinks:
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
        block: Of the pool or of the arena; given back when it dies.
        stream: On which the block is used again.
    """

    __slots__ = (
        '__weakref__', '_looks', 'allocator', 'block', 'ident', 'nbytes', 'stream'
    )  # fmt: skip

    def __init__(
        self, allocator: Allocator, ident: int, nbytes: int, block: Any, stream: Any
    ) -> None:
        self.allocator = allocator
        self.ident = ident
        self.nbytes = nbytes
        self.block = block
        self.stream = stream
        self._looks: weakref.WeakSet[_Look] | None = None

    def call_last(self, look: Callable[[int], None]) -> object:
        """Has a function called with the address before the block is given back.

        Returns:
            What keeps it so.
        """
        kept = _Look(look)
        if self._looks is None:
            self._looks = weakref.WeakSet()
        self._looks.add(kept)
        return kept

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():
            return
        for kept in self._looks or ():
            kept.look(self.block.ptr)
        self.block = None
        self.allocator.let_go(self.ident, self.nbytes)


class _Look:
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
        shrinks (bool): Whether an array has died there, so that less may be held.
    """

    def __init__(self, gpu: Gpu, counter: AllocationCounter, own: BlockPool) -> None:
        self._gpu = gpu
        self._counter = counter
        self._own = own
        self._ident = 0
        self.nbytes = 0
        self.shrinks = False

    def count(self, known_bytes: int, previous: Any) -> None:
        """Counts anew what is held.

        Args:
            known_bytes: Of it, counted elsewhere.
            previous: The allocator that was installed before the session's.
        """
        self.shrinks = False
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


_new_id = itertools.count(1).__next__  # over all devices, so never used twice


class AllocationCounter:
    """What is in use, its peaks, and a log of mallocs and frees; for all threads.

    Attributes:
        used_bytes (int): In use now.
        peak_bytes (int): Highest load since :meth:`reset_peak`.
        window_peak_bytes (int): Highest load since :meth:`reset_window`.
        lock: Held while something is counted.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.window_peak_bytes = 0
        self._sample_peak = 0
        self._log: list[tuple[int, int]] | None = None

    def count(self, nbytes: int) -> int:
        """Counts an allocation; returns its id."""
        with self.lock:
            ident = _new_id()
            used = self.used_bytes = self.used_bytes + nbytes
            # Comparisons take a third of the time of max(): this runs very often.
            if used > self.peak_bytes:
                self.peak_bytes = used
            if used > self.window_peak_bytes:
                self.window_peak_bytes = used
            if used > self._sample_peak:
                self._sample_peak = used
            if self._log is not None:
                self._log.append((ident, nbytes))
            return ident

    def uncount(self, ident: int, nbytes: int) -> None:
        """Takes back what :meth:`count` has counted."""
        with self.lock:
            self.used_bytes -= nbytes
            if self._log is not None:
                self._log.append((-ident, nbytes))

    def reset_peak(self) -> None:
        """Starts a new peak at the present load."""
        self.peak_bytes = self.used_bytes

    def reset_window(self) -> None:
        """Starts a new window peak at the present load."""
        self.window_peak_bytes = self.used_bytes

    def sample(self, new_peak: bool) -> tuple[int, int]:
        """The load and its peak since the last sample that began a new one."""
        with self.lock:
            used, peak = self.used_bytes, max(self._sample_peak, self.used_bytes)
            if new_peak:
                self._sample_peak = used
        return used, peak

    def start_events(self) -> None:
        """Starts a new log."""
        self._log = []

    @property
    def event_count(self) -> int:
        """Events logged so far."""
        return len(self._log or ())

    def take_events(self) -> list[tuple[int, int]]:
        """Ends the log: ``(+id or -id, bytes)`` for each malloc and free."""
        log, self._log = self._log, None
        return log or []
