"""When a search has to end because somebody waits."""

from __future__ import annotations

import math

from chainer_hybridmem.jit import clock


class Deadline:
    """A moment after which nothing new is begun; compiling does not count.

    Args:
        seconds (float): From now on; infinite if nobody waits.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._began = clock()

    def within(self, seconds: float) -> Deadline:
        """One that has begun with this one, and allows so many seconds."""
        other = Deadline(seconds)
        other._began = self._began
        return other

    @property
    def is_set(self) -> bool:
        """Whether anybody waits."""
        return self._seconds < math.inf

    @property
    def left_seconds(self) -> float:
        """Seconds until then, below zero afterwards."""
        return self._began + self._seconds - clock()

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.left_seconds <= 0
