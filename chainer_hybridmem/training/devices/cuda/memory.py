"""Counted and limited GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.interrupts import held_back
from chainer_hybridmem.training.devices.adopted import AdoptedArrays
from chainer_hybridmem.training.devices.cuda.allocator import (
    AllocationCounter,
    Allocator,
    OtherPools,
)
from chainer_hybridmem.training.devices.cuda.block_pool import open_pool
from chainer_hybridmem.training.devices.cuda.gpu import Gpu, round_up
from chainer_hybridmem.training.devices.ports import Memory
from chainer_hybridmem.training.devices.values import Array, PoolFigures, Root


class CudaMemory(Memory):
    """CuPy's allocations; see :class:`.Memory`.

    Args:
        gpu: Whose memory it is.
        limit_bytes: Most bytes in use; a smaller ``CUPY_GPU_MEMORY_LIMIT`` wins.

    Attributes:
        pool (BlockPool): Where blocks come from.
        allocator (Allocator): Gives them.
    """

    counter: AllocationCounter

    def __init__(self, gpu: Gpu, limit_bytes: int) -> None:
        self._gpu = gpu
        self.pool = open_pool(gpu, limit_bytes)
        self.limit_bytes = self.pool.limit_bytes
        self.counter = AllocationCounter()
        self.counter.limit(self.limit_bytes)
        self._adopted = AdoptedArrays(self.counter.count, self._lose_adopted)
        self._others = OtherPools(gpu, self.counter, self.pool)
        self.allocator = Allocator(
            gpu, self.pool, self.counter, self._others, self._count_others
        )
        self._installed = False

    # -- life ---------------------------------------------------------------
    @held_back
    def install(self, reclaim: Callable[[int], None]) -> None:
        """See :meth:`.Memory.install`; counts those of the calling thread.

        Raises:
            SessionError: If a CUDA device is installed, or inside
                ``cupy.cuda.using_allocator``.
        """
        previous = self._gpu.cuda.get_allocator()
        if isinstance(getattr(previous, '__self__', None), Allocator):
            raise SessionError(
                'a CUDA device already counts the CuPy allocations; leave the first '
                'session before entering another one.'
            )
        try:
            self._gpu.cuda.set_allocator(self.allocator.pointer)
        except ValueError as error:
            raise SessionError(
                'no session can start inside cupy.cuda.using_allocator; start it '
                'outside.'
            ) from error
        self.allocator.begin(reclaim, previous)
        self._installed = True
        self.pool.enforces_limit = True
        self._count_others()
        if self._others.nbytes:
            self.collect_garbage()  # as graphs from before are

    @held_back
    def uninstall(self) -> None:
        if not self._installed:
            return
        self._installed = False
        self.pool.enforces_limit = False  # graphs that the program keeps come back
        previous = self.allocator.end()
        if self._gpu.cuda.get_allocator() is self.allocator.pointer:
            self._gpu.cuda.set_allocator(previous)
        self._others.forget()
        self.pool.set_external_bytes(self._elsewhere_bytes)
        self.pool.give_back()

    def follow(self) -> None:
        """CuPy has one allocator for all contexts; other pools are counted anew."""
        if self._others.nbytes:
            self._count_others()

    def close(self) -> None:
        self._adopted.clear()
        self.allocator.close()

    def without_reclaim(self) -> AbstractContextManager[None]:
        return self.allocator.without_reclaim()

    def adopt(self, arrays: Iterable[Array]) -> None:
        others = [array for array in arrays if not self._knows(array.data.mem)]
        if not others:
            return
        self._others.forget()  # they may be among what other pools hold
        for array in others:
            base = array if array.base is None else array.base
            memory = array.data.mem
            if not self._knows(memory):
                self._adopted.add(memory.ptr, base, round_up(memory.size))
        if self._installed:
            self._count_others()
        self.pool.set_external_bytes(self._elsewhere_bytes)

    def allocate(self, nbytes: int) -> Root:
        with self._gpu.current():
            return self.allocator.pointer(nbytes).mem

    def ident_of(self, root: Root) -> int:
        """Id of an allocation; 0 if it is not counted."""
        return self.allocator.ident_of(root) or self._adopted.ident_at(root.ptr)

    def _knows(self, root: Root) -> bool:
        """Whether an allocation is counted, or has no bytes."""
        return not root.size or self.ident_of(root) != 0

    def collect_garbage(self) -> None:
        super().collect_garbage()
        if self._others.nbytes:
            self._count_others()

    # -- counting -----------------------------------------------------------
    @property
    def other_bytes(self) -> int:
        """See [other pools] in :mod:`.allocator`."""
        return self._others.nbytes

    @property
    def last_failure(self) -> tuple[int, int] | None:  # type: ignore[override]
        return self.allocator.last_failure

    @property
    def reclaim_error(self) -> BaseException | None:  # type: ignore[override]
        return self.allocator.reclaim_error

    @property
    def wanted_bytes(self) -> int:  # type: ignore[override]
        return self.allocator.wanted_bytes

    def raise_limit(self, nbytes: int) -> bool:
        raised = self.pool.raise_limit(nbytes)
        self.counter.limit(self.pool.limit_bytes)
        return raised

    def restore_limit(self) -> None:
        super().restore_limit()
        self.pool.set_limit(self.limit_bytes)

    def forget_failure(self) -> None:
        self.allocator.forget_failure()

    def watch_pool(self, watched: bool) -> None:
        self.pool.watch(watched)
        self.counter.watch(watched)

    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        used, peak = self.counter.sample(new_peak)
        pool = self.pool
        free = max(0, pool.footprint_bytes - (used - self._elsewhere_bytes))
        from_pool = pool.from_pool + self.counter.from_pool
        return PoolFigures(used, free, from_pool, pool.from_driver, peak)

    @property
    def _elsewhere_bytes(self) -> int:
        """Bytes in use that this pool has not given."""
        return self._adopted.nbytes + self._others.nbytes

    def _count_others(self) -> None:
        self._others.count(self._adopted.nbytes, self.allocator.previous)
        self.pool.set_external_bytes(self._elsewhere_bytes)

    def _lose_adopted(self, ident: int, nbytes: int) -> None:
        self.counter.uncount(ident, nbytes)
        if self._installed:
            self.counter.recounts = True
        self.pool.set_external_bytes(self._elsewhere_bytes)
