"""One temporary file that holds swapped feature maps."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref

from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.training.devices.swap_store.blocks import StoreBlock
from chainer_hybridmem.training.devices.swap_store.space import FreeList
from chainer_hybridmem.units import format_bytes


class FileBlock(StoreBlock):
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
        os.close(_make_file(swap_dir))  # or it cannot be
        self._dir = os.path.abspath(swap_dir)  # the program may change its folder
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
            self._fd = -1  # the number may soon name another file

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


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast('B')


def _free_disk(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
