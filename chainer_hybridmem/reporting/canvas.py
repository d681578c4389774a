"""Picture files: the only place that knows matplotlib is optional."""

from __future__ import annotations

import os
from typing import Any

from chainer_hybridmem.errors import FormatError, OptionError
from chainer_hybridmem.version import describe_installation

_UNITS = (('GiB', 2**30), ('MiB', 2**20), ('KiB', 2**10))


def check(path: str) -> None:
    """Refuses what could not be drawn, before any work is done.

    Raises:
        OptionError: If matplotlib is missing or does not know the kind of picture.
    """
    ending = os.path.splitext(path)[1]
    known = make(1, 1).canvas.get_supported_filetypes()
    if not ending:
        raise OptionError(
            f'{path} does not say which kind of picture it is; name it {path}.png.'
        )
    if ending[1:].lower() not in known:
        raise OptionError(
            f'{path} cannot be drawn: {ending} is none of {", ".join(sorted(known))}.'
        )


def make(width: float, height: float) -> Any:
    """An empty figure of so many inches that keeps its parts apart.

    Raises:
        OptionError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f'Pictures need matplotlib: {describe_installation("plot")}.'
        ) from error
    return Figure(figsize=(width, height), layout='constrained')


def unit_of(highest_bytes: float) -> tuple[str, int]:
    """Name and bytes of the unit for an axis that goes up to so many bytes."""
    return next((unit for unit in _UNITS if highest_bytes >= unit[1]), _UNITS[-1])


def save(figure: Any, path: str) -> None:
    """Writes a figure; the ending of the path says which kind of picture.

    Raises:
        FormatError: If the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        reason = error.strerror or error
        raise FormatError(f'{path} cannot be written: {reason}.') from error
