"""Lets ChainerMN's kernels know the type of half precision.

They pack gradients of any type into one buffer, and name ``half``. Since CuPy 14 a
kernel has to include its header itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

NAME = 'chainermn.communicators._memory_utility'
FLOAT16 = 'cupy/float16.cuh'
KERNELS = ('_cupy_batched_pack_params', '_cupy_batched_unpack_params')


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Around the import of the module."""
    yield
    repair()


def repair() -> None:
    """Replaces both kernels, once."""
    module: Any = sys.modules[NAME]
    for name in KERNELS:
        make = getattr(module, name)
        if not isinstance(make, _WithHeader):
            setattr(module, name, _WithHeader(make))


def has_float16_header(cupy: Any) -> bool:
    """Whether half precision has a header of its own in this CuPy."""
    folder = os.path.dirname(cupy.__file__)
    return os.path.exists(os.path.join(folder, '_core', 'include', FLOAT16))


class _WithHeader:
    """Makes a kernel that begins with the header.

    Args:
        make (callable): Makes the kernel without it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        cuda: Any = importlib.import_module('chainer.backends.cuda')
        kernel = self._make()
        if not has_float16_header(cuda.cupy):
            return kernel
        return cuda.raw(f'#include <{FLOAT16}>\n{kernel.code}', kernel.name)
