"""The rules of the Chrome trace event format, as its viewers apply them.

Of the format's description (Trace Event Format, catapult) and Perfetto's importer of
JSON: keys that each phase needs, slices of a thread that nest, flows that begin and
end inside slices, counters of numbers. Viewers add up start and duration as doubles
(speedscope in microseconds, catapult in milliseconds, Perfetto whole nanoseconds): no
neighbours may overlap then either.
"""

from __future__ import annotations

import json
import math

REQUIRED = {
    'X': {'name', 'cat', 'ph', 'ts', 'dur', 'pid', 'tid'},
    's': {'name', 'cat', 'ph', 'ts', 'pid', 'tid', 'id'},
    'f': {'name', 'cat', 'ph', 'ts', 'pid', 'tid', 'id', 'bp'},
    'C': {'name', 'ph', 'ts', 'pid', 'args'},
    'M': {'name', 'ph', 'pid', 'args'},
}
SHORT = 0.125  # microseconds; no time lies inside a shorter slice
METADATA = {
    'process_name': ('name', str),
    'thread_name': ('name', str),
    'process_sort_index': ('sort_index', int),
    'thread_sort_index': ('sort_index', int),
}


def check_trace(trace):
    """Raises AssertionError with the event that breaks a rule."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) <= {'traceEvents', 'displayTimeUnit', 'otherData'}
    assert trace['displayTimeUnit'] in ('ms', 'ns')
    events = trace['traceEvents']
    for event in events:
        _check_keys(event)
    slices = _check_slices([e for e in events if e['ph'] == 'X'])
    _check_flows([e for e in events if e['ph'] in 'sf'], slices)
    _check_counters([e for e in events if e['ph'] == 'C'])
    _check_names(events)


def _check_keys(event):
    assert event['ph'] in REQUIRED, event
    assert REQUIRED[event['ph']] <= set(event), event
    assert isinstance(event['name'], str) and event['name'], event
    for key in ('pid', 'tid'):
        assert isinstance(event.get(key, 0), int), event
    for key in ('ts', 'dur'):
        value = event.get(key, 0)
        assert isinstance(value, int | float) and math.isfinite(value), event
    # An empty slice becomes a child of the one before, or is never closed.
    assert event.get('dur', 1) > 0, event
    assert isinstance(event.get('args', {}), dict), event


def _check_slices(slices):
    """Slices of a thread lie side by side or inside one another."""
    threads = {}
    for event in slices:
        start, end = event['ts'], event['ts'] + event['dur']
        threads.setdefault((event['pid'], event['tid']), []).append((start, end))
    for spans in threads.values():
        stack = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], (start, end, stack)
            stack.append(end)
    return threads


def _check_flows(flows, slices):
    """Each id has one start and one end, in slices, and never leads back in time.

    Where one slice ends and the next one begins, viewers differ in which is meant.
    """
    by_id = {}
    for event in flows:
        by_id.setdefault((event['cat'], event['id']), []).append(event)
        moment = event['ts']
        spans = slices[event['pid'], event['tid']]
        short = [a for a, b in spans if b - a <= SHORT and a == moment]
        assert short or any(a < moment < b for a, b in spans), event
    for pair in by_id.values():
        assert [e['ph'] for e in pair] == ['s', 'f'], pair
        start, end = pair
        assert start['ts'] <= end['ts'], pair
        assert start['name'] == end['name'] and end['bp'] == 'e', pair
        assert start['pid'] == end['pid'], pair


def _check_counters(counters):
    latest = {}
    for event in counters:
        assert event['args'], event
        for value in event['args'].values():
            assert isinstance(value, int | float) and not isinstance(value, bool)
            assert value >= 0, event
        track = event['pid'], event['name']
        assert event['ts'] >= latest.get(track, -math.inf), event
        latest[track] = event['ts']


def _check_names(events):
    """Every process and thread that has slices has a name, and one only."""
    named = {}
    for event in events:
        if event['ph'] == 'M':
            key, kind = METADATA[event['name']]
            assert isinstance(event['args'][key], kind), event
            who = event['name'], event['pid'], event.get('tid')
            assert who not in named, event
            named[who] = event
    for event in events:
        if event['ph'] == 'X':
            assert ('process_name', event['pid'], None) in named
            assert ('thread_name', event['pid'], event['tid']) in named
