"""Measured timelines as versioned JSON, and checks that they make sense."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.records.measured_timeline import (
    OPERATIONS,
    Measured,
    MemoryEvent,
    Sample,
)
from chainer_hybridmem.records.timeline import Interval

FORMAT = 'chainer_hybridmem/timeline'
VERSION = 1
KINDS = {
    'compute': (*OPERATIONS, 'recompute', 'stall'),
    'd2h': ('swap-out',),
    'h2d': ('swap-in',),
}
_LONGEST_SECONDS = 1e9


def serialise_timeline(measured: Measured) -> str:
    """The JSON text of a measured timeline."""
    body: dict[str, Any] = {
        'planner': measured.planner,
        'profile_fingerprint': measured.profile_fingerprint,
        'memory_limit_bytes': measured.memory_limit_bytes,
        'device': measured.device,
        'total_seconds': measured.total_seconds,
        'load_bytes': measured.load_bytes,
        'intervals': [files.row(i) for i in measured.intervals],
        'uses': measured.uses,
        'samples': [files.row(s) for s in measured.samples],
        'events': [files.row(e) for e in measured.events],
    }
    return json.dumps({'format': FORMAT, 'version': VERSION, **body})


def parse_timeline(text: str) -> Measured:
    """Reads what :func:`serialise_timeline` has written.

    Raises:
        FormatError: If the text is no such file, or its parts contradict each other.
    """
    body = files.parse(text, FORMAT, VERSION)
    with files.reading('timeline'):
        measured = Measured(
            planner=str(body['planner']),
            profile_fingerprint=str(body['profile_fingerprint']),
            memory_limit_bytes=int(body['memory_limit_bytes']),
            device=dict(body['device']),
            total_seconds=float(body['total_seconds']),
            load_bytes=tuple(int(n) for n in body['load_bytes']),
            intervals=tuple(files.unrow(Interval, r) for r in body['intervals']),
            uses=tuple((int(s), int(k)) for s, k in body['uses']),
            samples=tuple(files.unrow(Sample, row) for row in body['samples']),
            events=tuple(files.unrow(MemoryEvent, row) for row in body['events']),
        )
    check_measured(measured)
    return measured


def check_measured(measured: Measured) -> None:
    """Refuses a measured timeline whose parts contradict each other.

    Raises:
        FormatError: Naming the first contradiction found.
    """
    if not 0 <= measured.total_seconds < _LONGEST_SECONDS:
        raise _broken(f'it takes {measured.total_seconds} seconds')
    sizes = (measured.memory_limit_bytes, *measured.load_bytes)
    if not all(0 <= n < files.LARGEST_SIZE for n in sizes):
        raise _broken(f'its limit and loads are {sizes[:9]}')
    operations = [i for i in measured.intervals if i.kind in OPERATIONS]
    if not operations or len(operations) != len(measured.load_bytes):
        raise _broken(
            f'it has {len(operations)} operations and {len(measured.load_bytes)} loads'
        )
    _check_intervals(measured.intervals)
    for one, two in itertools.pairwise(operations):
        if two.start_seconds < one.end_seconds:
            raise _broken(f'{two.label!r} begins before {one.label!r} has ended')
    for storage, operation in measured.uses:
        if storage < 0 or not 0 <= operation < len(operations):
            raise _broken(f'storage {storage} is used by operation {operation}')
    _check_samples(measured.samples)
    _check_events(measured.events, len(operations))


def _check_intervals(intervals: tuple[Interval, ...]) -> None:
    for interval in intervals:
        if interval.kind not in KINDS.get(interval.lane, ()):
            raise _broken(f'a {interval.kind!r} is in lane {interval.lane!r}')
        first, last = interval.start_seconds, interval.end_seconds
        if not -_LONGEST_SECONDS < first <= last < _LONGEST_SECONDS:
            raise _broken(f'{interval.label!r} runs from {first} to {last}')
        if not -1 <= interval.storage < files.LARGEST_SIZE:
            raise _broken(f'{interval.label!r} has storage {interval.storage}')


def _check_samples(samples: tuple[Sample, ...]) -> None:
    before = -math.inf
    for sample in samples:
        if not before <= sample.seconds < _LONGEST_SECONDS:
            raise _broken(f'a sample is at {sample.seconds} after one at {before}')
        before = sample.seconds
        if not all(0 <= n < files.LARGEST_SIZE for n in dataclasses.astuple(sample)):
            raise _broken(f'a sample is {sample}')


def _check_events(events: tuple[MemoryEvent, ...], operations: int) -> None:
    """Each block is allocated once at most, and freed once while it is there."""
    allocated: set[int] = set()
    freed: set[int] = set()
    for event in events:
        block = abs(event.block)
        seen = allocated if event.block > 0 else freed
        if not block or block in seen or (event.block > 0 and block in freed):
            raise _broken(f'block {event.block} comes twice or after its free')
        seen.add(block)
        if not 0 <= event.nbytes < files.LARGEST_SIZE:
            raise _broken(f'block {event.block} has {event.nbytes} bytes')
        if not 0 <= event.operation < operations or event.storage < -1:
            raise _broken(f'event {event} is out of range')


def _broken(why: str) -> FormatError:
    return files.broken('timeline', why)
