"""Timelines as Chrome trace JSON, for Perfetto and chrome://tracing.

One process for each timeline, predicted and measured, one thread for each stream.
What each kind of event (``ph``) says:

====  ==========================================================
``M`` names of the process and its streams
``X`` one interval: an operation, a replay, a copy or a stall
``s`` start of an arrow: swap-out to swap-in, swap-in to use
``f`` its end
``C`` memory load and limit; measured: the four series of the pool
====  ==========================================================

Times are eighths of a microsecond. These are exact in binary, and so are the sums of
start and duration and the nanoseconds of Perfetto: neighbours do not overlap, however
a viewer computes. What rounds to no time at all (a reshape, the backward function of
an addition) is left out: viewers hang it into the slice before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from chainer_hybridmem.planning.records.measured_timeline import OPERATIONS, Measured
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.reporting.rows import LANE_TITLES

Event = dict[str, Any]

STREAMS = {'compute': 1, 'd2h': 2, 'h2d': 3}
PREDICTED, MEASURED = 1, 2  # process ids
SERIES = {
    'occupied_bytes': 'pool: occupied',
    'free_bytes': 'pool: free',
    'pool_allocated_bytes': 'pool: from the pool',
    'device_allocated_bytes': 'pool: from the device API',
}
_EIGHTHS = 8  # of a microsecond


def chrome_trace(
    timeline: Timeline, plan: Plan, measured: Measured | None = None
) -> dict[str, Any]:
    """A simulated iteration as a whole trace file, and a measured one beside it.

    Args:
        timeline: What :func:`chainer_hybridmem.simulate` gave for the plan.
        plan: The plan; says which operation waits for a swap-in.
        measured: An iteration that followed the plan.

    Returns:
        dict: The object to write as JSON.
    """
    uses = {entry.storage: entry.needed_before for entry in plan.maps}
    predicted = [
        *_names('predicted', PREDICTED),
        *_slices(timeline.intervals),
        *_arrows(timeline.intervals, uses, PREDICTED),
        *_loads(timeline),
        *_limit(plan.memory_limit_bytes, timeline.total_seconds),
    ]
    events = [{'pid': PREDICTED, **event} for event in predicted]
    figures = {
        'planner': plan.planner,
        'memory_limit_bytes': plan.memory_limit_bytes,
        'peak_bytes': timeline.peak_bytes,
        'total_seconds': timeline.total_seconds,
        'in_core_seconds': plan.in_core_seconds,
        'lower_bound_seconds': plan.lower_bound_seconds,
        'gap': plan.gap,
    }
    if measured is not None:
        events += measured_events(measured)
        figures['measured_seconds'] = measured.total_seconds
        figures['measured_peak_bytes'] = max(measured.load_bytes)
    return {'traceEvents': events, 'displayTimeUnit': 'ms', 'otherData': figures}


def measured_events(measured: Measured) -> list[Event]:
    """The events of a measured timeline, as another process of the file."""
    loads = [(s.seconds, s.peak_bytes) for s in measured.samples]
    events = [
        *_names('measured', MEASURED),
        *_slices(measured.intervals),
        *_arrows(measured.intervals, dict(measured.uses), MEASURED),
        *_counter('memory load', loads),
        *_limit(measured.memory_limit_bytes, measured.total_seconds),
        *series_events(measured.samples),
    ]
    return [{'pid': MEASURED, **event} for event in events]


def profile_trace(samples: Sequence[Any], title: str) -> dict[str, Any]:
    """The log of a memory profiler as a whole trace file.

    Args:
        samples: :attr:`MemoryProfiler.samples`.
        title: What was watched.

    Returns:
        dict: The object to write as JSON: the four series, the highest load in
        between, and a slice from each sample to the next.
    """
    intervals = (
        Interval('compute', 'operation', one.label, one.seconds, two.seconds)
        for one, two in itertools.pairwise(samples)
    )
    # The peak of a sample is that of the time before it.
    peaks = [(one.seconds, two.peak_bytes) for one, two in itertools.pairwise(samples)]
    events = [
        *_names(title, MEASURED, ('compute',)),
        *_slices(intervals),
        *_counter('memory load', peaks),
        *series_events(samples),
    ]
    return {
        'traceEvents': [{'pid': MEASURED, **event} for event in events],
        'displayTimeUnit': 'ms',
    }


def series_events(samples: Iterable[Any]) -> Iterator[Event]:
    """Counters of the four series, without a process."""
    for sample in samples:
        for name, title in SERIES.items():
            yield from _counter(title, [(sample.seconds, getattr(sample, name))])


def _names(
    title: str, process: int, lanes: Iterable[str] = tuple(STREAMS)
) -> Iterator[Event]:
    yield {'ph': 'M', 'name': 'process_name', 'args': {'name': title}}
    yield {'ph': 'M', 'name': 'process_sort_index', 'args': {'sort_index': process}}
    for lane in lanes:
        stream = STREAMS[lane]
        names = {'ph': 'M', 'tid': stream}
        yield {**names, 'name': 'thread_name', 'args': {'name': LANE_TITLES[lane]}}
        yield {**names, 'name': 'thread_sort_index', 'args': {'sort_index': stream}}


def _ends(interval: Interval) -> tuple[float, float]:
    return _micros(interval.start_seconds), _micros(interval.end_seconds)


def _shown(interval: Interval) -> bool:
    start, end = _ends(interval)
    return start < end


def _slices(intervals: Iterable[Interval]) -> Iterator[Event]:
    for interval in filter(_shown, intervals):
        start, end = _ends(interval)
        event = {
            'ph': 'X',
            'tid': STREAMS[interval.lane],
            'cat': interval.kind,
            'name': interval.label,
            'ts': start,
            'dur': end - start,
        }
        if interval.storage >= 0:
            event['args'] = {'storage': interval.storage}
        yield event


def _arrows(
    intervals: Sequence[Interval], uses: dict[int, int], process: int
) -> Iterator[Event]:
    """Two arrows for each swapped map: out to in, and in to its first use."""
    copies = {(i.kind, i.storage): i for i in intervals if i.storage >= 0 and _shown(i)}
    # They run in host issue order.
    operations = [i for i in intervals if i.kind in OPERATIONS]
    number = 0
    for storage, use in uses.items():
        swap_out = copies.get(('swap-out', storage))
        swap_in = copies.get(('swap-in', storage))
        if swap_out is None or swap_in is None:
            continue
        pairs = [(swap_out, swap_in)]
        user = next(filter(_shown, operations[use:] if use >= 0 else ()), None)
        if user is not None:
            pairs.append((swap_in, user))
        for source, target in pairs:
            name = f'{process}.{number + 1}'  # ids are shared by all processes
            start, end = _arrow_end(source, name), _arrow_end(target, name)
            if start['ts'] > end['ts']:
                continue  # evicted again after its use: not the copy that was used
            number += 1
            yield {**start, 'ph': 's'}
            yield {**end, 'ph': 'f', 'bp': 'e'}


def _arrow_end(interval: Interval, name: str) -> Event:
    """An end that binds to the interval and to neither of its neighbours.

    It lies a little after the start: chrome://tracing counts milliseconds, and the
    sum of start and duration of the interval before can round to past the start.
    """
    start, end = _ends(interval)
    return {
        'tid': STREAMS[interval.lane],
        'cat': 'swap',
        'name': 'swap',
        'id': name,
        'ts': min(start + 1 / _EIGHTHS, max(start, end - 1 / _EIGHTHS)),
    }


def _loads(timeline: Timeline) -> Iterator[Event]:
    """Highest load of each operation."""
    starts = operation_starts(timeline.intervals)
    return _counter('memory load', zip(starts, timeline.load_bytes, strict=True))


def operation_starts(intervals: Iterable[Interval]) -> list[float]:
    """Start of each operation, from its first replay on."""
    starts: list[float] = []
    first_replay = None
    for interval in intervals:
        if interval.kind == 'recompute' and first_replay is None:
            first_replay = interval.start_seconds
        if interval.kind in OPERATIONS:
            own = interval.start_seconds
            starts.append(own if first_replay is None else first_replay)
            first_replay = None
    return starts


def _limit(limit_bytes: int, total_seconds: float) -> Iterator[Event]:
    """A flat line beside the load, where there is a limit."""
    ends = [(0.0, limit_bytes), (total_seconds, limit_bytes)]
    return _counter('memory limit', ends if limit_bytes else [])


def _counter(name: str, values: Iterable[tuple[float, int]]) -> Iterator[Event]:
    for seconds, nbytes in values:
        yield {
            'ph': 'C',
            'name': name,
            'ts': _micros(seconds),
            'args': {'bytes': nbytes},
        }


def _micros(seconds: float) -> float:
    return round(seconds * 1e6 * _EIGHTHS) / _EIGHTHS
