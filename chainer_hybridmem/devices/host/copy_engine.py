"""Copies of the host device: a thread for each direction."""

from __future__ import annotations

from chainer_hybridmem import timing
from chainer_hybridmem.devices.copies import CopyEngine
from chainer_hybridmem.devices.host.array_data import address_of
from chainer_hybridmem.devices.host.copies import CopyThread, HostTransfer
from chainer_hybridmem.devices.host.shared_link import SharedLink
from chainer_hybridmem.devices.swap_store.space import Space
from chainer_hybridmem.devices.values import Root, Transfer
from chainer_hybridmem.errors import SwapStoreError


class HostCopyEngine(CopyEngine):
    """Copies as fast as a link with a given bandwidth and latency.

    Args:
        bandwidth: Bytes per second and direction; None for no limit.
        latency_seconds: What every copy takes on top.
        disk_bandwidth: Like ``bandwidth``, for copies to and from files.
        shared_link: The link with this bandwidth, if others use it, too.

    Attributes:
        bandwidth (float or None): As given or throttled.
        shared_link (SharedLink or None): As given.
    """

    def __init__(
        self,
        bandwidth: float | None,
        latency_seconds: float,
        disk_bandwidth: float | None,
        shared_link: SharedLink | None = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.shared_link = shared_link
        lanes = shared_link and (shared_link.outward, shared_link.inward)
        self._d2h, self._h2d = (
            CopyThread(name, bandwidth, latency_seconds, disk_bandwidth, lane)
            for name, lane in zip(
                ('hybridmem-d2h', 'hybridmem-h2d'), lanes or (None, None), strict=True
            )
        )
        self._stall_seconds = 0.0

    def throttle(self, bandwidth: float | None) -> None:
        """From the next copy on another bandwidth; None for no limit."""
        self.bandwidth = bandwidth
        self._d2h.throttle(bandwidth)
        self._h2d.throttle(bandwidth)

    def start(self, root: Root, space: Space, outward: bool) -> HostTransfer:
        thread = self._d2h if outward else self._h2d
        return thread.submit(root, space, address_of(root), outward=outward)

    def wait(self, transfer: Transfer) -> None:
        assert isinstance(transfer, HostTransfer)
        completion = transfer.completion
        if not completion.done():
            start = timing.now()
            completion.wait()
            self._stall_seconds += timing.now() - start
        if completion.error is not None:
            # A new error each time: the kept one would hold its own traceback,
            # and with it the array, until the next garbage collection.
            raise SwapStoreError(str(completion.error))

    def fill(self, space: Space, root: Root) -> None:
        space.fill(address_of(root))

    def has(self, space: Space, root: Root) -> bool:
        return space.has(address_of(root))

    def take_stall_seconds(self) -> float:
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def finish(self) -> None:
        self._d2h.drain()
        self._h2d.drain()

    def close(self) -> None:
        self._d2h.close()
        self._h2d.close()
        if self.shared_link is not None:
            self.shared_link.close()
