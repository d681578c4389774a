"""cuDNN 9 by its C functions, as directly as a test can call them."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import pytest

TYPES = {'f': 0, 'd': 1, 'e': 2}
DEFAULT_MATH, FMA_MATH = 0, 3
BAD_PARAM, NOT_SUPPORTED, ALLOC_FAILED = 2000, 3000, 4003
STEPS_PADDED, STEPS_PACKED, SEQUENCES_PADDED = 0, 1, 2


class Refused(Exception):
    """A function has answered with a status other than zero.

    Args:
        name: Of the function.
        status: What it has answered.
    """

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f'{name}: {status}, {last_error()}')
        self.status = status


def library() -> ctypes.CDLL:
    """The one that is found first."""
    found = ctypes.CDLL('libcudnn.so.9')
    found.cudnnGetErrorString.restype = ctypes.c_char_p
    found.cudnnGetVersion.restype = ctypes.c_size_t
    return found


def last_error() -> str:
    """Why the last call was refused, as the library says it."""
    text = ctypes.create_string_buffer(200)
    library().cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


def call(name: str, *arguments) -> None:
    """Calls a function; arrays of CuPy stand for their addresses.

    Raises:
        Refused: It has not answered with zero.
    """
    given = [
        ctypes.c_void_p(a.data.ptr) if hasattr(a, '__cuda_array_interface__') else a
        for a in arguments
    ]
    status = getattr(library(), f'cudnn{name}')(*given)
    if status:
        raise Refused(f'cudnn{name}', status)


def ask(name: str, *arguments, kind=ctypes.c_size_t):
    """What a function writes to its last argument."""
    out = kind()
    call(name, *arguments, ctypes.byref(out))
    return out.value


def ints(*values: int) -> ctypes.Array:
    """An array of int."""
    return (ctypes.c_int * len(values))(*values)


def size(value: int) -> ctypes.c_size_t:
    """An argument of that type."""
    return ctypes.c_size_t(value)


@contextlib.contextmanager
def descriptor(kind: str):
    """A descriptor, or with '' a handle, until the block ends."""
    found = ctypes.c_void_p()
    call(f'Create{kind}', ctypes.byref(found))
    try:
        yield found
    finally:
        call(f'Destroy{kind}', found)


def set_tensor(tensor, shape, dtype='f') -> None:
    """Describes an array of contiguous elements."""
    strides = ints(*(int(np.prod(shape[i + 1 :])) for i in range(len(shape))))
    kind = TYPES[np.dtype(dtype).char]
    call('SetTensorNdDescriptor', tensor, kind, len(shape), ints(*shape), strides)


def tensor_shape(tensor) -> tuple[int, ...]:
    """What a tensor's descriptor says."""
    kind, dims = ctypes.c_int(), ctypes.c_int()
    shape, strides = ints(*[0] * 8), ints(*[0] * 8)
    out = (ctypes.byref(kind), ctypes.byref(dims), shape, strides)
    call('GetTensorNdDescriptor', tensor, 8, *out)
    return tuple(shape[: dims.value])


def scale(value: float, dtype='f'):
    """A factor of the host, of the type that cuDNN expects beside arrays of a type."""
    kind = ctypes.c_double if np.dtype(dtype).char == 'd' else ctypes.c_float
    return ctypes.byref(kind(value))


def check_refusal(status: int, function, *arguments, **named) -> None:
    """Calls a function that has to end with a status."""
    with pytest.raises(Refused) as caught:
        function(*arguments, **named)
    assert caught.value.status == status
