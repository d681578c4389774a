"""Times of a guided iteration's operations, and nothing else.

Profiling swaps every feature map, which makes operations slower than they are
under a plan: colder caches, copies beside them. So the first guided iterations
are timed once more, between the same hooks as the recording.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from chainer_hybridmem.devices.protocol import Device, Mark


class Times(NamedTuple):
    """How long one operation took."""

    device_seconds: float  # copies excluded
    host_seconds: float  # to issue it, hooks included; zero where that is computing


class Stopwatch:
    """Times one iteration.

    Args:
        device (Device): Tells the time.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._entered: list[Mark] = []
        self._left: list[Mark] = []
        self._starts: list[int] = []  # hook before each operation
        self._issued: list[float] = []  # when the host entered each hook

    def enter(self) -> None:
        """The session's hook begins."""
        self._issued.append(time.perf_counter())
        self._entered.append(self.device.mark())

    def leave(self, starts_operation: bool) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if starts_operation:
            self._starts.append(len(self._left))
        self._left.append(self.device.mark())

    def times(self) -> list[Times]:
        """Times of every operation, the update last.

        To be called in the hook that ends the iteration, when the device has
        finished its work.
        """
        # The update runs between the last two hooks.
        starts = [*self._starts, len(self._left) - 1]
        ends = [*starts[1:], len(self._left)]
        return [
            Times(self._device_seconds(start, end), self._host_seconds(start, end))
            for start, end in zip(starts, ends, strict=True)
        ]

    def _device_seconds(self, start: int, end: int) -> float:
        elapsed = self.device.elapsed
        return sum(
            elapsed(self._left[h], self._entered[h + 1]) for h in range(start, end)
        )

    def _host_seconds(self, start: int, end: int) -> float:
        if not self.device.asynchronous:
            return 0.0
        return self._issued[end] - self._issued[start]
