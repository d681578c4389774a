"""Values of the planners' options, checked before anything is recorded or planned."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from chainer_hybridmem.errors import OptionError


class _Range(NamedTuple):
    """Where the values of an option lie: from ``least`` on, below ``end``."""

    whole: bool
    least: float
    end: float
    rule: str
    optional: bool = False


_COUNTED = 2**62  # sums of some still are 64-bit numbers
_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_LONGEST = 1e9  # seconds
_SECONDS = 'is in seconds and must be positive'
_RANGES = {
    'node_budget': _Range(True, 1, _COUNTED, 'must be above zero'),
    'steps': _Range(True, 0, _COUNTED, 'must not be negative', optional=True),
    'time_budget': _Range(False, _ABOVE_ZERO, _LONGEST, _SECONDS, optional=True),
    'tolerance': _Range(False, 0, math.inf, 'must not be negative'),
    'smallest_bytes': _Range(True, 0, _COUNTED, 'must not be negative'),
    'evaluations': _Range(True, 1, 10_000, 'must be above zero'),
    'seed': _Range(True, 0, _COUNTED, 'must not be negative'),
    'rehearsals': _Range(True, 0, _COUNTED, 'must not be negative'),
    'margin': _Range(False, 0, math.inf, 'must not be negative'),
    'segments': _Range(True, 1, _COUNTED, 'must be above zero', optional=True),
    'most_lower_sets': _Range(True, 1, _COUNTED, 'must be above zero'),
    'time_limit': _Range(False, _ABOVE_ZERO, _LONGEST, _SECONDS),
}


def checked(option: str, value: Any) -> Any:
    """The value as a plain number, or None where that is one of the values.

    Raises:
        OptionError: If it is not a number of the kind and range of this option.
    """
    if option not in _RANGES:
        return value
    allowed = _RANGES[option]
    if value is None and allowed.optional:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or (allowed.whole and value % 1 != 0):
        needed = 'a whole number' if allowed.whole else 'a number'
        needed += ' or None' if allowed.optional else ''
        raise OptionError(f'{option} is {value!r}; {needed} is needed.')
    if value >= allowed.end:
        raise OptionError(f'{option} must be below {allowed.end:g}; {value} was given.')
    if not value >= allowed.least:
        raise OptionError(f'{option} {allowed.rule}; {value} was given.')
    return int(value) if allowed.whole else float(value)
