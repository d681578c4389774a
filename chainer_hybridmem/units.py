"""Sizes and rates as people write them, and back.

Inside the package bytes are ``int`` and seconds are ``float``; text is parsed
and produced only here. ``GiB`` and ``G`` are 2**30, ``GB`` is 10**9.
"""

from __future__ import annotations

import contextlib
import math
import re

from chainer_hybridmem.errors import OptionError

_PATTERN = re.compile(r'\s*([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*')
_PERCENTAGE = re.compile(r'\s*([0-9]*\.?[0-9]+)\s*%\s*')
_MOST_PERCENT = 1e6
_LEAST_MEANT = 2**14  # no model trains in less, and no link is as slow
AUTO, FREE = 'auto', 'free'  # limits that are no size; see docs/guide/run.md
_FACTORS = {
    '': 1,
    'b': 1,
    'kb': 10**3,
    'mb': 10**6,
    'gb': 10**9,
    'tb': 10**12,
    'kib': 2**10,
    'mib': 2**20,
    'gib': 2**30,
    'tib': 2**40,
    'k': 2**10,
    'm': 2**20,
    'g': 2**30,
    't': 2**40,
    'ki': 2**10,
    'mi': 2**20,
    'gi': 2**30,
    'ti': 2**40,
}


def parse_bytes(
    value: str | int | float,
    name: str = 'size',
    least: int = 1,
    whole_bytes: int | None = None,
) -> int:
    """Turns ``'16GiB'``, ``'500 MB'``, ``'8G'`` (2**30) or a number into bytes.

    Args:
        value: Text with a unit, a number of bytes or, where there is a whole, a
            percentage of it.
        name: What the value is, for the error message.
        least: The smallest number that will do.
        whole_bytes: What ``'100%'`` is; None if there is no such thing.

    Returns:
        int: Bytes, ``least`` or more.

    Raises:
        OptionError: If the value cannot be read or is too small.
    """
    if is_percentage(value):
        share = _parse_percentage(str(value), name, least)
        if whole_bytes is None:
            raise OptionError(
                f'{name} {value!r} is a percentage, and there is nothing yet that it '
                f'could be a share of: name a size, such as 8GiB. A share of the '
                f'in-core peak is understood by `hybridmem run` and `hybridmem '
                f'verify`, and where there is a profile, by `hybridmem plan` and '
                f'make_plan().'
            )
        return max(least, int(whole_bytes * share))
    example = "'16GiB' (2**30) or '16GB' (10**9)"
    return int(_parse(value, name, 'size', example, least))


def parse_limit(value: str | int | float, name: str = 'memory_limit') -> int:
    """Turns the memory limit of a device into bytes.

    Raises:
        OptionError: If it is no size, or must have been meant with a unit.
    """
    if str(value).strip().lower() == 'auto':
        raise OptionError(
            f'{name} is {value!r}, and only `hybridmem run` looks for a limit: name a '
            "size such as '8GiB' here, or 'free' for all that the device has left."
        )
    number = _read_without_unit(value)
    if 0 < number < _LEAST_MEANT:
        unit = 'GiB' if number <= 512 else 'MiB'
        meant = f'{number:.0%}' if number < 1 else f'{number:g}{unit}'
        raise OptionError(
            f'{name} is {value!r}, which is in bytes. Did you mean {meant!r}?'
        )
    return parse_bytes(value, name)


def _read_without_unit(value: str | int | float) -> float:
    """A number, also as text; NaN if it is none."""
    with contextlib.suppress(ValueError):
        return float(str(value))
    return math.nan


def is_percentage(value: object) -> bool:
    """Whether it is text such as ``'50%'``."""
    return isinstance(value, str) and value.rstrip().endswith('%')


def _parse_percentage(text: str, name: str, least: int) -> float:
    """Turns ``'50%'`` into 0.5."""
    match = _PERCENTAGE.fullmatch(text)
    percentage = float(match.group(1)) if match else -1.0
    if not 0 <= percentage <= _MOST_PERCENT or percentage < min(least, 1e-9):
        rule = 'above zero' if least else 'of zero or more'
        raise OptionError(f'{name} {text!r} is not a percentage {rule}, such as 50%.')
    return percentage / 100


def _parse(
    value: str | int | float, name: str, what: str, example: str, least: int = 1
) -> float:
    number: float
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        factor = _FACTORS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            point = value.replace(',', '.')
            if point != value and _PATTERN.fullmatch(point):
                hint = f'. Did you mean {point.strip()!r}?'
            else:
                hint = f'; write bytes or a number with a unit such as {example}.'
            raise OptionError(f'{name} {value!r} is not a {what}{hint}')
        number = float(match.group(1)) * factor
    else:
        try:
            number = float('nan' if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f'{name} is {value!r}, not a {what} in bytes.') from error
    if number >= 2**62:
        raise OptionError(f'{name} is {value!r}; it must be below 2**62 bytes.')
    if not number >= least:
        rule = 'above zero' if least else 'of zero or more'
        raise OptionError(f'{name} is {value!r}; it must be a {what} {rule}.')
    return number


def parse_bandwidth(value: str | int | float, name: str = 'bandwidth') -> float:
    """Turns ``'12GB/s'`` or a number of bytes per second into a float.

    Raises:
        OptionError: If it is no bandwidth, or must have been meant with a unit.
    """
    if isinstance(value, str):
        value = re.sub(r'\s*/\s*s(ec)?\s*$', '', value)
    number = _read_without_unit(value)
    if 0 < number < _LEAST_MEANT:
        meant = f'{number:g}{"GB" if number <= 64 else "MB"}/s'
        raise OptionError(
            f'{name} is {value!r}, which is in bytes a second. Did you mean {meant!r}?'
        )
    return _parse(value, name, 'bandwidth', "'2GB/s'")


def format_bytes(nbytes: float, digits: int = 1) -> str:
    """Bytes for people, in binary units: ``'1.5 GiB'``.

    Args:
        nbytes: The size.
        digits: After the point; one more for TiB, none for bytes.
    """
    size = float(nbytes)
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if abs(size) < 1024:
            return f'{size:.0f} B' if unit == 'B' else f'{size:.{digits}f} {unit}'
        size /= 1024
    return f'{size:.{digits + 1}f} TiB'


def format_enough(nbytes: int) -> str:
    """At least so many bytes, for people and :func:`parse_bytes`: ``'27.2 MiB'``.

    Args:
        nbytes: Rounded up to three digits.
    """
    factor, units = 1, ('B', 'KiB', 'MiB', 'GiB', 'TiB')
    for unit in units:
        for digits in (0,) if unit == 'B' else (2, 1, 0):
            scaled = -(-nbytes * 10**digits // factor)
            if scaled < 1000:
                break
        if scaled < 1024 or unit == units[-1]:
            break
        factor *= 1024
    return f'{scaled / 10**digits:.{digits}f} {unit}'


def format_apart(*sizes: float) -> list[str]:
    """Bytes for people, exactly enough that different sizes look different.

    >>> format_apart(16 * 2**30, 16 * 2**30 + 2**20)
    ['16.000 GiB', '16.001 GiB']
    """
    for digits in (1, 2, 3, 4, 5, 6):
        texts = [format_bytes(size, digits) for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            return texts
    return [f'{size:.0f} B' for size in sizes]


def format_count(number: int, one: str, several: str | None = None) -> str:
    """A number of things: ``'1 plan'``, ``'2 plans'``.

    Args:
        number: How many.
        one: The word for one of them.
        several: The word for more or none; None if it only has an ``s`` more.
    """
    return f'{number} {one if number == 1 else several or one + "s"}'


def format_bound(bound_seconds: float, gap: float) -> str:
    """A proven lower bound and a plan's distance from it: ``'1.200 s (gap 3.4%)'``."""
    return f'{format_seconds(bound_seconds)} (gap {format_gap(gap)})'


def format_gap(gap: float) -> str:
    """A distance from a bound, which rounding alone may put below zero: ``'3.4%'``."""
    return f'{round(gap, 3) + 0.0:.1%}'


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``'1.234 s'``, ``'12.3 ms'`` or ``'45.6 us'``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f'{seconds:.3f} s'
    if abs(seconds) >= 1e-3:
        return f'{seconds * 1e3:.1f} ms'
    return f'{seconds * 1e6:.1f} us'
