"""Planners side by side: as tables, and as a picture of overhead against limit.

A row is a dict as :func:`chainer_hybridmem.commands.compare.compare_one` makes it,
with ``profile`` and ``memory_limit_bytes``. A case is a profile under a limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from chainer_hybridmem.reporting import canvas
from chainer_hybridmem.reporting.palette import LINE_COLOURS
from chainer_hybridmem.reporting.rows import IN_CORE_PEAK
from chainer_hybridmem.reporting.tables import (
    UNITS,
    UNKNOWN,
    Column,
    figures_table,
    table,
)
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_seconds

Row = dict[str, Any]
Case = tuple[str, int]

PREDICTED = (
    Column('overhead', 'overhead', 'difference'),
    Column('bound', 'lower_bound_seconds', 'seconds'),
    Column('gap', 'gap', 'share'),
    Column('peak', 'peak_bytes', 'bytes'),
    Column('host', 'host_bytes', 'bytes'),
)
DISK = Column('disk', 'disk_bytes', 'bytes')  # shown where there is one
COLUMNS = (
    Column('planner', 'planner'),
    Column('s / iteration', 'iteration_seconds', 'seconds'),
    *PREDICTED,
    DISK,
    Column('keep', 'keep'),
    Column('swap', 'swap'),
    Column('recompute', 'recompute'),
    Column('planning', 'planning_seconds', 'seconds'),
    Column('simulations', 'simulations'),
)
SUMMARY_HEADERS = ('planner', 'fits', 'time / bound', 'fastest', 'longest planning')
HERE = ' *'
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


def sweep(rows: Sequence[Row], peak_bytes: int, marked: Sequence[int] = ()) -> str:
    """A table of one profile: overheads of planners, with a column for each limit.

    Args:
        rows: Of all limits.
        peak_bytes: In-core peak; limits are shown as a share of it, too.
        marked: Limits at which the reader is.
    """
    cases = [found for _, found in sorted(by_case(rows).items())]
    limits = [found[0]['memory_limit_bytes'] for found in cases]
    shares = [f'{limit / peak_bytes:.0%}' if peak_bytes else '' for limit in limits]
    columns = [{row['planner']: _overhead(row) for row in found} for found in cases]
    cells = [['of the in-core peak', *shares], ['lower bound', *map(_bound, cases)]]
    for planner in dict.fromkeys(row['planner'] for row in rows):
        cells.append([planner, *(column[planner] for column in columns)])
    heads = [format_bytes(limit) + HERE * (limit in marked) for limit in limits]
    told = table(['overhead at a limit of', *heads], cells)
    if any(limit in marked for limit in limits):
        told += f'\n{HERE.strip()}: the limit of --memory-limit'
    if all(row['fits'] for row in rows):
        return told
    return f'{told}\n{UNKNOWN}: does not fit; --memory-limit LIMIT alone says why'


def _bound(rows: Sequence[Row]) -> str:
    seconds, in_core = bound_seconds(rows), rows[0]['in_core_seconds']
    if seconds is None or not in_core:
        return UNKNOWN
    return UNITS['difference'](seconds / in_core - 1)


def _overhead(row: Row) -> str:
    if row['fits']:
        return UNITS['difference'](row['overhead'])
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


# Lengths that share no factor: planners of one colour differ in the others.
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')
LINES = ('-', '--', '-.', ':', (0, (5, 1)))
THIN = {'linewidth': 1.4, 'markersize': 5, 'zorder': 3}
# An eye tells few colours apart in thin lines: the best planners have one, others none.
MOST_COLOURED = 6
PLAIN = {'color': '#aab1ba', 'linewidth': 0.8, 'markersize': 4, 'zorder': 1}
# Thick and below the others, so that both are seen where lines meet.
EMPHASIS = {
    'color': '#111827',
    'linestyle': '-',
    'linewidth': 4.0,
    'markersize': 9,
    'zorder': 2,
}
BOUND_COLOUR = '#d9dde2'
BOUND = {'color': '#5a6470', 'marker': '_', 'linestyle': ':'}
# Overheads from nothing to several times: percent, logarithmic above the first.
LINEAR_PERCENT = 1.0
TICKS = (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
APART = 0.012  # of the height of a panel, between lines that would coincide
MARK = {'color': '#d64545', 'linewidth': 1.4, 'linestyle': '--', 'zorder': 1}
PANEL_INCHES = (6.0, 4.6)
LEGEND_INCHES = 2.2
LEGEND_TITLE = 'lines that would coincide\nare drawn side by side'
LINE_INCHES = 0.24  # of the legend
MOST_COLUMNS = 3


def draw_comparison(
    rows: Sequence[Row],
    path: str,
    peaks: dict[str, int],
    planners: Sequence[str],
    default: str,
    marked: dict[str, list[int]] | None = None,
) -> None:
    """Draws a panel for each profile, with a line for each planner.

    Args:
        rows: As in :mod:`chainer_hybridmem.reporting.comparison`.
        path: Picture to write; the ending says which kind (``.png``, ``.svg``).
        peaks: In-core peak of each profile, in bytes.
        planners: All planners there are: the place in this list decides about
            colour and marker, so that they are the same in every picture.
        default: The planner to emphasise. Of the others, the best ones have their
            colours.
        marked: Limits of each profile at which the reader is, in bytes.

    Raises:
        OptionError: If matplotlib is missing or does not know the kind of picture.
    """
    lines = math.ceil(len(peaks) / MOST_COLUMNS)
    columns = math.ceil(len(peaks) / lines)
    width, height = PANEL_INCHES
    # Bound and its range, the peak, marked limits and what is said of lines, too.
    entries = len({row['planner'] for row in rows}) + 5
    figure = canvas.make(
        columns * width + LEGEND_INCHES, max(lines * height, entries * LINE_INCHES)
    )
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    order = rank(rows)
    best = [name for name in order if name != default][:MOST_COLOURED]
    places = {name: place for place, name in enumerate(order)}
    styles = {  # the best planner first
        name: {**_style(planners.index(name)), **_weight(name, default, best)}
        for name in order
    }
    for panel, (profile, peak) in zip(panels, peaks.items(), strict=False):
        here = (marked or {}).get(profile, [])
        own = [row for row in rows if row['profile'] == profile]
        _draw_panel(panel, own, peak, here, styles)
        panel.set_title(profile)
    for panel in panels[len(peaks) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    listed = sorted(  # the bound comes first, then the best planner
        zip(labels, handles, strict=True), key=lambda pair: places.get(pair[0], -1)
    )
    named = [f'{label} (default)' if label == default else label for label, _ in listed]
    figure.legend(
        [handle for _, handle in listed],
        named,
        loc='outside right upper',
        title=LEGEND_TITLE,
        title_fontsize='small',
    )
    canvas.save(figure, path)


def _style(index: int) -> dict[str, Any]:
    return {
        'color': LINE_COLOURS[index % len(LINE_COLOURS)],
        'marker': MARKERS[index % len(MARKERS)],
        'linestyle': LINES[index % len(LINES)],
    }


def _weight(name: str, default: str, best: Sequence[str]) -> dict[str, Any]:
    """Colour and width: of the default, of the best others, of the rest."""
    if name == default:
        return EMPHASIS
    if name in best:
        return THIN
    return PLAIN


def _draw_panel(
    axes: Any,
    rows: Sequence[Row],
    peak_bytes: int,
    marked: Sequence[int],
    styles: dict[str, Any],
) -> None:
    """One profile: rows of all limits, in any order."""
    cases = sorted(by_case(rows).items())
    limits = [limit for (_, limit), _ in cases]
    unit, size = canvas.unit_of(max(*limits, peak_bytes))
    places = [limit / size for limit in limits]
    bounds = [_bound_percent(found) for _, found in cases]
    # What is proven for a limit holds for all below it, hence steps to the left.
    axes.fill_between(
        places, bounds, -1, step='pre', color=BOUND_COLOUR, label='proven impossible'
    )
    axes.plot(places, bounds, drawstyle='steps-pre', **BOUND, label='bound')
    columns = _columns([found for _, found in cases])
    _scale(axes, [p for percents in columns.values() for p in percents])
    ordered = {name: columns[name] for name in styles if name in columns}
    for planner, percents in _apart(axes, ordered).items():
        axes.plot(places, percents, label=planner, **styles[planner])
    peak = {'linewidth': 1, 'linestyle': '--', 'label': IN_CORE_PEAK}
    axes.axvline(peak_bytes / size, color='#5a6470', **peak)
    for limit in marked:
        axes.axvline(limit / size, label=f'limit of {format_bytes(limit)}', **MARK)
    _label(axes, unit, peak_bytes / size)


def _columns(cases: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Overheads of each planner by case; not a number where it does not fit."""
    found = [{row['planner']: _percent(row) for row in rows} for rows in cases]
    planners = dict.fromkeys(name for column in found for name in column)
    return {name: [column[name] for column in found] for name in planners}


def _apart(axes: Any, columns: dict[str, list[float]]) -> dict[str, list[float]]:
    """The columns with what would coincide one above the other, the first one below."""
    transform = axes.yaxis.get_transform()
    low, high = transform.transform(axes.get_ylim())
    step = APART * (high - low)
    drawn = {name: transform.transform(column) for name, column in columns.items()}
    for case in range(max(map(len, drawn.values()), default=0)):
        known = [c for c in drawn.values() if math.isfinite(c[case])]
        last = -math.inf
        for column in sorted(known, key=lambda column: round(column[case] / step)):
            last = column[case] = max(column[case], last + step)
    back = transform.inverted().transform
    return {name: back(column).tolist() for name, column in drawn.items()}


def _percent(row: Row) -> float:
    return 100 * row['overhead'] if row['fits'] else math.nan


def _bound_percent(rows: Sequence[Row]) -> float:
    bound, in_core = bound_seconds(rows), rows[0]['in_core_seconds']
    if bound is None or not in_core:
        return math.nan
    return 100 * (bound / float(in_core) - 1)


def _label(axes: Any, unit: str, peak: float) -> None:
    axes.set_xlabel(f'memory limit, {unit}')
    axes.set_ylabel('time over in-core, %')
    axes.grid(alpha=0.3)
    shares = axes.secondary_xaxis(
        'top', functions=(lambda x: 100 * x / peak, lambda x: x * peak / 100)
    )
    shares.set_xlabel('memory limit, % of the in-core peak')


def _scale(axes: Any, percents: Sequence[float]) -> None:
    highest = max([LINEAR_PERCENT, *(p for p in percents if math.isfinite(p))])
    ticks = [tick for tick in TICKS if tick <= 2 * highest]
    axes.set_yscale('symlog', linthresh=LINEAR_PERCENT)
    axes.set_yticks(ticks, [f'{tick:g}' for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(-LINEAR_PERCENT / 10, 1.3 * highest)
