"""A timeline as Chrome trace JSON, for Perfetto and chrome://tracing.

One process for each timeline, one thread for each stream. What each kind of event
(``ph``) says:

====  ==========================================================
``M`` names of the process and its streams
``X`` one interval: an operation, a replay, a copy or a stall
``s`` start of an arrow: swap-out to swap-in, swap-in to use
``f`` its end
``C`` the memory load, from the moment an operation starts
====  ==========================================================

Times are microseconds with three decimals: the viewers count whole nanoseconds, and
rounding the two ends of an interval alike keeps neighbours from overlapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chainer_hybridmem.plan import Plan
from chainer_hybridmem.simulation.timeline import Interval, Timeline

Event = dict[str, Any]

STREAMS = {'compute': 1, 'd2h': 2, 'h2d': 3}
_TITLES = {
    'compute': 'compute',
    'd2h': 'swap-out (device to host)',
    'h2d': 'swap-in (host to device)',
}
_OPERATIONS = ('forward', 'backward', 'update')


def chrome_trace(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """A simulated iteration as a whole trace file.

    Args:
        timeline: What :func:`chainer_hybridmem.simulate` gave for the plan.
        plan: The plan; says which operation waits for a swap-in.

    Returns:
        dict: The object to write as JSON.
    """
    return {
        'traceEvents': trace_events(timeline, plan),
        'displayTimeUnit': 'ms',
        'otherData': {
            'planner': plan.planner,
            'memory_limit_bytes': plan.memory_limit_bytes,
            'peak_bytes': timeline.peak_bytes,
            'total_seconds': timeline.total_seconds,
            'in_core_seconds': plan.in_core_seconds,
            'lower_bound_seconds': plan.lower_bound_seconds,
            'gap': plan.gap,
        },
    }


def trace_events(
    timeline: Timeline, plan: Plan, process: int = 1, title: str = 'predicted'
) -> list[Event]:
    """The events of one timeline, so that several can share a file.

    Args:
        timeline: As for :func:`chrome_trace`.
        plan: As for :func:`chrome_trace`.
        process: Process id; another one for each timeline of a file.
        title: Name of the process.
    """
    events = [
        *_names(title),
        *(_slice(interval) for interval in timeline.intervals),
        *_arrows(timeline, plan, process),
        *_loads(timeline),
    ]
    return [{'pid': process, **event} for event in events]


def _names(title: str) -> Iterator[Event]:
    yield {'ph': 'M', 'name': 'process_name', 'args': {'name': title}}
    for lane, stream in STREAMS.items():
        names = {'ph': 'M', 'tid': stream}
        yield {**names, 'name': 'thread_name', 'args': {'name': _TITLES[lane]}}
        yield {**names, 'name': 'thread_sort_index', 'args': {'sort_index': stream}}


def _slice(interval: Interval) -> Event:
    start, end = _micros(interval.start_seconds), _micros(interval.end_seconds)
    event = {
        'ph': 'X',
        'tid': STREAMS[interval.lane],
        'cat': interval.kind,
        'name': interval.label,
        'ts': start,
        'dur': round(end - start, 3),
    }
    if interval.storage >= 0:
        event['args'] = {'storage': interval.storage}
    return event


def _arrows(timeline: Timeline, plan: Plan, process: int) -> Iterator[Event]:
    """Two arrows for each swapped map: out to in, and in to its first use."""
    copies = {(i.kind, i.storage): i for i in timeline.intervals if i.storage >= 0}
    operations = _operations(timeline)
    number = 0
    for entry in plan.maps:
        swap_out = copies.get(('swap-out', entry.storage))
        swap_in = copies.get(('swap-in', entry.storage))
        if swap_out is None or swap_in is None:
            continue
        pairs = [(swap_out, swap_in)]
        if 0 <= entry.needed_before < len(operations):
            pairs.append((swap_in, operations[entry.needed_before]))
        for source, target in pairs:
            number += 1
            name = f'{process}.{number}'  # ids are shared by all processes
            yield {**_arrow_end(source, name), 'ph': 's'}
            yield {**_arrow_end(target, name), 'ph': 'f', 'bp': 'e'}


def _arrow_end(interval: Interval, name: str) -> Event:
    """An end at the interval's start binds to that interval, not to the next."""
    return {
        'tid': STREAMS[interval.lane],
        'cat': 'swap',
        'name': 'swap',
        'id': name,
        'ts': _micros(interval.start_seconds),
    }


def _loads(timeline: Timeline) -> Iterator[Event]:
    """Highest load of each operation, from its first replay on."""
    starts: list[float] = []
    first_replay = None
    for interval in timeline.intervals:
        if interval.kind == 'recompute' and first_replay is None:
            first_replay = interval.start_seconds
        if interval.kind in _OPERATIONS:
            own = interval.start_seconds
            starts.append(own if first_replay is None else first_replay)
            first_replay = None
    for start, load in zip(starts, timeline.load_bytes, strict=True):
        yield {
            'ph': 'C',
            'name': 'memory load',
            'ts': _micros(start),
            'args': {'bytes': load},
        }


def _operations(timeline: Timeline) -> list[Interval]:
    """Intervals of the operations, by index: they run in host issue order."""
    return [i for i in timeline.intervals if i.kind in _OPERATIONS]


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
