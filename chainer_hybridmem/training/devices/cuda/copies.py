"""Copies to pinned memory, on two streams beside the compute stream.

Note: [streams]
    A block is used again only on the stream on which it was allocated. Before that,
    this stream waits for the block's copies: when they are waited for, and also when a
    transfer is dropped without that.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.training.devices.copies import CopyEngine
from chainer_hybridmem.training.devices.cuda.gpu import CudaClock, Gpu
from chainer_hybridmem.training.devices.cuda.memory import CudaMemory
from chainer_hybridmem.training.devices.swap_store.blocks import (
    MemoryBlock,
    check_available,
)
from chainer_hybridmem.training.devices.swap_store.space import Space
from chainer_hybridmem.training.devices.values import Completion, Mark, Root, Transfer


class CudaCopyEngine(CopyEngine):
    """One stream for each direction.

    Args:
        gpu: Whose memory is copied.
        memory: Knows on which stream a block is used again.
        clock: Measures the copies.

    Attributes:
        d2h: The stream of copies to the host.
        h2d: The stream of copies to the GPU.
    """

    def __init__(self, gpu: Gpu, memory: CudaMemory, clock: CudaClock) -> None:
        self._gpu = gpu
        self._memory = memory
        self._clock = clock
        with gpu.current():
            self.d2h = gpu.cuda.Stream(non_blocking=True)
            self.h2d = gpu.cuda.Stream(non_blocking=True)
            self._ready = gpu.cuda.Event(disable_timing=True)
        self._stalls: list[tuple[Any, Any]] = []

    def make_block(self, nbytes: int) -> PinnedBlock:
        """Pinned memory for host copies.

        Raises:
            MemoryError: If there is none.
        """
        check_available(nbytes)
        with self._gpu.current():
            try:
                return PinnedBlock(self._gpu.cuda.PinnedMemory(nbytes), nbytes)
            except self._gpu.runtime.CUDARuntimeError as error:
                raise MemoryError(f'CUDA refuses to pin it ({error})') from error

    def start(self, root: Root, space: Space, outward: bool) -> CudaTransfer:
        gpu, stream = self._gpu, self.d2h if outward else self.h2d
        with gpu.current():
            # Captured before anything is done with the copy stream.
            compute = gpu.compute()
            self._ready.record(compute)  # a stream waits for what was recorded last
            stream.wait_event(self._ready)
            if isinstance(space.last, _CudaCompletion):
                stream.wait_event(space.last.end)
            start, end = gpu.cuda.Event(), gpu.cuda.Event()
            start.record(stream)
            if space.nbytes:
                self._issue(root, space, outward, stream)
            end.record(stream)
        space.last = _CudaCompletion(self._clock, start, end)
        return CudaTransfer(self, root, space.nbytes, space.last)

    def _issue(self, root: Root, space: Space, outward: bool, stream: Any) -> None:
        runtime = self._gpu.runtime
        ends = (space.address, root.ptr) if outward else (root.ptr, space.address)
        kind = runtime.memcpyDeviceToHost if outward else runtime.memcpyHostToDevice
        runtime.memcpyAsync(*ends, space.nbytes, kind, stream.ptr)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, CudaTransfer)
        transfer.mark_waited()
        if transfer.done():
            return
        with self._gpu.current():
            compute = self._gpu.compute()
            before = compute.record()
            self.order_after(transfer)
            self._stalls.append((before, compute.record()))

    def order_after(self, transfer: CudaTransfer) -> None:
        """What uses the memory from now on does so after the copy; see [streams]."""
        with self._gpu.current():
            compute = self._gpu.compute()
            compute.wait_event(transfer.end)
            home = self._memory.allocator.find_stream(transfer.root)
            if home not in (None, compute) and not gc.is_finalized(home):
                home.wait_event(transfer.end)

    def order_after_all(self, transfer: CudaTransfer) -> None:
        """The same for a copy whose events are gone: it waits for all copies so far."""
        for stream in (self.d2h, self.h2d):
            if not gc.is_finalized(stream):
                transfer.end = stream.record()
                self.order_after(transfer)

    def take_stall_seconds(self) -> float:
        stalls, self._stalls = self._stalls, []
        seconds = 0.0
        for before, after in stalls:
            if after.done:
                seconds += self._clock.elapsed(before, after)
            else:
                self._stalls.append((before, after))
        return seconds

    def finish(self) -> None:
        self._gpu.synchronize()

    def close(self) -> None:
        self.finish()
        self._stalls.clear()


class CudaTransfer(Transfer):
    """One copy on a copy stream; keeps its root alive.

    Attributes:
        root: The memory that is copied.
        end (cupy.cuda.Event): Recorded behind the copy.
    """

    completion: _CudaCompletion

    def __init__(
        self,
        engine: CudaCopyEngine,
        root: Root,
        nbytes: int,
        completion: _CudaCompletion,
    ) -> None:
        self.nbytes = nbytes
        self.completion = completion
        self.end = completion.end
        self._waited = False
        self.root = root
        self._engine = engine

    def mark_waited(self) -> None:
        """Compute is being ordered after it."""
        self._waited = True

    def seconds(self) -> float:
        return self.completion.clock.elapsed(self.completion.start, self.end)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # See Note: [streams].
        if finalizing() or self._waited:
            return
        if gc.is_finalized(self.end):  # the collector takes both, and that one first
            self._engine.order_after_all(self)
        elif not self.done():
            self._engine.order_after(self)


class _CudaCompletion(Completion):
    __slots__ = ('clock', 'end', 'start')

    def __init__(self, clock: CudaClock, start: Any, end: Any) -> None:
        self.clock = clock
        self.start, self.end = start, end

    def done(self) -> bool:
        return bool(self.end.done)

    def wait(self) -> None:
        self.end.synchronize()

    def after(self, origin: Mark) -> tuple[float, float]:
        elapsed = self.clock.elapsed
        return elapsed(origin, self.start), elapsed(origin, self.end)


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
