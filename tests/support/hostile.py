"""Surroundings in which a session's mistakes show: poisoned memory, odd copies."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from chainer_hybridmem.training.devices.host import copies
from chainer_hybridmem.training.devices.host.memory import HostMemory

from .native_faults import NativeFaults


@contextlib.contextmanager
def poisoned_memory() -> Iterator[list[NativeFaults]]:
    """Freed memory is full of NaN; what sees to it, for each device."""
    install = HostMemory.install
    faults: list[NativeFaults] = []

    def poisoned(self: HostMemory, reclaim: Callable[[int], None]) -> None:
        install(self, reclaim)
        faults.append(NativeFaults(self))
        faults[-1].poison_freed()

    with mock.patch.object(HostMemory, 'install', poisoned):
        try:
            yield faults
        finally:
            for fault in reversed(faults):
                fault.remove()


class _Poisoned:
    """A block that is full of NaN once nobody has it, in the order of compute."""

    def __init__(self, block: Any, nbytes: int) -> None:
        self._block, self.ptr, self._nbytes = block, block.ptr, nbytes

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            import cupy

            runtime = cupy.cuda.runtime
            with cupy.cuda.Device(runtime.pointerGetAttributes(self.ptr).device):
                stream = cupy.cuda.get_current_stream().ptr
                runtime.memsetAsync(self.ptr, 0xFF, self._nbytes, stream)


@contextlib.contextmanager
def poisoned_blocks() -> Iterator[None]:
    """Every block of a GPU that is let go of is full of NaN."""
    from chainer_hybridmem.training.devices.cuda.block_pool import BlockPool

    find = BlockPool.find

    def found(self: Any, nbytes: int, stream: int) -> Any:
        block = find(self, nbytes, stream)
        return None if block is None else _Poisoned(block, nbytes)

    with mock.patch.object(BlockPool, 'find', found):
        yield


@contextlib.contextmanager
def late_copies(seed: int, delays: tuple[float, ...]) -> Iterator[None]:
    """Each copy begins after one of the delays, by chance, in seconds.

    A delay ends when somebody waits for a copy of the same thread: while nobody does,
    copies are as late as they can be, and then they keep nobody from going on.
    """
    execute, wait = copies.CopyThread._execute, copies.HostCompletion.wait
    chance = random.Random(seed)
    awaited: dict[threading.Thread, _Awaited] = collections.defaultdict(_Awaited)

    def late(self: copies.CopyThread, job: Any) -> None:
        awaited[threading.current_thread()].event.wait(chance.choice(delays))
        execute(self, job)

    def impatient(self: copies.HostCompletion) -> None:
        if self.done():
            return wait(self)
        with awaited[self._thread]:
            return wait(self)

    with (
        mock.patch.object(copies.CopyThread, '_execute', late),
        mock.patch.object(copies, 'AT_ONCE_BYTES', 0),
        mock.patch.object(copies.HostCompletion, 'wait', impatient),
    ):
        yield


class _Awaited:
    """Whether anybody waits for copies of one thread."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._waiting = 0

    def __enter__(self) -> None:
        with self._lock:
            self._waiting += 1
            self.event.set()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self.event.clear()
