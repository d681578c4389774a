"""Which values an option of a planner takes."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any, NamedTuple, Protocol

from chainer_hybridmem.errors import OptionError


def read_value(text: str) -> Any:
    """A number or None, if a text looks so; else the text."""
    if text.lower() == 'none':
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Option(Protocol):
    """What checks the values of one option."""

    def check(self, name: str, value: Any) -> Any:
        """Returns the value as a plain one.

        Raises:
            OptionError: If the option cannot have this value.
        """
        ...


class Number(NamedTuple):
    """A number from ``least`` on, below ``end``.

    Attributes:
        rule (str): What an error says about a number below ``least``.
        least (float): The smallest value.
        end (float): What every value is below.
        whole (bool): Whether it is an integer.
        optional (bool): Whether None is a value, too.
    """

    rule: str
    least: float
    end: float
    whole: bool = True
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or (self.whole and value % 1 != 0):
            needed = 'a whole number' if self.whole else 'a number'
            needed += ' or None' if self.optional else ''
            raise OptionError(f'{name} is {value!r}; {needed} is needed.')
        if value >= self.end:
            raise OptionError(f'{name} must be below {self.end:g}; {value} was given.')
        if not value >= self.least:
            raise OptionError(f'{name} {self.rule}; {value} was given.')
        return int(value) if self.whole else float(value)


_COUNTED = 2**62  # sums of some still are 64-bit numbers
_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_LONGEST = 1e9  # seconds

POSITIVE = Number('must be above zero', 1, _COUNTED)
COUNT = Number('must not be negative', 0, _COUNTED)
SHARE = Number('must not be negative', 0, math.inf, whole=False)
SECONDS = Number(
    'is in seconds and must be positive', _ABOVE_ZERO, _LONGEST, whole=False
)
