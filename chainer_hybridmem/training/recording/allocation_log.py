"""The mallocs and frees of one iteration, operation by operation."""

from __future__ import annotations

from chainer_hybridmem.planning.layouts.arena import IterationLog
from chainer_hybridmem.training.devices.protocol import Device


class AllocationLog:
    """Logs one iteration; nothing else may take the device's events meanwhile.

    Args:
        device (Device): Logs its events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._starts: list[int] = []
        self._initial_bytes = device.memory.used_bytes
        device.memory.start_events()

    def start_operation(self) -> None:
        """The next events belong to the next operation."""
        self._starts.append(self._device.memory.event_count)

    def finish(self) -> IterationLog:
        """Ends the log."""
        events = tuple(self._device.memory.take_events())
        return IterationLog(events, (0, *self._starts[1:]), self._initial_bytes)
