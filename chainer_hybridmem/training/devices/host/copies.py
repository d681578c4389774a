"""Copies between the memory budget and its store, on worker threads.

Note: [frees in the main thread]
    A worker drops everything that keeps an array alive before it announces
    that a copy has finished, so that memory is released where the program
    releases it and not at some moment in a worker.

Note: [small copies]
    A worker needs the interpreter before and after each copy, and so does a program
    whose functions are small: handing a small copy over takes longer than the copy
    itself. So the program makes small ones at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

from chainer_hybridmem import timing
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.interrupts import Worker, start_whole
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.copies import CopyEngine
from chainer_hybridmem.training.devices.host.array_data import address_of
from chainer_hybridmem.training.devices.host.shared_link import (
    LATE_SECONDS,
    Lane,
    SharedLink,
)
from chainer_hybridmem.training.devices.swap_store.space import Space
from chainer_hybridmem.training.devices.values import Completion, Mark, Root, Transfer

# A throttled copy wakes this often. Each time it takes a core from BLAS, whose
# other threads then spin: seldom is better.
_STEP_SECONDS = 0.2
AT_ONCE_BYTES = 1 << 17  # up to this size; see Note: [small copies]
_LEAST_STEP_BYTES = 1 << 16
_ALIVE_SECONDS = 1.0  # who waits looks so often whether the thread still lives

_Copy = Callable[[int, int, int], None]


class HostCompletion(Completion):
    """When a worker has finished a copy.

    Args:
        thread: The worker; None for a copy that is made at once.
        outward: Whether it is a copy to the store.

    Attributes:
        spoilt (bool): The space in the store does not have the contents (yet).
        error (Exception or None): Why it failed.
        began (float): When the copy began, on the clock of ``perf_counter``.
        ended (float): When it ended.
    """

    __slots__ = '_finished', '_runs', '_thread', 'began', 'ended', 'error', 'spoilt'

    def __init__(self, thread: Worker | None, outward: bool) -> None:
        self._thread = thread
        self.spoilt = outward
        self._finished = False
        # An event would be four objects, for each copy of a small map, too.
        self._runs = None if thread is None else threading.Lock()
        if self._runs is not None:
            self._runs.acquire()
        self.error: BaseException | None = None
        self.began = self.ended = 0.0

    def done(self) -> bool:
        return self._finished

    def end(self) -> None:
        """The copy has finished or failed."""
        self._finished = True
        if self._runs is not None:
            self._runs.release()

    def after(self, origin: Mark) -> tuple[float, float]:
        return self.began - origin, self.ended - origin

    def wait(self) -> None:
        """Returns once the copy has finished or failed.

        Raises:
            SwapStoreError: If the worker has died with it.
        """
        thread, runs = self._thread, self._runs
        if thread is None or runs is None:  # it was made at once
            return
        while thread.runs and not self._finished:
            if runs.acquire(timeout=_ALIVE_SECONDS):
                runs.release()  # for others who wait
        if not self._finished:
            raise SwapStoreError(
                f'the thread {thread.name} has died before a copy of a feature '
                f'map had finished; run the iteration again.'
            )


class HostTransfer(Transfer):
    """One copy of a :class:`CopyThread`; keeps its root alive."""

    completion: HostCompletion

    __slots__ = ('_carried', '_seconds', 'completion', 'nbytes', 'root', 'submitted')

    def __init__(self, root: Root, nbytes: int, completion: HostCompletion) -> None:
        self.root = root
        self.nbytes = nbytes
        self.completion = completion
        self.submitted = timing.now()
        self._seconds = 0.0
        self._carried = 0.0, 0.0

    def seconds(self) -> float:
        return self._seconds

    def carried(self, origin: Mark) -> tuple[float, float]:
        began, ended = self._carried
        return began - origin, ended - origin


class _Job:
    __slots__ = ('address', 'after', 'block', 'offset', 'outward', 'tier', 'transfer')

    def __init__(
        self,
        transfer: HostTransfer,
        space: Space,
        address: int,
        outward: bool,
    ) -> None:
        self.transfer = transfer
        self.block = space.block  # the space may be closed before the copy runs
        self.offset = space.offset
        self.tier = space.tier
        self.address = address
        self.outward = outward
        self.after = space.last if isinstance(space.last, HostCompletion) else None


class CopyThread:
    """Copies in one direction, one after the other.

    Args:
        name: Of the thread.
        bandwidth: Bytes per second that no copy exceeds; None for no limit.
        disk_bandwidth: Likewise for copies to and from files.
        lane: Of a link with this bandwidth that is shared; None for one of its own.
    """

    def __init__(
        self,
        name: str,
        bandwidth: float | None,
        disk_bandwidth: float | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._name = name
        self._lane = lane
        self._disk_bandwidth = disk_bandwidth
        limits = [b for b in (bandwidth, disk_bandwidth) if b is not None]
        self._bandwidths = {Tier.RAM: bandwidth, Tier.DISK: min(limits, default=None)}
        self._jobs: queue.SimpleQueue[_Job | None]
        self._last: HostCompletion | None = None
        self._thread: Worker | None = None
        self._closed = False
        self._free_from = 0.0

    def submit(
        self, root: Root, space: Space, address: int, outward: bool
    ) -> HostTransfer:
        """Queues a copy, or makes it now; it waits for the space's former copy.

        Raises:
            SwapStoreError: If there is no thread for it.
        """
        thread = self._living()
        at_once = self._copies_at_once(space)
        completion = HostCompletion(None if at_once else thread, outward)
        transfer = HostTransfer(root, space.nbytes, completion)
        job = _Job(transfer, space, address, outward)
        space.last = completion
        if at_once:
            self._finish(job)
        else:
            self._last = completion
            self._jobs.put(job)
        return transfer

    def _copies_at_once(self, space: Space) -> bool:
        """See Note: [small copies]."""
        return (
            space.nbytes <= AT_ONCE_BYTES
            and space.tier is Tier.RAM
            and self._bandwidths[Tier.RAM] is None
            and (space.last is None or space.last.done())
        )

    def _living(self) -> Worker:
        """The thread, which begins with the first copy, and again if it has died.

        What a dead thread had not finished stays undone; waiting for it is an error.
        """
        if self._closed:
            raise SwapStoreError(
                f'the thread {self._name} has ended with its session; nothing can be '
                f'copied any more.'
            )
        if self._thread is None or not self._thread.runs:
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            thread = Worker(lambda: self._run(jobs), self._name)
            self._jobs, self._thread = jobs, thread
            try:
                start_whole(thread, lambda: jobs.put(None))
            except RuntimeError as error:
                raise SwapStoreError(
                    f'the thread {self._name}, which copies feature maps, cannot be '
                    f'started ({error}). Allow this process more threads.'
                ) from error
        return self._thread

    def drain(self) -> None:
        """Waits until every copy queued so far has finished."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """Finishes what is queued and ends the thread."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread.ident is not None:  # it has started
                self._thread.join()
            self._thread = None
            self._jobs = queue.SimpleQueue()  # a thread that has died left some

    def _run(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while True:
            job = jobs.get()
            if job is None:
                return
            completion = job.transfer.completion
            try:
                self._execute(job)
            except BaseException as error:
                completion.error = _failure(job.transfer.nbytes, job.outward, error)
            # See Note: [frees in the main thread].
            del job
            completion.end()

    def _finish(self, job: _Job) -> None:
        """Makes a copy in the thread of the program."""
        completion = job.transfer.completion
        try:
            self._execute(job)
        except Exception as error:
            completion.error = _failure(job.transfer.nbytes, job.outward, error)
        finally:
            completion.end()

    def _execute(self, job: _Job) -> None:
        transfer = job.transfer
        start = max(transfer.submitted, self._free_from)
        if job.after is not None and not job.after.done():
            with contextlib.suppress(SwapStoreError):  # it has died
                job.after.wait()
            start = timing.now()
        if job.after is not None and job.after.spoilt and not job.outward:
            transfer.completion.spoilt = True
            raise SwapStoreError(str(job.after.error or 'it has not been copied out'))
        copy = job.block.write if job.outward else job.block.read
        transfer.completion.began = timing.now()
        bandwidth = self._bandwidths[job.tier]
        if bandwidth is not None:
            carried = self._copy_throttled(copy, job, start, bandwidth)
        else:
            start = timing.now()
            copy(job.offset, job.address, transfer.nbytes)
            carried = start, timing.now()
        transfer.completion.spoilt = False
        transfer.completion.ended = end = timing.now()
        transfer._seconds, transfer._carried = end - start, carried

    def _copy_throttled(
        self, copy: _Copy, job: _Job, begin: float, bandwidth: float
    ) -> tuple[float, float]:
        """Spreads a copy over the time that the link would take for it.

        The link keeps its own clock, so that waking up late after one copy
        does not slow the next ones down.

        Returns:
            tuple: When it has begun and ended on that clock.
        """
        nbytes = job.transfer.nbytes
        if self._lane is not None:
            begin = self._lane.enter(nbytes, begin)
            due = self._copy_shared(copy, job, begin, self._lane)
        else:
            due = begin + nbytes / bandwidth
            for copied in _copy_steps(copy, job, bandwidth):
                _sleep_until(begin + copied / bandwidth)
        self._free_from = max(due, timing.now() - LATE_SECONDS)
        return begin, due

    def _copy_shared(self, copy: _Copy, job: _Job, begin: float, lane: Lane) -> float:
        """Spreads a copy that has begun over what the shared link takes; when it ends.

        The throttle of the disk is this process's own.
        """
        nbytes = job.transfer.nbytes
        bandwidth, disk = self._bandwidths[Tier.RAM], self._disk_bandwidth
        assert bandwidth is not None
        due = begin
        try:
            for copied in _copy_steps(copy, job, bandwidth):
                due = lane.wait(nbytes - copied)
                if job.tier is Tier.DISK and disk is not None:
                    due = max(due, begin + copied / disk)
                    _sleep_until(due)
        except BaseException:
            lane.leave()
            raise
        return due


def _copy_steps(copy: _Copy, job: _Job, bandwidth: float) -> Iterator[int]:
    """Copies a step, and says how many bytes are copied by now."""
    nbytes = job.transfer.nbytes
    step = max(_LEAST_STEP_BYTES, int(bandwidth * _STEP_SECONDS))
    for start in range(0, nbytes, step):
        size = min(step, nbytes - start)
        copy(job.offset + start, job.address + start, size)
        yield start + size


def _sleep_until(moment: float) -> None:
    remaining = moment - timing.now()
    if remaining > 0:
        timing.sleep(remaining)


def _failure(nbytes: int, outward: bool, error: BaseException) -> SwapStoreError:
    if isinstance(error, SwapStoreError):
        return error.with_traceback(None)  # its frames keep the array alive
    direction = 'to' if outward else 'from'
    return SwapStoreError(
        f'copying {nbytes} bytes of a feature map {direction} the swap store failed: '
        f'{error}. Check the disk behind swap_dir, or leave swap_dir out to swap '
        'to memory.'
    )


class HostCopyEngine(CopyEngine):
    """Copies as fast as a link with a given bandwidth.

    Args:
        bandwidth: Bytes per second and direction; None for no limit.
        disk_bandwidth: Like ``bandwidth``, for copies to and from files.
        shared_link: The link with this bandwidth, if others use it, too.

    Attributes:
        bandwidth (float or None): As given.
        shared_link (SharedLink or None): As given.
    """

    def __init__(
        self,
        bandwidth: float | None,
        disk_bandwidth: float | None,
        shared_link: SharedLink | None = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.shared_link = shared_link
        lanes = shared_link and (shared_link.outward, shared_link.inward)
        self._d2h, self._h2d = (
            CopyThread(name, bandwidth, disk_bandwidth, lane)
            for name, lane in zip(
                ('hybridmem-d2h', 'hybridmem-h2d'), lanes or (None, None), strict=True
            )
        )
        self._stall_seconds = 0.0

    def start(self, root: Root, space: Space, outward: bool) -> HostTransfer:
        thread = self._d2h if outward else self._h2d
        return thread.submit(root, space, address_of(root), outward=outward)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, HostTransfer)
        completion = transfer.completion
        if not completion.done():
            start = timing.now()
            completion.wait()
            self._stall_seconds += timing.now() - start
        if completion.error is not None:
            # A new error each time: the kept one would hold its own traceback,
            # and with it the array, until the next garbage collection.
            raise SwapStoreError(str(completion.error))

    def has(self, space: Space, root: Root) -> bool:
        return space.has(address_of(root))

    def take_stall_seconds(self) -> float:
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def finish(self) -> None:
        self._d2h.drain()
        self._h2d.drain()

    def close(self) -> None:
        self._d2h.close()
        self._h2d.close()
        if self.shared_link is not None:
            self.shared_link.close()
