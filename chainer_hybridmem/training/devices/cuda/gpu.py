"""CuPy for one GPU; imported when a device is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.training.devices.ports import Clock
from chainer_hybridmem.training.devices.slab import UNIT_BYTES
from chainer_hybridmem.training.devices.values import Mark
from chainer_hybridmem.version import describe_installation


class Gpu:
    """The modules of CuPy, and which GPU is meant.

    Args:
        number: Of the GPU; None for the current one.

    Attributes:
        cupy: The module.
        cuda: The module ``cupy.cuda``.
        runtime: The module ``cupy.cuda.runtime``.
        compute: Returns the user's current stream, the compute stream.
        number (int): Of the GPU.

    Raises:
        OptionError: If CuPy or the GPU is missing.
    """

    def __init__(self, number: int | None) -> None:
        self.cupy = import_cupy()
        self.cuda = self.cupy.cuda
        self.runtime = self.cuda.runtime
        self.compute: Callable[[], Any] = self.cuda.get_current_stream
        self.number = _choose_gpu(self.runtime, number)

    def current(self) -> Any:
        """Makes this GPU the current one for a while."""
        return self.cuda.Device(self.number)

    def synchronize(self) -> None:
        """Waits until everything issued has finished."""
        self.cuda.Device(self.number).synchronize()

    def measure_free(self) -> tuple[int, int]:
        """Bytes that the driver has left, and those that CuPy's pool has in use.

        What the pool holds for later goes back to the driver first.
        """
        pool = self.cupy.get_default_memory_pool()
        with self.current():
            pool.free_all_blocks()
            return int(self.runtime.memGetInfo()[0]), int(pool.total_bytes())

    def describe(self) -> dict[str, Any]:
        """Name, size and versions, as plain values."""
        properties = self.runtime.getDeviceProperties(self.number)
        return {
            'name': properties['name'].decode(),
            'device_id': self.number,
            'total_bytes': int(properties['totalGlobalMem']),
            'multiprocessors': int(properties['multiProcessorCount']),
            'cupy': self.cupy.__version__,
            'cuda_runtime': self.runtime.runtimeGetVersion(),
            'cuda_driver': self.runtime.driverGetVersion(),
        }


def round_up(nbytes: int) -> int:
    """What CuPy's pool hands out for so many bytes."""
    return (nbytes + UNIT_BYTES - 1) // UNIT_BYTES * UNIT_BYTES


def import_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        OptionError: If it cannot be imported.
    """
    try:
        import cupy
        import cupy.cuda.memory
    except ImportError as error:
        raise OptionError(
            'a CUDA device needs CuPy, which cannot be imported '
            f"({error}); use device='cpu', or install it: "
            f'{describe_installation("cuda12")}'
        ) from error
    return cupy


def _choose_gpu(runtime: Any, number: int | None) -> int:
    try:
        count = int(runtime.getDeviceCount())
        chosen = int(runtime.getDevice()) if number is None else number
    except runtime.CUDARuntimeError as error:
        raise OptionError(
            f'CUDA finds no GPU ({error}); check the driver with nvidia-smi, or use '
            "device='cpu'."
        ) from error
    if not 0 <= chosen < count:
        raise OptionError(
            f'GPU number {chosen} does not exist; there are {count}, numbered from 0.'
        )
    return chosen


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
