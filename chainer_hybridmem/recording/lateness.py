"""Measures how long compute waits for each swap-in of one guided iteration."""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem.devices.protocol import Device, Mark, Span
from chainer_hybridmem.execution.movements import Observer


class Lateness(Observer):
    """Watches one iteration.

    Costs two marks per wait and one per iteration. The results are there once the
    device has finished the iteration's work.

    Args:
        device (Device): Tells the time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._origin = device.clock.mark()
        self._copies: list[tuple[str, int, Span]] = []
        self._waits: list[tuple[int, Mark, Mark]] = []

    def copy(self, kind: str, storage: int, span: Span) -> None:
        """See :class:`Observer`."""
        self._copies.append((kind, storage, span))

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        """See :class:`Observer`."""
        start = self._device.clock.mark()
        action()
        if kind == 'swap-in':
            self._waits.append((storage, start, self._device.clock.mark()))

    def late_seconds(self) -> dict[int, float]:
        """Seconds that compute waited for swap-ins, by storage."""
        elapsed = self._device.clock.elapsed
        return {storage: elapsed(start, end) for storage, start, end in self._waits}

    def copy_seconds(self, kind: str) -> dict[int, float]:
        """Seconds of the copies of one kind, by storage."""
        result = {}
        for other, storage, span in self._copies:
            if other == kind:
                start, end = span.after(self._origin)
                result[storage] = end - start
        return result
