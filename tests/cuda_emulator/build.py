"""Builds the emulator: CuPy's wheel, a library in place of CUDA's, one module of CuPy.

    python tests/cuda_emulator/build.py FOLDER [14 | 13]

The number is that of CuPy's release (`releases.py`). It runs with the Python that will
use it (3.11 or newer, with its headers) and g++. Packages come from the usual registry.
What is there already is not made again. Where something is lacking that this cannot
make, it says so and ends with 77.

Note: [what is replaced]
    CuPy's wheel finds CUDA's libraries by their names, except for the runtime, which is
    linked into one module. That one is built again from CuPy's sources. Thrust is
    compiled into another one, which a module in Python replaces. Functions that CuPy
    names and the emulator lacks become stubs that tell their names and fail.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.machinery
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterable

from releases import RELEASES, Release

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ('streams', 'memory', 'races', 'kernels', 'libraries', 'nccl', 'nccl_calls')
CUDNN_PARTS = ('tensors', 'layers', 'convolutions', 'recurrent')
# Of a source that begins with the second one.
USUAL = ('"prelude.h"', '<cupy/complex.cuh>', '<cupy/carray.cuh>', '<cupy/atomics.cuh>')
LACKING = 77
API = pathlib.Path('cupy_backends/cuda/api')
_FLAGS = ('-std=c++17', '-march=native', '-ffp-contract=off', '-w', '-fPIC')
_LIBRARY = ('g++', '-O3', *_FLAGS)
_KERNEL = ('g++', '-O1', *_FLAGS)


class Builder:
    """Everything in one folder.

    Args:
        folder: Where to.
        release: Of CuPy.
    """

    def __init__(self, folder: pathlib.Path, release: Release) -> None:
        self.folder = folder
        self.release = release
        self.site = folder / 'site'
        self.source = folder / f'cupy-{release.cupy}'
        self.build = folder / 'build'
        self.lib = folder / 'lib'

    def run(self) -> None:
        """Makes what is not there."""
        _check_tools(self.release)
        for part in ('build', 'lib', 'cache/kernels', 'cache/cupy', 'tools'):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._fetch()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            runtime = pool.submit(self._compile_runtime)
            objects = [pool.submit(self._compile, part) for part in self._parts()]
            made = [future.result() for future in objects]
            self._link(made, runtime.result())
        self._replace_thrust()
        self._prepare_kernels()
        _say(f'emulator in {self.folder}')

    def _parts(self) -> tuple[str, ...]:
        cudnn = (*CUDNN_PARTS, f'recurrent_{self.release.cudnn}')
        return (*PARTS, *(f'cudnn_{part}' for part in cudnn))

    # -- what others have made ------------------------------------------------
    def _fetch(self) -> None:
        if not (self.site / 'cupy').exists():
            _say(f'fetching CuPy {self.release.cupy}')
            _pip('install', '--no-deps', '--target', self.site, *self.release.wheels)
        if not (self.folder / 'headers').exists():
            headers = self.folder / 'headers'
            _pip('install', '--no-deps', '--target', headers, *self.release.headers)
            compiler = next(headers.rglob('crt'))
            if compiler.parent != self._include():
                (self._include() / 'crt').symlink_to(compiler)
            # Of a package of its own, with two functions in it.
            (self._include() / 'cuda_profiler_api.h').write_text(
                '#include <cuda_runtime_api.h>\nextern "C" { cudaError_t '
                'cudaProfilerStart(void); cudaError_t cudaProfilerStop(void); }\n'
            )
        if not self.source.exists():
            self._fetch_source()

    def _fetch_source(self) -> None:
        """CuPy's sources, unpacked only: asking for their metadata needs its tools."""
        tools = self.folder / 'tools'
        if not any(tools.iterdir()):
            _pip('install', '--target', tools, *self.release.tools)
        environment = {'CUPY_INSTALL_USE_STUB': '1', 'PYTHONPATH': str(tools)}
        options = ('--no-deps', '--no-build-isolation', '--no-binary', ':all:')
        sources = self.folder / 'sources'
        package = f'cupy=={self.release.cupy}'
        _pip('download', *options, '-d', sources, package, **environment)
        with tarfile.open(sources / f'cupy-{self.release.cupy}.tar.gz') as archive:
            archive.extractall(self.folder, filter='data')

    def _include(self) -> pathlib.Path:
        return next((self.folder / 'headers').rglob('cuda_runtime_api.h')).parent

    # -- compiling --------------------------------------------------------------
    def _compile(self, part: str) -> pathlib.Path:
        source, target = HERE / f'{part}.cpp', self.build / f'{part}.o'
        if _is_older(target, (source, *HERE.glob('*.h'))):
            flags = (f'-I{self._include()}', f'-DCUDNN_MAJOR={self.release.cudnn}')
            _call(*_LIBRARY, '-c', *flags, source, '-o', target)
        return target

    def _compile_runtime(self) -> pathlib.Path:
        target, source = self.build / 'runtime.o', self.source / API / 'runtime.cpp'
        if target.exists():
            return target
        _say("compiling CuPy's runtime module")
        tools = {'PYTHONPATH': str(self.folder / 'tools')}
        release = json.dumps(dataclasses.asdict(self.release))
        cythonize = (HERE / 'cythonize_runtime.py', self.source, release)
        _call(sys.executable, *cythonize, **tools)
        include = [self._include(), self.source, self.source / API]
        include.append(pathlib.Path(sysconfig.get_paths()['include']))
        macros = ('-DCUPY_USE_HIP=0', '-DCUPY_CACHE_KEY=emulator')
        flags = [f'-I{path}' for path in include]
        _call('g++', '-O1', '-w', '-fPIC', '-c', *macros, *flags, source, '-o', target)
        return target

    def _link(self, objects: list[pathlib.Path], runtime: pathlib.Path) -> None:
        library = self.lib / 'libcudaemulator.so'
        if _is_older(library, objects):
            stubs = self._stubs(objects, runtime)
            name = f'-Wl,-soname,{library.name}'
            _call('g++', '-shared', name, *objects, stubs, '-o', library, '-ldl')
        for name in self.release.libraries:
            if not (self.lib / name).exists():
                (self.lib / name).symlink_to(library.name)
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        module = self.site / API / f'runtime{suffix}'
        found = (f'-L{self.lib}', '-lcudaemulator', f'-Wl,-rpath,{self.lib}')
        _call('g++', '-shared', runtime, *found, '-o', self.build / 'runtime.so')
        (self.build / 'runtime.so').replace(module)

    def _stubs(
        self, objects: list[pathlib.Path], runtime: pathlib.Path
    ) -> pathlib.Path:
        modules = [*self.site.glob('cupy*/**/*.so'), runtime]
        missing = _symbols(modules, 'U') - _symbols(objects, 'T')
        source, target = self.build / 'stubs.c', self.build / 'stubs.o'
        lines = ['#include <stdio.h>']
        lines += [
            f'int {name}(void) {{ fprintf(stderr, "emulator: {name} is not there\\n"); '
            f'return 999; }}'
            for name in sorted(missing)
        ]
        source.write_text('\n'.join(lines) + '\n')
        _call('gcc', '-c', '-fPIC', '-w', source, '-o', target)
        return target

    def _replace_thrust(self) -> None:
        for compiled in (self.site / 'cupy/cuda').glob('thrust.*.so'):
            compiled.unlink()
        shutil.copy(HERE / 'thrust.py', self.site / 'cupy/cuda/thrust.py')

    def _prepare_kernels(self) -> None:
        """What every kernel includes is compiled once, and what most of CuPy's do."""
        shutil.copy2(HERE / 'prelude.h', self.build)
        usual = self.build / 'cupy_prelude.h'
        usual.write_text(''.join(f'#include {name}\n' for name in USUAL))
        core = self.site / 'cupy/_core/include'
        paths = self.build, *sorted(core.glob('cupy/_cccl/*')), core, self._include()
        flags = [f'-I{path}' for path in paths]
        for header in (self.build / 'prelude.h', usual):
            compiled = header.with_suffix('.h.gch')
            if _is_older(compiled, [HERE / 'prelude.h', pathlib.Path(__file__)]):
                _call(*_KERNEL, *flags, '-x', 'c++-header', header, '-o', compiled)
        command = [*_KERNEL, f"'-I{self.build}'", f"'-I{self._include()}'"]
        (self.build / 'compile.txt').write_text(' '.join(command) + '\n')


def _check_tools(release: Release) -> None:
    if sys.version_info < (3, 11):
        here = sys.version.split()[0]
        _lack(f'CuPy {release.cupy} needs Python 3.11, and this is {here}.')
    for tool in ('g++', 'gcc', 'nm'):
        if shutil.which(tool) is None:
            _lack(f'{tool} was not found. On Debian and Ubuntu: apt install g++')
    header = pathlib.Path(sysconfig.get_paths()['include']) / 'Python.h'
    if not header.exists():
        _lack(f'{header} was not found. On Debian and Ubuntu: apt install python3-dev')


def _lack(what: str) -> None:
    print(f'No CUDA emulator here: {what}', file=sys.stderr)
    raise SystemExit(LACKING)


def _symbols(files: Iterable[pathlib.Path], kind: str) -> set[str]:
    """Functions of CUDA that files need (U) or have (T)."""
    found = set()
    for file in files:
        option = '--dynamic' if file.suffix == '.so' else '--extern-only'
        text = subprocess.run(
            ['nm', option, file], capture_output=True, text=True, check=False
        ).stdout
        for line in text.splitlines():
            words = line.split()
            name = words[-1].partition('@')[0]
            ours = name.startswith(('cu', 'nvrtc', 'nvJitLink', 'nccl'))
            if kind in words and ours and not name.startswith('cutensor'):
                found.add(name)
    return found


def _is_older(target: pathlib.Path, sources: Iterable[pathlib.Path]) -> bool:
    if not target.exists():
        return True
    made = target.stat().st_mtime
    return any(source.stat().st_mtime > made for source in sources)


def _pip(*arguments: object, **environment: str) -> None:
    quiet = ('--disable-pip-version-check', '--quiet')
    try:
        _call(sys.executable, '-m', 'pip', *quiet, *arguments, **environment)
    except SystemExit as error:
        _lack(f'packages cannot be had.\n{error}')


def _call(*command: object, **environment: str) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f'{" ".join(words)}\n{done.stdout}{done.stderr}'[-4000:])


_start = time.monotonic()


def _say(text: str) -> None:
    print(f'[{time.monotonic() - _start:.0f} s] {text}', flush=True)


if __name__ == '__main__':
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    target, release = pathlib.Path(sys.argv[1]), (*sys.argv[2:], '14')[0]
    if release not in RELEASES:
        raise SystemExit(
            f'no CuPy {release!r} is built here; take {", ".join(RELEASES)}'
        )
    target.mkdir(parents=True, exist_ok=True)
    Builder(target.resolve(), RELEASES[release]).run()
