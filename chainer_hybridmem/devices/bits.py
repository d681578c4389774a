"""Comparing arrays of either device by their bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chainer_hybridmem.devices import cuda_bits, hashing
from chainer_hybridmem.devices.values import Array

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
    """Of every element's bits: 64 bits, other ones if a single element is another.

    Axes are taken in the order of memory, so that nothing is copied but what has gaps.
    On CUDA this is :func:`.cuda_bits.fingerprint`, in the memory of the CPU
    :mod:`chainer_hybridmem.devices.hashing`: their digests differ.
    """
    if not isinstance(array, np.ndarray):
        return cuda_bits.fingerprint(array)
    array = cuda_bits.in_order(array)
    if array.flags.c_contiguous:
        return hashing.digest(array.ctypes.data, array.nbytes)
    running = hashing.Running()
    for piece in _pieces(array):
        running.add(piece.ctypes.data, piece.nbytes)
    return running.digest()


def _pieces(array: Array) -> Iterator[Array]:
    """An array in the order of its elements.

    All pieces but the last one have a multiple of :data:`hashing.STRIPE_BYTES`.
    """
    elements = max(1, CHECKED_BYTES // array.itemsize // hashing.STRIPE_BYTES)
    elements *= hashing.STRIPE_BYTES
    for i in range(0, array.size, elements):
        yield array.flat[i : i + elements]  # copied
