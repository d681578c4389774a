"""Sizes and rates as people write them, and back.

Inside the package bytes are ``int`` and seconds are ``float``; text is parsed
and produced only here. ``GiB`` is 2**30, ``GB`` is 10**9.
"""

from __future__ import annotations

import re

from chainer_hybridmem.errors import OptionError

_PATTERN = re.compile(r'\s*([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*')
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
}


def parse_bytes(value: str | int | float, name: str = 'size', least: int = 1) -> int:
    """Turns ``'16GiB'``, ``'500 MB'`` or a number into bytes.

    Args:
        value: Text with a unit, or a number of bytes.
        name: What the value is, for the error message.
        least: The smallest number that will do.

    Returns:
        int: Bytes, ``least`` or more.

    Raises:
        OptionError: If the value cannot be read or is too small.
    """
    example = "'16GiB' (2**30) or '16GB' (10**9)"
    return int(_parse(value, name, 'size', example, least))


def _parse(
    value: str | int | float, name: str, what: str, example: str, least: int = 1
) -> float:
    number: float
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        factor = _FACTORS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            raise OptionError(
                f'{name} {value!r} is not a {what}; write bytes or a number with a '
                f'unit such as {example}.'
            )
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
    """Turns ``'12GB/s'`` or a number of bytes per second into a float."""
    if isinstance(value, str):
        value = re.sub(r'\s*/\s*s(ec)?\s*$', '', value)
    return _parse(value, name, 'bandwidth', "'2GB/s'")


def format_bytes(nbytes: float) -> str:
    """Bytes for people, in binary units: ``'1.50 GiB'``."""
    size = float(nbytes)
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if abs(size) < 1024:
            return f'{size:.0f} B' if unit == 'B' else f'{size:.1f} {unit}'
        size /= 1024
    return f'{size:.2f} TiB'


def format_bound(bound_seconds: float, gap: float) -> str:
    """A proven lower bound and a plan's distance from it: ``'1.200 s (gap 3.4%)'``."""
    return f'{format_seconds(bound_seconds)} (gap {gap:.1%})'


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``'1.234 s'``, ``'12.3 ms'`` or ``'45.6 us'``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f'{seconds:.3f} s'
    if abs(seconds) >= 1e-3:
        return f'{seconds * 1e3:.1f} ms'
    return f'{seconds * 1e6:.1f} us'
