"""Why two plans for one profile differ where they decide the same about feature maps.

What a plan was asked for, when maps leave and return, what is made again, functions in
parts, and what is in memory at the highest moments of both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.measured_timeline import OPERATIONS
from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, MapPlan, Part, Plan
from chainer_hybridmem.planning.records.profile import Profile, Storage
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.planning.simulation.problem import CrossIteration, decided_by
from chainer_hybridmem.reporting.page.composition import Composition
from chainer_hybridmem.reporting.page.figures import Run, Tables, shown_name

PASSED = 'made anew'  # by each chain of replays that reads it
MOST_MOVED = 200
MOST_THERE = 100
_POSITIONS = {
    'swap_out_before': 'swap-out starts',
    'release_before': 'memory is released',
    'swap_in_before': 'swap-in starts',
    'needed_before': 'is needed',
    'drop_before': 'is dropped',
}
Figures = dict[str, Any]


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


def find_reasons(tables: Tables, one: Side, other: Side) -> Figures:
    """What differs between two plans besides their decisions about feature maps.

    Args:
        tables: Of the page.
        one: A run.
        other: Another run of the same profile.

    Returns:
        dict: ``settings``, ``moved``, ``replays``, ``parts`` and ``peaks``.
    """
    return {
        'settings': list(_find_settings(one, other)),
        'moved': _find_moved(tables, one, other),
        'replays': _count_replays(one.run.plan, other.run.plan),
        'parts': _find_parts(tables, one, other),
        'peaks': _find_peaks(tables, one, other),
    }


# -- what the plans were asked for -------------------------------------------
def _find_settings(one: Side, other: Side) -> Iterator[Figures]:
    """Options count only where both plans have the same planner."""
    alike = one.run.plan.planner == other.run.plan.planner
    first, second = (_list_settings(side, alike) for side in (one, other))
    for name in dict.fromkeys([*first, *second]):
        unit, value = first.get(name, (None, None))
        other_unit, other_value = second.get(name, (None, None))
        if value != other_value:
            yield {
                'name': name,
                'unit': unit or other_unit,
                'values': [value, other_value],
            }


def _list_settings(side: Side, options: bool) -> dict[str, tuple[str, Any]]:
    """Unit and value by name."""
    plan = side.run.plan
    rules = '; '.join(f'{pattern}: {rule}' for pattern, rule in plan.rules)
    settings: dict[str, tuple[str, Any]] = {
        'planner': ('name', shown_name(plan.planner)),
        'memory limit': ('bytes', plan.memory_limit_bytes),
        'host limit': ('bytes', plan.host_limit_bytes),
        'what crosses iterations': (
            'name',
            _name_crossing(decided_by(side.profile, plan)),
        ),
        'rules': ('name', shown_name(rules) or None),
    }
    for name, value in plan.options.items() if options else ():
        settings[f'option {shown_name(name)}'] = 'name', shown_name(str(value))
    return settings


def _name_crossing(crossing: CrossIteration) -> str:
    if isinstance(crossing, bool):
        return 'all' if crossing else 'nothing'
    return crossing


# -- when maps leave and return ----------------------------------------------
def _find_moved(tables: Tables, one: Side, other: Side) -> Figures:
    """Maps with the same action that leave or return at another position."""
    storages = one.profile.storages
    entries = {entry.storage: entry for entry in one.run.plan.maps}
    rows = [
        (storages[entry.storage], *change)
        for entry in other.run.plan.maps
        for change in _list_changes(entries.get(entry.storage), entry)
    ]
    firsts = {source.storage: source.drop_before for source in one.run.plan.sources}
    rows += [
        (storages[s.storage], 'is dropped', 'count', firsts[s.storage], s.drop_before)
        for s in other.run.plan.sources
        if firsts.get(s.storage, s.drop_before) != s.drop_before
    ]
    rows.sort(key=lambda row: -row[0].nbytes)
    maps = {storage.id: storage.nbytes for storage, *_ in rows}
    return {
        'maps': len(maps),
        'bytes': sum(maps.values()),
        'largest': [
            [tables.place_storage(storage), what, unit, before, after]
            for storage, what, unit, before, after in rows[:MOST_MOVED]
        ],
    }


def _list_changes(
    one: MapPlan | None, other: MapPlan
) -> Iterator[tuple[str, str, Any, Any]]:
    """What has moved, the unit of where it is, and both places; None is never."""
    if one is None or one.action is not other.action:
        return
    for field, title in _POSITIONS.items():
        before, after = getattr(one, field), getattr(other, field)
        if before != after:
            known = [None if k < 0 else k for k in (before, after)]
            yield title, 'count', known[0], known[1]
    if one.tier is not other.tier:
        yield 'host copy lies in', 'name', one.tier.value, other.tier.value


# -- what is made again ------------------------------------------------------
def _count_replays(one: Plan, other: Plan) -> Figures:
    """How many replays there are, and how many of them the other plan lacks."""
    kinds = [
        Counter((replay.before, replay.operation) for replay in plan.replays)
        for plan in (one, other)
    ]
    return {
        'count': [len(one.replays), len(other.replays)],
        'alone': [
            (kinds[0] - kinds[1]).total(),
            (kinds[1] - kinds[0]).total(),
        ],
        'same': one.replays == other.replays,
    }


# -- functions in parts ------------------------------------------------------
def _find_parts(tables: Tables, one: Side, other: Side) -> list[Figures]:
    """Functions that the plans take in other parts."""
    first, second = (_list_parts(side.run.plan) for side in (one, other))
    operations = one.profile.operations
    return [
        {
            'operation': place[0],
            'name': tables.place_name(operations[place[0]].label),
            'ways': [_name_way(parts.get(place)) for parts in (first, second)],
        }
        for place in sorted({*first, *second})
        if first.get(place) != second.get(place)
    ]


def _list_parts(plan: Plan) -> dict[tuple[int, int], Part]:
    return {(part.operation, part.function): part for part in plan.parts}


def _name_way(part: Part | None) -> str:
    if part is None:
        return 'as recorded'
    exact = '' if part.exact else ', equal up to rounding'
    return shown_name(f'{part.parts} parts along {part.cut}{exact}')


# -- highest moments ---------------------------------------------------------
def _find_peaks(tables: Tables, one: Side, other: Side) -> list[Figures]:
    """The highest moment of each run, and what both runs have in memory there."""
    sides = one, other
    highest = [int(side.composition.load_bytes.argmax()) for side in sides]
    found = []
    for number, k in enumerate(highest):
        if k not in highest[:number]:
            found.append(_describe_moment(tables, sides, number, k))
    return found


def _describe_moment(
    tables: Tables, sides: tuple[Side, Side], number: int, k: int
) -> Figures:
    held = [_list_held(side, k) for side in sides]
    rows = []
    for storage in {**held[0], **held[1]}:
        sizes = [there.get(storage, 0) for there in held]
        if sizes[0] != sizes[1]:
            larger = sides[sizes[1] > sizes[0]].profile.storages[storage]
            rows.append((larger, sizes))
    rows.sort(key=_largest_difference)
    compositions = [side.composition for side in sides]
    return {
        'run': number,
        'operation': k,
        'name': tables.place_name(sides[0].profile.operations[k].label),
        'load_bytes': [int(found.load_bytes[k]) for found in compositions],
        'replay_bytes': [int(found.replay_bytes[k]) for found in compositions],
        'storages': len(rows),
        'largest': [
            [tables.place_storage(storage), *sizes]
            for storage, sizes in rows[:MOST_THERE]
        ],
        'others_bytes': [
            sum(sizes[i] for _, sizes in rows[MOST_THERE:]) for i in (0, 1)
        ],
    }


def _largest_difference(row: tuple[Storage, list[int]]) -> int:
    return -abs(row[1][0] - row[1][1])


def _list_held(side: Side, k: int) -> dict[int, int]:
    """Bytes of the storages that are there at the highest moment of an operation."""
    held: defaultdict[int, int] = defaultdict(int)
    for presence in side.composition.presences:
        if any(first <= k < last for first, last in presence.stays):
            held[presence.storage] += side.profile.storages[presence.storage].nbytes
    return dict(held)


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
        'reasons': find_reasons(tables, side, other_side),
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
