"""What is tried when memory is short, and what that may cost.

Note: [price]
    A rescue that helps is worth what it costs: without it, training would end. One that
    has not helped has taken time for nothing, and where the program can go on without
    it, as a function that runs in parts can, it comes again in every operation. So the
    time that it may take in vain is a small share of all time. Where an error would
    follow, it is tried whatever it costs.
"""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem import timing

SHARE = 0.02  # of all time, that may be spent in vain


class Rescue:
    """Something that may free memory; see [price].

    Args:
        act (callable): Tries to free memory.
        measure (callable): Tells the bytes in use.

    Attributes:
        vain_seconds (float): What tries have cost since one has freed memory.
    """

    def __init__(self, act: Callable[[], object], measure: Callable[[], int]) -> None:
        self._act = act
        self._measure = measure
        self._start = timing.now()
        self.vain_seconds = 0.0

    @property
    def pays(self) -> bool:
        """Whether another try is not too dear, should it be in vain."""
        return self.vain_seconds <= SHARE * (timing.now() - self._start)

    def run(self) -> bool:
        """Tries it; returns whether it has freed memory."""
        start, before = timing.now(), self._measure()
        self._act()
        helped = self._measure() < before
        seconds = timing.now() - start
        self.vain_seconds = 0.0 if helped else self.vain_seconds + seconds
        return helped
