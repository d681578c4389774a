"""A plugin: times as on a machine where much else runs, without loading this one.

``pytest -p support.weather`` (with ``tests`` in PYTHONPATH) makes whatever is timed
longer by chance. Tests that fail only then depend on how fast the machine
happens to be.
``HYBRIDMEM_WEATHER`` is the seed.
"""

from __future__ import annotations

import os
import random
import time

from chainer_hybridmem import timing

SHARE = 0.05  # of the looks at the clock, before which something else has run
MEAN_SECONDS = 0.01  # for so long


class Weather:
    """A time that other work takes a part of."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lost = 0.0

    def now(self) -> float:
        """The time, and what others have taken."""
        if self._chance.random() < SHARE:
            self._lost += self._chance.expovariate(1 / MEAN_SECONDS)
        return time.perf_counter() + self._lost


timing.now = Weather(int(os.environ.get('HYBRIDMEM_WEATHER', '0'))).now
