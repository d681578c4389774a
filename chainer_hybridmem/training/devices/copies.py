"""Copies between a device and its host copies: the part that all devices share."""

from __future__ import annotations

import abc

from chainer_hybridmem.training.devices.ports import Arrays
from chainer_hybridmem.training.devices.swap_store.space import Space
from chainer_hybridmem.training.devices.swap_store.store import Store, TieredStore
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


class Copies(TieredStore):
    """Host copies of allocations, and the transfers to and from them.

    Args:
        ram: Host copies in memory.
        disk: Those in a file; None if there is none.
        engine: What moves their bytes.
        arrays: Knows the size of an allocation.
    """

    def __init__(
        self, ram: Store, disk: Store | None, engine: CopyEngine, arrays: Arrays
    ) -> None:
        super().__init__(ram, disk)
        self._engine = engine
        self._arrays = arrays

    def close(self) -> None:
        """Ends copy threads or streams and gives all host copies back."""
        self._engine.close()
        super().close()

    def same_contents(self, copy: HostCopy, root: Root) -> bool:
        """Whether a host copy has what is in memory, where the host can read both.

        Raises:
            SwapStoreError: If the copy cannot be read.
        """
        return self._engine.has(_space(copy, self._arrays.root_bytes(root)), root)

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
