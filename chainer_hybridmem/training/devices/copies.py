"""Copies between a device and its host copies: the part that all devices share."""

from __future__ import annotations

import abc

from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.ports import Arrays
from chainer_hybridmem.training.devices.swap_store.space import Space
from chainer_hybridmem.training.devices.swap_store.store import TieredStore
from chainer_hybridmem.training.devices.values import HostCopy, Root, Transfer


class CopyEngine(abc.ABC):
    """What moves bytes between a device and its host copies."""

    @abc.abstractmethod
    def start(self, root: Root, space: Space, outward: bool) -> Transfer:
        """Starts a copy after all compute work issued so far.

        Args:
            root: The allocation; the transfer keeps it alive.
            space: Of the same size.
            outward: Whether the copy goes to the host.
        """

    @abc.abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """See :meth:`Copies.wait`."""

    def has(self, space: Space, root: Root) -> bool:
        raise NotImplementedError

    @abc.abstractmethod
    def take_stall_seconds(self) -> float:
        """See :meth:`Copies.take_stall_seconds`."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Waits until all copies have finished."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finishes all copies; none can be started any more."""


class Copies:
    """Host copies of allocations, and the transfers to and from them.

    Args:
        store: Where host copies lie.
        engine: What moves their bytes.
        arrays: Knows the size of an allocation.
    """

    def __init__(self, store: TieredStore, engine: CopyEngine, arrays: Arrays) -> None:
        self._store = store
        self._engine = engine
        self._arrays = arrays

    def close(self) -> None:
        """Ends copy threads or streams and gives all host copies back."""
        self._engine.close()
        self._store.close()

    # -- host copies --------------------------------------------------------
    @property
    def host_bytes(self) -> int:
        """Bytes of RAM held for host copies; never more than the host limit."""
        return self._store.ram_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files held for host copies."""
        return self._store.disk_bytes

    @property
    def host_refusal(self) -> str | None:
        """Why a host copy was last refused for want of host memory, and what to do."""
        return self._store.refusal

    def host_room(self, tier: Tier) -> int:
        """Bytes that may still be taken there; a huge number without a limit."""
        return self._store.room_bytes(tier)

    def reserve(self, ram_bytes: int, disk_bytes: int = 0) -> None:
        """Takes one slab of exactly this size in each tier for the copies to come.

        The one in RAM is smaller where the host limit leaves less.

        Raises:
            SwapStoreError: If the machine cannot give it.
        """
        self._store.reserve(ram_bytes, disk_bytes)

    def host_copy(self, nbytes: int, tier: Tier | None = None) -> HostCopy:
        """Space for one host copy.

        Args:
            nbytes: Its size.
            tier: Where it should lie; RAM that is used up makes it the disk if there
                is one. None is RAM.

        Raises:
            HostFullError: If the host limit leaves no room, and there is no disk.
            SwapStoreError: If the machine cannot give it.
        """
        return self._store.take(nbytes, tier)

    def same_contents(self, copy: HostCopy, root: Root) -> bool:
        """Whether a host copy has what is in memory, where the host can read both.

        Raises:
            SwapStoreError: If the copy cannot be read.
        """
        return self._engine.has(_space(copy, self._arrays.root_bytes(root)), root)

    # -- transfers ----------------------------------------------------------
    def swap_out(self, root: Root, copy: HostCopy | None) -> tuple[HostCopy, Transfer]:
        """Starts a copy to the host after all compute work issued so far.

        Args:
            root: The allocation; the transfer keeps it alive until the caller
                drops the transfer, and it must not be released before
                :meth:`wait`.
            copy: Where it goes: new space, or where it went last time, to be written
                again; None takes new space.
        """
        nbytes = self._arrays.root_bytes(root)
        space = _space(copy or self.host_copy(nbytes), nbytes)
        return space, self._engine.start(root, space, outward=True)

    def swap_in(self, copy: HostCopy, root: Root) -> Transfer:
        """Starts a copy to ``root`` after all compute work issued so far."""
        space = _space(copy, self._arrays.root_bytes(root))
        return self._engine.start(root, space, outward=False)

    def wait(self, transfer: Transfer) -> None:
        """Orders all later compute work after the copy; see :mod:`.ports`.

        Raises:
            SwapStoreError: If the copy failed.
        """
        self._engine.wait(transfer)

    def take_stall_seconds(self) -> float:
        """Time compute spent in :meth:`wait` since the last call.

        On CUDA without the waits that are still to come; the next call has them.
        """
        return self._engine.take_stall_seconds()


def _space(copy: HostCopy, nbytes: int) -> Space:
    if not isinstance(copy, Space) or copy.nbytes != nbytes:
        raise ValueError(
            f'a host copy of {copy.nbytes} bytes cannot hold an allocation of '
            f'{nbytes} bytes'
        )
    return copy
