"""What is installed on this machine: versions, processors, libraries."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import shutil
from typing import Any

from chainer_hybridmem import blas, version
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.cudnn import functions
from chainer_hybridmem.units import format_count

ABSENT = 'not installed'


def installed() -> dict[str, str]:
    """Names and versions of everything that matters here."""
    return {
        'chainer_hybridmem': version.describe(),
        'python': platform.python_version(),
        'chainer': _version('chainer'),
        'numpy': _version('numpy'),
        'numba': _version('numba'),
        'blas': _blas(),
        'cores': str(usable_cores()),
        'cupy': cupy_version(),
        'cudnn': _cudnn(),
    }


def usable_cores() -> int:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def blas_threads() -> int | None:
    """Threads of the BLAS; None if nothing tells them."""
    return max(blas.count_threads(), default=None)


@functools.cache  # it reads what all installed packages say of themselves
def cupy_version() -> str:
    """Version of CuPy, under any of the names of its package."""
    from importlib import metadata

    names = metadata.packages_distributions().get('cupy', [])
    versions = [f'{name} {metadata.version(name)}' for name in names]
    return ', '.join(dict.fromkeys(versions)) or ABSENT


def has_nvidia_driver() -> bool:
    """Whether this machine shows an NVIDIA GPU, with or without CuPy."""
    return os.path.exists('/dev/nvidiactl') or shutil.which('nvidia-smi') is not None


def cuda_problem() -> str | None:
    """Why CUDA cannot be used, in a sentence; None if it can."""
    if cupy_version() == ABSENT:
        return 'CuPy is not installed, so training runs on the CPU.'
    if compat.cuda_available():
        return None
    try:
        count = importlib.import_module('cupy').cuda.runtime.getDeviceCount()
    except Exception as error:
        return f'CuPy is installed but finds no GPU ({type(error).__name__}: {error}).'
    return (
        f'CuPy is installed and finds {format_count(count, "GPU")}, but cannot use any.'
    )


def cudnn_problem() -> str | None:
    """Why Chainer's convolutions cannot use cuDNN, in a sentence; None if they can."""
    compat.load_libraries()
    try:
        library = importlib.import_module('cupy_backends.cuda.libs.cudnn')
        if not compat.cupy_has_cudnn():
            functions.check_names()
        library.getVersion()
    except functions.LibraryError as error:
        return str(error)
    except Exception as error:
        return f'cuDNN cannot be loaded ({type(error).__name__}: {error}).'
    return None


def cudnn_version() -> str:
    """Version of the library that is loaded, 8907 for 8.9.7 and 92800 for 9.28.0."""
    return str(importlib.import_module('cupy_backends.cuda.libs.cudnn').getVersion())


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def _blas() -> str:
    threads = blas_threads()
    used = '' if threads is None else f', {format_count(threads, "thread")}'
    return f'{_blas_name()}{used}'


def _blas_name() -> str:
    """NumPy's own account of the BLAS that it was built with."""
    try:
        import numpy

        config: Any = numpy.show_config(mode='dicts')
        blas = config['Build Dependencies']['blas']
        return f'{blas["name"]} {blas["version"]}'
    except (TypeError, KeyError):
        return 'unknown'


def _cudnn() -> str:
    if cupy_version() == ABSENT:
        return ABSENT
    try:
        return cudnn_version()
    except Exception:
        return 'not found'


def loaded_libraries(part: str) -> list[str]:
    """Files with ``part`` in their name that are mapped into this process."""
    try:
        with open('/proc/self/maps', encoding='utf-8', errors='replace') as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file]
    except OSError:
        return []
    names = {path for path in paths if part in os.path.basename(path)}
    return sorted(path for path in names if '.so' in path)
