"""Time on a GPU: events on the compute stream."""

from __future__ import annotations

from chainer_hybridmem.devices.cuda.gpu import Gpu
from chainer_hybridmem.devices.ports import Clock
from chainer_hybridmem.devices.values import Mark


class CudaClock(Clock):
    """Marks are CUDA events.

    Args:
        gpu: Whose time it is.
    """

    asynchronous = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # Looked up once, for each operation calls them.
        self._current, self._compute = gpu.current, gpu.compute

    def mark(self) -> Mark:
        with self._current():
            return self._compute().record()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(self._gpu.cuda.get_elapsed_time(start, end)) / 1e3

    def synchronize(self) -> None:
        self._gpu.synchronize()
