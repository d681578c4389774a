"""GPU addresses that cost nothing, and memory that is mapped behind them.

Note: [addresses first]
    Memory from ``cudaMalloc`` has its addresses for good, so an arena needs all of its
    memory at once, while what the iteration before has left to it, such as gradients,
    still lies elsewhere: both together may be more than the limit. So slabs reserve
    addresses, and memory is mapped behind a block where there is none when the block is
    cut. Memory behind holes is unmapped when the limit has no room for more. This is
    what a system does for the host with pages (:mod:`..host.native_pages`), but the
    driver orders nothing: before memory is unmapped, the GPU must have finished.

Source: CUDA driver API, Virtual Memory Management (``cuMemMap`` and its kin).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.training.devices.cuda.gpu import Gpu

_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # kind of memory, place, access
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
LEAST_GRANULES = 512  # in a limit; below, they are too large for small blocks


class _Location(ctypes.Structure):
    _fields_ = (('type', ctypes.c_int), ('id', ctypes.c_int))


class _Property(ctypes.Structure):
    _fields_ = (
        ('type', ctypes.c_int),
        ('handle_types', ctypes.c_int),
        ('location', _Location),
        ('metadata', ctypes.c_void_p),
        ('flags', ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (('location', _Location), ('flags', ctypes.c_int))


_address, _size, _flags = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
_ARGUMENTS = {
    'cuDeviceGetAttribute': (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    'cuMemGetAllocationGranularity': (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    'cuMemAddressReserve': (ctypes.c_void_p, _size, _size, _address, _flags),
    'cuMemAddressFree': (_address, _size),
    'cuMemCreate': (ctypes.c_void_p, _size, ctypes.c_void_p, _flags),
    'cuMemRelease': (ctypes.c_uint64,),
    'cuMemMap': (_address, _size, _size, ctypes.c_uint64, _flags),
    'cuMemSetAccess': (_address, _size, ctypes.c_void_p, _size),
    'cuMemUnmap': (_address, _size),
}


class Mapper:
    """Asks the driver for addresses and memory.

    Args:
        gpu: Whose memory it is.
        driver: CUDA's driver library.

    Attributes:
        granule_bytes (int): Memory is mapped in multiples of it; 0 if this driver maps
            none.
    """

    def __init__(self, gpu: Gpu, driver: ctypes.CDLL) -> None:
        self._gpu = gpu
        self._calls = {name: getattr(driver, name) for name in _ARGUMENTS}
        for name, types in _ARGUMENTS.items():
            self._calls[name].argtypes = types
        place = _Location(_DEVICE, gpu.number)
        self._property = _Property(_PINNED, 0, place)
        self._access = _Access(place, _READ_WRITE)
        supported, granule = ctypes.c_int(), ctypes.c_size_t()
        gpu.runtime.getDeviceCount()  # CUDA's libraries are ready
        self._try(
            'cuDeviceGetAttribute', ctypes.byref(supported), _SUPPORTED, gpu.number
        )
        if supported.value:
            asked = (ctypes.byref(granule), ctypes.byref(self._property), _MINIMUM)
            self._try('cuMemGetAllocationGranularity', *asked)
        self.granule_bytes = int(granule.value)

    def _try(self, name: str, *arguments: object) -> bool:
        return self._calls[name](*arguments) == 0

    def _must(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise SessionError(
                f'CUDA: {name} has failed with error {code}. Set HYBRIDMEM_MAP=0: then '
                'no memory is mapped.'
            )

    def reserve(self, nbytes: int) -> int:
        """The first of some addresses, a multiple of ``granule_bytes``."""
        address = ctypes.c_uint64()
        self._must('cuMemAddressReserve', ctypes.byref(address), nbytes, 0, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Gives addresses back, behind which there is no memory."""
        self._must('cuMemAddressFree', address, nbytes)

    def map(self, address: int, nbytes: int) -> bool:
        """Puts memory behind addresses; False if the GPU has none."""
        handle = ctypes.c_uint64()
        create = (ctypes.byref(handle), nbytes, ctypes.byref(self._property), 0)
        if not self._try('cuMemCreate', *create):
            return False
        done = self._try('cuMemMap', address, nbytes, 0, handle, 0)
        self._must('cuMemRelease', handle)  # what is mapped goes with its addresses
        access = ctypes.byref(self._access)
        if done and not self._try('cuMemSetAccess', address, nbytes, access, 1):
            self._must('cuMemUnmap', address, nbytes)
            return False
        return done

    def unmap(self, address: int, nbytes: int) -> None:
        """Gives back the memory behind addresses, which was mapped in one piece."""
        self._must('cuMemUnmap', address, nbytes)

    def synchronize(self) -> None:
        """Waits until the GPU uses nothing that is to be unmapped."""
        self._gpu.synchronize()


def find_mapper(gpu: Gpu, limit_bytes: int) -> Mapper | None:
    """What maps memory for a limit; None where blocks must come from elsewhere.

    Other GPUs, and MPI, cannot read what is mapped for one: a process that sees several
    maps none unless ``HYBRIDMEM_MAP`` is 1. If that is 0, none is mapped at all.
    """
    wish = os.environ.get('HYBRIDMEM_MAP', '')
    if wish == '0' or (wish != '1' and gpu.runtime.getDeviceCount() > 1):
        return None
    try:
        with gpu.current():
            mapper = Mapper(gpu, ctypes.CDLL('libcuda.so.1'))
    except (OSError, AttributeError):  # no such library, or an old one
        return None
    granule_bytes = mapper.granule_bytes
    if not 0 < granule_bytes <= limit_bytes // LEAST_GRANULES:
        return None
    return mapper


class MappedMemory:
    """Addresses of one slab, and what is mapped behind them.

    Args:
        mapper: Asks the driver.
        nbytes: Multiple of a granule.
        piece_bytes: Most that is mapped at once, or a granule.
        find_room: Makes room for some bytes more; returns how many it lacks.
        count: Is told how much more is mapped, or less.

    Attributes:
        ptr (int): The first address.
        granule_bytes (int): Memory is mapped in multiples of it.
        mapped_address (int): Of a byte for each granule: whether it is mapped.

    Raises:
        SessionError: If there are no addresses.
    """

    def __init__(
        self,
        mapper: Mapper,
        nbytes: int,
        piece_bytes: int,
        find_room: Callable[[int], int],
        count: Callable[[int], None],
    ) -> None:
        self.ptr = 0
        self._mapper = mapper
        self._refused_bytes = 0
        self.granule_bytes = mapper.granule_bytes
        self._nbytes = nbytes
        self._most = max(1, piece_bytes // self.granule_bytes)  # granules of a piece
        self._find_room = find_room
        self._count = count
        self._mapped = bytearray(nbytes // self.granule_bytes)  # granules
        # Native code looks there, too.
        self._bytes = (ctypes.c_char * len(self._mapped)).from_buffer(self._mapped)
        self.mapped_address = ctypes.addressof(self._bytes)
        self._pieces: dict[int, int] = {}  # the first granule of each, and how many
        self._lock = threading.RLock()
        self.ptr = mapper.reserve(nbytes)

    def cover(self, address: int, nbytes: int) -> bool:
        """Sees to it that there is memory behind a block; whether there is."""
        offset, granule = address - self.ptr, self.granule_bytes
        first, end = offset // granule, (offset + nbytes - 1) // granule + 1
        if self._mapped.find(0, first, end) < 0:
            return True
        with self._lock:
            return self._map(first, end)

    def _map(self, first: int, end: int) -> bool:
        granule = self.granule_bytes
        lacking_bytes = self._find_room(self._mapped.count(0, first, end) * granule)
        if lacking_bytes:
            self._refused_bytes = max(self._refused_bytes, lacking_bytes)
            return False
        while (begin := self._mapped.find(0, first, end)) >= 0:
            behind = self._mapped.find(1, begin, end)
            first = min(end if behind < 0 else behind, begin + self._most)
            count = first - begin
            address, nbytes = self.ptr + begin * granule, count * granule
            if not self._mapper.map(address, nbytes):
                return False
            self._pieces[begin] = count
            self._mapped[begin:first] = b'\1' * count
            self._count(nbytes)
        return True

    def take_refused(self) -> int:
        """Most bytes that have lacked since this was last asked."""
        refused_bytes, self._refused_bytes = self._refused_bytes, 0
        return refused_bytes

    def pieces_inside(
        self, starts: np.ndarray, ends: np.ndarray
    ) -> Iterator[tuple[int, int]]:
        """Address and bytes of each mapped piece in one of some spaces, backwards.

        Args:
            starts: (n,) int64, first addresses of the spaces, ascending.
            ends: (n,) int64, those behind them.
        """
        granule, pieces = self.granule_bytes, self._pieces
        firsts = -((self.ptr - starts) // granule)  # whole granules
        lasts = (ends - self.ptr) // granule
        large = firsts < lasts
        spaces = zip(firsts[large].tolist(), lasts[large].tolist(), strict=True)
        for first, end in reversed(list(spaces)):
            at = self._mapped.rfind(1, first, end)
            while at >= 0:
                begin = at
                while begin not in pieces:
                    begin -= 1
                count = pieces[begin]
                if begin >= first and begin + count <= end:
                    yield self.ptr + begin * granule, count * granule
                at = self._mapped.rfind(1, first, max(begin, first))

    def unmap(self, address: int, nbytes: int) -> None:
        """Gives a piece back; the GPU must not use it any more."""
        granule = self.granule_bytes
        first, count = (address - self.ptr) // granule, nbytes // granule
        with self._lock:
            self._mapped[first : first + count] = bytes(count)
            del self._pieces[first]
            self._mapper.unmap(address, nbytes)
            self._count(-nbytes)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if finalizing() or not self.ptr:  # the driver may be gone
            return
        if self._pieces:
            self._mapper.synchronize()
        for first, count in list(self._pieces.items()):
            address = self.ptr + first * self.granule_bytes
            self.unmap(address, count * self.granule_bytes)
        self._mapper.free(self.ptr, self._nbytes)
