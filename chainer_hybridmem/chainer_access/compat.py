"""Makes Chainer 7.8.1 importable and right on current Python and NumPy.

Chainer 7.8.1 was released for Python 3.5 to 3.9 and NumPy 1. Two kinds of repair
are needed, and both leave everything that exists for real alone:

* *Before* ``import chainer``: names that Chainer imports and that are gone
  (:func:`prepare`). They are there only while Chainer is being imported, so no
  other package meets a stand-in where it expects the real thing. And cuDNN, which
  CuPy does not find in its package (:func:`load_cudnn`).
* *After* it: code that fails, or silently gives other numbers, under NumPy 2's
  promotion rules (:func:`patch_chainer`). Known and left: the means of ``F.hinge``
  and ``F.triplet`` in float16, on the CPU, over more than 65,504 rows.

:func:`install` has both done around Chainer's import, whenever that comes. Every
function here may be called any number of times.
"""

import builtins
import contextlib
import ctypes
import functools
import glob
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy

CUDNN = 'libcudnn.so.8'  # what CuPy 13 is made for; later ones use none
_FLOAT16 = 'cupy/float16.cuh'
_MARK = '_chainer_hybridmem_patch'

# What is in place between prepare() and the end of Chainer's import.
_temporary = contextlib.ExitStack()
_prepared = False


def install() -> None:
    """Has Chainer repaired: at once if it is imported, else when it will be.

    It imports nothing itself. Deprecations that Chainer's own import raises are then
    not shown, whatever the warning filters say; afterwards the filters are the
    user's again.
    """
    if 'chainer' in sys.modules:
        patch_chainer()
    else:
        _ImportWrapper.install('chainer', _repaired_import)


def import_chainer() -> types.ModuleType:
    """Imports Chainer, repaired.

    Returns:
        The module ``chainer``.

    Raises:
        ImportError: Chainer, or something that it needs, is not installed.
    """
    install()
    return importlib.import_module('chainer')


def prepare() -> None:
    """Puts in place what ``import chainer`` needs and does not find.

    Nothing is done for a Chainer that is imported already. What is put in place
    goes away with :func:`patch_chainer`.
    """
    if 'chainer' not in sys.modules:
        _begin_preparation()


def patch_chainer() -> None:
    """Repairs the Chainer that has been imported and ends :func:`prepare`.

    Raises:
        RuntimeError: Chainer has not been imported.
    """
    if 'chainer' not in sys.modules:
        raise RuntimeError(
            'chainer has not been imported: call import_chainer() instead, or import '
            'chainer between prepare() and patch_chainer()'
        )
    _end_preparation()
    _patch_summary()
    _patch_micro_average()
    _patch_as_strided()
    _patch_resize_images()
    _patch_categorical()
    _patch_pad_sequence()
    _patch_mean_squared_error()
    _patch_multiprocess_updater()
    _accept_cupy_without_cudnn()


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
    """Tells whether the CuPy that is installed has modules for cuDNN; imports nothing.

    The Python modules alone may be there in packages that cannot use it.
    """
    pattern = os.path.join('cuda', 'libs', 'cudnn.*')
    return any(glob.glob(pattern, root_dir=f) for f in _folders('cupy_backends'))


def load_cudnn() -> None:
    """Loads cuDNN from its own package where CuPy needs it and nobody else has it.

    CuPy 13 looks into packages for cuTENSOR and NCCL only. The parts of cuDNN, and
    cuBLAS, are found by cuDNN itself, as they lie beside it.
    """
    if not cupy_can_use_cudnn():
        return
    folders = [os.path.join(folder, 'cudnn', 'lib') for folder in _folders('nvidia')]
    for path in (CUDNN, *(os.path.join(folder, CUDNN) for folder in folders)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return


def _folders(package: str) -> list[str]:
    """Where a package that lies in no other one would be imported from."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody has made it up
        return []
    return [] if spec is None else list(spec.submodule_search_locations or ())


# ---------------------------------------------------------------- before the import


class _ImportWrapper(importlib.abc.MetaPathFinder):
    """Executes one module, when it gets imported, inside a context manager.

    The module is found and loaded by whatever would do so without this class.
    """

    def __init__(
        self, fullname: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._fullname = fullname
        self._context = context

    @classmethod
    def install(
        cls, fullname: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Starts to wait for a module, unless that is being done."""
        wrappers = [f for f in sys.meta_path if isinstance(f, cls)]
        if not any(wrapper._fullname == fullname for wrapper in wrappers):
            sys.meta_path.insert(0, cls(fullname, context))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module that is waited for through the other finders."""
        if fullname != self._fullname:
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            with self._context():
                execute(module)

        # On the instance: the loader keeps its class and everything else.
        loader.exec_module = exec_module


@contextlib.contextmanager
def _repaired_import() -> Iterator[None]:
    _forget_failed_import()
    _begin_preparation()
    try:
        with _chainer_import_noise_ignored():
            yield
    finally:
        _end_preparation()
    patch_chainer()


def _forget_failed_import() -> None:
    """Forgets what an ``import chainer`` that failed, unrepaired, left behind.

    With those halves of modules the next attempt, say in a notebook, fails too.
    """
    for name in [name for name in sys.modules if name.startswith('chainer.')]:
        del sys.modules[name]


def _begin_preparation() -> None:
    global _prepared
    if _prepared:
        return
    _prepared = True
    if not hasattr(numpy, 'sctypes'):
        _temporary.enter_context(_numpy_attribute('sctypes', _scalar_types()))
    if not _can_import('numpy.distutils.system_info'):
        _temporary.enter_context(_numpy_distutils_stub())
    if not _can_import('pkg_resources'):
        _temporary.enter_context(_pkg_resources_stub())
        # chainer.testing needs it too, but chainer does not import that itself.
        _ImportWrapper.install('chainer.testing', _pkg_resources_stub)
    load_cudnn()
    # The modules that are imported after this one make Chainer give its advice.
    _ImportWrapper.install('chainer.backends.cuda', _without_needless_advice)


def _end_preparation() -> None:
    global _prepared
    _temporary.close()
    _prepared = False


@contextlib.contextmanager
def _without_needless_advice() -> Iterator[None]:
    yield
    _accept_cupy_without_cudnn()


@contextlib.contextmanager
def _chainer_import_noise_ignored() -> Iterator[None]:
    """Ignores the warnings of Chainer's import that say nothing to its user."""
    with warnings.catch_warnings():
        for category in (
            DeprecationWarning,
            PendingDeprecationWarning,
            FutureWarning,
            SyntaxWarning,
        ):
            warnings.simplefilter('ignore', category)
        # UserWarnings: setuptools says so since 80.9; only Chainer's
        # MultiprocessParallelUpdater uses NCCL, and tells when it is missing.
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated')
        warnings.filterwarnings('ignore', r'\s*nccl library could not be loaded')
        # Chainer's range, 7.7 to 8.0, is that of CUDA 11; see patch_chainer.
        warnings.filterwarnings('ignore', r'\s*-+\s*CuPy \(.*may not be compatible')
        yield


def _can_import(name: str) -> bool:
    with _chainer_import_noise_ignored():
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


def _scalar_types() -> dict[str, list[type]]:
    """Returns what ``numpy.sctypes`` was: scalar types by kind."""
    return {
        'int': [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
        'uint': [numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64],
        'float': [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
        'complex': [numpy.complex64, numpy.complex128, numpy.clongdouble],
        'others': [bool, object, bytes, str, numpy.void],
    }


@contextlib.contextmanager
def _modules(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Keeps stand-ins in ``sys.modules`` where nothing else is."""
    added = {name for name in modules if name not in sys.modules}
    sys.modules.update({name: modules[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            if sys.modules.get(name) is modules[name]:
                del sys.modules[name]


@contextlib.contextmanager
def _numpy_attribute(name: str, value: object) -> Iterator[None]:
    vars(numpy)[name] = value
    try:
        yield
    finally:
        del vars(numpy)[name]


@contextlib.contextmanager
def _numpy_distutils_stub() -> Iterator[None]:
    """Stands in for ``numpy.distutils``, which is gone with Python 3.12.

    Chainer asks it, on macOS only, whether NumPy was built with Accelerate.
    """
    distutils = types.ModuleType('numpy.distutils')
    system_info = types.ModuleType('numpy.distutils.system_info')
    vars(system_info)['get_info'] = lambda name: {}
    vars(distutils)['system_info'] = system_info
    stubs = {module.__name__: module for module in (distutils, system_info)}
    with _modules(stubs), _numpy_attribute('distutils', distutils):
        yield


class ResolutionError(Exception):
    """A requirement is not met; stands in for pkg_resources' class."""


class DistributionNotFound(ResolutionError):
    """A required distribution is not installed."""


class VersionConflict(ResolutionError):
    """A required distribution is installed in another version."""


def require(*requirements: str) -> None:
    """Checks that distributions are installed.

    Args:
        requirements: Such as ``'cupy>=7.7.0,<8.0.0'``. Versions are compared by
            their numbers only, which is all that Chainer's requirements use.

    Raises:
        DistributionNotFound: One is missing.
        VersionConflict: One has a version outside its range.
    """
    for requirement in requirements:
        match = re.match(r'\s*([\w.-]+)\s*(.*)', requirement)
        if match is None:
            raise ResolutionError(f'not a requirement: {requirement!r}')
        name, ranges = match.groups()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise DistributionNotFound(name) from error
        if not _in_range(version, ranges):
            raise VersionConflict(f'{name} {version} is not {ranges}')


def _in_range(version: str, ranges: str) -> bool:
    found = _version_numbers(version)
    holds: dict[str, Callable[[Any, Any], bool]] = {
        '>=': lambda a, b: a >= b,
        '<=': lambda a, b: a <= b,
        '==': lambda a, b: a == b,
        '!=': lambda a, b: a != b,
        '>': lambda a, b: a > b,
        '<': lambda a, b: a < b,
    }
    bounds = re.findall(r'([<>=!]=|[<>])\s*([\w.]+)', ranges)
    return all(holds[sign](found, _version_numbers(bound)) for sign, bound in bounds)


def _version_numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r'\d+', version.split('+')[0])]
    while numbers and numbers[-1] == 0:  # 2.0 and 2.0.0 are the same version
        numbers.pop()
    return tuple(numbers)


class WorkingSet:
    """The installed distributions; stands in for pkg_resources' class."""

    def require(self, *requirements: str) -> None:
        """See :func:`require`."""
        require(*requirements)


def _pkg_resources_stub() -> AbstractContextManager[None]:
    """Stands in for ``pkg_resources``, which setuptools 82 no longer has."""
    stub = types.ModuleType('pkg_resources')
    vars(stub).update(
        require=require,
        get_distribution=importlib.metadata.distribution,
        WorkingSet=WorkingSet,
        ResolutionError=ResolutionError,
        DistributionNotFound=DistributionNotFound,
        VersionConflict=VersionConflict,
    )
    return _modules({'pkg_resources': stub})


# ----------------------------------------------------------------- after the import


def _chainer_module(name: str) -> Any:
    return importlib.import_module('chainer.' + name)


def _wrap(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces ``owner.name`` by ``wrap`` of it, once."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


class _Overlay(types.ModuleType):
    """A module seen through a few replaced attributes.

    One Chainer module gets it for its global ``numpy``; NumPy itself, which all
    others share, stays as it is. Not for modules that test ``xp is numpy``.
    """

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _patch_summary() -> None:
    """Lets Summary accumulate in double precision.

    Under NEP 50 ``0.0 + numpy.float32`` stays float32, and an int32 square
    overflows: means lose digits, deviations become NaN, silently.
    """

    def wrap(add: Any) -> Any:
        def add_in_double(self: Any, value: Any, weight: Any = 1) -> None:
            add(self, _widened(value), _widened(weight))

        return add_in_double

    _wrap(_chainer_module('reporter').Summary, 'add', wrap)


def _widened(value: Any) -> Any:
    """Casts a NumPy scalar or 0-d array as NumPy 1 did beside a Python number."""
    if not isinstance(value, numpy.generic | numpy.ndarray):
        return value  # Python numbers, and arrays on a GPU
    if value.ndim != 0:
        return value
    if value.dtype.kind in 'bi' or (value.dtype.kind == 'u' and value.itemsize < 8):
        return value.astype(numpy.int64)
    if value.dtype.kind == 'u' or (value.dtype.kind == 'f' and value.itemsize < 8):
        return value.astype(numpy.float64)
    return value


def _patch_micro_average() -> None:
    """Lets MicroAverage add up in double precision, as :func:`_patch_summary`."""

    def wrap(call: Any) -> Any:
        def call_in_double(self: Any, trainer: Any) -> None:
            # Its sums start from the Python number 0 after every trigger, which
            # float32 observations would turn into float32.
            if isinstance(self._numerator, int):
                self._numerator = numpy.float64(self._numerator)
            if isinstance(self._denominator, int):
                self._denominator = numpy.float64(self._denominator)
            call(self, trainer)

        return call_in_double

    module = _chainer_module('training.extensions.micro_average')
    _wrap(module.MicroAverage, '__call__', wrap)


def _patch_as_strided() -> None:
    """Gives as_strided, whose backward needs it as well, its numpy.sctypes."""
    module = _chainer_module('functions.array.as_strided')
    if not hasattr(module.np, 'sctypes'):
        module.np = _Overlay(numpy, sctypes=_scalar_types())


def _patch_resize_images() -> None:
    """Gives resize_images its numpy.float, which went with NumPy 1.24."""
    module = _chainer_module('functions.array.resize_images')
    if hasattr(module.numpy, 'float'):
        return

    def wrap(function: Any) -> Any:
        # The module tests `xp is numpy` elsewhere: only this function, which uses
        # no other global, may see another numpy. CuPy asks for the builtins.
        return types.FunctionType(
            function.__code__,
            {'__builtins__': builtins, 'numpy': _Overlay(numpy, float=float)},
        )

    _wrap(module, 'compute_indices_and_weights', wrap)


def _patch_categorical() -> None:
    """Lets Categorical.log_prob append to what meshgrid returns.

    It is a tuple since NumPy 2.
    """
    module = _chainer_module('distributions.categorical')
    if isinstance(module.numpy, _Overlay):
        return

    @functools.wraps(numpy.meshgrid)
    def meshgrid(*args: Any, **kwargs: Any) -> list[Any]:
        return list(numpy.meshgrid(*args, **kwargs))

    module.numpy = _Overlay(numpy, meshgrid=meshgrid)


def _patch_pad_sequence() -> None:
    """Lets pad_sequence pad with a number outside the range of an integer dtype.

    -1 in uint8 is 255, as it was before NumPy 2 refused it.
    """

    def wrap(forward: Any) -> Any:
        def forward_with_cast_padding(self: Any, xs: Any) -> Any:
            padding, dtype = self.padding, xs[0].dtype
            if isinstance(padding, int) and dtype.kind in 'iu':
                self.padding = numpy.asarray(padding).astype(dtype)[()]
            try:
                return forward(self, xs)
            finally:
                self.padding = padding

        return forward_with_cast_padding

    module = _chainer_module('functions.array.pad_sequence')
    _wrap(module.PadSequence, 'forward', wrap)


def _patch_mean_squared_error() -> None:
    """Lets mean_squared_error divide float16 by more than 65,504 elements.

    Under NEP 50 the count becomes float16, that is infinity, and the error 0.
    """

    def wrap(forward_cpu: Any) -> Any:
        def forward_cpu_in_double(self: Any, inputs: Any) -> Any:
            if inputs[0].dtype != numpy.float16:
                return forward_cpu(self, inputs)
            self.retain_inputs((0, 1))
            difference = (inputs[0] - inputs[1]).ravel()
            total = numpy.float64(difference.dot(difference))
            return (numpy.array(total / difference.size, dtype=numpy.float16),)

        return forward_cpu_in_double

    module = _chainer_module('functions.loss.mean_squared_error')
    _wrap(module.MeanSquaredError, 'forward_cpu', wrap)


def _patch_multiprocess_updater() -> None:
    """Lets the kernels of MultiprocessParallelUpdater know the type float16.

    Since CuPy 14 only kernels with such arguments get its header.
    """
    module = _chainer_module('training.updaters.multiprocess_parallel_updater')
    if isinstance(module.cuda, _Overlay):
        return
    elementwise = module.cuda.elementwise

    @functools.wraps(elementwise)
    def elementwise_with_float16(*args: Any, **options: Any) -> Any:
        folder = os.path.dirname(module.cuda.cupy.__file__)
        if os.path.exists(os.path.join(folder, '_core', 'include', _FLOAT16)):
            options.setdefault('preamble', f'#include <{_FLOAT16}>')
        return elementwise(*args, **options)

    module.cuda = _Overlay(module.cuda, elementwise=elementwise_with_float16)


def _accept_cupy_without_cudnn() -> None:
    """Stops Chainer's advice to install cuDNN for a CuPy that cannot use it.

    It does what ``CHAINER_CUDNN=0`` does. The variable itself would also reach
    child processes, whose CuPy may have cuDNN.
    """
    cuda = sys.modules.get('chainer.backends.cuda')
    if not getattr(cuda, 'available', False) or 'CHAINER_CUDNN' in os.environ:
        return
    if not cupy_can_use_cudnn():
        vars(cuda)['_cudnn_disabled_by_user'] = True
