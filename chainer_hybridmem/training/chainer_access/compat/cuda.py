"""What CuPy can use on this machine: a GPU, cuDNN."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys

# What CuPy 13 for CUDA 12 loads, with the folder of NVIDIA's package for each; what
# others need comes first.
LIBRARIES = {
    'libnvJitLink.so.12': 'nvjitlink',
    'libnvrtc.so.12': 'cuda_nvrtc',
    'libcublasLt.so.12': 'cublas',
    'libcublas.so.12': 'cublas',
    'libcurand.so.10': 'curand',
    'libcufft.so.11': 'cufft',
    'libcusparse.so.12': 'cusparse',
    'libcusolver.so.11': 'cusolver',
    'libcudnn.so.8': 'cudnn',
}


def cuda_available() -> bool:
    """Tells whether CuPy is installed and finds a GPU that it can use.

    ``chainer.backends.cuda.available`` only says that CuPy could be imported.

    Returns:
        False also when CuPy raises instead of answering, as some versions do on a
        machine without a CUDA driver.
    """
    try:
        cupy = importlib.import_module('cupy')
        return bool(cupy.cuda.is_available())
    except Exception:
        return False


def cupy_can_use_cudnn() -> bool:
    """Tells whether CuPy has modules for cuDNN, or gets those of this package."""
    if cupy_has_cudnn():
        return True
    if not _folders('cupy'):
        return False
    from chainer_hybridmem.training.cudnn import functions

    try:
        return functions.is_available()
    except Exception:  # a CuPy that cannot be imported
        return False


def cupy_has_cudnn() -> bool:
    """Tells whether the CuPy that is installed has modules for cuDNN; imports nothing.

    The Python modules alone may be there in packages that cannot use it.
    """
    import glob

    pattern = os.path.join('cuda', 'libs', 'cudnn.*')
    return any(glob.glob(pattern, root_dir=f) for f in _folders('cupy_backends'))


def load_libraries() -> None:
    """Loads CUDA's libraries from packages for a CuPy that does not look there.

    CuPy 13 looks into packages for cuTENSOR, NCCL and header files only. A library of
    the system comes first. What is missing is left to CuPy to complain about.
    """
    if not cupy_has_cudnn():
        return
    import ctypes

    folders = _folders('nvidia')
    for library, package in LIBRARIES.items():
        files = [os.path.join(f, package, 'lib', library) for f in folders]
        for path in (library, *files):
            with contextlib.suppress(OSError):
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
                break


def _folders(package: str) -> list[str]:
    """Where a package that lies in no other one would be imported from."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a made-up module
        return []
    return [] if spec is None else list(spec.submodule_search_locations or ())


def accept_cupy_without_cudnn() -> None:
    """Stops Chainer's advice to install cuDNN for a CuPy that cannot use it.

    It does what ``CHAINER_CUDNN=0`` does. The variable itself would also reach
    child processes, whose CuPy may have cuDNN.
    """
    cuda = sys.modules.get('chainer.backends.cuda')
    if not getattr(cuda, 'available', False) or 'CHAINER_CUDNN' in os.environ:
        return
    if not cupy_can_use_cudnn():
        vars(cuda)['_cudnn_disabled_by_user'] = True
