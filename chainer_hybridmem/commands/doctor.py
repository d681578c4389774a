"""``hybridmem doctor``: shows what is installed and checks what works."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.commands import arguments, base, machine, outputs, repair
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.reporting.tables import named_values
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.units import format_bytes, format_count, format_seconds
from chainer_hybridmem.version import describe_installation

CHAINER_HINT = (
    'Chainer is built from source, with setuptools older than 81: put setuptools<81 in '
    'a file, name it in PIP_CONSTRAINT and PIP_BUILD_CONSTRAINT, and pip install '
    'chainer==7.8.1.'
)


def cupy_hint() -> str:
    """Says which extra installs CuPy."""
    return (
        f'With an NVIDIA GPU: {describe_installation("cuda13")} gives CuPy and cuDNN; '
        f'for a driver of CUDA 12, {describe_installation("cuda12")}.'
    )


def cudnn_hint() -> str:
    """What to do where CuPy has no cuDNN."""
    hint = 'Without cuDNN convolutions take more memory and more time on a GPU'
    if compat.cupy_has_cudnn():
        return f'{hint}: {describe_installation("cuda12-cudnn8")} brings it.'
    return f'{hint}.'


def libraries_hint() -> str:
    """What to do where a library of CUDA is missing."""
    return (
        'A driver and CuPy with its libraries are all that is needed: '
        f'{describe_installation("cuda12")}, or {describe_installation("cuda13")}; '
        'CUDA_PATH and LD_LIBRARY_PATH may name an older CUDA.'
    )


_CONVOLVED = (2, 8, 6, 6), (4, 8, 3, 3)
# Where functions are compiled for types that are known before.
WITH_COMPILED = ('training.devices.host', 'planning', 'lab.planners')


class Status(enum.Enum):
    """Result of a check."""

    WORKS = 'works'
    FAILS = 'FAILS'
    ABSENT = 'absent'


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name (str): What.
        status (Status): Absent is what this machine does not have and need not have.
        detail (str): What was seen.
        hint (str): What to do about it; empty for nothing.
    """

    name: str
    status: Status
    detail: str
    hint: str = ''


class DoctorCommand(base.Command):
    """Shows what is installed and tries what should work.

    Exit status 1 if something does not.
    """

    name = 'doctor'
    help = 'show what is installed and what works'

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        outputs.check_output(args.json)
        checks = examine()
        versions = {**machine.installed(), 'repair': repair.describe()}
        hints = list(dict.fromkeys(check.hint for check in checks if check.hint))
        hints += thread_hints()
        healthy = all(check.status is not Status.FAILS for check in checks)
        figures = {
            'healthy': healthy,
            'installed': versions,
            'checks': [
                {**dataclasses.asdict(check), 'status': check.status.value.lower()}
                for check in checks
            ],
            'hints': hints,
        }
        outputs.publish(describe(versions, checks, hints), figures, args.json)
        return 0 if healthy else 1


def examine() -> list[Check]:
    """Runs all checks; those that others depend on come first."""
    has_cupy = machine.cupy_version() != machine.ABSENT
    found = looks() if has_cupy else {}
    with Progress(5 + len(found) + has_cupy, sys.stderr) as progress:
        progress.step('compiling')
        checks = [attempt('functions are compiled', compile_functions)]
        progress.step('counting memory')
        checks.append(attempt('memory is counted', count_memory))
        progress.step('importing Chainer')
        checks.append(attempt('chainer imports', import_chainer, CHAINER_HINT))
        progress.step('training on the CPU')
        if all(check.status is Status.WORKS for check in checks):
            checks.append(attempt('training on the CPU', lambda: train('cpu')))
        for name, look in found.items():
            progress.step(name)
            checks.append(examine_library(name, look))
        if has_cupy:
            progress.step('cuDNN convolutions')
            checks.append(examine_convolutions())
        progress.step('training on CUDA')
        checks.append(examine_cuda())
    return checks


def examine_library(name: str, look: Callable[[], str]) -> Check:
    """Looks at one part of CUDA; on a machine without a GPU it need not be there."""
    check = attempt(name, look, libraries_hint())
    if check.status is Status.FAILS and not machine.has_nvidia_driver():
        return dataclasses.replace(check, status=Status.ABSENT, hint='')
    return check


def attempt(name: str, action: Callable[[], str], hint: str = '') -> Check:
    """Runs one check; an error that it raises is its result.

    Args:
        name: What is checked.
        action: Does it and returns what was seen.
        hint: What to do if it fails.
    """
    try:
        return Check(name, Status.WORKS, action())
    except Exception as error:
        detail = ' '.join(f'{type(error).__name__}: {error}'.split())
        return Check(name, Status.FAILS, detail, hint)


def compile_functions() -> str:
    """Compiles what plans and sessions need, which later processes find."""
    from chainer_hybridmem import jit

    for room in WITH_COMPILED:
        package = importlib.import_module(f'chainer_hybridmem.{room}')
        for module in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):
            importlib.import_module(module.name)
    before = jit.compiling_seconds()
    count = jit.make_all_ready()
    seconds = jit.compiling_seconds() - before
    how = f'compiled in {format_seconds(seconds)}' if seconds else 'found compiled'
    return f'{format_count(count, "function")} {how}'


def count_memory() -> str:
    """Lets the NumPy memory handler count one allocation and refuse another."""
    import numpy

    from chainer_hybridmem.training.devices.host.device import HostDevice

    limit_bytes, nbytes = 2**24, 2**20
    device = HostDevice(limit_bytes)
    with contextlib.closing(device), device.memory.counting():
        before = device.memory.used_bytes
        array = numpy.empty(nbytes, numpy.uint8)
        counted = device.memory.used_bytes - before
        refused = _refuses(2 * limit_bytes)
        del array
    if counted < nbytes or not refused:
        raise HybridMemoryError(
            f'{counted} of {nbytes} bytes were counted, and {2 * limit_bytes} bytes '
            f'above the limit were {"refused" if refused else "given"}.'
        )
    return f'{format_bytes(nbytes)} counted, {format_bytes(2 * limit_bytes)} refused'


def _refuses(nbytes: int) -> bool:
    import numpy

    try:
        numpy.empty(nbytes, numpy.uint8)
    except MemoryError:
        return True
    return False


def import_chainer() -> str:
    """Tries to import Chainer; says its version."""
    chainer = compat.import_chainer()
    return f'version {chainer.__version__}'


def train(device_name: str) -> str:
    """Trains a tiny network inside a memory limit."""
    from chainer_hybridmem.commands.self_check import training_is_the_same

    return training_is_the_same(device_name)


def examine_cuda() -> Check:
    """Trains on the GPU, or says why there is none."""
    problem = machine.cuda_problem()
    if problem is None:
        return attempt('training on CUDA', lambda: train('cuda'))
    broken = machine.has_nvidia_driver() and machine.cupy_version() != machine.ABSENT
    status = Status.FAILS if broken else Status.ABSENT
    return Check('training on CUDA', status, ' '.join(problem.split()), cupy_hint())


def examine_convolutions() -> Check:
    """What Chainer's convolutions go through on a GPU."""
    name, problem, hint = 'cuDNN convolutions', machine.cudnn_problem(), cudnn_hint()
    if problem is None and os.environ.get('CHAINER_CUDNN') == '0':
        problem, hint = 'CHAINER_CUDNN=0 turns cuDNN off.', ''
    if problem is None:
        return attempt(name, describe_cudnn)
    detail = f'im2col is used instead: {" ".join(problem.split())}'
    return Check(name, Status.ABSENT, detail, hint)


def describe_cudnn() -> str:
    """The version of cuDNN and its file, once it has convolved where there is a GPU."""
    if compat.cuda_available():
        convolve()
    files = [path for path in machine.loaded_libraries('libcudnn.so')][:1]
    return ', '.join([f'cuDNN {machine.cudnn_version()}', *files])


def convolve() -> None:
    """A convolution with all of its gradients, through cuDNN."""
    cupy = importlib.import_module('cupy')
    chainer = compat.import_chainer()
    x, w = (chainer.Variable(cupy.ones(shape, 'f')) for shape in _CONVOLVED)
    with chainer.using_config('use_cudnn', 'always'):
        chainer.functions.sum(chainer.functions.convolution_2d(x, w)).backward()
    cupy.cuda.get_current_stream().synchronize()


def thread_hints() -> list[str]:
    """What to say about the threads of the BLAS."""
    threads, cores = machine.blas_threads(), machine.usable_cores()
    if threads is None or threads < cores or threads == 1:
        return []
    if threads > cores:
        return [
            f'BLAS uses {threads} threads on {format_count(cores, "core")}; set '
            f'OPENBLAS_NUM_THREADS={cores}.'
        ]
    return [
        f'On the CPU, swapping copies in threads of its own beside the {threads} of '
        f'BLAS; if they are in the way, try OPENBLAS_NUM_THREADS={cores - 1}.'
    ]


def describe(versions: dict[str, str], checks: list[Check], hints: list[str]) -> str:
    """Formats what is installed, what works and what to do about the rest."""
    parts = [
        named_values('installed', list(versions.items())),
        named_values(
            'works', [(c.name, f'{c.status.value}: {c.detail}') for c in checks]
        ),
    ]
    if hints:
        parts.append('\n'.join(['hints', '-----', *hints]))
    return '\n\n'.join(parts)


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
