"""Stand-ins for what Chainer imports and what is gone; each one is a context."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy

from chainer_hybridmem.chainer_access.compat.requirements import make_pkg_resources


def list_scalar_types() -> dict[str, list[type]]:
    """Returns what ``numpy.sctypes`` was: scalar types by kind."""
    return {
        'int': [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
        'uint': [numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64],
        'float': [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
        'complex': [numpy.complex64, numpy.complex128, numpy.clongdouble],
        'others': [bool, object, bytes, str, numpy.void],
    }


def stand_in_for_sctypes() -> AbstractContextManager[None]:
    """Stands in for ``numpy.sctypes``, which is gone with NumPy 2."""
    return numpy_attribute('sctypes', list_scalar_types())


@contextlib.contextmanager
def stand_in_for_distutils() -> Iterator[None]:
    """Stands in for ``numpy.distutils``, which is gone with Python 3.12.

    Chainer asks it, on macOS only, whether NumPy was built with Accelerate.
    """
    distutils = types.ModuleType('numpy.distutils')
    system_info = types.ModuleType('numpy.distutils.system_info')
    vars(system_info)['get_info'] = lambda name: {}
    vars(distutils)['system_info'] = system_info
    stubs = {module.__name__: module for module in (distutils, system_info)}
    with _modules(stubs), numpy_attribute('distutils', distutils):
        yield


def stand_in_for_pkg_resources() -> AbstractContextManager[None]:
    """Stands in for ``pkg_resources``, which setuptools 82 no longer has."""
    return _modules({'pkg_resources': make_pkg_resources()})


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
def numpy_attribute(name: str, value: object) -> Iterator[None]:
    """Gives NumPy an attribute that it does not have."""
    vars(numpy)[name] = value
    try:
        yield
    finally:
        del vars(numpy)[name]
