"""Which cuDNN is loaded, and what is said where there is none."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
import textwrap
import types

import pytest

from chainer_hybridmem.training.cudnn import functions, library, modules

SYSTEMS, PACKAGES, TORCHES = 'libcudnn.so.9', 'nvidia/cudnn/lib', 'torch/lib'
ASKED = []  # libraries that have been asked what they are made for


class Library:
    """A cuDNN made for some CUDA."""

    def __init__(self, name, cuda, lacking=(), status=0):
        self._name, self._lacking, self._status = name, lacking, status
        self.cuda = cuda

    def __getattr__(self, name):
        if not name.startswith('cudnn') or name in self._lacking:
            raise AttributeError(name)

        class Function:
            def __call__(_, *args):
                if name == 'cudnnGetCudartVersion':
                    ASKED.append(self._name)
                    return self.cuda * 1000 + 10
                return b'BROKEN' if name == 'cudnnGetErrorString' else self._status

        return Function()


class Machine:
    """One with CuPy 14 for CUDA 13, and libraries."""

    def __init__(self, folder):
        self.folder, self.libraries, self.loaded = folder, {}, None

    def add(self, where, cuda=13, made_for=(), parts=True, **options):
        """A library, with the metadata of packages for some CUDA beside it."""
        self.libraries[where] = Library(where, cuda, **options)
        if where == SYSTEMS:
            return self.libraries[where]
        (self.folder / where).mkdir(parents=True)
        names = library._PARTS if parts else library._PARTS[:1]
        for name in (library.NAME, *names):
            (self.folder / where / name).touch()
        for number in made_for:
            (self.folder / f'nvidia_cudnn_cu{number}-9.28.dist-info').mkdir()
        return self.libraries[where]

    def load(self, path, mode=0):
        """As ctypes does."""
        if mode and self.loaded is None:
            raise OSError('not loaded')
        if mode:
            return self.loaded
        if path in (SYSTEMS, library._PARTS[0]) and SYSTEMS in self.libraries:
            return self.libraries[SYSTEMS]
        for where, found in self.libraries.items():
            if where != SYSTEMS and where in path:
                return found
        raise OSError(f'{path}: cannot open shared object file: No such file')


@pytest.fixture
def machine(monkeypatch, tmp_path):
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
    found = Machine(tmp_path)
    monkeypatch.setattr(ctypes, 'CDLL', found.load)
    ASKED.clear()
    for cached in (library.find, functions.check_names):
        cached.cache_clear()
    yield found
    for cached in (library.find, functions.check_names):
        cached.cache_clear()


@pytest.mark.parametrize('where', [SYSTEMS, PACKAGES, TORCHES])
def test_it_is_found_wherever_it_is(machine, where):
    assert machine.add(where) is library.load()
    assert functions.is_available()


def test_what_the_process_has_loaded_comes_first_then_packages(machine):
    machine.add(SYSTEMS)
    package = machine.add(PACKAGES, made_for=[13])
    assert library.load() is package
    library.find.cache_clear()
    machine.loaded = Library('loaded', 13)
    assert library.load() is machine.loaded


def test_a_package_for_another_cuda_is_not_loaded(machine):
    """Its parts would serve every other cuDNN of the process."""
    machine.add(PACKAGES, 12, made_for=[12])
    system = machine.add(SYSTEMS)
    assert library.load() is system
    assert ASKED == [SYSTEMS]


def fail_to_load():
    with pytest.raises(library.LibraryError) as caught:
        functions.check_names()
    assert not functions.is_available()
    return str(caught.value)


def test_without_one_it_is_said_what_to_install(machine):
    said = fail_to_load()
    assert said == 'libcudnn.so.9 was not found: install nvidia-cudnn-cu13.'


def test_one_of_another_cuda_is_named(machine):
    machine.add(SYSTEMS, 12)
    machine.add(TORCHES)  # whose parts would be those of the first one
    said = fail_to_load()
    assert said.startswith('CuPy uses CUDA 13; libcudnn.so.9 is made for CUDA 12')
    assert ASKED and TORCHES not in ASKED


def test_another_one_that_is_loaded_already_is_named(machine):
    machine.add(PACKAGES, made_for=[13])
    machine.loaded = Library('loaded', 12)
    assert 'this process has loaded a cuDNN for CUDA 12 before' in fail_to_load()


def test_one_without_its_parts_is_not_loaded(machine):
    machine.add(PACKAGES, parts=False, made_for=[13])
    assert 'is there without libcudnn_ops.so.9' in fail_to_load()
    assert not ASKED


def test_one_that_lacks_a_function_is_not_used(machine):
    machine.add(SYSTEMS, lacking=['cudnnRNNForward'])
    assert 'libcudnn.so.9 lacks cudnnRNNForward' in fail_to_load()


def test_one_that_makes_no_descriptor_is_not_used(machine):
    machine.add(SYSTEMS, status=3009)
    assert 'libcudnn.so.9 is not whole: BROKEN (3009)' in fail_to_load()


def test_a_cupy_that_looks_for_cudnn_itself_is_left_alone(machine):
    machine.add(SYSTEMS)
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
    importable.add(PACKAGES)
    assert importlib.import_module('cupy.cuda.cudnn').available is True
    cudnn = importlib.import_module('cupy.cudnn')
    used = {'convolution_forward', 'get_handle', 'DropoutStates', 'rnn_backward_data'}
    assert used <= set(dir(cudnn))


@pytest.mark.parametrize('name', ['cupy.cudnn', 'cupy.cuda.cudnn'])
def test_what_else_cupy_13_had_is_told_apart(importable, name):
    importable.add(PACKAGES)
    module = importlib.import_module(name)
    with pytest.raises(AttributeError) as caught:
        _ = module.ctc_loss
    said = str(caught.value)
    assert said.startswith(f"module '{name}' has no attribute 'ctc_loss': of cuDNN 9")
    assert re.search(r'CuPy 13 and cuDNN 8: pip install .*cupy-cuda12x==13', said)
    assert not hasattr(module, 'ctc_loss')
    assert getattr(module, 'fusedOpsExecute', None) is None
    assert not hasattr(module, '__path__')


def test_names_are_those_of_cupy_13(importable):
    importable.add(PACKAGES)
    library = importlib.import_module('cupy.cuda.cudnn')
    assert library.addTensor_v3 is library.addTensor
    assert 'tensor' not in dir(importlib.import_module('cupy.cudnn'))


def test_a_file_that_is_no_library_is_named(machine, monkeypatch):
    """Not told as one that is not there."""

    def load(path, mode=0):
        raise OSError('not loaded' if mode else f'{path}: file too short')

    monkeypatch.setattr(ctypes, 'CDLL', load)
    assert 'libcudnn_graph.so.9: file too short' in fail_to_load()


def test_a_forked_child_destroys_nothing():
    """A fork drops the handles of other threads; CUDA has no place in the child."""
    code = """
    import os
    from chainer_hybridmem.training.cudnn.descriptors import Descriptor
    destroyed = []
    descriptor = Descriptor(1, destroyed.append)
    child = os.fork()
    del descriptor
    if not child:
        os._exit(len(destroyed))
    assert os.waitpid(child, 0)[1] == 0
    assert destroyed == [1]
    """
    subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True)


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
