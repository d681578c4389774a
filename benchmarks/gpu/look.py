"""Says which GPU and packages a run has; fails where there is nothing to measure.

python -m benchmarks run gpu.look
"""

from __future__ import annotations

import argparse
import importlib.util

from benchmarks import saving
from chainer_hybridmem.commands import doctor
from chainer_hybridmem.training.chainer_access import compat


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
    cudnn = doctor.examine_convolutions()
    print(f'{cudnn.name}: {cudnn.detail}')
    frontend = importlib.util.find_spec('cudnn')  # of nvidia-cudnn-frontend
    print(f'nvidia-cudnn-frontend: {"not " if frontend is None else ""}installed')
    return 0
