"""What two plans for one profile decide otherwise, and which operations take longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.measured_timeline import OPERATIONS
from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.reporting.page.composition import Composition
from chainer_hybridmem.reporting.page.figures import Run, Tables

PASSED = 'made anew'  # by each chain of replays that reads it
MOST_MAPS = 200
MOST_OPERATIONS = 20
LEAST_SECONDS = 1e-9  # of a difference


class Side(NamedTuple):
    """One of two runs that are compared.

    Attributes:
        run (Run): The run.
        profile (Profile): With the functions in parts that its plan takes so.
        composition (Composition): Of its moments.
    """

    run: Run
    profile: Profile
    composition: Composition


def find_differences(
    tables: Tables,
    one: tuple[Side, Timeline],
    other: tuple[Side, Timeline],
) -> dict[str, Any]:
    """Maps that are treated otherwise, and operations that take another time.

    Args:
        tables: Of the page.
        one: A run, and its plan as simulated.
        other: Another run of the same profile, likewise.

    Returns:
        dict: Numbers over all maps, and the largest ones with both actions; operations
        with both times, measured ones where both runs were measured.
    """
    (side, timeline), (other_side, other_timeline) = one, other
    run, other_run, profile = side.run, other_side.run, side.profile
    plans = run.plan, other_run.plan
    first, second = map(_list_actions, plans)
    sources = {source.storage for plan in plans for source in plan.sources}
    known = sources | (first.keys() & second.keys())
    maps = [
        (
            profile.storages[storage],
            first.get(storage, PASSED),
            second.get(storage, PASSED),
        )
        for storage in sorted(known)
        if first.get(storage) != second.get(storage)
    ]
    maps.sort(key=lambda row: -row[0].nbytes)
    measured = run.measured is not None and other_run.measured is not None
    return {
        'maps': len(maps),
        'bytes': sum(storage.nbytes for storage, _, _ in maps),
        'largest': [
            [tables.place_storage(storage), before, after]
            for storage, before, after in maps[:MOST_MAPS]
        ],
        'measured': measured,
        'operations': differing_operations(
            tables,
            profile,
            _intervals(timeline, run, measured),
            _intervals(other_timeline, other_run, measured),
        ),
    }


def _list_actions(plan: Plan) -> dict[int, str]:
    actions = {entry.storage: entry.action.value for entry in plan.maps}
    return actions | {source.storage: FOR_REPLAYS for source in plan.sources}


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
