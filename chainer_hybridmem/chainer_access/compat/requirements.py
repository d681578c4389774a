"""What Chainer asks of ``pkg_resources``, which setuptools 82 no longer has."""

from __future__ import annotations

import importlib.metadata
import re
import types
from collections.abc import Callable
from typing import Any


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
    """Makes a module with the names of ``pkg_resources`` that Chainer uses."""
    stub = types.ModuleType('pkg_resources')
    vars(stub).update(
        require=require,
        get_distribution=importlib.metadata.distribution,
        WorkingSet=WorkingSet,
        ResolutionError=ResolutionError,
        DistributionNotFound=DistributionNotFound,
        VersionConflict=VersionConflict,
    )
    return stub
