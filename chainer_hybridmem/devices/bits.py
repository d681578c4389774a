"""Comparing arrays of either device by their bits."""

from __future__ import annotations

from chainer_hybridmem.devices.protocol import Array

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
