"""Predicted next to measured, where the link decides and the machine does not."""

from __future__ import annotations

import statistics

import pytest
from support import networks

TOLERANCE = 0.15  # of the measured time


def test_the_forecast_is_close_to_what_is_measured() -> None:
    """A slow link: copies of a known rate are most of the time."""
    _, reference = networks.train(
        networks.Everything, networks.batches(5), memory_limit='1GB'
    )
    peak = reference.statistics()['in_core_peak_bytes']
    _, session = networks.train(
        networks.Everything,
        networks.batches(12),
        memory_limit=int(peak * 0.72),
        planner='swap-all',
        link_bandwidth='4MB/s',
    )
    figures = session.statistics()
    measured = statistics.median(session.iteration_times())
    assert figures['predicted_seconds'] == pytest.approx(measured, rel=TOLERANCE)
    assert measured > 0.1  # 4 MB/s
    assert figures['predicted_peak_bytes'] == pytest.approx(
        figures['guided_peak_bytes'], rel=0.01
    )
