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

from chainer_hybridmem.devices import link
from chainer_hybridmem.devices.host import clock, copies, copy_engine
from chainer_hybridmem.recording import hook_log, stopwatch, trials
from chainer_hybridmem.session.iterations import iteration

SHARE = 0.05  # of the looks at the clock, before which something else has run
MEAN_SECONDS = 0.01  # for so long
TIMED = clock, copies, copy_engine, hook_log, iteration, link, stopwatch, trials


class Weather:
    """In place of the module ``time``."""

    sleep = staticmethod(time.sleep)

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lost = 0.0

    def perf_counter(self) -> float:
        """The time, and what others have taken."""
        if self._chance.random() < SHARE:
            self._lost += self._chance.expovariate(1 / MEAN_SECONDS)
        return time.perf_counter() + self._lost


_weather = Weather(int(os.environ.get('HYBRIDMEM_WEATHER', '0')))
for module in TIMED:
    module.time = _weather  # type: ignore[attr-defined]
