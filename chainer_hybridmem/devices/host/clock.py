"""Time on the host, where issuing is computing."""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem import timing
from chainer_hybridmem.devices.ports import Clock
from chainer_hybridmem.devices.values import Mark


class HostClock(Clock):
    """Marks are seconds of ``perf_counter``.

    Args:
        finish_copies: Waits for all copies.
    """

    asynchronous = False

    def __init__(self, finish_copies: Callable[[], None]) -> None:
        self._finish_copies = finish_copies

    def mark(self) -> Mark:
        return timing.now()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def synchronize(self) -> None:
        self._finish_copies()
