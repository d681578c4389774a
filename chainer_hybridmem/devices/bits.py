"""Comparing arrays of either device by their bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from chainer_hybridmem.devices.protocol import Array

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
    """Of every element's bits: two checksums of 32 bits each.

    Axes are taken in the order of memory, so that nothing is copied but what has gaps.
    """
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    crc, adler = 0, 1
    for piece in _pieces(array.transpose(order)):
        crc, adler = zlib.crc32(piece, crc), zlib.adler32(piece, adler)
    return crc << 32 | adler


def _pieces(array: Array) -> Iterator[Array]:
    """An array in the order of its elements, as bytes in the memory of the CPU."""
    if array.nbytes <= CHECKED_BYTES:
        part = array.get() if hasattr(array, 'get') else array
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        return
    rows = max(1, CHECKED_BYTES * len(array) // array.nbytes)
    for i in range(0, len(array), rows):
        yield from _pieces(array[i : i + rows] if len(array) > 1 else array[0])
