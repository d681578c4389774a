"""Blocks of host memory that swapped feature maps are copied to."""

from __future__ import annotations

import abc
import ctypes
import mmap

from chainer_hybridmem.training.devices.addresses import RESERVED
from chainer_hybridmem.training.devices.ram import available_ram

_HUGE_BYTES = 1 << 22  # from this size on blocks ask for huge pages
_COMPARED_BYTES = 1 << 20  # of a file at a time
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class StoreBlock(abc.ABC):
    """Contiguous host memory or part of a file.

    Attributes:
        nbytes (int): Its size.
        address (int): Of the first byte; 0 for a file.
    """

    nbytes: int
    address: int = 0

    @abc.abstractmethod
    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copies memory at ``address`` into the block."""

    @abc.abstractmethod
    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copies from the block to memory at ``address``."""

    def equals(self, offset: int, address: int, nbytes: int) -> bool:
        """Whether the block has the same bytes as memory at ``address``."""
        buffer = (ctypes.c_char * min(nbytes, _COMPARED_BYTES))()
        for start in range(0, nbytes, _COMPARED_BYTES):
            size = min(nbytes - start, _COMPARED_BYTES)
            self.read(offset + start, ctypes.addressof(buffer), size)
            if _compare(ctypes.addressof(buffer), address + start, size):
                return False
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the block back."""


class MemoryBlock(StoreBlock):
    """A block that has an address."""

    def write(self, offset: int, address: int, nbytes: int) -> None:
        ctypes.memmove(self.address + offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        ctypes.memmove(address, self.address + offset, nbytes)

    def equals(self, offset: int, address: int, nbytes: int) -> bool:
        return _compare(self.address + offset, address, nbytes) == 0


class RamBlock(MemoryBlock):
    """Anonymous memory that NumPy's handler never sees."""

    def __init__(self, nbytes: int) -> None:
        check_available(nbytes)
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes, flags=RESERVED)
        if nbytes >= _HUGE_BYTES and hasattr(mmap, 'MADV_HUGEPAGE'):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._export = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._export)

    def close(self) -> None:
        # The memory goes with the last reference to it.
        if self.address:
            self.address = 0
            del self._export, self._memory


def check_available(nbytes: int) -> None:
    """Refuses what would make the machine swap, or end the process.

    Raises:
        MemoryError: If so many bytes are not available.
    """
    available = available_ram()
    if available is not None and nbytes > available:
        raise MemoryError(f'{available} bytes are available to this process')
