"""Where swapped feature maps live: RAM outside the limit, or one file.

A store hands out :class:`.Space` objects. Space comes from one slab of exactly
the size a plan asked for; what does not fit the slab comes from other blocks.
Freed space is merged with its free neighbours and given out first-fit.

Note: [growing stores]
    Without a plan, memory for each copy would come and go in each iteration. The system
    hands out pages that were never touched, and is asked first how much is left: that
    costs more than small copies do. So blocks outside the slab are larger than what is
    asked for, and stay when they are empty; a plan ends them. What is empty and too
    small goes for a larger one: iterations of many sizes would keep blocks for each
    size. Within a limit each copy has a block of its own: in a larger one, parts that
    are too small would be lost.

    Pinning memory takes long, and giving it back waits for the GPU. So a plan takes
    over what a pinned store has, and asks only for what that lacks; what it needs less
    goes block by block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from chainer_hybridmem.errors import HostFullError, SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.swap_store.blocks import RamBlock, StoreBlock
from chainer_hybridmem.training.devices.swap_store.space import Space, StoreSlab
from chainer_hybridmem.training.devices.swap_store.swap_file import SwapFile
from chainer_hybridmem.training.devices.values import Completion
from chainer_hybridmem.units import format_bytes

NO_LIMIT = 1 << 62  # bytes
GROWN_BYTES = 1 << 21  # of a block of the host's memory, at least


class Store:
    """Space in blocks from a factory; see the module's description.

    Args:
        make_block: Makes a block of at least one byte. May raise
            :class:`OSError`, :class:`MemoryError` or :class:`ValueError`.
        tier: What the blocks are.
        limit_bytes: Most bytes of blocks at any time; None is without a limit.
        least_bytes: Of a block outside the slab; 0 if each copy has its own.
        pinned: Whether a plan takes over what there is; see [growing stores].
    """

    def __init__(
        self,
        make_block: Callable[[int], StoreBlock],
        tier: Tier,
        limit_bytes: int | None = None,
        least_bytes: int = 0,
        pinned: bool = False,
    ) -> None:
        self.tier = tier
        self._least_bytes = least_bytes
        self._pinned = pinned
        self.limit_bytes = limit_bytes
        self._make_block = make_block
        self._slab: StoreSlab | None = None
        self._slabs: dict[StoreSlab, None] = {}  # in the order in which they were made
        self._closing: list[tuple[StoreSlab, int, int, Completion]] = []
        self._lock = threading.RLock()

    @property
    def host_bytes(self) -> int:
        """Bytes really held, whether in use or free."""
        with self._lock:
            self._finish_closing()
            return sum(slab.block.nbytes for slab in self._slabs)

    @property
    def room_bytes(self) -> int:
        """Bytes of blocks that the limit still allows."""
        if self.limit_bytes is None:
            return NO_LIMIT
        return self.limit_bytes - self.host_bytes

    def reserve(self, nbytes: int) -> None:
        """Takes one slab of exactly this size for the copies to come.

        A former slab goes when its last copy is closed. Where a limit leaves less
        until then, the new one is smaller.

        Raises:
            SwapStoreError: If the machine cannot give it.
        """
        with self._lock:
            self._finish_closing()
            if self._pinned:
                self._reserve_more(nbytes)
                return
            kept = self._slab
            if kept is not None and kept.block.nbytes != nbytes:
                kept = self._slab = None
            for slab in [slab for slab in self._slabs if slab is not kept]:
                slab.retired = True
                self._close_if_done(slab)
            if kept is not None:
                return
            nbytes = min(nbytes, self.room_bytes)
            if nbytes > 0:
                self._slab = self._new_slab(nbytes, retired=False)

    def _reserve_more(self, nbytes: int) -> None:
        """See [growing stores]."""
        for slab in sorted(self._slabs, key=lambda slab: -slab.block.nbytes):
            if not slab.spaces and self.host_bytes - slab.block.nbytes >= nbytes:
                self._close_block(slab)
        missing = min(nbytes - self.host_bytes, self.room_bytes)
        if missing > 0:
            self._new_slab(missing, retired=False)

    def take(self, nbytes: int) -> Space:
        """Space for one copy.

        Raises:
            HostFullError: If it would exceed the limit.
            SwapStoreError: If the machine cannot give it.
        """
        with self._lock:
            self._finish_closing()
            size = max(nbytes, 1)
            for slab in self._slabs:
                offset = None if slab.retired else slab.take(size)
                if offset is not None:
                    break
            else:
                slab = self._grow(size)
                offset = slab.take(size)
                assert offset is not None
            return Space(slab, offset, nbytes, self.tier, self._give)

    def _grow(self, nbytes: int) -> StoreSlab:
        if not self._least_bytes:
            return self._new_slab(nbytes, retired=True)
        wanted = max(nbytes, self._least_bytes)
        if self._pinned:
            wanted = max(wanted, self.host_bytes // 2)
        else:
            self._close_empty(wanted)
        wanted = min(wanted, self.room_bytes)
        if wanted > nbytes:
            with contextlib.suppress(SwapStoreError):  # there may be less
                return self._new_slab(wanted, retired=False)
        return self._new_slab(nbytes, retired=False)

    def _close_empty(self, nbytes: int) -> None:
        """Closes empty blocks that are too small, up to so many bytes."""
        for slab in list(self._slabs):
            if nbytes <= 0:
                break
            if slab is not self._slab and not slab.spaces:
                nbytes -= slab.block.nbytes
                self._close_block(slab)

    def close(self) -> None:
        """Closes every block, also those that still hold copies."""
        with self._lock:
            for slab in self._slabs:
                slab.block.close()
            self._slabs.clear()
            self._closing.clear()
            self._slab = None

    def _give(
        self, slab: StoreSlab, offset: int, nbytes: int, last: Completion | None
    ) -> None:
        with self._lock:
            if last is not None and not last.done():
                self._closing.append((slab, offset, nbytes, last))
            elif slab in self._slabs:
                slab.give(offset, max(nbytes, 1))
                self._close_if_done(slab)

    def _finish_closing(self) -> None:
        """Frees spaces that were closed while a copy was under way."""
        if self._closing:
            closing, self._closing = self._closing, []
            for slab, offset, nbytes, last in closing:
                self._give(slab, offset, nbytes, last)

    def _close_if_done(self, slab: StoreSlab) -> None:
        if slab.retired and not slab.spaces:
            self._close_block(slab)

    def _close_block(self, slab: StoreSlab) -> None:
        self._slabs.pop(slab, None)
        slab.block.close()

    def _new_slab(self, nbytes: int, retired: bool) -> StoreSlab:
        if nbytes > self.room_bytes:
            raise HostFullError(
                f'host_limit is used up: {nbytes} bytes ({format_bytes(nbytes)}) of a '
                f'feature map do not fit beside {self.host_bytes} of '
                f'{self.limit_bytes} bytes. Raise host_limit, or give swap_dir a '
                'folder on a disk.'
            )
        try:
            block = self._make_block(nbytes)
        except SwapStoreError:
            raise
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise SwapStoreError(
                f'no host memory for {nbytes} bytes ({format_bytes(nbytes)}) of '
                f'swapped feature maps, with {self.host_bytes} bytes held already: '
                f'{error}. Free memory, raise the memory limit so that less is '
                'swapped, or give swap_dir a folder on a disk.'
            ) from error
        slab = StoreSlab(block, retired)
        self._slabs[slab] = None
        return slab


class FileStore(Store):
    """Host copies in one temporary file under a folder."""

    def __init__(self, swap_dir: str) -> None:
        self._file = SwapFile(swap_dir)
        super().__init__(self._file.make_block, Tier.DISK)

    @property
    def host_bytes(self) -> int:
        """Size of the file, holes included."""
        with self._lock:
            self._finish_closing()
            return self._file.nbytes

    def close(self) -> None:
        super().close()
        self._file.close()


class RamStore(Store):
    """Host copies in memory outside the budget.

    Args:
        limit_bytes: Most bytes of it; None for as many as the machine has.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        least_bytes = GROWN_BYTES if limit_bytes is None else 0
        super().__init__(RamBlock, Tier.RAM, limit_bytes, least_bytes)


class TieredStore:
    """One store in memory and perhaps one in a file.

    Args:
        ram (Store): With the limit for host copies, if there is one.
        disk (Store or None): Where the rest goes; None if there is nowhere.
    """

    def __init__(self, ram: Store, disk: Store | None) -> None:
        self._ram, self._disk = ram, disk
        self._refused: tuple[int, str] | None = None  # so many bytes, and why

    @property
    def host_refusal(self) -> str | None:
        """Why a copy was last refused for want of room, as long as there is none."""
        if self._refused is None or self._ram.room_bytes >= self._refused[0]:
            return None
        return self._refused[1]

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM held for host copies; never more than the host limit."""
        return self._ram.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files held for host copies."""
        return 0 if self._disk is None else self._disk.host_bytes

    def describe(self) -> str:
        """The tiers there are, for people."""
        if self._disk is None:
            return 'ram'
        return 'file' if self._ram.limit_bytes == 0 else 'ram+file'

    def host_room(self, tier: Tier) -> int:
        """Bytes that may still be taken there; a huge number without a limit."""
        if tier is Tier.RAM:
            return self._ram.room_bytes
        return 0 if self._disk is None else NO_LIMIT

    def reserve(self, ram_bytes: int, disk_bytes: int = 0) -> None:
        """Takes one slab of exactly this size in each tier for the copies to come.

        The one in RAM is smaller where the host limit leaves less.

        Raises:
            SwapStoreError: If the machine cannot give it.
        """
        self._ram.reserve(ram_bytes)
        if self._disk is not None:
            self._disk.reserve(disk_bytes)

    def host_copy(self, nbytes: int, tier: Tier | None = None) -> Space:
        """Space for one host copy.

        Args:
            nbytes: Its size.
            tier: Where it should lie; RAM that is used up makes it the disk if there
                is one. None is RAM.

        Raises:
            HostFullError: If the host limit leaves no room, and there is no disk.
            SwapStoreError: If the machine cannot give it.
        """
        if self._disk is not None and tier is Tier.DISK:
            return self._disk.take(nbytes)
        try:
            return self._ram.take(nbytes)
        except HostFullError as error:
            if self._disk is not None:
                return self._disk.take(nbytes)
            self._refused = nbytes, str(error)
            raise

    def close(self) -> None:
        """Closes every block, also those that still hold copies."""
        self._ram.close()
        if self._disk is not None:
            self._disk.close()
