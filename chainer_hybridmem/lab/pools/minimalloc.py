"""Traces and layouts as minimalloc's CSV: ``id,lower,upper,size[,offset]``.

Lifetimes are half-open, as here. Files from strangers are bounded and checked. A
carried buffer becomes two rows: the format knows no iterations.
"""

from __future__ import annotations

import csv
import io

import numpy as np

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.layouts.layout import Layout
from chainer_hybridmem.planning.layouts.trace import MOST_BYTES, Trace, from_lifetimes

COLUMNS = ('id', 'lower', 'upper', 'size')
OFFSET = 'offset'
MOST_ROWS = 100_000


def loads(text: str) -> tuple[Trace, tuple[int, ...] | None]:
    """Reads a problem, and its solution if there is a column ``offset``.

    Returns:
        tuple: The trace, and the offset of each buffer or None.

    Raises:
        FormatError: Naming the line and what is wrong with it.
    """
    header, rows = _read_rows(text)
    if not rows:
        raise FormatError('There is a header, but no buffer below it.')
    names = [name for name, _ in rows]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise FormatError(f'Buffer {twice} is there twice.')
    numbers = [row for _, row in rows]
    lower, upper, sizes = ([row[i] for row in numbers] for i in range(3))
    trace = from_lifetimes(sizes, lower, upper, names)
    if OFFSET not in header:
        return trace, None
    return trace, tuple(row[3] for row in numbers)


def _read_rows(text: str) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Names of the columns, and of each row that is not empty its id and numbers."""
    lines = csv.reader(io.StringIO(text))
    rows: list[tuple[str, list[int]]] = []
    try:
        header = [name.strip().lower() for name in next(lines, [])]
        columns = _columns(header)
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if len(rows) == MOST_ROWS:
                raise FormatError(f'There are more than {MOST_ROWS} buffers.')
            rows.append(_row(cells, header, columns, lines.line_num))
    except csv.Error as error:
        raise FormatError(f'Line {lines.line_num}: {error}.') from error
    return header, rows


def dumps(trace: Trace, layout: Layout | None = None) -> str:
    """Writes a trace, and with a layout its offsets."""
    lower, upper = trace.lifetimes()
    if trace.times:
        times = np.array([*trace.times[:1], *trace.times, *trace.times[-1:]])
        lower, upper = times[lower], times[upper]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator='\n')
    writer.writerow([*COLUMNS, OFFSET] if layout else COLUMNS)
    for i, nbytes in enumerate(trace.sizes):
        row = [trace.name(i), int(lower[i]), int(upper[i]), nbytes]
        writer.writerow([*row, layout.offsets[i]] if layout else row)
    return out.getvalue()


def _columns(header: list[str]) -> list[int]:
    """Where each number stands."""
    for name in COLUMNS:
        if name not in header:
            raise FormatError(
                f'The first line lacks column {name!r}; a minimalloc file starts with '
                f'{",".join(COLUMNS)} and perhaps {OFFSET}.'
            )
    for name in header:
        if name not in (*COLUMNS, OFFSET) or header.count(name) > 1:
            raise FormatError(
                f'Column {name!r} is not understood; the columns are '
                f'{", ".join(COLUMNS)} and {OFFSET}.'
            )
    wanted = [*COLUMNS[1:], OFFSET] if OFFSET in header else COLUMNS[1:]
    return [header.index(name) for name in wanted]


def _row(
    cells: list[str], header: list[str], columns: list[int], line: int
) -> tuple[str, list[int]]:
    if len(cells) != len(header):
        raise FormatError(
            f'Line {line} has {len(cells)} values; the first line names {len(header)}.'
        )
    numbers = []
    for column in columns:
        text = cells[column].strip()
        try:
            number = int(text)
        except ValueError:
            number = -1
        if not 0 <= number <= MOST_BYTES:
            raise FormatError(
                f'Line {line}: {header[column]} is {text[:40]!r}; a whole number from '
                f'0 to 2**53 was expected.'
            )
        numbers.append(number)
    return cells[header.index('id')].strip(), numbers
