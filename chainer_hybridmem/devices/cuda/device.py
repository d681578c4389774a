"""Training with CuPy inside a memory limit.

Allocations come from a pool of our own, limited to that; copies run on two streams
beside the user's current one, which is called the compute stream here.
"""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.devices.copies import Copies
from chainer_hybridmem.devices.cuda.arrays import CudaArrays
from chainer_hybridmem.devices.cuda.block_pool import WHOLE_SHARE
from chainer_hybridmem.devices.cuda.clock import CudaClock
from chainer_hybridmem.devices.cuda.copies import CudaCopyEngine
from chainer_hybridmem.devices.cuda.gpu import Gpu
from chainer_hybridmem.devices.cuda.late_checks import LateChecks
from chainer_hybridmem.devices.cuda.memory import CudaMemory
from chainer_hybridmem.devices.cuda.offsets import CudaOffsets
from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.devices.swap_store.store import Store
from chainer_hybridmem.devices.swap_store.tiers import TieredStore
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.records.plan import Tier

_PINNED_BYTES = 1 << 26  # at once, at least, or such a part of the limit


class CudaDevice(Device):
    """CuPy behind the ports of a device.

    Args:
        limit_bytes: Most bytes of GPU memory that may be in use; a smaller
            ``CUPY_GPU_MEMORY_LIMIT`` wins.
        device_id: GPU number; None for the current one.
        link_bandwidth: Must be None: a GPU's link cannot be throttled.
        swap_dir: Must be None: feature maps are swapped to pinned memory.
        host_limit_bytes: Most bytes of pinned memory for them; None is no limit.
        disk_bandwidth: Must be None: there is no ``swap_dir``.
        shared_link: Must be None: GPUs share what the machine has.

    Raises:
        OptionError: If CuPy or a GPU is missing or an option cannot be used.
    """

    kind = 'cuda'
    memory: CudaMemory

    def __init__(
        self,
        limit_bytes: int,
        device_id: int | None = None,
        link_bandwidth: float | None = None,
        swap_dir: str | None = None,
        host_limit_bytes: int | None = None,
        disk_bandwidth: float | None = None,
        shared_link: str | None = None,
    ) -> None:
        if shared_link is not None:
            raise OptionError(
                f'shared_link is {shared_link!r}, but GPUs share the links that the '
                "machine has; leave it out, or use device 'cpu'."
            )
        _check_options(limit_bytes, link_bandwidth, swap_dir, disk_bandwidth)
        self._gpu = gpu = Gpu(device_id)
        self.memory = memory = CudaMemory(gpu, limit_bytes)
        self.arrays = CudaArrays(gpu, memory)
        self.clock = CudaClock(gpu)
        engine = CudaCopyEngine(gpu, memory, self.clock)
        least_bytes = min(_PINNED_BYTES, max(1, memory.limit_bytes // WHOLE_SHARE))
        pinned = Store(engine.make_block, Tier.RAM, host_limit_bytes, least_bytes)
        self.copies = Copies(TieredStore(pinned, None), engine, self.arrays)
        self.offsets = CudaOffsets(gpu, memory.pool)
        with gpu.current():
            self.late_checks = LateChecks(gpu.cuda)

    def describe(self) -> dict[str, Any]:
        return {'kind': self.kind, **self._gpu.describe()}


def _check_options(
    limit_bytes: int,
    link_bandwidth: float | None,
    swap_dir: str | None,
    disk_bandwidth: float | None,
) -> None:
    if limit_bytes <= 0:
        raise OptionError(f'limit_bytes is {limit_bytes}; it must be above zero.')
    if link_bandwidth is not None:
        raise OptionError(
            f"link_bandwidth is {link_bandwidth}, but a GPU's link cannot be "
            "throttled; leave it out, or use device 'cpu'."
        )
    if swap_dir is not None:
        raise OptionError(
            f'swap_dir is {swap_dir!r}, but a GPU swaps to pinned memory; leave it '
            "out, or use device 'cpu'."
        )
    if disk_bandwidth is not None:
        raise OptionError(
            f'disk_bandwidth is {disk_bandwidth}, but a GPU swaps to no disk; leave it '
            "out, or use device 'cpu'."
        )
