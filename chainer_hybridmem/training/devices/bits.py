"""Comparing arrays of either device by their bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.training.devices import cuda_bits
from chainer_hybridmem.training.devices.slab import load, store
from chainer_hybridmem.training.devices.values import Array

CHECKED_BYTES = 2**24  # at once
_UINT_OF_SIZE = {1: 'u1', 2: 'u2', 4: 'u4', 8: 'u8'}


def same_bits(left: Array, right: Array, most_elements: int) -> bool:
    """Whether shapes, types and every bit are equal.

    Args:
        left: A NumPy or CuPy array.
        right: An array of the same kind.
        most_elements: Compared at a time; one byte each is allocated for them.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    same = None if isinstance(left, np.ndarray) else cuda_bits.same_memory(left, right)
    if same is not None:
        return same
    integer = _UINT_OF_SIZE.get(left.dtype.itemsize)
    if integer is None or left.dtype.hasobject:
        return bool(left.tobytes() == right.tobytes())
    return _all_equal(_as_type(left, integer), _as_type(right, integer), most_elements)


def _as_type(array: Array, dtype: str) -> Array:
    return array.reshape(1).view(dtype) if array.ndim == 0 else array.view(dtype)


def _all_equal(left: Array, right: Array, most_elements: int) -> bool:
    if left.size <= most_elements:
        return bool((left == right).all())
    rows = most_elements * len(left) // left.size
    if not rows:
        return all(
            _all_equal(left[i], right[i], most_elements) for i in range(len(left))
        )
    return all(
        _all_equal(left[i : i + rows], right[i : i + rows], most_elements)
        for i in range(0, len(left), rows)
    )


def fingerprint(array: Array) -> int:
    """64-bit fingerprint of every element; it differs if a single element does.

    Axes are taken in the order of memory, so that nothing is copied but what has gaps.
    On CUDA this is :func:`.cuda_bits.fingerprint`, in the memory of the CPU
    :func:`digest`: the two differ.
    """
    if not isinstance(array, np.ndarray):
        return cuda_bits.fingerprint(array)
    array = cuda_bits.in_order(array)
    if array.flags.c_contiguous:
        return digest(array.ctypes.data, array.nbytes)
    running = Running()
    for piece in _pieces(array):
        running.add(piece.ctypes.data, piece.nbytes)
    return running.digest()


def _pieces(array: Array) -> Iterator[Array]:
    """An array in the order of its elements.

    All pieces but the last one have a multiple of :data:`STRIPE_BYTES`.
    """
    elements = max(1, CHECKED_BYTES // array.itemsize // STRIPE_BYTES)
    elements *= STRIPE_BYTES
    for i in range(0, array.size, elements):
        yield array.flat[i : i + elements]  # copied


# -- digests in the memory of the CPU -----------------------------------------
# Memory is hashed about as fast as it can be read. Four lanes take in 8-byte words in
# turn with the round of XXH64: a product, a rotation and another product. Each round is
# reversible, so memory that differs in one word always has another digest; memory that
# differs in more has the same one with a probability of about 2^-64. No protection
# against a search for collisions.
STRIPE_BYTES = 32  # one word for each lane
_STATE_WORDS = 5  # the lanes, and the bytes so far

_FIRST = np.uint64(0x9E3779B185EBCA87)
_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)
_i64, _u64 = types.int64, types.uint64


@compiled(inline=True)
def _mixed(lane: int, word: int) -> int:
    lane += word * _SECOND
    return ((lane << _LEFT) | (lane >> _RIGHT)) * _FIRST


@compiled(types.void(_i64, _i64, _i64), nogil=True)
def _take_in(state: int, address: int, nbytes: int) -> None:
    """Adds memory to the lanes; zeros follow what is no multiple of a word."""
    a, b = np.uint64(load(state)), np.uint64(load(state + 8))
    c, d = np.uint64(load(state + 16)), np.uint64(load(state + 24))
    stripes = nbytes // 32
    for i in range(stripes):
        at = address + 32 * i
        a = _mixed(a, np.uint64(load(at)))
        b = _mixed(b, np.uint64(load(at + 8)))
        c = _mixed(c, np.uint64(load(at + 16)))
        d = _mixed(d, np.uint64(load(at + 24)))
    at, rest = address + 32 * stripes, nbytes - 32 * stripes
    while rest >= 8:
        a = _mixed(a, np.uint64(load(at)))
        at, rest = at + 8, rest - 8
    if rest > 0:
        word = np.uint64(0)
        for i in range(rest):
            # The word that the last bytes lie in may reach beyond the memory.
            byte = load((at + i) & -8) >> (8 * ((at + i) & 7)) & 255
            word |= np.uint64(byte) << np.uint64(8 * i)
        b = _mixed(b, word)
    store(state, np.int64(a))
    store(state + 8, np.int64(b))
    store(state + 16, np.int64(c))
    store(state + 24, np.int64(d))
    store(state + 32, load(state + 32) + nbytes)


@compiled(_u64(_i64))
def _finish(state: int) -> int:
    result = np.uint64(load(state + 32))
    for i in range(4):
        result = _mixed(result, np.uint64(load(state + 8 * i)))
    result ^= result >> _RIGHT
    return result * _SECOND


class Running:
    """A digest of several pieces of memory, one after the other.

    All of them but the last one have a multiple of :data:`STRIPE_BYTES`: the digest is
    then that of the whole.
    """

    def __init__(self) -> None:
        self._state = (ctypes.c_int64 * _STATE_WORDS)(1, 2, 3, 4, 0)
        self._address = ctypes.addressof(self._state)

    def add(self, address: int, nbytes: int) -> None:
        """Takes in one piece."""
        _take_in(self._address, address, nbytes)

    def digest(self) -> int:
        """64-bit digest of all pieces that were added."""
        return int(_finish(self._address))


def digest(address: int, nbytes: int) -> int:
    """64-bit digest of ``nbytes`` at ``address``."""
    running = Running()
    running.add(address, nbytes)
    return running.digest()
