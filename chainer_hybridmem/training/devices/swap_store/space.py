"""The part of a store that holds one swapped feature map."""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.training.devices.swap_store.blocks import StoreBlock
from chainer_hybridmem.training.devices.values import Completion, HostCopy


class StoreSlab:
    """A block and what is free in it.

    Attributes:
        block (StoreBlock): The memory or the part of a file.
        retired (bool): Whether it is closed as soon as it is empty.
        free (FreeList): What of it is free.
        spaces (int): Number of spaces in it.
    """

    def __init__(self, block: StoreBlock, retired: bool) -> None:
        self.block = block
        self.retired = retired
        self.free = FreeList(block.nbytes)
        self.spaces = 0

    def take(self, nbytes: int) -> int | None:
        """Offset of free space, which is no longer free; None if there is none."""
        offset = self.free.take(nbytes)
        if offset is not None:
            self.spaces += 1
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Makes the space of :meth:`take` free again."""
        self.free.give(offset, nbytes)
        self.spaces -= 1


Give = Callable[[StoreSlab, int, int, Completion | None], None]


class Space(HostCopy):
    """A part of a store that holds one swapped feature map.

    Args:
        slab: Where it lies.
        offset: Of its first byte in the slab's block.
        nbytes: Its size.
        tier: Whether it lies in memory or in a file.
        give: Called with slab, offset, size and the latest copy when it is closed.

    Attributes:
        last (Completion or None): Of the latest copy to or from here.
    """

    __slots__ = ('_give', '_slab', 'last', 'nbytes', 'offset', 'tier')

    def __init__(
        self, slab: StoreSlab, offset: int, nbytes: int, tier: Tier, give: Give
    ) -> None:
        self._slab: StoreSlab | None = slab
        self._give = give
        self.offset = offset
        self.nbytes = nbytes
        self.tier = tier
        self.last: Completion | None = None

    @property
    def block(self) -> StoreBlock:
        """The block this space is a part of."""
        if self._slab is None:
            raise SwapStoreError(
                f'the host copy of {self.nbytes} bytes was closed before this use.'
            )
        return self._slab.block

    @property
    def address(self) -> int:
        """Address of the first byte, for stores in memory."""
        return self.block.address + self.offset

    def has(self, address: int) -> bool:
        """Whether it has what is in memory.

        Raises:
            SwapStoreError: If it cannot be read.
        """
        try:
            return self.block.equals(self.offset, address, self.nbytes)
        except OSError as error:
            raise SwapStoreError(
                f'{self.nbytes} bytes of a feature map cannot be read from the swap '
                f'store: {error}. Check the disk behind swap_dir.'
            ) from error

    def close(self) -> None:
        """Gives the space back, once any copy that is under way has finished."""
        if self._slab is not None:
            slab, self._slab = self._slab, None
            self._give(slab, self.offset, self.nbytes, self.last)


class FreeList:
    """First-fit space management with merging of free neighbours."""

    def __init__(self, nbytes: int = 0) -> None:
        self._holes: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Offset of the first hole that is large enough, or None."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + nbytes, end)
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Makes a range free again."""
        holes = sorted([*self._holes, (offset, offset + nbytes)])
        merged = holes[:1]
        for start, end in holes[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._holes = merged

    def cut_tail(self, end: int) -> int:
        """Removes the hole that reaches ``end``; returns where it began."""
        if self._holes and self._holes[-1][1] == end:
            return self._holes.pop()[0]
        return end

    def tail(self, end: int) -> int:
        """Where the hole that reaches ``end`` begins."""
        if self._holes and self._holes[-1][1] == end:
            return self._holes[-1][0]
        return end
