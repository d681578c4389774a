"""The releases of CuPy that the emulator is built for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Release:
    """What one of them needs.

    Attributes:
        cupy: Its version.
        cuda: CUDA's version, as CuPy's build writes it.
        wheels: What is installed.
        headers: Packages with CUDA's headers.
        tools: What its build needs.
        libraries: Names of the libraries that it loads.
        directives: Of Cython, beyond those that every release has.
        cudnn: Major version of its cuDNN.
    """

    cupy: str
    cuda: int
    wheels: tuple[str, ...]
    headers: tuple[str, ...]
    tools: tuple[str, ...]
    libraries: tuple[str, ...]
    directives: dict[str, bool]
    cudnn: int


CUPY_14 = Release(
    '14.2.0',
    13000,
    ('cupy-cuda13x==14.2.0', 'cuda-pathfinder==1.*'),
    ('nvidia-cuda-runtime==13.0.*', 'nvidia-cuda-crt==13.0.*'),
    ('setuptools==80.*', 'Cython>=3.2,<3.3,!=3.2.6', 'numpy'),
    (
        *('libcuda.so.1', 'libcudart.so.13', 'libnvrtc.so.13', 'libnvJitLink.so.13'),
        *('libcublas.so.13', 'libcublasLt.so.13', 'libcurand.so.10', 'libcufft.so.12'),
        *('libcusolver.so.12', 'libcusparse.so.12', 'libnccl.so.2', 'libcudnn.so.9'),
        'libcudnn_graph.so.9',
    ),
    {'freethreading_compatible': True},
    cudnn=9,
)
# The last one that has modules for cuDNN. CUDA 12 has headers of the compiler in the
# package of nvcc.
CUPY_13 = Release(
    '13.6.0',
    12080,
    ('cupy-cuda12x==13.6.0', 'fastrlock'),
    ('nvidia-cuda-runtime-cu12==12.8.*', 'nvidia-cuda-nvcc-cu12==12.8.*'),
    ('setuptools==80.*', 'Cython>=3.1,<3.2', 'fastrlock', 'numpy'),
    (
        *('libcuda.so.1', 'libcudart.so.12', 'libnvrtc.so.12', 'libnvJitLink.so.12'),
        *('libcublas.so.12', 'libcublasLt.so.12', 'libcurand.so.10', 'libcufft.so.11'),
        *('libcusolver.so.11', 'libcusparse.so.12', 'libnccl.so.2', 'libcudnn.so.8'),
    ),
    {'legacy_implicit_noexcept': True},
    cudnn=8,
)
RELEASES = {'14': CUPY_14, '13': CUPY_13}
