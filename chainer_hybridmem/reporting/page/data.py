"""What a page shows, as plain values: bytes int, seconds float, names as text.

A page embeds one object of :func:`make_data`, and everything in it comes from there.
Long columns hold numbers of entries: a name is its place in ``names``, a storage its
place in ``storages``, a group its place in ``groups``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.planning.records.measured_timeline import Measured, Sample
from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.planning.simulation import Problem, make_problem, simulate
from chainer_hybridmem.planning.simulation.problem import decided_by, with_parts
from chainer_hybridmem.reporting.chrome_trace import operation_starts
from chainer_hybridmem.reporting.page.composition import (
    GROUPS,
    Composition,
    Presence,
    compose,
)
from chainer_hybridmem.reporting.page.differences import (
    Side,
    differing_operations,
    find_differences,
)
from chainer_hybridmem.reporting.page.figures import (
    Figures,
    Run,
    Tables,
    profile_figures,
    run_figures,
    shown_name,
    storage_name,
    sweep_figures,
)
from chainer_hybridmem.reporting.page.prices import find_prices
from chainer_hybridmem.reporting.palette import (
    COLOURS,
    GROUP_COLOURS,
    LINE_COLOURS,
)
from chainer_hybridmem.reporting.rows import LANE_TITLES
from chainer_hybridmem.terminal import printable

FORMAT, VERSION = 'chainer_hybridmem/report', 1
MOST_MOMENTS = 2000  # of all runs together, and likewise below
MOST_SPANS = 5000
MOST_STORAGES = 2500
MOST_PRICED = 20
GIBIBYTE = 2**30
SWEEP_SECONDS = 10.0
_DIGITS = 9  # of seconds in long columns: nanoseconds


def make_data(
    profile: Profile,
    runs: Sequence[Run],
    name: str,
    sweep_seconds: float = SWEEP_SECONDS,
    report: str = '',
) -> Figures:
    """Everything that a page shows.

    Args:
        profile: The recorded iteration.
        runs: One or more; the first one is what others are compared with.
        name: What the page calls the profile.
        sweep_seconds: Time for the bound at other limits.
        report: A session's report as a table, to be shown as it is.

    Raises:
        PlanError: If a plan is not one for the profile.
    """
    problems = [_problem_of(profile, run) for run in runs]
    timelines = [
        simulate(problem, run.plan) for run, problem in zip(runs, problems, strict=True)
    ]
    tables = Tables()
    sides = [
        Side(run, problem.profile, compose(problem.profile, run.plan))
        for run, problem in zip(runs, problems, strict=True)
    ]
    shown = [
        _RunColumns(tables, problem, len(runs)).collect(side, timeline)
        for side, problem, timeline in zip(sides, problems, timelines, strict=True)
    ]
    one, *others = zip(sides, timelines, strict=True)
    differences = [find_differences(tables, one, other) for other in others]
    return {
        'format': FORMAT,
        'version': VERSION,
        'profile': profile_figures(problems[0], name),
        'report': printable(report, lines=True),
        'groups': list(GROUPS),
        'colours': {
            'groups': GROUP_COLOURS,
            'kinds': COLOURS,
            'lines': list(LINE_COLOURS),
        },
        'titles': {'swap-out': LANE_TITLES['d2h'], 'swap-in': LANE_TITLES['h2d']},
        'names': tables.names,
        'storages': tables.storage_columns(),
        'runs': shown,
        'differences': differences,
        'bounds': sweep_figures(problems[0], sweep_seconds),
    }


def _problem_of(profile: Profile, run: Run) -> Problem:
    plan = run.plan
    if run.problem is not None:
        return with_parts(run.problem, plan.parts)
    crossing = decided_by(profile, plan)
    return make_problem(profile, crossing, plan.host_limit_bytes, parts=plan.parts)


class _RunColumns:
    """What a page shows of one run.

    Args:
        tables (Tables): Of the page.
        problem (Problem): Of the run's plan.
        runs (int): How many runs share the page.
    """

    def __init__(self, tables: Tables, problem: Problem, runs: int) -> None:
        self._tables = tables
        self._problem = problem
        self._profile = problem.profile
        self._moments = MOST_MOMENTS // runs
        self._spans = MOST_SPANS // runs
        self._most_storages = MOST_STORAGES // runs

    def _place(self, storage: int) -> int:
        """The place of a storage by its id; -1 for none."""
        if storage < 0:
            return -1
        return self._tables.place_storage(self._profile.storages[storage])

    def collect(self, side: Side, timeline: Timeline) -> Figures:
        """All columns and figures.

        Args:
            side: The run and its moments.
            timeline: Its plan as simulated.
        """
        run, composition = side.run, side.composition
        plan = run.plan
        prices = find_prices(self._problem, plan.memory_limit_bytes)
        costs = np.append(0.0, np.cumsum(prices.seconds_per_byte))
        shown = self._choose(composition.presences)
        figures = run_figures(self._profile, run, timeline)
        limit_bytes = figures['memory_limit_bytes']
        return {
            'name': shown_name(run.name),
            'figures': figures,
            'advice': prices.advise(limit_bytes, timeline.total_seconds),
            'moments': self._moment_columns(composition, timeline),
            'presences': [self._presence(p, costs) for p in shown],
            'maps': self._map_rows(plan),
            'lanes': self._lane_columns(timeline.intervals),
            'measured': self._measured(run.measured, timeline),
            'prices': {
                'fits': plan.memory_limit_bytes >= self._problem.in_core_peak_bytes,
                'bound_seconds': prices.bound_seconds,
                'more_bytes': prices.more_bytes,
                'bound_with_more_seconds': prices.bound_with_more_seconds,
                'saved_seconds': prices.bound_seconds - prices.bound_with_more_seconds,
                'seconds_per_gibibyte': float(costs[-1] * GIBIBYTE),
                'operations': self._priced_operations(prices.seconds_per_byte),
                'layers': self._priced_layers(composition.presences, costs),
            },
        }

    def _choose(self, presences: Sequence[Presence]) -> list[Presence]:
        """Picks the storages that are shown: the largest ones."""
        storages = self._profile.storages
        ordered = sorted(presences, key=lambda p: -storages[p.storage].nbytes)
        return ordered[: self._most_storages]

    def _presence(self, presence: Presence, costs: np.ndarray) -> Figures:
        """A storage while it is there.

        Args:
            presence: The storage.
            costs: (n + 1,) seconds per byte of all operations before.
        """
        return {
            'storage': self._place(presence.storage),
            'group': GROUPS.index(presence.group),
            'seconds': self._cost(presence, costs),
            'stays': [position for stay in presence.stays for position in stay],
        }

    def _cost(self, presence: Presence, costs: np.ndarray) -> float:
        """Most seconds by which its bytes more while it stays would lower the bound."""
        per_byte = sum(costs[last] - costs[first] for first, last in presence.stays)
        return float(per_byte * self._profile.storages[presence.storage].nbytes)

    def _priced_layers(
        self, presences: Sequence[Presence], costs: np.ndarray
    ) -> list[Figures]:
        """Links, with the costs of all that their functions hold, the dearest first."""
        seconds: dict[str, float] = defaultdict(float)
        for presence in presences:
            label = storage_name(self._profile.storages[presence.storage])
            layer = label.rpartition('/')[0] or label
            seconds[layer] += self._cost(presence, costs)
        dearest = sorted(seconds.items(), key=lambda item: -item[1])
        return [
            {'name': self._tables.place_name(layer), 'seconds': cost}
            for layer, cost in dearest[:MOST_PRICED]
            if cost > 0
        ]

    def _moment_columns(self, composition: Composition, timeline: Timeline) -> Figures:
        firsts, highest = thin_operations(composition.load_bytes, self._moments)
        starts = operation_starts(timeline.intervals)
        operations = self._profile.operations
        replayed = composition.replayed[highest].tolist()
        return {
            'operation': highest.tolist(),
            'name': self._tables.place_names(
                operations[k].label for k in highest.tolist()
            ),
            'phase': [operations[k].phase.value for k in highest.tolist()],
            'start_seconds': [_rounded(starts[k]) for k in firsts.tolist()],
            'end_seconds': _rounded(timeline.total_seconds),
            'load_bytes': composition.load_bytes[highest].tolist(),
            'group_bytes': [
                composition.group_bytes[group][highest].tolist() for group in GROUPS
            ],
            'replay_bytes': composition.replay_bytes[highest].tolist(),
            'replayed': [
                self._tables.place_name(operations[k].label) if k >= 0 else -1
                for k in replayed
            ],
        }

    def _map_rows(self, plan: Plan) -> list[list[Any]]:
        """Storage, action, position of release and of need; the largest maps."""
        rows: list[tuple[Any, ...]] = [
            (
                entry.storage,
                entry.action.value,
                entry.release_before,
                entry.needed_before,
            )
            for entry in plan.maps
        ]
        rows += [(s.storage, FOR_REPLAYS, s.drop_before, -1) for s in plan.sources]
        rows.sort(key=lambda row: -self._profile.storages[row[0]].nbytes)
        return [
            [self._place(storage), *row]
            for storage, *row in rows[: self._most_storages]
        ]

    def _lane_columns(self, intervals: Sequence[Interval]) -> Figures:
        spans = thin_intervals(intervals, self._spans)
        shown = [span.interval for span in spans]
        return {
            'lane': [interval.lane for interval in shown],
            'kind': [interval.kind for interval in shown],
            'name': self._tables.place_names(interval.label for interval in shown),
            'start_seconds': [_rounded(interval.start_seconds) for interval in shown],
            'end_seconds': [_rounded(interval.end_seconds) for interval in shown],
            'storage': [self._place(interval.storage) for interval in shown],
            'count': [span.count for span in spans],
        }

    def _measured(
        self, measured: Measured | None, timeline: Timeline
    ) -> Figures | None:
        if measured is None:
            return None
        samples = thin_samples(measured.samples, self._moments)
        return {
            'total_seconds': measured.total_seconds,
            'start_seconds': [_rounded(seconds) for seconds, _ in samples],
            'load_bytes': [nbytes for _, nbytes in samples],
            'lanes': self._lane_columns(measured.intervals),
            'operations': differing_operations(
                self._tables, self._profile, timeline.intervals, measured.intervals
            ),
        }

    def _priced_operations(self, prices: np.ndarray) -> list[Figures]:
        """Operations at which memory is short, the dearest first."""
        order = np.argsort(-prices, kind='stable')[:MOST_PRICED].tolist()
        return [
            {
                'operation': k,
                'name': self._tables.place_name(self._profile.operations[k].label),
                'seconds_per_gibibyte': float(prices[k] * GIBIBYTE),
            }
            for k in order
            if prices[k] > 0
        ]


def _rounded(seconds: float) -> float:
    return round(float(seconds), _DIGITS)


@dataclasses.dataclass(slots=True)
class Span:
    """One interval, or several short ones of a kind, one soon after the other.

    Attributes:
        interval (Interval): From the start of the first to the end of the last, named
            after the longest of them.
        count (int): How many there are.
        longest_seconds (float): Of the longest one.
    """

    interval: Interval
    count: int
    longest_seconds: float


def thin_operations(loads: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of operations, and of each one the operation with the highest load.

    Args:
        loads: (n,) load of each operation.
        most: Number of stretches.

    Returns:
        tuple: First operation of each stretch; its operation with the highest load.
    """
    n = len(loads)
    count = min(n, most)
    firsts = np.arange(count) * n // max(count, 1)
    ends = np.append(firsts[1:], n)
    highest = [
        first + int(np.argmax(loads[first:end]))
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
    ]
    return firsts, np.array(highest, np.int64)


def thin_samples(samples: Sequence[Sample], most: int) -> list[tuple[float, int]]:
    """Seconds and highest load from there on, in at most so many stretches."""
    peaks = np.array([sample.peak_bytes for sample in samples], np.int64)
    firsts, highest = thin_operations(peaks, most)
    return [
        (samples[first].seconds, samples[top].peak_bytes)
        for first, top in zip(firsts.tolist(), highest.tolist(), strict=True)
    ]


def thin_intervals(intervals: Sequence[Interval], most: int) -> list[Span]:
    """Joins short neighbours of a lane and kind until there are few enough.

    Args:
        intervals: By start.
        most: Number of spans.
    """
    spans = [
        Span(interval, 1, interval.end_seconds - interval.start_seconds)
        for interval in intervals
    ]
    if len(spans) <= most:
        return spans
    first = min(interval.start_seconds for interval in intervals)
    last = max(interval.end_seconds for interval in intervals)
    width = (last - first) / most
    while len(spans) > most:
        spans = _join(spans, width)
        width *= 2
    return spans


def _join(spans: Sequence[Span], width: float) -> list[Span]:
    joined: list[Span] = []
    newest: dict[tuple[str, str], Span] = {}
    for span in spans:
        key = span.interval.lane, span.interval.kind
        before = newest.get(key)
        if before is not None and _whole_seconds(before, span) <= width:
            _extend(before, span)
        else:
            newest[key] = copied = dataclasses.replace(span)
            joined.append(copied)
    return joined


def _whole_seconds(one: Span, other: Span) -> float:
    """Seconds from the start of one span to the end of the other."""
    return other.interval.end_seconds - one.interval.start_seconds


def _extend(span: Span, other: Span) -> None:
    one, two = span.interval, other.interval
    named = two if other.longest_seconds > span.longest_seconds else one
    span.interval = dataclasses.replace(
        one,
        label=named.label,
        end_seconds=max(one.end_seconds, two.end_seconds),
        storage=one.storage if one.storage == two.storage else -1,
    )
    span.count += other.count
    span.longest_seconds = max(span.longest_seconds, other.longest_seconds)
