"""Where the data of NumPy's arrays are."""

from __future__ import annotations

import ctypes

import numpy

_pointer_at = ctypes.c_size_t.from_address
_DATA_FIELD = object.__basicsize__  # of PyArrayObject in NumPy's C interface


def address_of(array: numpy.ndarray) -> int:
    """Address of the first element."""
    return _pointer_at(id(array) + _DATA_FIELD).value


def _check_layout() -> None:
    """Reading the field is ten times faster than the array interface."""
    probe = numpy.empty(1)
    if address_of(probe) != probe.__array_interface__['data'][0]:
        raise ImportError(
            f'NumPy {numpy.__version__} on this Python has arrays of a layout that is '
            'not known; the host device needs CPython.'
        )


_check_layout()


def root_of(array: numpy.ndarray) -> numpy.ndarray:
    """The array that owns the memory, or the last one before it.

    Arrays over foreign memory (a file, bytes, another library) end in an
    array that does not own its data; they are never counted.
    """
    base = array.base
    while base is not None and isinstance(base, numpy.ndarray):
        array, base = base, base.base
    return array


def bytes_of(root: numpy.ndarray) -> numpy.ndarray:
    """All bytes of an owning array in memory order, without a copy."""
    if root.dtype == numpy.uint8 and root.ndim == 1:
        return root
    return root.ravel(order='K').view(numpy.uint8)
