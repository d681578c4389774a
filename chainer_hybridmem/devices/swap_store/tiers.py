"""RAM up to a limit, then a file: where swapped feature maps go first and next."""

from __future__ import annotations

from chainer_hybridmem.devices.swap_store.space import Space
from chainer_hybridmem.devices.swap_store.store import NO_LIMIT, Store
from chainer_hybridmem.errors import HostFullError
from chainer_hybridmem.records.plan import Tier


class TieredStore:
    """One store in memory and perhaps one in a file.

    Args:
        ram (Store): With the limit for host copies, if there is one.
        disk (Store or None): Where the rest goes; None if there is nowhere.

    Attributes:
        refusal (str or None): Why space was last refused for want of host memory.
    """

    def __init__(self, ram: Store, disk: Store | None) -> None:
        self._ram, self._disk = ram, disk
        self.refusal: str | None = None

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM held, whether in use or free."""
        return self._ram.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return 0 if self._disk is None else self._disk.host_bytes

    def describe(self) -> str:
        """The tiers there are, for people."""
        if self._disk is None:
            return 'ram'
        return 'file' if self._ram.limit_bytes == 0 else 'ram+file'

    def room_bytes(self, tier: Tier) -> int:
        """Bytes that may still be taken in a tier."""
        if tier is Tier.RAM:
            return self._ram.room_bytes
        return 0 if self._disk is None else NO_LIMIT

    def reserve(self, ram_bytes: int, disk_bytes: int) -> None:
        """See :meth:`.Copies.reserve`."""
        self._ram.reserve(ram_bytes)
        if self._disk is not None:
            self._disk.reserve(disk_bytes)

    def take(self, nbytes: int, tier: Tier | None) -> Space:
        """See :meth:`.Copies.host_copy`."""
        if self._disk is not None and tier is Tier.DISK:
            return self._disk.take(nbytes)
        try:
            return self._ram.take(nbytes)
        except HostFullError as error:
            if self._disk is not None:
                return self._disk.take(nbytes)
            self.refusal = str(error)
            raise

    def close(self) -> None:
        """Closes every block, also those that still hold copies."""
        self._ram.close()
        if self._disk is not None:
            self._disk.close()
