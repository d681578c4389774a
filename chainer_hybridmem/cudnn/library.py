"""Finds cuDNN 9 and loads it.

In this order: what is loaded already or the system finds, NVIDIA's package
(``nvidia-cudnn-cu12``, ``nvidia-cudnn-cu13``), PyTorch's folder. The first one that is
made for CuPy's CUDA is taken.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator

NAME = 'libcudnn.so.9'
_PACKAGES = (('nvidia', 'cudnn/lib'), ('torch', 'lib'))


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
    major, unfit = _cuda_major(), []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        made_for = _made_for(library)
        if made_for in (None, major):
            return library
        unfit.append(f'{path} is made for CUDA {made_for}')
    package = f'nvidia-cudnn-cu{major}'
    if unfit:
        return f'CuPy uses CUDA {major}, and {"; ".join(unfit)}: install {package}.'
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


def _candidates() -> Iterator[str]:
    yield NAME
    for package, folder in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # a made-up module
            continue
        for root in (spec and spec.submodule_search_locations) or ():
            yield os.path.join(root, folder, NAME)
