"""Hashes memory about as fast as it can be read.

Four lanes take in 8-byte words in turn with the round of XXH64: a product, a rotation
and another product. Each round is reversible, so memory that differs in one word
always has another digest; memory that differs in more has the same one with a
probability of about 2^-64. No protection against a search for collisions.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numba import types

from chainer_hybridmem.devices.slab import load, store
from chainer_hybridmem.jit import compiled

STRIPE_BYTES = 32  # one word for each lane
_STATE_WORDS = 5  # the lanes, and the bytes so far

_FIRST = np.uint64(0x9E3779B185EBCA87)
_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)
_i64, _u64 = types.int64, types.uint64


@compiled(_u64(_u64, _u64), inline=True)
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
        """Of all pieces so far."""
        return int(_finish(self._address))


def digest(address: int, nbytes: int) -> int:
    """Of one piece of memory."""
    running = Running()
    running.add(address, nbytes)
    return running.digest()
