"""The time that everything here goes by: the one place that asks the machine for it.

A test that puts a time of its own in these places decides how long everything takes.
Dates are none of its business.
"""

from __future__ import annotations

import os
import time

now = time.perf_counter  # seconds since some moment
sleep = time.sleep


def delayed() -> float:
    """Seconds that this thread was ready to run while others had the processor.

    Unlike the time in which it computes nothing, these are none in which it waits, for
    data or a copy. Zero where the system does not tell it.
    """
    # An open file would be faster to ask, but programs close all files or fork.
    try:
        file = os.open('/proc/thread-self/schedstat', os.O_RDONLY)
    except OSError:  # not every kernel or sandbox has it
        return 0.0
    try:
        return 1e-9 * int(os.read(file, 64).split()[1])
    finally:
        os.close(file)


def undelayed() -> float:
    """Seconds since some moment, but for those in :func:`delayed`."""
    return now() - delayed()


def both() -> tuple[float, float]:
    """Seconds since some moments: of :func:`now`, and :func:`undelayed`."""
    seconds = now()
    return seconds, seconds - delayed()
