"""Finds cuDNN 9 and loads it.

In this order: what the process has loaded already, NVIDIA's package
(``nvidia-cudnn-cu12``, ``nvidia-cudnn-cu13``), what the system finds, PyTorch's folder.

Note: [one in a process]
    The library is a shim that finds its parts by their names. Where the parts of one
    cuDNN are loaded, every other shim finds those: one that is made for another CUDA
    must not be asked anything. So packages tell by their metadata what they are made
    for. A shim without its parts ends the process: those are looked for first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator

NAME = 'libcudnn.so.9'
_PARTS = tuple(f'libcudnn_{part}.so.9' for part in ('graph', 'ops', 'cnn', 'adv'))
_PACKAGE = re.compile(r'nvidia_cudnn_cu(\d+)-.*\.dist-info')


class LibraryError(ImportError):
    """There is no cuDNN 9 that this CuPy can use; says why."""


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        LibraryError: If there is none, or none for CuPy's CUDA.
    """
    found = find()
    if isinstance(found, str):
        raise LibraryError(found)
    return found


@functools.cache
def find() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    problem = _find_problem_of_cupy()
    if problem is not None:
        return problem
    major = _cuda_major()
    package = f'nvidia-cudnn-cu{major}'
    with contextlib.suppress(OSError):
        loaded = ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        other = _made_for(loaded)
        if other in (None, major):
            return loaded
        return (
            f'CuPy uses CUDA {major}, and this process has loaded a cuDNN for CUDA '
            f'{other} before.'
        )
    problems = []
    for path, made_for in _candidates():
        if made_for and major not in made_for:
            others = ' and '.join(map(str, made_for))
            problems.append(f'{path} is made for CUDA {others}')
            continue
        try:
            _check_parts(path)
            library = ctypes.CDLL(path)
        except OSError as error:
            if path != NAME or 'No such file' not in str(error):
                problems.append(str(error))
            continue
        other = _made_for(library)
        if other in (None, major):
            return library
        problems.append(f'{path} is made for CUDA {other}')
        break  # see [one in a process]
    if problems:
        return f'CuPy uses CUDA {major}; {"; ".join(problems)}: install {package}.'
    return f'{NAME} was not found: install {package}.'


def _find_problem_of_cupy() -> str | None:
    """Why this is not asked for cuDNN; None if it is."""
    import cupy

    if int(cupy.__version__.split('.')[0]) < 14:
        return f'CuPy {cupy.__version__} looks for cuDNN 8 itself.'
    if cupy.cuda.runtime.is_hip:
        return 'cuDNN is for GPUs of NVIDIA.'
    return None


def _cuda_major() -> int:
    import cupy

    return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000


def _made_for(library: ctypes.CDLL) -> int | None:
    """The major version of CUDA; None if the library does not tell."""
    try:
        function = library.cudnnGetCudartVersion
    except AttributeError:
        return None
    function.restype = ctypes.c_size_t
    return int(function()) // 1000 or None


def _check_parts(path: str) -> None:
    """Fails where a library would end the process; see [one in a process]."""
    folder = os.path.dirname(path)
    if not folder:
        ctypes.CDLL(_PARTS[0])  # of which the others are beside it
    for part in _PARTS if folder else ():
        if not os.path.exists(os.path.join(folder, part)):
            raise OSError(f'{path} is there without {part}')


def _candidates() -> Iterator[tuple[str, list[int]]]:
    """Paths, and for which CUDA each is made; of some it is not known."""
    for root in _folders('nvidia'):
        path = os.path.join(root, 'cudnn', 'lib', NAME)
        if os.path.exists(path):
            beside = os.listdir(os.path.dirname(root))
            found = [match for match in map(_PACKAGE.fullmatch, beside) if match]
            yield path, sorted(int(match[1]) for match in found)
    yield NAME, []
    for root in _folders('torch'):
        path = os.path.join(root, 'lib', NAME)
        if os.path.exists(path):
            yield path, []


def _folders(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a made-up module
        return []
    return list((spec and spec.submodule_search_locations) or ())
