"""When Chainer is repaired: around its import, or at once if it is imported.

:func:`prepare` comes before the import and :func:`patch_chainer` after it;
:func:`install` has both done around Chainer's import, whenever that comes.

What repairs is imported then: ``import chainer_hybridmem`` imports not even NumPy.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator

from chainer_hybridmem.training.chainer_access.compat import chainermn
from chainer_hybridmem.training.chainer_access.compat.cuda import (
    accept_cupy_without_cudnn,
    cupy_can_use_cudnn,
    load_libraries,
)
from chainer_hybridmem.training.chainer_access.compat.import_wrapper import (
    ImportWrapper,
)
from chainer_hybridmem.training.cudnn import modules as cudnn_modules

CHAINER = 'chainer'
# What is in place between prepare() and the end of Chainer's import.
_temporary = contextlib.ExitStack()
_prepared = False
_awaiting: list[Callable[[], None]] = []  # the end of Chainer's import


def install() -> None:
    """Has Chainer repaired: at once if it is imported, else when it will be.

    It imports nothing itself. Deprecations that Chainer's own import raises are then
    not shown, whatever the warning filters say; afterwards the filters are the
    user's again. chainercv and ChainerMN's kernels are repaired likewise. A CuPy
    without modules for cuDNN gets them.
    """
    cudnn_modules.install()
    ImportWrapper.install('chainercv', _repaired_chainercv)
    ImportWrapper.install(chainermn.NAME, chainermn.repaired)
    ImportWrapper.install('onnx_chainer', _repaired_exporter)
    if CHAINER in sys.modules:
        patch_chainer()
        _tell_what_comes_too_late()
    else:
        ImportWrapper.install(CHAINER, _repaired_import)


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
    """Puts in place what ``import chainer`` needs, and does not find or finds slowly.

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
    from chainer_hybridmem.training.chainer_access.compat import patches

    end_preparation()
    patches.patch_all()
    if chainermn.NAME in sys.modules:
        chainermn.repair()
    accept_cupy_without_cudnn()
    while _awaiting:
        _awaiting.pop(0)()


def after_import(act: Callable[[], None], name: str = CHAINER) -> None:
    """Calls something once a module is imported; at once if it is.

    Args:
        act: Is called.
        name: Of the module. Chainer is repaired then.
    """
    if name in sys.modules:
        act()
    elif name == CHAINER:
        _awaiting.append(act)
    else:
        ImportWrapper.install(name, lambda: _followed_by(act))


@contextlib.contextmanager
def _followed_by(act: Callable[[], None]) -> Iterator[None]:
    yield
    act()


def _tell_what_comes_too_late() -> None:
    """Of a Chainer that is imported already, all but one thing can be repaired."""
    cuda = sys.modules.get('chainer.backends.cuda')
    wanted = getattr(cuda, 'available', False) and cupy_can_use_cudnn()
    refused = os.environ.get('CHAINER_CUDNN') == '0'
    if wanted and not getattr(cuda, 'cudnn_enabled', True) and not refused:
        warnings.warn(
            'hybridmem: Chainer was imported before chainer_hybridmem and has not '
            'found cuDNN, which cannot be made up for: import chainer_hybridmem first.',
            stacklevel=4,
        )


@contextlib.contextmanager
def _repaired_import() -> Iterator[None]:
    _forget_failed_import()
    _begin_preparation()
    try:
        with _chainer_import_noise_ignored():
            yield
    finally:
        end_preparation()
    patch_chainer()


@contextlib.contextmanager
def _repaired_chainercv() -> Iterator[None]:
    from chainer_hybridmem.training.chainer_access.compat import chainercv

    with chainercv.repaired():
        yield


@contextlib.contextmanager
def _repaired_exporter() -> Iterator[None]:
    from chainer_hybridmem.training.chainer_access.compat import onnx

    with onnx.repaired():
        yield


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
    import numpy

    from chainer_hybridmem.training.chainer_access.compat import stand_ins

    if not hasattr(numpy, 'sctypes'):
        _temporary.enter_context(stand_ins.stand_in_for_sctypes())
    # To import these two, where they are there, takes a third of Chainer's import.
    needless = sys.platform != 'darwin' and 'numpy.distutils' not in sys.modules
    if needless or not _can_import('numpy.distutils.system_info'):
        _temporary.enter_context(stand_ins.stand_in_for_distutils())
    if 'pkg_resources' not in sys.modules:
        _temporary.enter_context(stand_ins.stand_in_for_pkg_resources())
        # chainer.testing needs it too, but chainer does not import that itself.
        ImportWrapper.install('chainer.testing', stand_ins.stand_in_for_pkg_resources)
    load_libraries()
    # The modules that are imported after this one make Chainer give its advice.
    ImportWrapper.install('chainer.backends.cuda', _without_needless_advice)


def end_preparation() -> None:
    """Takes away what :func:`prepare` has put in place."""
    global _prepared
    _temporary.close()
    _prepared = False


@contextlib.contextmanager
def _without_needless_advice() -> Iterator[None]:
    yield
    accept_cupy_without_cudnn()


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
