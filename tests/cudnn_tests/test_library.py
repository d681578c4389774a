"""Which cuDNN is loaded, and what is said where there is none."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import textwrap
import types

import pytest

from chainer_hybridmem.cudnn import functions, library, modules

SYSTEMS, PACKAGES, TORCHES = 'libcudnn.so.9', 'nvidia/cudnn/lib', 'torch/lib'


class Library:
    """A cuDNN made for some CUDA."""

    def __init__(self, name, cuda, lacking=()):
        self._name, self._lacking = name, lacking
        self.cuda = cuda

    def __getattr__(self, name):
        if not name.startswith('cudnn') or name in self._lacking:
            raise AttributeError(name)
        found = types.SimpleNamespace
        return type('', (found,), {'__call__': lambda _: self.cuda * 1000 + 10})()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One with CuPy 14 for CUDA 13; the libraries that it has, by part of the path."""
    runtime = types.SimpleNamespace(is_hip=False, runtimeGetVersion=lambda: 13000)
    cupy = types.ModuleType('cupy')
    cupy.__version__ = '14.2.0'
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, 'cupy', cupy)
    for package in ('nvidia', 'torch'):
        (tmp_path / package).mkdir()
        (tmp_path / package / '__init__.py').touch()
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    libraries = {}

    def load(path):
        for part, found in libraries.items():
            if path == part or (part in path and part != SYSTEMS):
                return found
        raise OSError(path)

    monkeypatch.setattr(ctypes, 'CDLL', load)
    for cached in (library.find, functions.check_names):
        cached.cache_clear()
    yield libraries
    for cached in (library.find, functions.check_names):
        cached.cache_clear()


@pytest.mark.parametrize('where', [SYSTEMS, PACKAGES, TORCHES])
def test_it_is_found_wherever_it_is(machine, where):
    machine[where] = Library(where, 13)
    assert library.load() is machine[where]
    assert functions.is_available()


def test_the_first_one_for_the_cuda_of_cupy_is_taken(machine):
    machine[SYSTEMS] = Library(SYSTEMS, 12)
    machine[PACKAGES] = Library(PACKAGES, 13)
    machine[TORCHES] = Library(TORCHES, 13)
    assert library.load() is machine[PACKAGES]


def fail_to_load():
    with pytest.raises(library.LibraryError) as caught:
        functions.check_names()
    assert not functions.is_available()
    return str(caught.value)


def test_without_one_it_is_said_what_to_install(machine):
    said = fail_to_load()
    assert said == 'libcudnn.so.9 was not found: install nvidia-cudnn-cu13.'


def test_one_of_another_cuda_is_named(machine):
    machine[SYSTEMS] = Library(SYSTEMS, 12)
    assert 'CuPy uses CUDA 13, and libcudnn.so.9 is made for CUDA 12' in fail_to_load()


def test_one_that_lacks_a_function_is_not_used(machine):
    machine[SYSTEMS] = Library(SYSTEMS, 13, lacking=['cudnnRNNForward'])
    assert 'libcudnn.so.9 lacks cudnnRNNForward' in fail_to_load()


def test_a_cupy_that_looks_for_cudnn_itself_is_left_alone(machine):
    machine[SYSTEMS] = Library(SYSTEMS, 13)
    sys.modules['cupy'].__version__ = '13.6.0'
    assert 'CuPy 13.6.0 looks for cuDNN 8 itself' in fail_to_load()


@pytest.fixture
def importable(machine, monkeypatch):
    """With packages for CuPy's modules to be found in, and the finder."""
    sys.modules['cupy'].__path__ = []
    cuda = types.ModuleType('cupy.cuda')
    vars(cuda).update(vars(sys.modules['cupy'].cuda), __path__=[])
    monkeypatch.setitem(sys.modules, 'cupy.cuda', cuda)
    monkeypatch.setattr(sys, 'meta_path', list(sys.meta_path))
    modules.install()
    yield machine
    for name in ('cupy.cudnn', 'cupy.cuda.cudnn'):
        sys.modules.pop(name, None)


def test_the_library_module_tells_that_there_is_none(importable):
    cudnn = importlib.import_module('cupy.cuda.cudnn')
    assert cudnn.available is False
    assert cudnn.CUDNN_LSTM == 2
    with pytest.raises(library.LibraryError, match='install nvidia-cudnn-cu13'):
        cudnn.getVersion()
    with pytest.raises(library.LibraryError, match='install nvidia-cudnn-cu13'):
        cudnn.createTensorDescriptor()
    with pytest.raises(ImportError, match='install nvidia-cudnn-cu13'):
        importlib.import_module('cupy.cudnn')


def test_both_modules_are_there_with_it(importable):
    importable[PACKAGES] = Library(PACKAGES, 13)
    assert importlib.import_module('cupy.cuda.cudnn').available is True
    cudnn = importlib.import_module('cupy.cudnn')
    used = {'convolution_forward', 'get_handle', 'DropoutStates', 'rnn_backward_data'}
    assert used <= set(dir(cudnn))


def test_importing_the_package_looks_for_nothing():
    code = """
    import sys, chainer_hybridmem
    print([name for name in sys.modules if 'cupy' in name or name == 'ctypes'])
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == '[]'
