"""The time that everything here goes by: the one place that asks the machine for it.

A test that puts a time of its own in these places decides how long everything takes.
Dates are none of its business.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

now = time.perf_counter  # seconds since some moment
sleep = time.sleep


class _Schedule:
    """What Linux tells of one thread's turns.

    Its file stays open: it is asked at every hook of an iteration that is timed.
    """

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self._file: int | None = None
        with contextlib.suppress(OSError):  # not every kernel or sandbox has it
            self._file = os.open('/proc/thread-self/schedstat', os.O_RDONLY)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def delayed(self) -> float:
        """See :func:`delayed`."""
        if self._file is None:
            return 0.0
        return 1e-9 * int(os.pread(self._file, 64, 0).split()[1])


_own = threading.local()


def delayed() -> float:
    """Seconds that this thread was ready to run while others had the processor.

    Unlike the time in which it computes nothing, these are none in which it waits, for
    data or a copy. Zero where the system does not tell it.
    """
    schedule: _Schedule | None = getattr(_own, 'schedule', None)
    if schedule is None or schedule.thread != threading.get_native_id():  # forked
        schedule = _own.schedule = _Schedule()
    return schedule.delayed()


def undelayed() -> float:
    """Seconds since some moment, but for those in :func:`delayed`."""
    return now() - delayed()
