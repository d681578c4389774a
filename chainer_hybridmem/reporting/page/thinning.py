"""Fewer points for a picture: peaks stay, and so does what takes long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from chainer_hybridmem.records.measured_timeline import Sample
from chainer_hybridmem.records.timeline import Interval


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
    """From the start of one to the end of the other."""
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
