"""Surroundings in which a session's mistakes show: poisoned memory, odd copies."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from chainer_hybridmem.devices.host import copies
from chainer_hybridmem.devices.host.clock import HostClock
from chainer_hybridmem.devices.host.memory import HostMemory

from .native_faults import NativeFaults


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Freed memory is full of NaN."""
    install = HostMemory.install
    faults: list[NativeFaults] = []

    def poisoned(self: HostMemory, reclaim: Callable[[int], None]) -> None:
        install(self, reclaim)
        faults.append(NativeFaults(self))
        faults[-1].poison_freed()

    with mock.patch.object(HostMemory, 'install', poisoned):
        try:
            yield
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
    from chainer_hybridmem.devices.cuda.block_pool import BlockPool

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


class Clock:
    """A time of its own: every look moves it on by chance, and nobody sleeps.

    Args:
        chance (random.Random): Draws the seconds that pass.
        step_seconds: Their mean.
    """

    def __init__(self, chance: random.Random, step_seconds: float) -> None:
        self._chance = chance
        self._rate = 1 / step_seconds
        self._now = 1000.0

    def perf_counter(self) -> float:
        """Seconds since some moment."""
        self._now += self._chance.expovariate(self._rate)
        return self._now

    def sleep(self, seconds: float) -> None:
        """Lets time pass at once."""
        self._now += seconds


class _Done:
    """In place of a copy's event: the copy runs when somebody waits for it."""

    def __init__(self, line: _Line) -> None:
        self._line, self._set = line, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, seconds: float | None = None) -> bool:
        while not self._set:
            self._line.run_one()
        return True


class _Line:
    """The copies of one thread, without the thread."""

    def __init__(self, thread: copies.CopyThread) -> None:
        self._thread = thread
        self._jobs: collections.deque[Any] = collections.deque()

    def add(self, job: Any) -> None:
        self._jobs.append(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def run_one(self) -> None:
        job = self._jobs.popleft()
        completion = job.transfer.completion
        try:
            contextvars.Context().run(self._thread._execute, job)
        except Exception as error:
            completion.error = copies._failure(job.transfer.nbytes, job.outward, error)
        completion.event.set()


@contextlib.contextmanager
def repeatable_copies(chance: random.Random, eagerness: float, clock: Clock) -> Any:
    """Copies run in this thread: by chance when another is asked for, or when needed.

    Everything that depends on time is then the same in every run.

    Args:
        chance: Draws which copies run early.
        eagerness: How probable each is to run early; 0: as late as can be.
        clock: The time of copies and of the device.
    """
    lines: dict[Any, _Line] = {}

    def submit(self: Any, root: Any, space: Any, address: int, outward: bool) -> Any:
        line = lines.setdefault(self, _Line(self))
        completion = copies.HostCompletion(threading.main_thread(), outward)
        completion.event = _Done(line)  # type: ignore[assignment]
        transfer = copies.HostTransfer(root, space.nbytes, completion)
        job = copies._Job(transfer, space, address, outward)
        self._last = completion
        space.follow(completion)
        line.add(job)
        for other in lines.values():
            while len(other) and chance.random() < eagerness:
                other.run_one()
        return transfer

    def close(self: Any) -> None:
        line = lines.pop(self, ())
        while len(line):
            line.run_one()

    with (
        mock.patch.object(copies.CopyThread, 'submit', submit),
        mock.patch.object(copies.CopyThread, 'close', close),
        mock.patch.object(copies, 'time', clock),
        mock.patch.object(HostClock, 'mark', lambda self: clock.perf_counter()),
    ):
        yield
