"""Aligned text for terminals: tables, and lists of named values."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_count, format_seconds

UNKNOWN = '-'
UNITS: dict[str, Callable[[Any], str]] = {
    'bytes': format_bytes,
    'seconds': format_seconds,
    'rate': lambda bytes_per_second: f'{format_bytes(bytes_per_second)}/s',
    'share': '{:.1%}'.format,
    'difference': '{:+.1%}'.format,
}


class Row(NamedTuple):
    """A row of named values.

    Attributes:
        name (str): What stands before the value.
        text (str): The value: figures in braces by key and unit, such as
            ``'{peak_bytes:bytes}'``. A unit is one of ``UNITS`` or the noun of what is
            counted.
        given (str): Key of a figure; there is no row where it is nothing.
    """

    name: str
    text: str
    given: str = ''


class _Figures(string.Formatter):
    """Formats figures with units.

    Args:
        missing: What is said of a figure that is None, by unit.
    """

    def __init__(self, missing: Mapping[str, str]) -> None:
        self._missing = missing

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return self._missing.get(format_spec, UNKNOWN)
        if format_spec in UNITS:
            return UNITS[format_spec](value)
        return format_count(value, format_spec) if format_spec else str(value)


def told(
    rows: Sequence[Row],
    figures: Mapping[str, Any],
    missing: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:
    """Names and values, for :func:`named_values`.

    Args:
        rows: In this order.
        figures: By key.
        missing: What is said of a figure that is None, by unit; else ``UNKNOWN``.
    """
    formatter = _Figures(missing or {})
    return [
        (row.name, formatter.vformat(row.text, (), figures))
        for row in rows
        if not row.given or figures[row.given]
    ]


class Column(NamedTuple):
    """A column of a table of figures, each row of which is a mapping.

    Attributes:
        name (str): Its header.
        key (str): Of the figure.
        unit (str or callable): One of ``UNITS``, or what makes text of the figure; what
            is None or missing is ``UNKNOWN``.
    """

    name: str
    key: str
    unit: str | Callable[[Any], str] = str

    def cell(self, row: Mapping[str, Any]) -> str:
        """The figure of one row for people."""
        figure = row.get(self.key)
        if figure is None:
            return UNKNOWN
        return (self.unit if callable(self.unit) else UNITS[self.unit])(figure)


def figures_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats figures; see :func:`table`.

    A row that does not fit has its reason in short, ``row['why']``, in the second
    column.
    """
    cells = [[column.cell(row) for column in columns] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        line[1] = row.get('why', line[1])
    return table([column.name for column in columns], cells)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Formats rows under headers, with a line between them.

    Args:
        headers: Name of each column.
        rows: Cells; every row has as many as there are headers.
        left: How many columns, from the first, are aligned to the left. The others
            hold numbers and are aligned to the right.

    Returns:
        str: Several lines, the last without a line break.

    >>> print(table(['planner', 'swap'], [['in-core', '0'], ['swap-all', '23']]))
    planner   swap
    --------  ----
    in-core      0
    swap-all    23
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)
    ]
    ruler = ['-' * width for width in widths]
    return '\n'.join(_line(cells, widths, left) for cells in (headers, ruler, *rows))


def named_values(title: str, values: Sequence[tuple[str, str]]) -> str:
    """Formats a title and below it one ``name  value`` a line.

    Returns:
        str: Several lines, the last without a line break.

    >>> print(named_values('a plan', [('peak', '1.5 GiB'), ('overhead', '+3.0%')]))
    a plan
    ------
    peak      1.5 GiB
    overhead  +3.0%
    """
    title = printable(title)
    values = [(printable(name), printable(value)) for name, value in values]
    width = max((len(name) for name, _ in values), default=0)
    lines = [f'{name:<{width}}  {value}'.rstrip() for name, value in values]
    return '\n'.join([title, '-' * len(title), *lines])


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = [
        f'{cell:<{width}}' if column < left else f'{cell:>{width}}'
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return '  '.join(padded).rstrip()
