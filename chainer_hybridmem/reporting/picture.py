"""A planned iteration as a picture: what runs when, and the memory load."""

from __future__ import annotations

import os
from typing import Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.plan import Action, Plan
from chainer_hybridmem.simulation.timeline import Timeline
from chainer_hybridmem.units import format_bound, format_bytes, format_seconds

COLOURS = {
    'forward': '#4c9f70',
    'backward': '#3b7dd8',
    'update': '#8d8d8d',
    'recompute': '#e6a117',
    'swap-out': '#b25fc4',
    'swap-in': '#7d53de',
    'stall': '#d64545',
}
_LANES = {'compute': 2, 'd2h': 1, 'h2d': 0}
_NAMES = ('h2d\n(swap-in)', 'd2h\n(swap-out)', 'compute')
_GIB = 2**30


def draw(timeline: Timeline, plan: Plan, path: str) -> None:
    """Draws memory load over lanes of compute and copies.

    Args:
        timeline: What :func:`chainer_hybridmem.simulate` gave for the plan.
        plan: The plan.
        path: Picture to write; the ending says which kind (``.png``, ``.svg``).

    Raises:
        OptionError: If matplotlib is missing or does not know the kind of picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "Pictures need matplotlib: pip install 'chainer_hybridmem[plot]'."
        ) from error
    if not os.path.splitext(path)[1]:
        raise OptionError(
            f'{path} does not say which kind of picture it is; name it {path}.png.'
        )
    figure = Figure(figsize=(11, 5), layout='constrained')
    load, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_load(load, timeline, plan)
    _draw_lanes(lanes, timeline)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise OptionError(f'{path} cannot be drawn: {error}.') from error


def _draw_load(axes: Any, timeline: Timeline, plan: Plan) -> None:
    compute = [
        i for i in timeline.intervals if i.kind in ('forward', 'backward', 'update')
    ]
    starts = [i.start_seconds for i in compute] + [timeline.total_seconds]
    loads = [nbytes / _GIB for nbytes in timeline.load_bytes]
    axes.stairs(loads, starts, fill=True, color='#c9d6e3')
    axes.stairs(loads, starts, color='#5a7184')
    limit = plan.memory_limit_bytes / _GIB
    axes.axhline(limit, color='#d64545', linestyle='--', linewidth=1)
    axes.text(0, limit, f' limit {format_bytes(plan.memory_limit_bytes)}', va='bottom')
    axes.set_ylim(0, 1.15 * limit)
    axes.set_ylabel('memory load, GiB')
    counts = ', '.join(f'{plan.count(action)} {action.value}' for action in Action)
    axes.set_title(
        f'{plan.planner}: {counts}\npredicted '
        f'{format_seconds(timeline.total_seconds)} per iteration, in-core '
        f'{format_seconds(plan.in_core_seconds)}, bound '
        f'{format_bound(plan.lower_bound_seconds, plan.gap)}'
    )


def _draw_lanes(axes: Any, timeline: Timeline) -> None:
    for kind, colour in COLOURS.items():
        chosen = [i for i in timeline.intervals if i.kind == kind]
        for lane, height in _LANES.items():
            spans = [
                (i.start_seconds, i.end_seconds - i.start_seconds)
                for i in chosen
                if i.lane == lane
            ]
            axes.broken_barh(spans, (height - 0.4, 0.8), color=colour)
        if chosen:
            axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.set_yticks(range(len(_NAMES)), _NAMES)
    axes.set_xlim(0, timeline.total_seconds)
    axes.set_xlabel('seconds')
    axes.legend(ncols=len(COLOURS), loc='upper center', bbox_to_anchor=(0.5, -0.28))
