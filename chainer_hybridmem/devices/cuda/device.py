"""Training with CuPy inside a memory budget.

CuPy is imported when a device is opened, so that everything else works
without it. Allocations come from a pool of our own, limited to the budget;
copies run on two streams beside the user's current one, which is called the
compute stream here.

Note: [block owners]
    CuPy's memory hooks do not fire for foreign allocators, so the allocator
    hands out :class:`cupy.cuda.UnownedMemory` whose owner is an
    :class:`_Allocation`. It holds the pool's block, and its ``__del__`` learns
    when the last array has let go. CuPy's pool does not give back what is free when it
    dies itself: what outlives a session does so, array by array. And a block that dies
    with its pool, in one run of Python's collector, is lost: the pool lives longer.

Note: [other pools]
    Arrays that were made before the session lie in CuPy's default pool. It keeps whole
    chunks as long as one small array in them lives, so what it holds beyond the arrays
    that are known counts as in use: the driver's memory is what the limit is about.

Note: [streams]
    A block is used again only on the stream on which it was allocated. Before that,
    this stream waits for the block's copies: when they are waited for, and also when a
    transfer is dropped without that.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.devices.bits import same_bits
from chainer_hybridmem.devices.cuda.late_checks import LateChecks
from chainer_hybridmem.devices.cuda.whole_blocks import WholeBlocks
from chainer_hybridmem.devices.places import Slab
from chainer_hybridmem.devices.protocol import (
    Array,
    HostCopy,
    Mark,
    PlaceFigures,
    PoolFigures,
    Root,
    Span,
    Transfer,
    View,
)
from chainer_hybridmem.devices.swap_store.blocks import MemoryBlock, check_available
from chainer_hybridmem.devices.swap_store.space import Completion, Space
from chainer_hybridmem.devices.swap_store.store import Store
from chainer_hybridmem.devices.swap_store.tiers import StoringDevice, TieredStore
from chainer_hybridmem.errors import (
    OptionError,
    OutOfMemoryError,
    SessionError,
    without_frames,
)
from chainer_hybridmem.records.plan import Tier

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena

_UNIT_BYTES = 512  # CuPy's pool hands out multiples of this
_WHOLE_BYTES = 1 << 20  # from this size on blocks are not split, or from
_WHOLE_SHARE = 256  # such a part of the limit on; small ones share pieces of the pool
_PINNED_BYTES = 1 << 26  # at once, at least, or such a part of the limit
_COMPARED_ELEMENTS = 1 << 24  # at a time; one byte each is allocated for them

_new_id = itertools.count(1).__next__  # over all devices, so never used twice


class CudaDevice(StoringDevice):
    """CuPy behind the device protocol.

    Args:
        limit_bytes: Most bytes of GPU memory that may be in use; a smaller
            ``CUPY_GPU_MEMORY_LIMIT`` wins.
        device_id: GPU number; None for the current one.
        link_bandwidth: Must be None: a GPU's link cannot be throttled.
        swap_dir: Must be None: feature maps are swapped to pinned memory.
        host_limit_bytes: Most bytes of pinned memory for them; None is no limit.
        disk_bandwidth: Must be None: there is no ``swap_dir``.

    Raises:
        OptionError: If CuPy or a GPU is missing or an option cannot be used.
    """

    kind = 'cuda'
    asynchronous = True
    alignment_bytes = _UNIT_BYTES
    moves_in = False

    def __init__(
        self,
        limit_bytes: int,
        device_id: int | None = None,
        link_bandwidth: float | None = None,
        swap_dir: str | None = None,
        host_limit_bytes: int | None = None,
        disk_bandwidth: float | None = None,
    ) -> None:
        _check_options(limit_bytes, link_bandwidth, swap_dir, disk_bandwidth)
        self._cupy = _import_cupy()
        self._cuda = self._cupy.cuda
        self._runtime = self._cuda.runtime
        # Looked up once, for each allocation calls them.
        self._device_now: Callable[[], int] = self._runtime.getDevice
        self._compute: Callable[[], Any] = self._cuda.get_current_stream
        self._new_memory: Callable[..., Any] = self._cuda.UnownedMemory
        self._new_pointer: Callable[..., Any] = self._cuda.MemoryPointer
        self._device_id = _choose_device(self._runtime, device_id)
        with self._current():
            self._pool = self._cuda.MemoryPool()
            weakref.finalize(self, self._pool.free_all_blocks).atexit = False
            self._blocks = WholeBlocks()
            self._d2h = self._cuda.Stream(non_blocking=True)
            self._h2d = self._cuda.Stream(non_blocking=True)
            self.late_checks = LateChecks(self._cuda)
            of_environment = self._pool.get_limit()  # 0: none
        self.limit_bytes = min(limit_bytes, of_environment or limit_bytes)
        self._whole_bytes = min(_WHOLE_BYTES, self.limit_bytes // _WHOLE_SHARE)
        self.used_bytes = 0
        self.peak_bytes = 0
        self.window_peak_bytes = 0
        self.last_failure: tuple[int, int] | None = None
        self.reclaim_error: BaseException | None = None
        self._sample_peak = 0
        self._watching = 0
        self._from_pool = self._from_driver = 0
        self._lock = threading.RLock()
        self._log: list[tuple[int, int]] | None = None
        self._reclaim: Callable[[int], None] | None = None
        self._reclaiming = False
        self._installed = self._closed = False
        self._limited = True
        self._previous: Any = None
        self._allocator = self._take_pointer  # one object, to be recognised
        self._adopted: dict[int, tuple[int, int, Any]] = {}  # id, bytes, reference
        self._adopted_bytes = 0
        self._others: tuple[int, int] | None = None  # id, bytes; see [other pools]
        self._others_may_go = False
        least_bytes = min(_PINNED_BYTES, max(1, self.limit_bytes // _WHOLE_SHARE))
        pinned = Store(self._make_block, Tier.RAM, host_limit_bytes, least_bytes)
        self._store = TieredStore(pinned, None)
        self._stalls: list[tuple[Any, Any]] = []
        self._slab: Slab | None = None
        self._slab_stream = 0  # only there memory of the slab is used again
        self._placed = PlaceFigures(0, 0, 0)  # in slabs that are gone
        self._set_pool_limit()

    # -- life ---------------------------------------------------------------
    def install(self, reclaim: Callable[[int], None]) -> None:
        """See :meth:`Device.install`; counts the allocations of all threads.

        Raises:
            SessionError: If a CUDA device is installed, or inside
                ``cupy.cuda.using_allocator``.
        """
        previous = self._cuda.get_allocator()
        if isinstance(getattr(previous, '__self__', None), CudaDevice):
            raise SessionError(
                'a CUDA device already counts the CuPy allocations; leave the first '
                'session before entering another one.'
            )
        try:
            self._cuda.set_allocator(self._allocator)
        except ValueError as error:
            raise SessionError(
                'no session can start inside cupy.cuda.using_allocator; start it '
                'outside.'
            ) from error
        self._previous = previous
        self._reclaim = reclaim
        self._installed = self._limited = True
        self._count_others()

    def uninstall(self) -> None:
        if not self._installed:
            return
        self._installed = False
        self._limited = False  # graphs that the program keeps come back
        self._reclaim = None
        if self._cuda.get_allocator() is self._allocator:
            self._cuda.set_allocator(self._previous)
        self._previous = None
        self._forget_others()
        self._give_back()

    def close(self) -> None:
        self.synchronize()
        self._store.close()
        self._adopted.clear()
        self._stalls.clear()
        self._slab = None  # goes with the last block in it
        self._closed = True
        self._give_back()

    def adopt(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            base = array if array.base is None else array.base
            memory = array.data.mem
            if memory.size and not self.allocation_id(array):
                self._adopt_memory(base, memory.ptr, _rounded(memory.size))

    @property
    def other_bytes(self) -> int:
        """See [other pools]."""
        return self._others[1] if self._others else 0

    def describe(self) -> dict[str, Any]:
        properties = self._runtime.getDeviceProperties(self._device_id)
        return {
            'kind': self.kind,
            'name': properties['name'].decode(),
            'device_id': self._device_id,
            'total_bytes': int(properties['totalGlobalMem']),
            'multiprocessors': int(properties['multiProcessorCount']),
            'cupy': self._cupy.__version__,
            'cuda_runtime': self._runtime.runtimeGetVersion(),
            'cuda_driver': self._runtime.driverGetVersion(),
        }

    # -- events -------------------------------------------------------------
    def start_events(self) -> None:
        self._log = []

    @property
    def event_count(self) -> int:
        return len(self._log or ())

    def take_events(self) -> list[tuple[int, int]]:
        log, self._log = self._log, None
        return log or []

    # -- counting -----------------------------------------------------------
    @property
    def footprint_bytes(self) -> int:
        """GPU memory taken by the pool, whether in use or free."""
        with self._current():
            return int(self._pool.total_bytes()) + self._blocks.total_bytes

    def _take_pointer(self, size: int) -> Any:
        """The allocator: a ``MemoryPointer`` to ``size`` bytes."""
        if self._device_now() != self._device_id:
            return self._other_pointer(size)
        if size == 0:
            return self._pool.malloc(0)
        if self._others_may_go:
            self._count_others()
        nbytes = _rounded(size)
        if self.used_bytes + nbytes > self.limit_bytes:
            self._make_room(nbytes)
        stream = self._compute()
        block = self._find_block(nbytes, stream.ptr)
        # It fits by count, but what is free may lie in pieces.
        while block is None and self._frees(nbytes):
            block = self._find_block(nbytes, stream.ptr)
        if block is None:
            self._refuse(size)
        owner = _Allocation(self, self._count(nbytes), nbytes, block, stream)
        memory = self._new_memory(block.ptr, nbytes, owner, self._device_id)
        return self._new_pointer(memory, 0)

    def _find_block(self, nbytes: int, stream: int) -> Any:
        """Memory where it is planned to lie, beside the arena, or in a hole of it."""
        slab = self._slab if stream == self._slab_stream else None
        held: Any = slab.place(nbytes) if slab is not None else None
        if held is not None and not self._watching:
            return held
        whole = nbytes >= self._whole_bytes
        if held is None and whole:
            held = self._blocks.take(nbytes, stream)
        if held is None:
            new = self._new_block(nbytes) if whole else self._pool_pointer(nbytes)
            if new is not None or slab is None:
                return new
            held = slab.cut(nbytes)
        if held is not None and self._watching:
            self._from_pool += nbytes
        return held

    def _new_block(self, nbytes: int) -> Any:
        """A block of its own from the driver, or None if there is no memory."""
        limit = self.limit_bytes - self._elsewhere_bytes
        if self.footprint_bytes + nbytes > limit:
            self._give_back()
        if self._limited and self.footprint_bytes + nbytes > limit:
            return None
        try:
            with self._current():
                memory = self._cuda.Memory(nbytes)
        except (self._runtime.CUDARuntimeError, self._cuda.memory.OutOfMemoryError):
            return None
        if self._watching:
            self._from_driver += nbytes
        block = self._blocks.add(memory, nbytes, self._compute().ptr)
        self._set_pool_limit()
        return block

    def _give_back(self) -> None:
        """Gives the driver what is held and not in use."""
        with self._current():
            self._pool.free_all_blocks()
            self._blocks.free_all()
            self._set_pool_limit()

    def _other_pointer(self, size: int) -> Any:
        """For another GPU: what was installed before."""
        previous = self._previous or self._cuda.get_allocator()
        if previous is self._allocator:
            previous = self._cupy.get_default_memory_pool().malloc
        return previous(size)

    def _make_room(self, nbytes: int) -> None:
        """Sees to it that a block fits by count."""
        if not self._installed:
            return
        self._call_reclaim(self.used_bytes + nbytes - self.limit_bytes)
        if self.used_bytes + nbytes > self.limit_bytes:
            self._refuse(nbytes)

    def _frees(self, nbytes: int) -> bool:
        """Whether asking for memory once more has freed any."""
        before = self.used_bytes
        return self._call_reclaim(nbytes) and self.used_bytes < before

    def _pool_pointer(self, nbytes: int) -> Any:
        """Memory of the pool, or None if the pool cannot give it."""
        before = self._pool.total_bytes() if self._watching else 0
        pointer = self._ask_pool(nbytes)
        if pointer is None and self._blocks.total_bytes:
            self._give_back()
            pointer = self._ask_pool(nbytes)
        if pointer is None:
            return None
        if self._watching:
            # What it held may have shrunk meanwhile: it gives back before it asks.
            if self._pool.total_bytes() > before:
                self._from_driver += nbytes
            else:
                self._from_pool += nbytes
        return pointer

    def _ask_pool(self, nbytes: int) -> Any:
        try:
            return self._pool.malloc(nbytes)
        except self._cuda.memory.OutOfMemoryError:
            return None

    def _call_reclaim(self, missing_bytes: int) -> bool:
        if self._reclaim is None or self._reclaiming:
            return False
        with self.without_reclaim():
            try:
                self._reclaim(missing_bytes)
            except Exception as error:
                self.reclaim_error = without_frames(error)
        self._give_back()
        return True

    def forget_failure(self) -> None:
        self.last_failure = None

    @contextmanager
    def without_reclaim(self) -> Iterator[None]:
        former, self._reclaiming = self._reclaiming, True
        try:
            with self._current():
                yield
        finally:
            self._reclaiming = former

    def _refuse(self, nbytes: int) -> None:
        self.last_failure = (nbytes, self.used_bytes)
        kept = ''
        if self.other_bytes >= self._whole_bytes:
            kept = (
                f" {self.other_bytes} of them are kept by CuPy's default pool for "
                'arrays from before the session; begin the session earlier.'
            )
        raise make_out_of_memory_error(
            f'{nbytes} bytes do not fit: {self.used_bytes} of {self.limit_bytes} bytes '
            f'are in use, and the pool takes {self.footprint_bytes}.{kept} Raise the '
            'memory limit or use smaller batches.',
            nbytes,
            self.limit_bytes,
            self.used_bytes,
        ) from self.reclaim_error

    def _count(self, nbytes: int) -> int:
        with self._lock:
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

    def _forget(self, ident: int, nbytes: int) -> None:
        with self._lock:
            self.used_bytes -= nbytes
            if self._log is not None:
                self._log.append((-ident, nbytes))

    def _count_others(self) -> None:
        """See [other pools]."""
        self._others_may_go = False
        self._forget_others()
        with self._current():
            pool = self._cupy.get_default_memory_pool()
            pool.free_all_blocks()
            nbytes = int(pool.total_bytes()) - self._adopted_bytes
        if nbytes > 0:
            self._others = self._count(nbytes), nbytes
        self._set_pool_limit()

    def _forget_others(self) -> None:
        if self._others is not None:
            self._forget(*self._others)
            self._others = None

    def _let_go(self, ident: int, nbytes: int) -> None:
        """A block has been given back; see [block owners]."""
        self._forget(ident, nbytes)
        if self._closed:
            self._give_back()

    def _adopt_memory(self, base: Array, pointer: int, nbytes: int) -> None:
        def died(_: Any) -> None:
            adopted = self._adopted.pop(pointer, None)
            if adopted is not None:
                self._forget(adopted[0], nbytes)
                self._adopted_bytes -= nbytes
                self._others_may_go = self._installed
                self._set_pool_limit()

        with self._lock:
            ident = self._count(nbytes)
            self._adopted[pointer] = (ident, nbytes, weakref.ref(base, died))
            self._adopted_bytes += nbytes
            self._set_pool_limit()

    def _set_pool_limit(self) -> None:
        """Leaves the pool what nothing else takes; 0 is no limit."""
        others = self._elsewhere_bytes + self._blocks.total_bytes
        left = max(self.limit_bytes - others, 1) if self._limited else 0
        with self._current():
            self._pool.set_limit(size=left)

    @property
    def _elsewhere_bytes(self) -> int:
        """In use, but not from here."""
        return self._adopted_bytes + self.other_bytes

    def watch_pool(self, watched: bool) -> None:
        self._watching += 1 if watched else -1

    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        with self._lock:
            used, peak = self.used_bytes, max(self._sample_peak, self.used_bytes)
            if new_peak:
                self._sample_peak = used
        held = self.footprint_bytes
        free = max(0, held - (used - self._elsewhere_bytes))
        return PoolFigures(used, free, self._from_pool, self._from_driver, peak)

    # -- memory -------------------------------------------------------------
    def owns(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray)

    def allocation_id(self, array: Array) -> int:
        memory = array.data.mem
        owner = self._owner(memory)
        if owner is not None:
            return owner.ident
        adopted = self._adopted.get(memory.ptr)
        return 0 if adopted is None else adopted[0]

    def root(self, array: Array) -> Root:
        """CuPy's memory object, which all views of an allocation share."""
        return array.data.mem

    def root_bytes(self, root: Root) -> int:
        return int(root.size)

    def capture(self, array: Array) -> View:
        pointer = array.data
        offset_bytes = pointer.ptr - pointer.mem.ptr if array.size else 0
        return View(offset_bytes, array.shape, array.strides, array.dtype.str)

    def restore(self, root: Root, view: View) -> Array:
        pointer = self._new_pointer(root, view.offset_bytes)
        return self._cupy.ndarray(view.shape, view.dtype, pointer, view.strides)

    def allocate(self, nbytes: int) -> Root:
        with self._current():
            return self._take_pointer(nbytes).mem

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        owner = self._owner(root)
        return None if owner is None else _Look(owner, look)

    def memory_at(self, address: int, nbytes: int) -> Root:
        return self._cuda.UnownedMemory(address, nbytes, None, self._device_id)

    def fill(self, copy: HostCopy, root: Root) -> None:
        space = _space(copy, self.root_bytes(root))
        if space.last is not None:
            space.last.wait()
        with self._current():
            self._compute().synchronize()
            self._runtime.memcpy(
                space.address, root.ptr, space.nbytes,
                self._runtime.memcpyDeviceToHost,
            )  # fmt: skip
        space.follow(None)

    def same_bits(self, left: Array, right: Array) -> bool:
        return same_bits(left, right, _COMPARED_ELEMENTS)

    # -- places -------------------------------------------------------------
    def block_bytes(self, nbytes: int) -> int:
        return _rounded(nbytes)

    def set_places(self, arena: Arena) -> bool:
        """See :class:`Device`; a larger arena takes the place of a smaller one."""
        nbytes = arena.slab_bytes
        if self._slab is None or self._slab.nbytes < nbytes:
            smaller = weakref.ref(self._slab) if self._slab is not None else None
            counted = self._placed
            self.release_places()
            block = self._new_block(nbytes)
            if block is None:
                # Where blocks keep it alive, the rest of it is still to be used.
                self._slab = smaller() if smaller is not None else None
                if self._slab is not None:
                    self._placed = counted
                return False
            self._slab, self._slab_stream = Slab(block, nbytes), self._compute().ptr
        self._slab.table.expect(arena)
        return True

    def release_places(self) -> None:
        """See :meth:`Device.release_places`."""
        self._placed = self.place_figures()
        self._slab = None  # goes with the last block in it
        self._give_back()

    def seek(self, k: int) -> None:
        if self._slab is not None:
            self._slab.table.seek(k)

    def place_figures(self) -> PlaceFigures:
        if self._slab is None:
            return self._placed
        return PlaceFigures(
            *map(sum, zip(self._placed, self._slab.table.figures(), strict=True))
        )

    # -- copies -------------------------------------------------------------
    def swap_out(self, root: Root, copy: HostCopy | None) -> tuple[HostCopy, Transfer]:
        nbytes = self.root_bytes(root)
        space = _space(copy or self.host_copy(nbytes), nbytes)
        return space, self._copy(
            root, space, self._d2h, self._runtime.memcpyDeviceToHost
        )

    def swap_in(self, copy: HostCopy, root: Root) -> Transfer:
        space = _space(copy, self.root_bytes(root))
        return self._copy(root, space, self._h2d, self._runtime.memcpyHostToDevice)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, CudaTransfer)
        transfer.waited = True
        if transfer.done():
            return
        with self._current():
            compute = self._compute()
            before = compute.record()
            self.order_after(transfer)
            self._stalls.append((before, compute.record()))

    def _copy(self, root: Root, space: Space, stream: Any, kind: int) -> CudaTransfer:
        with self._current():
            # Captured before anything is done with the copy stream.
            compute = self._compute()
            ready = self._cuda.Event(disable_timing=True)
            ready.record(compute)
            stream.wait_event(ready)
            if isinstance(space.last, _CudaCompletion):
                stream.wait_event(space.last.event)
            start, end = self._cuda.Event(), self._cuda.Event()
            start.record(stream)
            if space.nbytes:
                ends = (root.ptr, space.address)
                source, target = (
                    ends if kind == self._runtime.memcpyDeviceToHost else ends[::-1]
                )
                self._runtime.memcpyAsync(
                    target, source, space.nbytes, kind, stream.ptr
                )
            end.record(stream)
        space.follow(_CudaCompletion(end))
        return CudaTransfer(self, root, space, start, end)

    def order_after(self, transfer: CudaTransfer) -> None:
        """What uses the memory from now on does so after the copy; see [streams]."""
        with self._current():
            compute = self._compute()
            compute.wait_event(transfer.end)
            home = getattr(self._owner(transfer.root), 'stream', compute)
            if home != compute:
                home.wait_event(transfer.end)

    def _owner(self, root: Root) -> _Allocation | None:
        owner = getattr(root, '_owner', None)
        return owner if type(owner) is _Allocation and owner.device is self else None

    def _make_block(self, nbytes: int) -> PinnedBlock:
        check_available(nbytes)
        with self._current():
            try:
                return PinnedBlock(self._cuda.PinnedMemory(nbytes), nbytes)
            except self._runtime.CUDARuntimeError as error:
                raise MemoryError(f'CUDA refuses to pin it ({error})') from error

    # -- time ---------------------------------------------------------------
    def mark(self) -> Mark:
        with self._current():
            return self._compute().record()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(self._cuda.get_elapsed_time(start, end)) / 1e3

    def synchronize(self) -> None:
        self._cuda.Device(self._device_id).synchronize()

    def take_stall_seconds(self) -> float:
        stalls, self._stalls = self._stalls, []
        seconds = 0.0
        for before, after in stalls:
            if after.done:
                seconds += self.elapsed(before, after)
            else:
                self._stalls.append((before, after))
        return seconds

    def _current(self) -> Any:
        """Makes this GPU the current one for a while."""
        return self._cuda.Device(self._device_id)


class CudaTransfer(Transfer):
    """One copy on a copy stream; keeps its root alive.

    Attributes:
        root: The memory that is copied.
        end (cupy.cuda.Event): Recorded behind the copy.
        waited (bool): Whether compute has been ordered after it.
    """

    def __init__(
        self, device: CudaDevice, root: Root, space: Space, start: Any, end: Any
    ) -> None:
        self.nbytes = space.nbytes
        self.end = end
        self.waited = False
        self.root = root
        self._device = device
        self._start = start

    def done(self) -> bool:
        return bool(self.end.done)

    def seconds(self) -> float:
        return self._device.elapsed(self._start, self.end)

    def span(self) -> Span:
        return _CudaSpan(self._device, self._start, self.end)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # See Note: [streams].
        if not finalizing() and not self.waited and not self.done():
            self._device.order_after(self)


class _CudaSpan(Span):
    def __init__(self, device: CudaDevice, start: Any, end: Any) -> None:
        self._device = device
        self._ends = start, end

    def after(self, origin: Mark) -> tuple[float, float]:
        first, last = (self._device.elapsed(origin, moment) for moment in self._ends)
        return first, last


class _CudaCompletion(Completion):
    __slots__ = ('event',)

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


class _Allocation:
    """Owner of one block; see Note: [block owners]."""

    __slots__ = ('__weakref__', 'block', 'device', 'ident', 'look', 'nbytes', 'stream')

    def __init__(
        self, device: CudaDevice, ident: int, nbytes: int, block: Any, stream: Any
    ) -> None:
        self.device = device
        self.ident = ident
        self.nbytes = nbytes
        self.block = block  # of the pool or of a slab; given back when it dies
        self.stream = stream  # on which the block is used again
        self.look: Any = None  # weak reference to a _Look

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing():
            return
        look = self.look and self.look()
        if look is not None:
            look.look(self.block.ptr)
        self.block = None
        self.device._let_go(self.ident, self.nbytes)


class _Look:
    """Somebody wants to see a block before it is given back; see Device.last_look."""

    __slots__ = ('__weakref__', 'look')

    def __init__(self, owner: _Allocation, look: Callable[[int], None]) -> None:
        self.look = look
        owner.look = weakref.ref(self)


class PinnedBlock(MemoryBlock):
    """Page-locked memory of exactly the size asked for.

    CuPy's pinned pool rounds up to a power of two, so it is not used.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes
        self.address = memory.ptr

    def close(self) -> None:
        # The store closes a block only when no copy to or from it is under way.
        self._memory, self.address = None, 0


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
    cupy_error = _import_cupy().cuda.memory.OutOfMemoryError

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


def _import_cupy() -> Any:
    try:
        import cupy
        import cupy.cuda.memory
    except ImportError as error:
        raise OptionError(
            'a CUDA device needs CuPy, which cannot be imported '
            f"({error}); install it with pip install 'chainer_hybridmem[cuda12]', or "
            "use device 'cpu'."
        ) from error
    return cupy


def _choose_device(runtime: Any, device_id: int | None) -> int:
    try:
        count = int(runtime.getDeviceCount())
        chosen = int(runtime.getDevice()) if device_id is None else device_id
    except runtime.CUDARuntimeError as error:
        raise OptionError(
            f'CUDA finds no GPU ({error}); check the driver with nvidia-smi, or use '
            "device 'cpu'."
        ) from error
    if not 0 <= chosen < count:
        raise OptionError(
            f'GPU number {chosen} does not exist; there are {count}, numbered from 0.'
        )
    return chosen


def _check_options(
    limit_bytes: int,
    link_bandwidth: float | None,
    swap_dir: str | None,
    disk_bandwidth: float | None,
) -> None:
    if limit_bytes <= 0:
        raise OptionError(f'limit_bytes is {limit_bytes}; it must be above zero.')
    if link_bandwidth is not None:
        raise OptionError(
            f"link_bandwidth is {link_bandwidth}, but a GPU's link cannot be "
            "throttled; leave it out, or use device 'cpu'."
        )
    if swap_dir is not None:
        raise OptionError(
            f'swap_dir is {swap_dir!r}, but a GPU swaps to pinned memory; leave it '
            "out, or use device 'cpu'."
        )
    if disk_bandwidth is not None:
        raise OptionError(
            f'disk_bandwidth is {disk_bandwidth}, but a GPU swaps to no disk; leave it '
            "out, or use device 'cpu'."
        )


def _rounded(nbytes: int) -> int:
    return (nbytes + _UNIT_BYTES - 1) // _UNIT_BYTES * _UNIT_BYTES


def _space(copy: HostCopy, nbytes: int) -> Space:
    if not isinstance(copy, Space) or copy.nbytes != nbytes:
        raise ValueError(
            f'a host copy of {copy.nbytes} bytes cannot hold an allocation of '
            f'{nbytes} bytes'
        )
    return copy
