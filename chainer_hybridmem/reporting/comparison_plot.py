"""Planners side by side, as a picture: overhead against memory limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from chainer_hybridmem.reporting import canvas
from chainer_hybridmem.reporting.comparison import Row, bound_seconds, by_case, rank
from chainer_hybridmem.reporting.palette import LINE_COLOURS

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
PANEL_INCHES = (6.0, 4.6)
LEGEND_INCHES = 2.2
LINE_INCHES = 0.24  # of the legend
MOST_COLUMNS = 3


def draw(
    rows: Sequence[Row],
    path: str,
    peaks: dict[str, int],
    planners: Sequence[str],
    default: str,
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

    Raises:
        OptionError: If matplotlib is missing or does not know the kind of picture.
    """
    lines = math.ceil(len(peaks) / MOST_COLUMNS)
    columns = math.ceil(len(peaks) / lines)
    width, height = PANEL_INCHES
    entries = len({row['planner'] for row in rows}) + 2  # bound and its range, too
    figure = canvas.make(
        columns * width + LEGEND_INCHES, max(lines * height, entries * LINE_INCHES)
    )
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    order = rank(rows)
    best = [name for name in order if name != default][:MOST_COLOURED]
    styles = {
        name: {**_style(i), **_weight(name, default, best)}
        for i, name in enumerate(planners)
    }
    for panel, (profile, peak) in zip(panels, peaks.items(), strict=False):
        _draw_panel(panel, [r for r in rows if r['profile'] == profile], peak, styles)
        panel.set_title(profile)
    for panel in panels[len(peaks) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    places = {name: place for place, name in enumerate(order)}
    listed = sorted(  # the bound comes first, then the best planner
        zip(labels, handles, strict=True), key=lambda pair: places.get(pair[0], -1)
    )
    named = [f'{label} (default)' if label == default else label for label, _ in listed]
    figure.legend([handle for _, handle in listed], named, loc='outside right upper')
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
    axes: Any, rows: Sequence[Row], peak_bytes: int, styles: dict[str, Any]
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
    for planner, percents in columns.items():
        axes.plot(places, percents, label=planner, **styles[planner])
    axes.axvline(peak_bytes / size, color='#5a6470', linewidth=1, linestyle='--')
    _label(axes, unit, peak_bytes / size)
    _scale(axes, [p for percents in columns.values() for p in percents])


def _columns(cases: Sequence[Sequence[Row]]) -> dict[str, list[float]]:
    """Overheads of each planner by case; not a number where it does not fit."""
    found = [{row['planner']: _percent(row) for row in rows} for rows in cases]
    planners = dict.fromkeys(name for column in found for name in column)
    return {name: [column[name] for column in found] for name in planners}


def _percent(row: Row) -> float:
    return 100 * row['overhead'] if row['fits'] else math.nan


def _bound_percent(rows: Sequence[Row]) -> float:
    bound, in_core = bound_seconds(rows), rows[0]['in_core_seconds']
    if bound is None or not in_core:
        return math.nan
    return 100 * (bound / in_core - 1)


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
