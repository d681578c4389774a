"""Planners side by side, as tables.

A row is a dict as :func:`chainer_hybridmem.commands.compare.compare_one` makes it,
with ``profile`` and ``memory_limit_bytes``. A case is a profile under a limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from chainer_hybridmem.reporting.tables import (
    UNKNOWN,
    Column,
    difference,
    figures_table,
    share,
    table,
)
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_seconds

Row = dict[str, Any]
Case = tuple[str, int]

PREDICTED = (
    Column('overhead', 'overhead', difference),
    Column('bound', 'lower_bound_seconds', format_seconds),
    Column('gap', 'gap', share),
    Column('peak', 'peak_bytes', format_bytes),
    Column('host', 'host_bytes', format_bytes),
)
DISK = Column('disk', 'disk_bytes', format_bytes)  # shown where there is one
COLUMNS = (
    Column('planner', 'planner'),
    Column('s / iteration', 'iteration_seconds', format_seconds),
    *PREDICTED,
    DISK,
    Column('keep', 'keep'),
    Column('swap', 'swap'),
    Column('recompute', 'recompute'),
    Column('planning', 'planning_seconds', format_seconds),
    Column('simulations', 'simulations'),
)
SUMMARY_HEADERS = ('planner', 'fits', 'time / bound', 'fastest', 'longest planning')
# Plans this close count as equally fast: searches stop at such a gap to the bound.
TIE = 1e-4


def comparison(rows: Sequence[Row]) -> str:
    """A table of planners, and below it why some do not fit."""
    reasons = dict.fromkeys(row['reason'] for row in rows if not row['fits'])
    disk = any(row['disk_bytes'] for row in rows)
    columns = [column for column in COLUMNS if disk or column is not DISK]
    told = figures_table(columns, [with_reason(row) for row in rows])
    return '\n'.join([told, *map(printable, reasons)])


def with_reason(row: Row) -> Row:
    """A row that says in short why there is no plan, if there is none."""
    if row['fits']:
        return row
    return {**row, 'why': 'failed' if row['failed'] else 'does not fit'}


def sweep(rows: Sequence[Row], peak_bytes: int) -> str:
    """A table of one profile: overheads of planners, with a column for each limit.

    Args:
        rows: Of all limits.
        peak_bytes: In-core peak; limits are shown as a share of it, too.
    """
    cases = [found for _, found in sorted(by_case(rows).items())]
    limits = [found[0]['memory_limit_bytes'] for found in cases]
    shares = [f'{limit / peak_bytes:.0%}' if peak_bytes else '' for limit in limits]
    columns = [{row['planner']: _overhead(row) for row in found} for found in cases]
    cells = [['of the in-core peak', *shares], ['lower bound', *map(_bound, cases)]]
    for planner in dict.fromkeys(row['planner'] for row in rows):
        cells.append([planner, *(column[planner] for column in columns)])
    told = table(['overhead at a limit of', *map(format_bytes, limits)], cells)
    if all(row['fits'] for row in rows):
        return told
    return f'{told}\n{UNKNOWN}: does not fit; the table of that limit says why'


def _bound(rows: Sequence[Row]) -> str:
    seconds, in_core = bound_seconds(rows), rows[0]['in_core_seconds']
    if seconds is None or not in_core:
        return UNKNOWN
    return f'{seconds / in_core - 1:+.1%}'


def _overhead(row: Row) -> str:
    if row['fits']:
        return difference(row['overhead'])
    return 'failed' if row['failed'] else UNKNOWN


def by_case(rows: Sequence[Row]) -> dict[Case, list[Row]]:
    """The rows of each profile and limit."""
    cases: dict[Case, list[Row]] = {}
    for row in rows:
        cases.setdefault((row['profile'], row['memory_limit_bytes']), []).append(row)
    return cases


def bound_seconds(rows: Sequence[Row]) -> float | None:
    """The highest bound proven in one case; None where nothing fits."""
    return max(
        (row['lower_bound_seconds'] for row in rows if row['fits']), default=None
    )


class _Standing(NamedTuple):
    """One planner over all cases."""

    planner: str
    fits: int
    ratio: float
    fastest: int
    planning_seconds: float

    def order(self) -> tuple[int, float, int, str]:
        """Most that fit first, then least time, then most often the fastest."""
        return -self.fits, self.ratio, -self.fastest, self.planner


def summary(rows: Sequence[Row]) -> str:
    """A table over all cases, the best planner first.

    ``time / bound`` is a geometric mean over the cases that the planner fits.
    """
    cases = by_case(rows)
    cells = [_summary_cells(standing, len(cases)) for standing in _standings(rows)]
    return table(SUMMARY_HEADERS, cells)


def rank(rows: Sequence[Row]) -> list[str]:
    """The planners, the best one over all cases first."""
    return [standing.planner for standing in _standings(rows)]


def _standings(rows: Sequence[Row]) -> list[_Standing]:
    cases = list(by_case(rows).values())
    planners = dict.fromkeys(row['planner'] for row in rows)
    standings = [_standing(planner, cases) for planner in planners]
    return sorted(standings, key=_Standing.order)


def _standing(planner: str, cases: Sequence[Sequence[Row]]) -> _Standing:
    ratios, planning, wins = [], [0.0], 0
    for rows in cases:
        fitting = {row['planner']: row for row in rows if row['fits']}
        row = fitting.get(planner)
        if row is None:
            continue
        seconds = row['iteration_seconds']
        ratios.append(seconds / bound_seconds(rows))
        planning.append(row['planning_seconds'])
        best = min(other['iteration_seconds'] for other in fitting.values())
        wins += seconds <= best * (1 + TIE)
    mean = statistics.geometric_mean(ratios) if ratios else math.inf
    return _Standing(planner, len(ratios), mean, wins, max(planning))


def _summary_cells(standing: _Standing, cases: int) -> list[str]:
    if not standing.fits:
        return [standing.planner, f'0 of {cases}', *[UNKNOWN] * 3]
    return [
        standing.planner,
        f'{standing.fits} of {cases}',
        f'{standing.ratio:.3f}',
        str(standing.fastest),
        format_seconds(standing.planning_seconds),
    ]
