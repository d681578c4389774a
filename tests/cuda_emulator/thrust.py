"""In place of CuPy's module: what Thrust does for it, on the emulator."""

import ctypes
import math
import os

import numpy
from cupy.cuda import stream

available = True
_library = ctypes.CDLL(os.environ['EMU_LIBRARY'])
_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_library.emu_sort.argtypes = (
    ctypes.c_char_p,
    _pointer,
    _pointer,
    _size,
    _size,
    _pointer,
)
_library.emu_lexsort.argtypes = _library.emu_sort.argtypes


def get_build_version():
    return 300000


def sort(dtype, data_start, keys_start, shape):
    _call(_library.emu_sort, dtype, data_start, None, *_rows(shape))


def argsort(dtype, idx_start, data_start, keys_start, shape):
    _call(_library.emu_sort, dtype, data_start, idx_start, *_rows(shape))


def lexsort(dtype, idx_start, keys_start, k, n):
    _call(_library.emu_lexsort, dtype, keys_start, idx_start, k, n)


def _rows(shape):
    return math.prod(shape[:-1]), shape[-1]


def _call(function, dtype, *arguments):
    name = numpy.dtype(dtype).str[1:].encode()
    if not function(name, *arguments, stream.get_current_stream().ptr):
        raise NotImplementedError(f'the emulator does not sort {dtype}')
