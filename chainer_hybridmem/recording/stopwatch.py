"""Measures the times of a guided iteration's operations.

Profiling swaps every feature map, which makes operations slower than they are
under a plan: colder caches, copies beside them. So the first guided iterations
are timed once more, between the same hooks as the recording.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from chainer_hybridmem.devices.protocol import Device, Mark
from chainer_hybridmem.records.profile import Profile


class Times(NamedTuple):
    """How long one operation took."""

    device_seconds: float  # copies excluded
    host_seconds: float  # to issue it, hooks included; zero where that is computing


class Hooks:
    """Marks where the session's hooks of one iteration begin and end.

    Args:
        device (Device): Tells the time.

    Attributes:
        entered (list of Mark): Where each hook began.
        left (list of Mark): Where each hook ended.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.entered: list[Mark] = []
        self.left: list[Mark] = []
        self.starts: list[int] = []  # hook before each operation
        self._after_backward: list[int] = []  # likewise, so far

    def enter(self) -> None:
        """The session's hook begins."""
        self.entered.append(self.device.clock.mark())

    def leave(self, starts_operation: bool) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if starts_operation:
            self._after_backward.clear()  # that was not the end of backward
            self.starts.append(len(self.left))
        self.left.append(self.device.clock.mark())

    def start_after_backward(self) -> None:
        """An all-reduce, or the update after it, starts where the hook will end."""
        self._after_backward.append(len(self.left))

    def operations(self) -> list[tuple[int, int]]:
        """The hooks before and after each operation, the update last.

        To be called in the hook that ends the iteration.
        """
        # Without an all-reduce, the update runs between the last two hooks.
        starts = [*self.starts, *(self._after_backward or [len(self.left) - 1])]
        return list(zip(starts, [*starts[1:], len(self.left)], strict=True))

    def has_seen(self, profile: Profile) -> bool:
        """Whether it has seen the profile's operations; an all-reduce may not come."""
        return len(self.operations()) == len(profile.operations)


class Stopwatch(Hooks):
    """Times one iteration.

    Args:
        device (Device): Tells the time.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._issued: list[float] = []  # when the host entered each hook

    def enter(self) -> None:
        """The session's hook begins."""
        self._issued.append(time.perf_counter())
        super().enter()

    def times(self) -> list[Times]:
        """Times of every operation, the update last.

        To be called in the hook that ends the iteration, when the device has
        finished its work.
        """
        return [
            Times(self._device_seconds(start, end), self._host_seconds(start, end))
            for start, end in self.operations()
        ]

    def _device_seconds(self, start: int, end: int) -> float:
        elapsed = self.device.clock.elapsed
        return sum(
            elapsed(self.left[h], self.entered[h + 1]) for h in range(start, end)
        )

    def _host_seconds(self, start: int, end: int) -> float:
        if not self.device.clock.asynchronous:
            return 0.0
        return self._issued[end] - self._issued[start]
