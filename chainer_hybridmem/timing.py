"""The time that everything here goes by: the one place that asks the machine for it.

A test that puts a time of its own in these places decides how long everything takes.
Dates are none of its business.
"""

from __future__ import annotations

import time

now = time.perf_counter  # seconds since some moment
spent = time.thread_time  # seconds that this thread has computed
sleep = time.sleep
