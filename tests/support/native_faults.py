"""Faults in the memory of NumPy arrays: NaN in what is freed, refused blocks.

They also count, on their own, what is in use. The functions here take the place of the
handler's own ones and call these, as a debugging allocator does. They are native code,
too: NumPy calls them while an exception is on its way.
"""

from __future__ import annotations

import ctypes

import llvmlite.binding
from numba import types

from chainer_hybridmem.jit import callback, compiled
from chainer_hybridmem.training.devices import counting, slab
from chainer_hybridmem.training.devices.host import counter_words as words
from chainer_hybridmem.training.devices.host import native_handler, numpy_memory
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.training.devices.host.native_handler import reclaim
from chainer_hybridmem.training.devices.slab import load, store

# Words of the faults of one handler.
_COUNTER, _POISON, _ALLOCATIONS, _REFUSED, _KIND, _HELD, _MOST, _BYTES = range(0, 64, 8)
_PASSING, _FINAL, _LASTING = 0, 1, 2  # kinds of refusals
_NOUGHT = -1  # no allocation is refused
_USED = slab, counting, words, native_handler

for _name in ('malloc', 'calloc', 'realloc', 'free'):
    _function = getattr(native_handler, f'on_{_name}')
    llvmlite.binding.add_symbol(f'hybridmem_own_{_name}', _function.address)

_i64 = types.int64
_own_malloc = types.ExternalFunction('hybridmem_own_malloc', _i64(_i64, _i64))
_own_calloc = types.ExternalFunction('hybridmem_own_calloc', _i64(_i64, _i64, _i64))
_own_free = types.ExternalFunction('hybridmem_own_free', types.void(_i64, _i64, _i64))
_c_memset = types.ExternalFunction('memset', _i64(_i64, types.int32, _i64))
_c_memcpy = types.ExternalFunction('memcpy', _i64(_i64, _i64, _i64))


@compiled(types.boolean(_i64, _i64), uses=_USED)
def _refuse(faults: int, size: int) -> bool:
    """Whether an allocation is refused; counts it."""
    number, counter = load(faults + _ALLOCATIONS), load(faults + _COUNTER)
    store(faults + _ALLOCATIONS, number + 1)
    first, kind = load(faults + _REFUSED), load(faults + _KIND)
    if first < 0 or number < first or (number > first and kind != _LASTING):
        return False
    if load(counter + words.LIMITED) == 0:
        return False
    used, limit = load(counter + counting.USED), load(counter + counting.LIMIT)
    refused = True
    if load(counter + words.RECLAIMING) == 0:
        reclaim(counter, max(used + size - limit, size))
        used = load(counter + counting.USED)
        refused = kind != _PASSING or used + size > limit
    if refused:
        store(counter + words.FAILED_BYTES, size)
        store(counter + words.FAILED_USED, used)
    return refused


@compiled(types.void(_i64, _i64), uses=_USED)
def _count(faults: int, size: int) -> None:
    """So many bytes more, or fewer, are in use."""
    held = load(faults + _HELD) + size
    store(faults + _HELD, held)
    store(faults + _MOST, max(held, load(faults + _MOST)))


@compiled(types.void(_i64, _i64, _i64), uses=_USED)
def _free(faults: int, address: int, size: int) -> None:
    """Fills a large block with ones, NaN as numbers, before it is given back."""
    counter = load(faults + _COUNTER)
    base = address - words.HEADER
    _count(faults, -load(base + words.SIZE))
    place = load(base + words.PLACE)
    if load(faults + _POISON) == 0 or (
        place != words.IN_SIDE and place != words.IN_ARENA
    ):
        _own_free(counter, address, size)
        return
    _c_memset(address, 255, load(base + words.EXTENT) - words.HEADER)
    limited = load(counter + words.LIMITED)
    _own_free(counter, address, size)
    if limited != 0:  # else the memory may be gone
        _c_memset(base, 255, words.HEADER)


@compiled(_i64(_i64, _i64), uses=_USED)
def _malloc(faults: int, size: int) -> int:
    if _refuse(faults, size):
        return 0
    address = _own_malloc(load(faults + _COUNTER), size)
    if address != 0:
        _count(faults, load(address - words.HEADER + words.SIZE))
    return address


@callback(_i64(_i64, _i64), uses=_USED)
def _on_malloc(faults: int, size: int) -> int:
    return _malloc(faults, size)


@callback(_i64(_i64, _i64, _i64), uses=_USED)
def _on_calloc(faults: int, count: int, size: int) -> int:
    if _refuse(faults, count * size):
        return 0
    address = _own_calloc(load(faults + _COUNTER), count, size)
    if address != 0:
        _count(faults, load(address - words.HEADER + words.SIZE))
    return address


@callback(_i64(_i64, _i64, _i64), uses=_USED)
def _on_realloc(faults: int, address: int, size: int) -> int:
    moved = _malloc(faults, size)
    if moved != 0 and address != 0:
        held = load(address - words.HEADER + words.SIZE)
        _c_memcpy(moved, address, min(size, held))
        _free(faults, address, held)
    return moved


@callback(types.void(_i64, _i64, _i64), uses=_USED)
def _on_free(faults: int, address: int, size: int) -> None:
    if address != 0:
        _free(faults, address, size)


class NativeFaults:
    """Stands between NumPy and the handler of a host device until it is removed.

    Args:
        memory: A host device's, which is installed.
    """

    def __init__(self, memory: HostMemory) -> None:
        (self._memory,) = (
            known
            for known in numpy_memory._memories
            if known.number == memory.counter._number
        )
        self._own = self._memory.functions
        address = slab.immortal(_BYTES)  # arrays may outlive this object
        self._words = (ctypes.c_int64 * (_BYTES // 8)).from_address(address)
        self._words[_COUNTER // 8] = self._memory.address
        self._words[_REFUSED // 8] = _NOUGHT
        self._memory.call(
            numpy_memory.Functions(
                address,
                _on_malloc.address,
                _on_calloc.address,
                _on_realloc.address,
                _on_free.address,
            )
        )

    def remove(self) -> None:
        """The handler's own functions are called again."""
        self._memory.call(self._own)

    def poison_freed(self) -> None:
        """Fills large blocks with ones when they are freed: NaN, as numbers."""
        self._words[_POISON // 8] = 1

    def refuse(self, number: int, final: bool = False, lasting: bool = False) -> None:
        """Makes an allocation fail.

        Args:
            number: Of the allocation among those from here on; the next one is 0.
            final: Whether it is refused although space was made for it; else it is
                given after ``reclaim`` was called, if it then fits.
            lasting: Whether all that come after it are refused, too.
        """
        kind = _LASTING if lasting else _FINAL if final else _PASSING
        self._words[_KIND // 8] = kind
        self._words[_REFUSED // 8] = self.allocations + number

    @property
    def allocations(self) -> int:
        """How many blocks NumPy has asked for, whether given or refused."""
        return self._words[_ALLOCATIONS // 8]

    @property
    def most_bytes(self) -> int:
        """Most that has been in use at once, of blocks given since this was made."""
        return self._words[_MOST // 8]

    @property
    def happened(self) -> bool:
        """Whether the allocation that :meth:`refuse` named has come."""
        return 0 <= self._words[_REFUSED // 8] < self.allocations
