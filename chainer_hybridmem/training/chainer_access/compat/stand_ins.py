"""Stand-ins for what Chainer imports and what is gone; each one is a context."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy


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
    """Stands in for ``pkg_resources``: slow to import, and gone with setuptools 82."""
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


def make_pkg_resources() -> types.ModuleType:
    """Makes a module with the names of ``pkg_resources`` that Chainer uses.

    Who asks it for another name gets that of the real one, which then takes its place.
    """
    stub = types.ModuleType('pkg_resources')

    def find_real(name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        stands_in = sys.modules.get('pkg_resources') is stub
        if stands_in:
            del sys.modules['pkg_resources']
        try:
            real = importlib.import_module('pkg_resources')
        except ImportError as error:
            if stands_in:
                sys.modules['pkg_resources'] = stub
            raise AttributeError(name) from error
        return getattr(real, name)

    vars(stub).update(
        require=require,
        get_distribution=importlib.metadata.distribution,
        WorkingSet=WorkingSet,
        ResolutionError=ResolutionError,
        DistributionNotFound=DistributionNotFound,
        VersionConflict=VersionConflict,
        __getattr__=find_real,
    )
    return stub
