"""Counts allocations of GPU memory and logs them."""

from __future__ import annotations

import itertools
import threading

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
