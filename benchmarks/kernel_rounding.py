"""Which instructions the real NVRTC makes of fused replays, beside Chainer's kernels.

Kernels are taken from CuPy on the emulator (docs/internals/cuda_emulator.md) and
compiled by NVIDIA's compiler, which needs no GPU. What matters is where it turns a
product and a sum into one rounding (``fma``): the same places give the same bits.

    pip download --no-deps nvidia-cuda-nvrtc-cu12==12.9.*
    pip download --no-deps nvidia-cuda-runtime-cu12==12.9.*
    # unpack both into FOLDER
    .venv/bin/python tests/cuda_emulator/run.py .cuda-emulator/13 \\
        .venv/bin/python -m benchmarks run kernel_rounding FOLDER

Writes ``kernel_rounding.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import chainer_hybridmem  # noqa: F401  before Chainer
from benchmarks import catalogue, common

ARCHITECTURES = ('compute_70', 'compute_90')
LIBRARY, HEADERS = 'nvidia/cuda_nvrtc/lib/libnvrtc.so.12', 'nvidia/cuda_runtime/include'
ARITHMETIC = re.compile(r'^\s*((?:add|sub|mul|fma|max|abs)\S*\.f(?:32|64))\s', re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folder', help="with NVIDIA's packages")
    parser.add_argument('--sources', help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Collects the kernels and has a process without the emulator compile them."""
    if options.sources:
        return compile_all(options.folder, options.sources)
    with tempfile.NamedTemporaryFile('w', suffix='.json') as file:
        json.dump({'include': include(), 'sources': sources()}, file)
        file.flush()
        command = [*catalogue.command('kernel_rounding'), options.folder]
        clean = {k: v for k, v in os.environ.items() if k != 'LD_LIBRARY_PATH'}
        result = subprocess.run(
            [*command, '--sources', file.name],
            env=clean,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    body = json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(body, indent=1))
    common.save('kernel_rounding', body)
    return 0


def include() -> str:
    """CuPy's own headers."""
    import cupy

    return str(pathlib.Path(cupy.__file__).parent / '_core/include')


def sources() -> dict[str, str]:
    """The text of Chainer's, CuPy's and our kernels, as CuPy would compile it."""
    import cupy
    import numpy as np
    from chainer.functions import local_response_normalization
    from chainer.functions.normalization import batch_normalization as bn
    from cupy.cuda import compiler

    from chainer_hybridmem.training.recompute import cuda_sums, fused_replays

    found: dict[str, str] = {}
    label = ''

    def collect(source: str, *arguments: Any, **options: Any) -> Any:
        again = sum(name.startswith(label) for name in found)
        found[f'{label} {again + 1}' if again else label] = source
        return original(source, *arguments, **options)

    original = compiler.compile_using_nvrtc
    compiler.compile_using_nvrtc = collect
    x = cupy.ones((2, 3, 4, 4), np.float32)
    parameters = [cupy.ones((1, 3, 1, 1), np.float32) for _ in range(4)]
    normalised, other = (x, *parameters), (cupy.ones_like(x),)
    os.environ['CUPY_CACHE_DIR'] = tempfile.mkdtemp()  # nothing is compiled already
    label = 'normalisation (Chainer)'
    bn._apply_bn_fwd(cupy, x, *parameters)
    label = 'addition (CuPy)'
    x + other[0]
    label = 'ReLU (CuPy)'
    cupy.maximum(x, 0, dtype=x.dtype)
    for name, terms in (
        ('normalisation', [normalised]),
        ('normalisation, addition', [normalised, other]),
        ('two normalisations, addition', [normalised, normalised]),
    ):
        for relu in (False, True):
            label = name + (', ReLU' if relu else '')
            kernel = cuda_sums._make_kernel(
                tuple(len(term) > 1 for term in terms), relu, 0
            )
            kernel(*(array for term in terms for array in term))
    label = 'square (CuPy)'
    cupy.square(x)
    label = 'local responses (Chainer)'
    function = local_response_normalization(x).creator_node
    label = 'squares, sums, local responses'
    fused_replays.normalise_responses(function, x)
    return found


def compile_all(folder: str, path: str) -> int:
    """In a process of its own; prints a line of JSON."""
    with open(path, encoding='utf-8') as file:
        body = json.load(file)
    library = ctypes.CDLL(os.path.join(folder, LIBRARY))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    folders = [body['include'], os.path.join(folder, HEADERS)]
    kernels = {
        architecture: {
            label: compile_one(library, source, architecture, folders)
            for label, source in body['sources'].items()
        }
        for architecture in ARCHITECTURES
    }
    print(json.dumps({'nvrtc': f'{major.value}.{minor.value}', 'kernels': kernels}))
    return 0


def compile_one(
    library: Any, source: str, architecture: str, folders: list[str]
) -> list[str]:
    """The arithmetic of a kernel, in order."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    named = [f'-I{folder}' for folder in folders]
    named += [f'-I{folders[0]}/cupy/_cccl/{part}' for part in ('libcudacxx', 'thrust')]
    named += [f'-I{folders[0]}/cupy/_cccl/cub', f'--gpu-architecture={architecture}']
    options = [option.encode() for option in (*named, '--std=c++17')]
    library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b'kernel.cu', 0, None, None
    )
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    if status:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        print(log.value.decode(), file=sys.stderr)
        raise SystemExit(f'NVRTC returns {status}')
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    return ARITHMETIC.findall(text.value.decode())
