"""The host copy of one live map, and the copy under way to it or from it."""

from __future__ import annotations

import contextlib

from chainer_hybridmem.devices.protocol import Device, HostCopy, Root, Transfer
from chainer_hybridmem.errors import HostFullError, SwapStoreError
from chainer_hybridmem.records.plan import Tier


class HostSide:
    """Moves the contents of one map between the device and the host.

    Args:
        device (Device): Starts copies and waits for them.
        nbytes (int): Size of the map.

    Attributes:
        copy (HostCopy or None): Space on the host.
        tier (Tier or None): Where the space should lie; None where there is room.
        valid (bool): Whether the host copy has the contents.
        memory (Root or None): Device memory of the copy under way.
        transfer (Transfer or None): The copy under way.
    """

    __slots__ = (
        '_device', '_lost', '_nbytes', 'copy', 'memory', 'tier', 'transfer', 'valid',
    )  # fmt: skip

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._lost: SwapStoreError | None = None  # why the contents are nowhere
        self.copy: HostCopy | None = None
        self.tier: Tier | None = None
        self.valid = False
        self.memory: Root | None = None
        self.transfer: Transfer | None = None

    # -- space ----------------------------------------------------------------
    def prefer(self, tier: Tier | None) -> None:
        """Says where new space should lie."""
        self.tier = tier

    def reuse(self, copy: HostCopy | None) -> None:
        """Takes the space of an earlier iteration if the map has none."""
        if self.copy is None:
            self.copy = copy

    def close(self) -> None:
        """Gives the space back."""
        if self.copy is not None:
            self.copy.close()
            self.copy = None

    def let_go(self, close: bool) -> None:
        """Has no copy from here on.

        Args:
            close: Whether the space is given back; else a plan owns it.
        """
        if close:
            self.close()
        self.copy, self.valid = None, False

    def take_space(self) -> bool:
        """Makes sure that there is space; False if the host has no room."""
        if self.copy is None:
            try:
                self.copy = self._device.copies.host_copy(self._nbytes, self.tier)
            except HostFullError:
                return False
        return True

    # -- contents -------------------------------------------------------------
    def set_valid(self, valid: bool) -> None:
        """Says whether the host copy has the contents."""
        self.valid = valid

    def differs_from(self, root: Root | None) -> bool:
        """Whether device memory has other contents, where the host can look at it."""
        if root is None or self.copy is None or self._device.clock.asynchronous:
            return False
        return not self._device.copies.same_contents(self.copy, root)

    def save(self, memory: Root) -> None:
        """Writes device memory into the host copy at once.

        Raises:
            SwapStoreError: If it cannot be written.
        """
        self.let_finish()
        self.end_copy()
        if self.copy is None:
            self.copy = self._device.copies.host_copy(self._nbytes, self.tier)
        self._device.copies.fill(self.copy, memory)
        self.valid = True

    def lose(self, error: BaseException) -> None:
        """Notes that what the program has written could not be kept."""
        self._lost = SwapStoreError(
            f'{self._nbytes} bytes of a feature map that the program has changed '
            f'could not be kept ({type(error).__name__}: {error}). Run the '
            f'iteration again, or change a copy instead.'
        )
        self.valid = False

    def refuse_lost(self) -> None:
        """Does nothing as long as the contents are somewhere, or can be made again.

        Raises:
            SwapStoreError: If they could not be kept when the program had changed them.
        """
        if self._lost is not None:
            raise SwapStoreError(str(self._lost))

    # -- copies ---------------------------------------------------------------
    def start_copy_out(self, root: Root) -> None:
        """Starts a copy of device memory to the host."""
        self.copy, self.transfer = self._device.copies.swap_out(root, self.copy)
        self.memory = root

    def start_copy_in(self, root: Root) -> None:
        """Starts a copy of the contents to device memory."""
        assert self.copy is not None
        self.transfer = self._device.copies.swap_in(self.copy, root)
        self.memory = root

    def wait(self) -> None:
        """Waits for the copy under way.

        Raises:
            SwapStoreError: If it has failed.
        """
        assert self.transfer is not None
        self._device.copies.wait(self.transfer)

    def let_finish(self) -> None:
        """Waits for a copy whose result is not needed."""
        if self.transfer is not None:
            with contextlib.suppress(SwapStoreError):
                self._device.copies.wait(self.transfer)

    def end_copy(self) -> None:
        """Lets go of the copy and of its device memory."""
        self.memory = self.transfer = None
