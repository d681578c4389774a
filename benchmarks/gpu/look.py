"""Says which GPU and packages a run has; fails where there is nothing to measure.

python -m benchmarks run gpu.look
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util

from benchmarks import saving
from chainer_hybridmem.chainer_access import compat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark takes nothing."""


def main(options: argparse.Namespace) -> int:
    for name, value in saving.environment().items():
        print(f'{name}: {value}')
    if not compat.cuda_available():
        print('No CUDA GPU that CuPy can use: nothing to measure here.')
        return 1
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    print(f'memory: {free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB')
    print(describe_cudnn())
    frontend = importlib.util.find_spec('cudnn')  # of nvidia-cudnn-frontend
    print(f'nvidia-cudnn-frontend: {"not " if frontend is None else ""}installed')
    return 0


def describe_cudnn() -> str:
    """Which cuDNN Chainer uses, and from where; why not, if it uses none."""
    cuda = compat.import_chainer().backends.cuda
    if not cuda.cudnn_enabled:
        from chainer_hybridmem.cudnn import functions, library

        try:
            functions.check_names()
        except library.LibraryError as error:
            return f'cuDNN: not used: {error}'
        return 'cuDNN: not used: CHAINER_CUDNN is 0'
    version = cuda.cuda.cudnn.getVersion()
    return f'cuDNN: {version} from {_loaded("libcudnn.so") or "an unknown file"}'


def _loaded(name: str) -> str | None:
    """The file that this process has loaded under a name."""
    with contextlib.suppress(OSError), open('/proc/self/maps') as file:
        for line in file:
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith('/') and name in path.rpartition('/')[2]:
                return path
    return None
