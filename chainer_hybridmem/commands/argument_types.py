"""Values of arguments: text of the command line, turned into what it means.

Every function raises ``argparse.ArgumentTypeError`` for text that it cannot read.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.reporting.rows import in_core_row
from chainer_hybridmem.units import (
    format_apart,
    is_percentage,
    parse_bandwidth,
    parse_bytes,
)

if TYPE_CHECKING:
    from chainer_hybridmem.simulation import Problem

FEWEST_BYTES = 101  # a number without a unit below it is surely meant with one


def positive(text: str) -> int:
    """Turns an argument into an integer above zero."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number above zero')
    return number


def ranks(text: str) -> int:
    """Turns an argument into a number of processes on one link."""
    from chainer_hybridmem.records.sharing import check_ranks

    try:
        return check_ranks(positive(text), 'it')
    except OptionError as error:
        raise argparse.ArgumentTypeError(f'{text!r}: {error}') from error


def size(text: str) -> int:
    """Turns an argument such as ``16GB`` into bytes."""
    number = _bytes_of(text)
    if text.strip().isdigit() and number < FEWEST_BYTES:
        raise argparse.ArgumentTypeError(
            f'{text!r} would be {number} bytes; name a unit: {text.strip()}GB'
        )
    return number


def _bytes_of(text: str, whole_bytes: int | None = None) -> int:
    try:
        return parse_bytes(text, whole_bytes=whole_bytes)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def host_size(text: str) -> int:
    """Turns an argument such as ``8GiB``, or 0, into bytes."""
    try:
        return parse_bytes(text, least=0)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def bandwidth(text: str) -> float:
    """Turns an argument such as ``2GB/s`` into bytes per second."""
    try:
        return parse_bandwidth(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def above_zero(text: str) -> float:
    """Turns an argument into a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number above zero')
    return number


def share(text: str) -> float:
    """Turns an argument such as ``80%`` into a share in (0, 1]."""
    try:
        number = float(text[:-1]) / 100 if text.endswith('%') else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a share such as 80% or 0.8')
    return number


def splitting(text: str) -> bool | str:
    """Turns an argument into what ``splitting`` is for :func:`make_problem`."""
    values: dict[str, bool | str] = {'exact': 'exact', 'true': True, 'false': False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f'{text!r} is not one of {", ".join(values)}')
    return values[text.lower()]


def rule(text: str) -> tuple[str, str]:
    """Splits an argument ``pattern=rule``."""
    from chainer_hybridmem.errors import OptionError
    from chainer_hybridmem.records.rules import check_rules

    pattern, separator, says = text.rpartition('=')
    if not separator or not pattern.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form PATTERN=RULE, such as '*/conv1/*=keep'"
        )
    try:
        (checked,) = check_rules([(pattern.strip(), says)])
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return checked.pair


class Limit:
    """A memory limit: a number of bytes, or a share of the in-core peak.

    Args:
        text: Such as ``'16GB'`` or ``'50%'``.

    Raises:
        ArgumentTypeError: If it is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        nbytes = self.bytes_of(1)
        if self.text.isdigit() and nbytes < FEWEST_BYTES:
            raise argparse.ArgumentTypeError(
                f'{self.text!r} would be {self.text} bytes; write {self.text}% for '
                f'a share of the in-core peak, or name a unit: {self.text}GB'
            )

    @property
    def is_share(self) -> bool:
        """Whether it is a share of the in-core peak."""
        return is_percentage(self.text)

    def bytes_of(self, peak_bytes: int) -> int:
        """The limit in bytes where plain Chainer needs so many."""
        return _bytes_of(self.text, peak_bytes)

    def bytes_for(self, problem: Problem) -> int:
        """The limit in bytes for one profile."""
        return self.bytes_of(problem.in_core_peak_bytes)

    def describe(self, problem: Problem) -> str:
        """The limit for people, next to the in-core peak it is to be seen with."""
        limit, peak = self.bytes_for(problem), problem.in_core_peak_bytes
        share = f'{limit / peak:.0%} of the ' if peak else ''
        limit_text, peak_text = format_apart(limit, peak)
        name, _ = in_core_row(problem.in_core.plain_peak_bytes, peak)
        return f'{limit_text}, {share}{name} of {peak_text}'
