"""How the tables of the results are written: cells, tables and sections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Body = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Section:
    """One table in full, with how to read it.

    Attributes:
        names (tuple of str): Result files, without their ending.
        title (str): Its heading.
        text (str): What the table shows, and how to read it. Links lead from ``docs``.
        render (callable): Takes the content of each file, returns Markdown.
    """

    names: tuple[str, ...]
    title: str
    text: str
    render: Callable[..., str]


@dataclasses.dataclass(frozen=True)
class Summary:
    """One table of ``docs/results.md``: the rows that answer a user's question.

    Attributes:
        names (tuple of str): Result files, without their ending.
        title (str): Its heading.
        says (callable): Takes the content of each file, returns what the table says.
        render (callable): Takes the content of each file, returns Markdown.
        details (tuple of str): Titles of the sections that have it in full.
    """

    names: tuple[str, ...]
    title: str
    says: Callable[..., str]
    render: Callable[..., str]
    details: tuple[str, ...]


def anchor(title: str) -> str:
    """Returns the anchor that a code host gives a heading."""
    return re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-')


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; None is an empty cell.

    Args:
        head: Names of the columns.
        rows: Cells of each row.
    """
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(map(_cell, line))} |' for line in lines)


def _cell(value: object) -> str:
    return '' if value is None else str(value).replace('|', '\\|')


def percent(share: float | None, digits: int = 1) -> str | None:
    """Returns a share such as 0.123 as ``12.3 %``."""
    return None if share is None else f'{100 * share:.{digits}f} %'


def overhead(share: float | None, digits: int = 1) -> str | None:
    """Returns time over a reference, minus 1, with its sign; ``none`` if infinite."""
    if share is None:
        return None
    if share == float('inf'):
        return 'no plan'
    return f'{100 * share:+.{digits}f} %'


def seconds(value: float | None, digits: int = 2) -> str | None:
    """Returns seconds with a fixed number of digits."""
    return None if value is None else f'{value:.{digits}f}'


def megabytes(nbytes: float | None, digits: int = 0) -> str | None:
    """Returns bytes in units of 10^6 bytes."""
    return None if nbytes is None else f'{nbytes / 1e6:,.{digits}f} MB'


def gigabytes(nbytes: float | None, digits: int = 1) -> str | None:
    """Returns bytes in units of 10^9 bytes."""
    return None if nbytes is None else f'{nbytes / 1e9:.{digits}f} GB'


def yes(value: bool) -> str:
    """Returns yes or no."""
    return 'yes' if value else 'no'


def ratio(value: float | None, digits: int = 2) -> str | None:
    """Returns a ratio such as ``1.25x``."""
    return None if value is None else f'{value:.{digits}f}x'


def actions(row: Body) -> str:
    """Returns the numbers of maps that a plan keeps, swaps and recomputes."""
    return f'{row["keep"]} / {row["swap"]} / {row["recompute"]}'
