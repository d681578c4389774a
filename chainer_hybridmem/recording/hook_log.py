"""When the session's hooks of one iteration begin and end."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem import timing
from chainer_hybridmem.devices.protocol import Device, Mark


@dataclasses.dataclass(slots=True)
class HookCall:
    """One hook call: its marks, and its positions in the raw event log."""

    entered: Mark
    left: Mark
    entered_seconds: float
    left_seconds: float
    first_event: int
    end_event: int

    def end(self, mark: Mark, seconds: float, event: int) -> None:
        """Notes where the hook ends."""
        self.left, self.left_seconds, self.end_event = mark, seconds, event


class HookLog:
    """Logs hook calls.

    Args:
        device (Device): Tells the time and counts events.

    Attributes:
        calls (list of HookCall): In order.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[HookCall] = []

    @property
    def latest(self) -> int:
        """Index of the latest call."""
        return len(self.calls) - 1

    def enter(self) -> None:
        """The session's hook begins."""
        mark, now = self._device.clock.mark(), timing.now()
        position = self._device.memory.event_count
        self.calls.append(HookCall(mark, mark, now, now, position, position))

    def leave(self) -> None:
        """The session's hook ends."""
        position = self._device.memory.event_count
        self.calls[-1].end(self._device.clock.mark(), timing.now(), position)
