"""Repairs what ChainerMN does with gradients on a GPU.

- Its kernels pack gradients of any type into one buffer, and name ``half``. Since CuPy
  14 a kernel has to include its header itself.
- With ``double_buffering``, they run on a stream of their own. Three small arrays say
  where the gradients are. Nothing orders that stream behind the copies that fill them,
  and they are freed when the kernels have been issued: the next arrays overwrite them.
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
MOVES = ('_batched_pack_params', '_batched_unpack_params')


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Around the import of the module."""
    yield
    repair()


def repair() -> None:
    """Replaces the kernels and what calls them, once."""
    module: Any = sys.modules[NAME]
    for names, repair_one in ((KERNELS, _WithHeader), (MOVES, _InOrder)):
        for name in names:
            function = getattr(module, name)
            if not isinstance(function, repair_one):
                setattr(module, name, repair_one(function))


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


class _InOrder:
    """Moves gradients on another stream, behind what the current one has to do.

    What says where they are lives until the buffer is used again; ChainerMN has waited
    for the stream by then.

    Args:
        move (callable): Packs or unpacks.
    """

    def __init__(self, move: Callable[..., None]) -> None:
        self._move = move

    def __call__(
        self, params_data: Any, buffer: Any, dtype: Any, stream: Any = None
    ) -> None:
        cuda: Any = importlib.import_module('chainer.backends.cuda')
        current = cuda.cupy.cuda.get_current_stream()
        if stream is not None and stream.ptr != current.ptr:
            stream.wait_event(current.record())
            buffer.read_by_stream = params_data
        self._move(params_data, buffer, dtype, stream=stream)
