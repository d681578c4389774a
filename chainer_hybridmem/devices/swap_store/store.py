"""Where swapped feature maps live: RAM outside the budget, or one file.

A store hands out :class:`Space` objects. Space comes from one slab of exactly
the size a plan asked for; what does not fit the slab gets a block of its own.
Freed space is merged with its free neighbours and given out first-fit.

Note: [growing stores]
    Pinning memory takes long, and giving it back waits for the GPU. A store that grows
    takes larger blocks than it is asked for and keeps what becomes free in them. A plan
    asks only for what they lack; what it needs less goes block by block.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

from chainer_hybridmem.devices.addresses import RESERVED
from chainer_hybridmem.devices.protocol import HostCopy
from chainer_hybridmem.devices.ram import available_ram
from chainer_hybridmem.errors import HostFullError, SwapStoreError
from chainer_hybridmem.records.plan import Tier
from chainer_hybridmem.units import format_bytes

_HUGE_BYTES = 1 << 22
_COMPARED_BYTES = 1 << 20  # of a file at a time
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
NO_LIMIT = 1 << 62


class Block(abc.ABC):
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


class Completion(abc.ABC):
    """When a copy has finished; holds no array alive."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the copy has finished or failed; never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns once it has."""


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


class _Slab:
    """A block and what is free in it; closed when retired and empty."""

    def __init__(self, block: Block, retired: bool) -> None:
        self.block = block
        self.retired = retired
        self.free = FreeList(block.nbytes)
        self.spaces = 0


class Space(HostCopy):
    """A part of a store that holds one swapped feature map.

    Attributes:
        last (Completion or None): Of the latest copy to or from here.
    """

    __slots__ = ('_slab', '_store', 'last', 'nbytes', 'offset')

    def __init__(self, store: Store, slab: _Slab, offset: int, nbytes: int) -> None:
        self._store = store
        self._slab: _Slab | None = slab
        self.offset = offset
        self.nbytes = nbytes
        self.last: Completion | None = None

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        """Whether it lies in memory or in a file."""
        return self._store.tier

    @property
    def block(self) -> Block:
        """The block this space is a part of."""
        if self._slab is None:
            raise SwapStoreError(
                f'the host copy of {self.nbytes} bytes was closed before this use.'
            )
        return self._slab.block

    @property
    def address(self) -> int:
        """Of the first byte, for stores in memory."""
        return self.block.address + self.offset

    def has(self, address: int) -> bool:
        """Whether it has what is in memory.

        Raises:
            SwapStoreError: If it cannot be read.
        """
        with self._told():
            return self.block.equals(self.offset, address, self.nbytes)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SwapStoreError(
                f'{self.nbytes} bytes of a feature map cannot be read from the swap '
                f'store: {error}. Check the disk behind swap_dir.'
            ) from error

    def fill(self, address: int) -> None:
        """Writes memory into it at once, after any copy that is under way.

        Raises:
            SwapStoreError: If it cannot be written.
        """
        if self.last is not None:
            self.last.wait()
        try:
            self.block.write(self.offset, address, self.nbytes)
        except OSError as error:
            raise SwapStoreError(
                f'{self.nbytes} bytes of a feature map that the program has changed '
                f'cannot be written to the swap store: {error}. Check the disk behind '
                f'swap_dir.'
            ) from error
        self.last = None

    def close(self) -> None:
        """Gives the space back, once any copy that is under way has finished."""
        if self._slab is not None:
            slab, self._slab = self._slab, None
            self._store._give(slab, self.offset, self.nbytes, self.last)


class Store:
    """Space in blocks from a factory; see the module's description.

    Args:
        make_block: Makes a block of at least one byte. May raise
            :class:`OSError`, :class:`MemoryError` or :class:`ValueError`.
        tier: What the blocks are.
        limit_bytes: Most bytes of blocks at any time; None is without a limit.
        least_bytes: Of a block of a store that grows; 0 for one that does not.
            See [growing stores].
    """

    def __init__(
        self,
        make_block: Callable[[int], Block],
        tier: Tier,
        limit_bytes: int | None = None,
        least_bytes: int = 0,
    ) -> None:
        self.tier = tier
        self._least_bytes = least_bytes
        self.limit_bytes = limit_bytes
        self._make_block = make_block
        self._slab: _Slab | None = None
        self._slabs: dict[_Slab, None] = {}  # in the order in which they were made
        self._closing: list[tuple[_Slab, int, int, Completion]] = []
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
            if self._least_bytes:
                self._reserve_more(nbytes)
                return
            former = self._slab
            if former is not None:
                if former.block.nbytes == nbytes:
                    return
                self._slab = None
                former.retired = True
                self._close_if_empty(former)
            nbytes = min(nbytes, self.room_bytes)
            if nbytes > 0:
                self._slab = self._new_slab(nbytes, retired=False)

    def _reserve_more(self, nbytes: int) -> None:
        """See [growing stores]."""
        for slab in sorted(self._slabs, key=lambda slab: -slab.block.nbytes):
            if not slab.spaces and self.host_bytes - slab.block.nbytes >= nbytes:
                del self._slabs[slab]
                slab.block.close()
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
            reserved = () if self._slab is None else (self._slab,)
            for slab in self._slabs if self._least_bytes else reserved:
                offset = slab.free.take(size)
                if offset is not None:
                    break
            else:
                slab = self._grow(size)
                offset = slab.free.take(size)
                assert offset is not None
            slab.spaces += 1
            return Space(self, slab, offset, nbytes)

    def _grow(self, nbytes: int) -> _Slab:
        if not self._least_bytes:
            return self._new_slab(nbytes, retired=True)
        wanted = max(nbytes, self._least_bytes, self.host_bytes // 2)
        wanted = min(wanted, self.room_bytes)
        if wanted > nbytes:
            with contextlib.suppress(SwapStoreError):  # there may be less
                return self._new_slab(wanted, retired=False)
        return self._new_slab(nbytes, retired=False)

    def close(self) -> None:
        """Closes every block, whoever still has space in it."""
        with self._lock:
            for slab in self._slabs:
                slab.block.close()
            self._slabs.clear()
            self._closing.clear()
            self._slab = None

    def _give(
        self, slab: _Slab, offset: int, nbytes: int, last: Completion | None
    ) -> None:
        with self._lock:
            if last is not None and not last.done():
                self._closing.append((slab, offset, nbytes, last))
            elif slab in self._slabs:
                slab.free.give(offset, max(nbytes, 1))
                slab.spaces -= 1
                self._close_if_empty(slab)

    def _finish_closing(self) -> None:
        """Frees spaces that were closed while a copy was under way."""
        if self._closing:
            closing, self._closing = self._closing, []
            for slab, offset, nbytes, last in closing:
                self._give(slab, offset, nbytes, last)

    def _close_if_empty(self, slab: _Slab) -> None:
        if slab.retired and not slab.spaces:
            self._slabs.pop(slab, None)
            slab.block.close()

    def _new_slab(self, nbytes: int, retired: bool) -> _Slab:
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
        slab = _Slab(block, retired)
        self._slabs[slab] = None
        return slab


class MemoryBlock(Block):
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


class FileBlock(Block):
    """A part of the file of a :class:`SwapFile`."""

    def __init__(self, file: SwapFile, offset: int, nbytes: int) -> None:
        self._file = file
        self._offset = offset
        self.nbytes = nbytes

    def write(self, offset: int, address: int, nbytes: int) -> None:
        self._file.write(self._offset + offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        self._file.read(self._offset + offset, address, nbytes)

    def close(self) -> None:
        self._file.give(self._offset, self.nbytes)


_files: weakref.WeakSet[SwapFile] = weakref.WeakSet()


class SwapFile:
    """One temporary file that only this process can reach.

    It is made when it gets something to hold, and removed from its folder while
    open, so that nothing stays behind whatever happens to the process. Its space is
    taken when it grows, so that a full disk is found before a copy starts.

    Args:
        swap_dir: Folder for the file.

    Raises:
        SwapStoreError: If no file can be made there.
    """

    def __init__(self, swap_dir: str) -> None:
        self._dir = swap_dir
        os.close(_make_file(swap_dir))  # or it cannot be
        self._fd = -1
        _files.add(self)
        self.nbytes = 0
        self._free = FreeList()
        self._open = True

    def make_block(self, nbytes: int) -> FileBlock:
        """A block of the file, which grows if no hole is large enough."""
        offset = self._free.take(nbytes)
        if offset is None:
            offset = self._free.tail(self.nbytes)
            self._grow(offset + nbytes)
            self._free.cut_tail(self.nbytes)
            self.nbytes = offset + nbytes
        return FileBlock(self, offset, nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Frees a part; the file shrinks if it was the last one."""
        if not self._open:
            return
        self._free.give(offset, nbytes)
        end = self._free.cut_tail(self.nbytes)
        if end < self.nbytes:
            os.ftruncate(self._fd, end)
            self.nbytes = end

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Writes memory to the file.

        Raises:
            OSError: If the file does not take it.
        """
        view = _memory(address, nbytes)
        done = 0
        while done < nbytes:
            step = os.pwrite(self._fd, view[done:], offset + done)
            if step <= 0:
                raise OSError(errno.EIO, f'{done} of {nbytes} bytes were written')
            done += step

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Reads from the file to memory.

        Raises:
            OSError: If the file does not have it all.
        """
        view = _memory(address, nbytes)
        done = 0
        while done < nbytes:
            step = os.preadv(self._fd, [view[done:]], offset + done)
            if step <= 0:
                raise OSError(errno.EIO, f'{done} of {nbytes} bytes were read')
            done += step

    def close(self) -> None:
        """Closes the file, which frees its space."""
        self._open = False
        self.nbytes = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # the number may be somebody else's soon

    def _grow(self, end: int) -> None:
        if self._open and self._fd < 0:
            self._fd = _make_file(self._dir)
        try:
            os.posix_fallocate(self._fd, self.nbytes, end - self.nbytes)
        except OSError as error:
            # Some of it may have been taken.
            os.ftruncate(self._fd, self.nbytes)
            raise SwapStoreError(
                f'swap_dir {self._dir!r} has no room for {end - self.nbytes} more '
                f'bytes ({format_bytes(end - self.nbytes)}): it holds {self.nbytes} '
                f'and has {_free_disk(self._fd)} free ({error}). Make room there, '
                'give another swap_dir, or raise the memory limit so that less '
                'is swapped.'
            ) from error


def _make_file(swap_dir: str) -> int:
    """Opens a file without a name in a folder.

    Raises:
        SwapStoreError: If no file can be made there.
    """
    try:
        if not swap_dir:
            raise TypeError('it is empty')  # would be the current folder
        fd, path = tempfile.mkstemp(prefix='hybridmem-', dir=swap_dir)
    except (OSError, TypeError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise SwapStoreError(
            f'swap_dir {swap_dir!r} cannot be used: {reason}. Give a folder '
            'that exists and that this user may write to.'
        ) from error
    os.unlink(path)
    return fd


def _leave_files() -> None:
    """A forked child must not change what its parent still reads."""
    for file in list(_files):
        file.close()


os.register_at_fork(after_in_child=_leave_files)


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
        super().__init__(RamBlock, Tier.RAM, limit_bytes)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast('B')


def _free_disk(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
