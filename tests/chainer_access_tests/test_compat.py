"""Chainer is imported and repaired, and nothing else changes."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
import warnings

import numpy
import pytest
from support import forks

from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.chainer_access.compat import stand_ins

chainer = compat.import_chainer()
F = chainer.functions

# What an interpreter does that has never seen chainer_hybridmem. Blocks real
# modules in the way that a missing installation does.
BLOCK = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname in {names!r}:
            raise ModuleNotFoundError('No module named ' + repr(fullname))
sys.meta_path.insert(0, Missing())
"""


def run_python(code, *options, missing=(), **environment):
    """Runs code in a new interpreter; returns what it printed, stderr included."""
    blocked = BLOCK.format(names=set(missing)) if missing else ''
    result = subprocess.run(
        [sys.executable, *options, '-c', blocked + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout.strip()


def run_fork(code, **environment):
    """The same in a process that has imported Chainer and the package."""
    environment = {**os.environ, **environment}
    result = forks.run('-c', textwrap.dedent(code), env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


GONE = ('pkg_resources', 'numpy.distutils', 'numpy.distutils.system_info')

REAL = """
more = 7
class DistributionNotFound(Exception): pass
VersionConflict = DistributionNotFound
def require(name): raise DistributionNotFound
"""

# Has every name that it is asked for.
FAKE = """
import types
from unittest import mock
__version__ = '14.2.0'
ndarray = type('ndarray', (), {})
def memoize(for_each_device=False):
    return lambda function: function
def __getattr__(name):
    if name in ('__path__', '__all__', '__spec__'):
        raise AttributeError(name)
    return mock.MagicMock()
"""

TRAINING = """
import os
import chainer.gradient_check, chainer.testing
model = chainer.links.Classifier(chainer.Sequential(
    chainer.links.Convolution2D(1, 4, 3), chainer.links.BatchNormalization(4),
    chainer.functions.relu, chainer.links.Linear(None, 3)))
optimizer = chainer.optimizers.MomentumSGD().setup(model)
data = chainer.datasets.TupleDataset(
    numpy.random.rand(12, 1, 6, 6).astype('f'), numpy.arange(12) % 3)
iterator = chainer.iterators.SerialIterator(data, 4)
updater = chainer.training.updaters.StandardUpdater(iterator, optimizer)
trainer = chainer.training.Trainer(updater, (2, 'epoch'), out=os.environ['OUT'])
log = chainer.training.extensions.LogReport(filename=None)
trainer.extend(log)
trainer.run()
print(type(log.log[-1]['main/loss']).__name__)
"""


class TestImport:
    def test_package_first_changes_nothing_else(self, tmp_path):
        """Not the filters of warnings, nor NumPy; nothing warns, as in training."""
        code = """
        import warnings, numpy
        warnings.simplefilter('error', UserWarning)
        filters, names = list(warnings.filters), set(vars(numpy))
        import chainer_hybridmem, chainer
        assert warnings.filters == filters
        print(chainer.__version__, hasattr(numpy, 'asscalar'))
        print((set(vars(numpy)) - names) & {'sctypes', 'float'})
        """
        code = textwrap.dedent(code) + TRAINING
        said = run_python(code, '-W', 'error', OUT=str(tmp_path))
        assert re.fullmatch(r'7.8.1 False\nset\(\)\nfloat(64)?', said)

    def test_install_does_not_import_chainer(self):
        code = """
        import sys
        from chainer_hybridmem import compat
        sys.modules.pop('chainer', None)
        compat.install()
        print('chainer' in sys.modules)
        """
        assert run_python(code) == 'False'

    def test_stand_ins_are_gone_after_the_import(self):
        """While it lasts, somebody whom Chainer imports finds no more than there is."""
        code = """
        import sys, types
        picture = types.ModuleType('PIL')
        def find(name):
            if name != 'Image':
                raise AttributeError(name)
            import pkg_resources
            picture.Image = hasattr(pkg_resources, 'more')
            return picture.Image
        picture.__getattr__ = find
        sys.modules['PIL'] = picture
        import chainer_hybridmem, chainer, chainer.testing, chainer.gradient_check
        import numpy
        assert chainer.testing.with_requires('no-such-package')(lambda: 0)
        left = [name for name in sys.modules if name in {gone}]
        print(chainer.__version__, picture.Image, left, 'distutils' in vars(numpy))
        """
        code = code.format(gone=GONE)
        assert run_python(code, missing=GONE) == '7.8.1 False [] False'

    def test_real_modules_stay(self):
        code = """
        import sys, types
        real = types.ModuleType('pkg_resources')
        class Error(Exception): pass
        real.require = lambda *names: (_ for _ in ()).throw(Error())
        real.DistributionNotFound = real.VersionConflict = Error
        sys.modules['pkg_resources'] = real
        import chainer_hybridmem, chainer
        assert sys.modules['pkg_resources'] is real
        assert sys.modules['chainer._environment_check'].pkg_resources is real
        """
        run_python(code)

    def test_what_is_slow_to_import_comes_when_asked_for(self):
        """Somebody whom Chainer imports may ask for more than Chainer does."""
        code = """
        import os, sys, tempfile
        REAL = '''%s'''
        folder = tempfile.mkdtemp()
        for name, text in (
            ('pkg_resources', REAL),
            ('PIL', 'import pkg_resources; found = Image = pkg_resources.more'),
        ):
            with open(os.path.join(folder, name + '.py'), 'w') as file:
                file.write(text)
        sys.path.insert(0, folder)
        import chainer_hybridmem, chainer
        print(sys.modules['PIL'].found, sys.modules['pkg_resources'].__file__[-5:])
        """
        assert run_python(textwrap.dedent(code) % REAL) == '7 es.py'

    def test_chainer_first(self):
        # A user's own repairs make chainer importable before this package is.
        code = """
        import sys, warnings
        from chainer_hybridmem.training.chainer_access import compat
        from chainer_hybridmem.training.chainer_access.compat import (
            import_wrapper, repair)
        sys.meta_path[:] = [
            f for f in sys.meta_path if not isinstance(f, import_wrapper.ImportWrapper)]
        for name in [n for n in sys.modules if n.partition('.')[0] == 'chainer']:
            del sys.modules[name]
        warnings.simplefilter('ignore')
        compat.prepare()
        import chainer
        repair.end_preparation()
        add = chainer.reporter.Summary.add
        compat.install()
        assert chainer.reporter.Summary.add is not add
        compat.prepare()
        compat.patch_chainer()
        """
        assert run_python(code) == ''

    def test_after_a_failed_import(self):
        code = """
        import sys
        sys.modules['chainer.links'] = None  # fails late, as for want of a module
        try:
            import chainer
        except Exception:
            pass
        assert 'chainer.functions' in sys.modules or 'chainer.backends' in sys.modules
        del sys.modules['chainer.links']
        import chainer_hybridmem, chainer
        print(chainer.__version__)
        """
        assert run_python(code, '-W', 'ignore') == '7.8.1'

    def test_missing_chainer_is_an_import_error(self):
        code = """
        from chainer_hybridmem import compat
        try:
            compat.import_chainer()
        except ImportError as error:
            print(error.name or error)
        """
        assert 'chainer' in run_python(code, missing=['chainer'])

    def test_patching_before_the_import_is_refused(self, monkeypatch):
        monkeypatch.delitem(sys.modules, 'chainer')
        with pytest.raises(RuntimeError, match='import_chainer'):
            compat.patch_chainer()

    def test_patching_twice_changes_nothing(self):
        patched = (
            chainer.reporter.Summary.add,
            F.array.resize_images.compute_indices_and_weights,
            F.array.pad_sequence.PadSequence.forward,
            F.loss.mean_squared_error.MeanSquaredError.forward_cpu,
        )
        compat.patch_chainer()
        assert patched == (
            chainer.reporter.Summary.add,
            F.array.resize_images.compute_indices_and_weights,
            F.array.pad_sequence.PadSequence.forward,
            F.loss.mean_squared_error.MeanSquaredError.forward_cpu,
        )


class TestRequire:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        def version(name):
            if name != 'tool':
                raise importlib.metadata.PackageNotFoundError(name)
            return '2.0.0.post3'

        monkeypatch.setattr(importlib.metadata, 'version', version)

    @pytest.mark.parametrize(
        'requirement', ['tool', 'tool>=2,<3', 'tool>=2.0.0.post3, <2.1', 'tool!=2.0']
    )
    def test_met(self, requirement):
        stand_ins.require(requirement)
        stand_ins.WorkingSet().require(requirement)

    @pytest.mark.parametrize('requirement', ['tool<2.0', 'tool>=2.0.1', 'tool==2.0'])
    def test_other_version(self, requirement):
        with pytest.raises(stand_ins.VersionConflict, match=r'2\.0\.0\.post3'):
            stand_ins.require(requirement)

    def test_not_installed(self):
        with pytest.raises(stand_ins.DistributionNotFound, match='other'):
            stand_ins.require('tool', 'other>=1')


class TestSummary:
    def summarize(self, values, weights=None):
        summary = chainer.reporter.Summary()
        for value, weight in zip(values, weights or [1] * len(values), strict=True):
            summary.add(value, weight)
        return summary.make_statistics()

    @pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
    @pytest.mark.parametrize('as_array', [False, True])
    def test_float_mean_is_accumulated_in_double(self, dtype, as_array):
        values = numpy.linspace(1000, 1000.2, 20000).astype(dtype)
        mean, std = self.summarize([numpy.array(v) if as_array else v for v in values])
        exact = values.astype('float64')
        assert mean == pytest.approx(exact.mean(), rel=1e-12)
        assert std == pytest.approx(exact.std(), rel=1e-3, abs=1e-6)
        assert numpy.asarray(mean).dtype == numpy.float64

    @pytest.mark.parametrize('dtype', ['int8', 'uint8', 'int32', 'uint64', 'bool'])
    def test_integers_do_not_overflow(self, dtype):
        top = 1 if dtype == 'bool' else min(numpy.iinfo(dtype).max, 2**31 - 1)
        values = numpy.array([top, 0, top], dtype)
        mean, std = self.summarize(list(values))
        assert mean == pytest.approx(values.astype('float64').mean())
        assert std == pytest.approx(values.astype('float64').std())

    def test_weights_do_not_overflow(self):
        values = [numpy.float32(1), numpy.float32(2)]
        mean, _ = self.summarize(values, [numpy.int8(100), numpy.int8(100)])
        assert mean == 1.5

    def test_python_numbers_pass_unchanged(self):
        assert self.summarize([1, 2.0, 3])[0] == 2

    def test_dict_summary_is_repaired_too(self):
        summary = chainer.reporter.DictSummary()
        for _ in range(20000):
            summary.add({'loss': chainer.Variable(numpy.array(1000.1, 'f'))})
        expected = float(numpy.float32(1000.1))
        assert summary.compute_mean()['loss'] == pytest.approx(expected, rel=1e-12)


class TestMicroAverage:
    def average(self, numerators, denominators):
        """Feeds observations, with a trigger that fires at the last one."""
        triggers = iter([False] * (len(numerators) - 1) + [True])
        extension = chainer.training.extensions.MicroAverage(
            'n', 'd', 'average', trigger=lambda trainer: next(triggers)
        )
        for n, d in zip(numerators, denominators, strict=True):
            extension(types.SimpleNamespace(observation={'n': n, 'd': d}))
        return chainer.get_current_reporter().observation['average']

    @pytest.fixture(autouse=True)
    def reporter(self):
        with chainer.Reporter():
            yield

    def test_float_sums_are_double(self):
        values = numpy.full(20000, 1000.1, 'f')
        expected = pytest.approx(float(values[0]), rel=1e-12)
        assert self.average(values, [1] * 20000) == expected

    def test_integer_sums_do_not_overflow(self):
        counts = numpy.full(4, 2**30, 'int32')
        assert self.average(counts, counts) == 1.0


class TestFunctions:
    @pytest.mark.parametrize('mode', ['bilinear', 'nearest'])
    @pytest.mark.parametrize('align_corners', [False, True])
    def test_resize_images(self, mode, align_corners):
        x = chainer.Variable(numpy.arange(8, dtype='f').reshape(1, 2, 2, 2))
        y = F.resize_images(x, (4, 4), mode=mode, align_corners=align_corners)
        assert y.shape == (1, 2, 4, 4)
        assert y.array[0, :, 0, 0].tolist() == [0, 4]
        y.grad = numpy.ones_like(y.array)
        y.backward()
        assert x.grad.sum() == pytest.approx(32)

    @pytest.mark.gpu
    @pytest.mark.parametrize('mode', ['bilinear', 'nearest'])
    def test_resize_images_with_cupy(self, mode):
        x = numpy.random.RandomState(0).rand(2, 3, 6, 6).astype('f')
        expected = F.resize_images(x, (4, 5), mode=mode).array
        actual = F.resize_images(
            chainer.get_device('@cupy:0').send(x), (4, 5), mode=mode
        )
        assert actual.array.get() == pytest.approx(expected, rel=1e-5)

    def test_resize_images_has_builtins(self):
        """CuPy's compiled code asks the functions that call it for them."""
        function = F.array.resize_images.compute_indices_and_weights.__wrapped__
        patched = F.array.resize_images.compute_indices_and_weights
        assert '__builtins__' in patched.__globals__
        assert function.__code__ is patched.__code__

    @pytest.mark.gpu
    def test_gradients_of_two_types_on_their_way_to_other_gpus(self):
        import cupy

        half = chainer.initializers.Normal(dtype='float16')
        L, module = chainer.links, chainer.training.updaters
        module = module.multiprocess_parallel_updater
        model = chainer.Sequential(L.Linear(3, 4), L.Linear(4, 2, initialW=half))
        model.to_device('@cupy:0')
        for i, parameter in enumerate(model.params()):
            parameter.grad = cupy.full(parameter.shape, i + 1, parameter.dtype)
        gathered = module.gather_grads(model)
        assert sorted(set(gathered.tolist())) == [1, 2, 3, 4]
        module.scatter_grads(model, gathered * 2)
        for i, parameter in enumerate(model.params()):
            assert (parameter.grad == 2 * i + 2).all()

    def test_as_strided_backward(self):
        x = chainer.Variable(numpy.arange(4, dtype='f'))
        y = F.as_strided(x, (3, 2), (1, 1), 0)
        y.grad = numpy.ones((3, 2), 'f')
        y.backward()
        assert x.grad.tolist() == [1, 2, 2, 1]

    def test_as_strided_refuses_integer_gradients(self):
        module = F.array.as_strided
        assert numpy.dtype('f') in module.np.sctypes['float']
        assert numpy.dtype('i') not in module.np.sctypes['float']

    def test_categorical_log_prob(self):
        p = numpy.array([[0.25, 0.75], [0.5, 0.5]], 'f')
        log_p = chainer.distributions.Categorical(p=p).log_prob(numpy.array([1, 0]))
        assert numpy.exp(log_p.array) == pytest.approx([0.75, 0.5])

    @pytest.mark.parametrize('dtype', ['uint8', 'uint32', 'int8', 'int64', 'float32'])
    @pytest.mark.parametrize('padding', [-1, 300, 0])
    def test_pad_sequence(self, dtype, padding):
        xs = [numpy.ones(2, dtype), numpy.ones(1, dtype)]
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            y = F.pad_sequence(xs, padding=padding).array
        assert y.dtype == dtype
        assert y.tolist() == [[1, 1], [1, numpy.array(padding).astype(dtype)]]

    @pytest.mark.parametrize('size', [3, 65504, 70000])
    def test_mean_squared_error_in_float16(self, size):
        x = numpy.full(size, 0.5, 'float16')
        y = F.mean_squared_error(chainer.Variable(x), numpy.zeros_like(x))
        assert y.dtype == numpy.float16
        assert float(y.array) == pytest.approx(0.25, rel=1e-2)

    def test_mean_squared_error_in_float32_is_chainers(self):
        x0, x1 = numpy.random.RandomState(0).randn(2, 1001).astype('f')
        difference = x0 - x1
        expected = numpy.array(difference.dot(difference) / 1001, 'f')
        assert F.mean_squared_error(x0, x1).array == expected

    def test_mean_squared_error_backward_in_float16(self):
        x = chainer.Variable(numpy.full(8, 0.5, 'float16'))
        F.mean_squared_error(x, numpy.zeros(8, 'float16')).backward()
        assert x.grad.tolist() == [0.125] * 8


class TestCuda:
    def test_no_cupy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, 'cupy', None)
        assert compat.cuda_available() is False

    @pytest.mark.parametrize('answer', [True, False])
    def test_answer_of_cupy(self, monkeypatch, answer):
        cuda = types.SimpleNamespace(is_available=lambda: answer)
        monkeypatch.setitem(sys.modules, 'cupy', types.SimpleNamespace(cuda=cuda))
        assert compat.cuda_available() is answer

    def test_cupy_that_raises(self, monkeypatch):
        def is_available():
            raise RuntimeError('CUDA driver is insufficient')

        cuda = types.SimpleNamespace(is_available=is_available)
        monkeypatch.setitem(sys.modules, 'cupy', types.SimpleNamespace(cuda=cuda))
        assert compat.cuda_available() is False

    @pytest.fixture
    def cupy(self, monkeypatch, tmp_path):
        """Where a CuPy without cuDNN is, as Chainer sees it."""
        (tmp_path / 'cupy_backends/cuda/libs').mkdir(parents=True)
        (tmp_path / 'cupy_backends/__init__.py').touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, 'cupy', types.ModuleType('cupy'))
        monkeypatch.delitem(sys.modules, 'cupy_backends', raising=False)
        monkeypatch.delenv('CHAINER_CUDNN', raising=False)
        cuda = chainer.backends.cuda
        monkeypatch.setattr(cuda, 'available', True)
        monkeypatch.setattr(cuda, '_cudnn_disabled_by_user', False, raising=False)
        return tmp_path

    def test_cupy_without_cudnn_gives_no_advice(self, cupy):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            compat.patch_chainer()
            chainer.backends.cuda.check_cuda_available()
        assert 'CHAINER_CUDNN' not in os.environ

    def test_cupy_with_cudnn_is_left_alone(self, cupy):
        (cupy / 'cupy_backends/cuda/libs/cudnn.so').touch()
        compat.patch_chainer()
        assert chainer.backends.cuda._cudnn_disabled_by_user is False

    def test_the_users_choice_is_left_alone(self, cupy, monkeypatch):
        monkeypatch.setenv('CHAINER_CUDNN', '1')
        compat.patch_chainer()
        assert chainer.backends.cuda._cudnn_disabled_by_user is False

    # Chainer imports cuda, and what gives the advice after it.
    IMPORT = """
    import warnings
    warnings.simplefilter('error', UserWarning)
    import chainer_hybridmem, chainer
    print(chainer.backends.cuda.available, chainer.backends.cuda.cudnn_enabled)
    """

    @pytest.mark.gpu
    def test_importing_chainer_gives_no_advice_for_cupy(self, monkeypatch):
        if compat.cupy_can_use_cudnn():
            pytest.skip('this CuPy can use cuDNN')
        monkeypatch.delenv('CHAINER_CUDNN', raising=False)
        assert run_python(self.IMPORT) == 'True False'

    def test_importing_chainer_gives_no_advice(self, monkeypatch, tmp_path):
        """With as much of a CuPy as Chainer asks for when it is imported."""
        names = 'cuda', 'cublas', 'random', '_util'
        for name in *(f'cupy/{name}.py' for name in names), 'cupyx/scipy/linalg.py':
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(FAKE)
        (tmp_path / 'cupyx/scipy/special.py').touch()
        (tmp_path / 'cupy/__init__.py').write_text(FAKE)
        (tmp_path / 'cupyx/__init__.py').touch()
        monkeypatch.delenv('CHAINER_CUDNN', raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
        assert run_python(self.IMPORT, PYTHONPATH=path) == 'True False'


class TestLoadLibraries:
    """CUDA's libraries are loaded from packages for a CuPy that does not look there."""

    @pytest.fixture
    def packages(self, monkeypatch, tmp_path):
        """A library that can be loaded under cuDNN's name, and CuPy's module for it."""
        library = tmp_path / 'nvidia/cudnn/lib/libcudnn.so.8'
        library.parent.mkdir(parents=True)
        shutil.copy(numpy.random.bit_generator.__file__, library)
        module = tmp_path / 'cupy_backends/cuda/libs/cudnn.so'
        module.parent.mkdir(parents=True)
        module.touch()
        (tmp_path / 'cupy_backends/__init__.py').touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, 'cupy_backends', raising=False)
        return tmp_path

    @pytest.fixture
    def loaded(self, monkeypatch):
        """What has been asked for; nothing can be loaded but by its path."""
        asked = []

        def load(path, mode):
            asked.append(path)
            if not os.path.exists(path):
                raise OSError(f'{path}: cannot open shared object file')

        monkeypatch.setattr(ctypes, 'CDLL', load)
        return asked

    def test_before_chainer_is_imported(self, packages):
        code = """
        import chainer_hybridmem, sys
        print('chainer' in sys.modules, 'cudnn' in open('/proc/self/maps').read())
        import chainer
        print('libcudnn.so.8' in open('/proc/self/maps').read())
        """
        path = os.pathsep.join([str(packages), os.environ.get('PYTHONPATH', '')])
        said = run_python(code, missing=['cupy'], PYTHONPATH=path, LD_LIBRARY_PATH='')
        assert said == 'False False\nTrue'

    def test_the_one_of_the_system_comes_first(self, packages, loaded, monkeypatch):
        compat.load_libraries()
        path = str(packages / 'nvidia/cudnn/lib/libcudnn.so.8')
        assert loaded[-2:] == ['libcudnn.so.8', path]
        loaded.clear()
        monkeypatch.setattr(os.path, 'exists', lambda path: True)
        compat.load_libraries()
        assert loaded == list(compat.cuda.LIBRARIES)

    def test_not_for_a_cupy_that_cannot_use_it(self, packages, loaded):
        (packages / 'cupy_backends/cuda/libs/cudnn.so').unlink()
        compat.load_libraries()
        assert not loaded

    def test_there_need_not_be_any(self, packages, loaded):
        (packages / 'nvidia/cudnn/lib/libcudnn.so.8').unlink()
        compat.load_libraries()
        assert len(loaded) == 2 * len(compat.cuda.LIBRARIES)


@pytest.mark.parametrize('first', ['chainer_hybridmem', 'chainermn'])
def test_chainermn_is_repaired_whichever_comes_first(first):
    pytest.importorskip('mpi4py')
    run = run_python if first == 'chainermn' else run_fork
    run(f"""
        from chainer_hybridmem.training.chainer_access import compat
        if {first!r} == 'chainer_hybridmem':
            compat.import_chainer()
        else:
            compat.prepare()  # Chainer alone cannot be imported here
            import chainer
        from chainermn.communicators import _memory_utility as module
        compat.patch_chainer()
        kernels = module._cupy_batched_pack_params, module._cupy_batched_unpack_params
        moves = module._batched_pack_params, module._batched_unpack_params
        assert [type(f).__name__ for f in kernels] == ['_WithHeader'] * 2
        assert [type(f).__name__ for f in moves] == ['_InOrder'] * 2
        assert not isinstance(moves[0]._move, type(moves[0]))  # once
    """)
