"""A planned iteration as a picture: what runs when, and the memory load."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainer_hybridmem.planning.records.measured_timeline import OPERATIONS
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.splits import in_parts
from chainer_hybridmem.planning.records.timeline import Timeline
from chainer_hybridmem.reporting import canvas
from chainer_hybridmem.reporting.page.composition import compose
from chainer_hybridmem.reporting.palette import COLOURS, GROUP_COLOURS
from chainer_hybridmem.reporting.rows import LANE_TITLES
from chainer_hybridmem.units import format_bound, format_bytes, format_seconds

_REST_COLOUR = '#d9dde2'
_LANES = {'compute': 2, 'd2h': 1, 'h2d': 0}


def draw(
    timeline: Timeline,
    plan: Plan,
    path: str,
    profile: Profile,
) -> None:
    """Draws memory load over lanes of compute and copies.

    Args:
        timeline: What :func:`chainer_hybridmem.simulate` gave for the plan.
        plan: The plan.
        path: Picture to write; the ending says which kind (``.png``, ``.svg``).
        profile: The plan's profile; the load is coloured by what happens to the feature
            maps in it.

    Raises:
        OptionError: If matplotlib is missing or does not know the kind of picture.
    """
    canvas.check(path)
    figure = canvas.make(11, 5)
    load, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 2))
    _draw_load(load, timeline, plan, profile)
    _draw_lanes(lanes, timeline)
    lanes.set_xlim(0, timeline.total_seconds)
    lanes.set_xlabel('time, s')
    _draw_legend(lanes, timeline)
    canvas.save(figure, path)


def _draw_load(axes: Any, timeline: Timeline, plan: Plan, profile: Profile) -> None:
    compute = [i for i in timeline.intervals if i.kind in OPERATIONS]
    starts = [i.start_seconds for i in compute] + [timeline.total_seconds]
    limit = plan.memory_limit_bytes
    highest = max(limit, timeline.peak_bytes)
    unit, size = canvas.unit_of(highest)
    loads = np.array(timeline.load_bytes) / size
    parts = compose(in_parts(profile, plan.parts), plan).group_bytes
    stacks = {action: parts[action.value] / size for action in Action}
    below = loads - sum(stacks.values())
    axes.stairs(below, starts, fill=True, color=_REST_COLOUR, label='everything else')
    for action, column in stacks.items():
        if column.any():
            colour, label = GROUP_COLOURS[action.value], f'maps to {action.value}'
            top = below + column
            axes.stairs(
                top, starts, baseline=below, fill=True, color=colour, label=label
            )
            below = top
    axes.stairs(loads, starts, color='#5a7184', label='predicted load')
    axes.axhline(limit / size, color='#d64545', linestyle='--', linewidth=1)
    axes.text(0, limit / size, f' limit {format_bytes(limit)}', va='bottom')
    axes.set_ylim(0, 1.15 * highest / size)
    axes.set_ylabel(f'memory load, {unit}')
    axes.legend(
        loc='upper center', bbox_to_anchor=(0.5, -0.01), ncols=6, fontsize='small'
    )
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
    names = [LANE_TITLES[lane].replace(' ', '\n', 1) for lane in _LANES]
    axes.set_yticks(list(_LANES.values()), names)


def _draw_legend(axes: Any, timeline: Timeline) -> None:
    kinds = {i.kind for i in timeline.intervals}
    for kind, colour in COLOURS.items():
        if kind in kinds:
            axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.legend(ncols=len(COLOURS), loc='upper center', bbox_to_anchor=(0.5, -0.28))
