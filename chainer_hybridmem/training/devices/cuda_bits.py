"""Looks at the bits of CuPy arrays where they are: one kernel writes a few words.

Note: [digests]
    Every element is mixed with its index by a function that is reversible for one
    index, and the results are added up. Sums of integers do not depend on the order in
    which threads add. Memory that differs in one element always has another digest;
    memory that differs in more has the same one with a probability of about 2^-64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from chainer_hybridmem.training.devices.values import Array

PIECE_BYTES = 1 << 24  # copied at a time of an array that has gaps
_WORD_BYTES = 8
_THREADS = 256
_MOST_BLOCKS = 512
_SOURCE = r"""
typedef unsigned long long word;

// The i-th word; zeros follow the last byte.
__device__ word read(const unsigned char* data, word i, word nbytes) {
    if (8 * i + 8 <= nbytes && (word)data % 8 == 0) return ((const word*)data)[i];
    word result = 0;
    for (word k = 8 * i; k < 8 * i + 8 && k < nbytes; ++k)
        result |= (word)data[k] << 8 * (k % 8);
    return result;
}

// One word for each block, which lies in pinned memory.
extern "C" __global__ void digest(
        const unsigned char* data, word nbytes, word first, word* result) {
    __shared__ word shares[256];
    word sum = 0, words = (nbytes + 7) / 8, step = (word)gridDim.x * blockDim.x;
    for (word i = (word)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        word x = read(data, i, nbytes) + (first + i + 1) * 0x9E3779B97F4A7C15ull;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        sum += x ^ (x >> 31);
    }
    shares[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    sum = 0;
    for (unsigned int i = 0; i < blockDim.x; ++i) sum += shares[i];
    result[blockIdx.x] = sum;
}

extern "C" __global__ void compare(
        const unsigned char* left, const unsigned char* right, word nbytes,
        word* result) {
    word words = (nbytes + 7) / 8, step = (word)gridDim.x * blockDim.x;
    for (word i = (word)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        if (read(left, i, nbytes) != read(right, i, nbytes)) { *result = 0; return; }
    }
}
"""


def fingerprint(array: Array) -> int:
    """64-bit fingerprint of every element; see [digests].

    Axes are taken in the order of memory, so that only what has gaps is copied.

    Args:
        array: A CuPy array of any shape and layout, on the current GPU.
    """
    found, first = [], 0
    for piece in _pieces(in_order(array)):
        words = _words(count_blocks(piece.nbytes))
        write_digest(piece, words.ctypes.data, len(words), first)
        found.append(words)
        first += piece.nbytes // _WORD_BYTES
    import_cupy().cuda.get_current_stream().synchronize()
    return int(np.concatenate(found).sum(dtype='u8'))


def count_blocks(nbytes: int) -> int:
    """How many words :func:`write_digest` writes for an array of this size."""
    return min(_MOST_BLOCKS, -(-nbytes // (_WORD_BYTES * _THREADS * 8)))


def write_digest(array: Array, address: int, blocks: int, first: int = 0) -> None:
    """Issues a kernel that writes words whose sum is an array's digest.

    Args:
        array: Contiguous, on the current GPU.
        address: Of the words, in pinned memory.
        blocks: How many: :func:`count_blocks`.
        first: Words of the whole array that come before this part of it.
    """
    arguments = array.data.ptr, array.nbytes, first, address
    _launch('digest', blocks, arguments)


def same_memory(left: Array, right: Array) -> bool | None:
    """Whether two arrays of one shape and type have the same bits.

    Returns:
        None if they have gaps or differ in layout: nothing has been compared.
    """
    if left.strides != right.strides:
        return None
    left, right = in_order(left), in_order(right)
    if not left.flags.c_contiguous:
        return None
    result = _words(1)
    result[0] = 1
    arguments = left.data.ptr, right.data.ptr, left.nbytes, result.ctypes.data
    _launch('compare', count_blocks(left.nbytes), arguments)
    import_cupy().cuda.get_current_stream().synchronize()
    return bool(result[0])


def in_order(array: Array) -> Array:
    """The array with its axes in the order of memory."""
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    return array.transpose(order)


def _pieces(array: Array) -> Iterator[Array]:
    """The elements in contiguous arrays, each a whole number of words but the last."""
    if array.flags.c_contiguous:
        yield array
        return
    rows = max(1, PIECE_BYTES * len(array) // array.nbytes // _WORD_BYTES)
    rows *= _WORD_BYTES
    for i in range(0, len(array), rows):
        yield array[i : i + rows].copy(order='C')


def _words(count: int) -> Array:
    """Words of pinned memory: where the GPU is full, it has no room for a result."""
    nbytes = max(count, 1) * _WORD_BYTES
    memory = import_cupy().cuda.alloc_pinned_memory(nbytes)
    return np.frombuffer(memory, 'u8', count)


def _launch(name: str, blocks: int, arguments: tuple[Any, ...]) -> None:
    if blocks:
        _kernel(name)((blocks,), (_THREADS,), arguments)


@functools.cache
def _kernel(name: str) -> Any:
    return import_cupy().RawKernel(_SOURCE, name)


@functools.cache
def import_cupy() -> Any:
    """CuPy, where arrays are known to be its own."""
    import cupy

    return cupy
