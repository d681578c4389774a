"""Pools whose figures can be read while Chainer runs, planned or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.training.devices.protocol import Array, Device, PoolFigures

_UNLIMITED_BYTES = 1 << 60
_SMALL = (
    'blocks below 64 KiB come from the heap of the C library, which tells nothing: '
    'they count as occupied only'
)
_BEFORE = 'arrays made before, other than those of the model, are not counted'


class DevicePool:
    """The pool of a device that is installed: a session's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name = f'{device.kind} pool of the session'
        self.unknown: tuple[str, ...] = (_SMALL,) if device.kind == 'host' else ()

    def open(self) -> None:
        self._device.memory.watch_pool(True)

    def close(self) -> None:
        self._device.memory.watch_pool(False)

    def figures(self) -> PoolFigures:
        return self._device.memory.pool_figures(new_peak=True)


class NumpyPool:
    """NumPy has no pool: ours, without a limit, is put under it for the time.

    Args:
        arrays: Made before, to be counted; the model's.
    """

    name = 'host pool without a limit'
    unknown: tuple[str, ...] = (_SMALL, _BEFORE)

    def __init__(self, arrays: Iterable[Array]) -> None:
        from chainer_hybridmem.training.devices.host.device import HostDevice

        self._arrays = tuple(arrays)
        self._device = HostDevice(_UNLIMITED_BYTES)

    def open(self) -> None:
        self._device.memory.adopt(self._arrays)
        self._arrays = ()
        self._device.memory.install(lambda missing_bytes: None)

    def close(self) -> None:
        self._device.memory.uninstall()
        self._device.close()

    def figures(self) -> PoolFigures:
        return self._device.memory.pool_figures(new_peak=True)


class CupyPool:
    """The pool that CuPy allocates from, watched by a memory hook of CuPy.

    Args:
        cupy: The module.
    """

    def __init__(self, cupy: Any) -> None:
        self._pool = find_pool(cupy)
        self.name = f'CuPy {type(self._pool).__name__}'
        self.unknown: tuple[str, ...] = ()
        self._hook = _make_hook(cupy)

    def open(self) -> None:
        self._hook.used = self._hook.peak = int(self._pool.used_bytes())
        self._hook.__enter__()

    def close(self) -> None:
        self._hook.__exit__(None, None, None)

    def figures(self) -> PoolFigures:
        hook = self._hook
        used, peak = hook.used, max(hook.peak, hook.used)
        hook.peak = used
        free = max(0, int(self._pool.total_bytes()) - used)
        return PoolFigures(used, free, hook.served - hook.asked, hook.asked, peak)


def find_pool(cupy: Any) -> Any:
    """The pool behind CuPy's present allocator.

    Raises:
        OptionError: If it is not a pool of CuPy.
    """
    from chainer_hybridmem.errors import OptionError

    allocator = cupy.cuda.get_allocator()
    pool = getattr(allocator, '__self__', None)
    if not isinstance(pool, cupy.cuda.MemoryPool):
        raise OptionError(
            f'CuPy allocates with {allocator}, which is not a pool of CuPy: its '
            f'figures cannot be read. Use cupy.cuda.set_allocator with a MemoryPool.'
        )
    return pool


def _make_hook(cupy: Any) -> Any:
    """Made when it is first needed, because its base is CuPy's."""

    class Hook(cupy.cuda.MemoryHook):
        name = 'hybridmem-memory'

        def __init__(self) -> None:
            self.used = self.peak = self.served = self.asked = 0

        def alloc_postprocess(self, **event: Any) -> None:
            if event['mem_ptr']:
                self.asked += event['mem_size']

        def malloc_postprocess(self, **event: Any) -> None:
            if event['mem_ptr']:
                self.served += event['mem_size']
                self.used += event['mem_size']
                if self.used > self.peak:
                    self.peak = self.used

        def free_postprocess(self, **event: Any) -> None:
            self.used -= event['mem_size']

    return Hook()
