"""Measured timelines made of simulated ones."""

from __future__ import annotations

import dataclasses
import itertools

from chainer_hybridmem.planning.records.measured_timeline import (
    OPERATIONS,
    Measured,
    Sample,
)


def measured_like(timeline, plan, factor=1.1):
    """A measured timeline that takes so many times as long as the simulated one."""
    longer = [
        dataclasses.replace(
            i,
            start_seconds=factor * i.start_seconds,
            end_seconds=factor * i.end_seconds,
        )
        for i in timeline.intervals
    ]
    starts = [i.start_seconds for i in longer if i.kind in OPERATIONS]
    samples = [
        Sample(start, load, 0, 0, 0, load)
        for start, load in zip(starts, timeline.load_bytes, strict=True)
    ]
    return Measured(
        plan.planner, plan.profile_fingerprint, plan.memory_limit_bytes, {},
        factor * timeline.total_seconds, timeline.load_bytes, tuple(longer), (),
        tuple(samples), (),
    )  # fmt: skip


def operation_loads(trace):
    """Highest load while each operation runs, as ``check_plan`` gives it."""
    every = trace.loads()
    bounds = [*trace.operation_starts, len(trace.events)]
    return [
        int(every[first : max(first, last) + 1].max())
        for first, last in itertools.pairwise(bounds)
    ]


def check_trace(trace):
    """The events of a trace do not contradict each other, nor what is carried."""
    n = len(trace.sizes)
    alive, gone = set(), set()
    for event in trace.events:
        buffer = abs(event) - 1
        assert 0 <= buffer < n and buffer not in gone
        if event > 0:
            assert buffer not in alive
            alive.add(buffer)
        else:
            gone.add(buffer)
    lower, upper = trace.lifetimes()
    for left, taken in trace.carried:
        assert lower[left] > 0 and upper[left] == trace.end
        assert not lower[taken] and trace.sizes[left] == trace.sizes[taken]
