"""What of CUDA is there, line by line: which version, from which file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.chainer_access import compat
from chainer_hybridmem.commands import machine

_LIBRARIES = 'cupy_backends.cuda.libs'
Look = Callable[[], str]


def looks() -> dict[str, Look]:
    """What is looked at, in the order in which one needs the other.

    Each raises whatever error it meets.
    """
    compat.load_libraries()
    return {
        'NVIDIA driver': _look_at_driver,
        'CUDA runtime': _look_at_runtime,
        'NVRTC': lambda: _look_at('nvrtc', _dotted),
        'NVRTC and headers': _compile,
        'cuBLAS': lambda: _look_at('cublas'),
        'cuRAND': lambda: _look_at('curand', str),
    }


def _look_at_driver() -> str:
    version = _runtime().driverGetVersion()
    if not version:
        raise OSError('there is no driver')
    return f'for CUDA {_of_cuda(version)}{_file("libcuda.so")}'


def _look_at_runtime() -> str:
    version = _of_cuda(_runtime().runtimeGetVersion())
    return f'CUDA {version}{_file("libcudart")}'


def _runtime() -> Any:
    return importlib.import_module('cupy_backends.cuda.api.runtime')


def _look_at(name: str, show: Callable[[Any], str] | None = None) -> str:
    """Imports CuPy's module for a library, which loads it.

    Args:
        name: Of the module.
        show: Makes text of the version that it tells; None if it tells none.
    """
    # CuPy 14 looks into NVIDIA's packages when the name is asked for.
    library = getattr(importlib.import_module(_LIBRARIES), name, None)
    library = library or importlib.import_module(f'{_LIBRARIES}.{name}')
    version = 'loaded' if show is None else f'version {show(library.getVersion())}'
    return version + _file(f'lib{name}.')


def _compile() -> str:
    """Compiles a kernel that includes one of the toolkit's headers, and runs it."""
    cupy = importlib.import_module('cupy')
    twice = cupy.ElementwiseKernel('float16 x', 'float16 y', 'y = x + x', 'twice')
    if twice(cupy.ones(1, 'e')).get()[0] != 2:
        raise OSError('1 + 1 is not 2')
    return 'a kernel compiles and runs'


def _dotted(version: tuple[int, int]) -> str:
    return '{}.{}'.format(*version)


def _of_cuda(version: int) -> str:
    return f'{version // 1000}.{version % 1000 // 10}'


def _file(part: str) -> str:
    """Where a library that has been loaded lies; nothing if it is part of CuPy."""
    paths = [
        path
        for path in machine.loaded_libraries(part)
        if os.path.basename(path).startswith(part)
    ]
    return f', {paths[0]}' if paths else ''
