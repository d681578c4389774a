"""What differs between two runs: decisions about maps, and seconds of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.records.measured_timeline import OPERATIONS
from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.records.timeline import Interval, Timeline
from chainer_hybridmem.reporting.page.figures import Run
from chainer_hybridmem.reporting.page.reasons import Side, find_reasons
from chainer_hybridmem.reporting.page.tables import Tables

MOST_MAPS = 200
MOST_OPERATIONS = 20
LEAST_SECONDS = 1e-9  # of a difference


def find_differences(
    tables: Tables,
    one: tuple[Side, Timeline],
    other: tuple[Side, Timeline],
) -> dict[str, Any]:
    """Maps that are treated otherwise, operations that take another time, and why.

    Args:
        tables: Of the page.
        one: A run, and its plan as simulated.
        other: Another run of the same profile, likewise.

    Returns:
        dict: Numbers over all maps, and the largest ones with both actions; operations
        with both times, measured ones where both runs were measured; ``reasons`` of
        :func:`.reasons.find_reasons`.
    """
    (side, timeline), (other_side, other_timeline) = one, other
    run, other_run, profile = side.run, other_side.run, side.profile
    first = {entry.storage: entry.action for entry in run.plan.maps}
    maps = [
        (profile.storages[entry.storage], first[entry.storage], entry.action)
        for entry in other_run.plan.maps
        if entry.storage in first and first[entry.storage] is not entry.action
    ]
    maps.sort(key=lambda row: -row[0].nbytes)
    measured = run.measured is not None and other_run.measured is not None
    return {
        'maps': len(maps),
        'bytes': sum(storage.nbytes for storage, _, _ in maps),
        'largest': [
            [tables.place_storage(storage), before.value, after.value]
            for storage, before, after in maps[:MOST_MAPS]
        ],
        'measured': measured,
        'reasons': find_reasons(tables, side, other_side),
        'operations': differing_operations(
            tables,
            profile,
            _intervals(timeline, run, measured),
            _intervals(other_timeline, other_run, measured),
        ),
    }


def _intervals(timeline: Timeline, run: Run, measured: bool) -> Sequence[Interval]:
    if measured and run.measured is not None:
        return run.measured.intervals
    return timeline.intervals


def differing_operations(
    tables: Tables,
    profile: Profile,
    one: Sequence[Interval],
    other: Sequence[Interval],
) -> list[dict[str, Any]]:
    """Operations whose seconds differ most between two iterations.

    Args:
        tables: Of the page.
        profile: The recorded iteration.
        one: Intervals of an iteration.
        other: Intervals of another one.
    """
    ours, theirs = operation_seconds(one), operation_seconds(other)
    differences = np.abs(ours - theirs)
    order = np.argsort(-differences, kind='stable')[:MOST_OPERATIONS].tolist()
    return [
        {
            'operation': k,
            'name': tables.place_name(profile.operations[k].label),
            'seconds': [float(ours[k]), float(theirs[k])],
        }
        for k in order
        if differences[k] > LEAST_SECONDS
    ]


def operation_seconds(intervals: Sequence[Interval]) -> np.ndarray:
    """(n,) seconds from the end of the operation before to the end of each one.

    Replays and waits before an operation count as its own.
    """
    ends = [i.end_seconds for i in intervals if i.kind in OPERATIONS]
    return np.diff(np.array([0.0, *ends]))
