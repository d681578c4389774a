"""Base lines of memory tests: one versioned JSON file with the peaks of all tests."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.extras.memory_tests.measured_peak import describe_bytes
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.peak import Peak
from chainer_hybridmem.units import format_bytes, parse_bytes

FORMAT = 'chainer_hybridmem/memory-baselines'
VERSION = 1
REPAIR = 'Restore the file, or remove it and run pytest --hybridmem-update.'


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The peak of one test, as it was.

    Attributes:
        peak_bytes (int): Its bytes.
        functions (dict): Bytes by layer and what they are at that moment.
    """

    peak_bytes: int
    functions: dict[str, dict[str, int]]


def load(path: str) -> dict[str, Baseline]:
    """Reads base lines by the id of their test; none if there is no file.

    Raises:
        FormatError: If the file holds something else.
    """
    if not os.path.exists(path):
        return {}
    try:
        text = files.read_text(path)
        with files.named(path):
            return _parse(files.parse(text, FORMAT, VERSION))
    except FormatError as error:
        raise FormatError(f'{error} {REPAIR}') from error


def _parse(body: dict[str, Any]) -> dict[str, Baseline]:
    tests = body.get('tests')
    if not isinstance(tests, dict):
        raise FormatError("It has no object 'tests' with the base lines.")
    return {test: _parse_baseline(test, entry) for test, entry in tests.items()}


def _parse_baseline(test: str, entry: Any) -> Baseline:
    try:
        functions = {
            layer: {what: _size(nbytes) for what, nbytes in parts.items()}
            for layer, parts in entry['functions'].items()
        }
        return Baseline(_size(entry['peak_bytes']), functions)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f'The base line of {test} cannot be used ({type(error).__name__}: {error}).'
        ) from error


def _size(nbytes: Any) -> int:
    if type(nbytes) is not int or nbytes < 0:
        raise ValueError(f'{nbytes!r} is no number of bytes')
    return nbytes


def save(path: str, changed: Mapping[str, Baseline]) -> None:
    """Writes base lines over those of the same tests; others stay.

    Raises:
        FormatError: If the file holds something else, or cannot be written.
    """
    tests = {**load(path), **changed}
    entries = {test: dataclasses.asdict(tests[test]) for test in sorted(tests)}
    body = {'format': FORMAT, 'version': VERSION, 'tests': entries}
    library.write_text(path, json.dumps(body, indent=1) + '\n')


def allowed_growth(tolerance: str | float, peak_bytes: int) -> int:
    """Bytes that a peak may grow by.

    Args:
        tolerance: A size, or a percentage such as ``'1%'``.
        peak_bytes: Of the base line.

    Raises:
        OptionError: If it is neither.
    """
    return parse_bytes(tolerance, 'tolerance', least=0, whole_bytes=peak_bytes)


def describe_growth(
    peak: Peak, before: Baseline, tolerance: str | float, path: str
) -> str | None:
    """Why a test fails that needs more than its base line; None if it does not.

    Args:
        peak: Measured now.
        before: Its base line.
        tolerance: As for :func:`allowed_growth`.
        path: The file of base lines.

    Raises:
        OptionError: If the tolerance cannot be used.
    """
    more = peak.nbytes - before.peak_bytes
    if more <= allowed_growth(tolerance, before.peak_bytes):
        return None
    growth = peak.describe_growth(before.functions)
    lines = [
        f'The peak has grown by {describe_bytes(more)}: {format_bytes(peak.nbytes)}, '
        f'and {format_bytes(before.peak_bytes)} in {path}.',
        *(f'  {line}' for line in growth),
        'If this is intended: pytest --hybridmem-update',
    ]
    return '\n'.join(lines)
