"""A bound is for the times that were recorded; a run that is faster has other ones."""

from __future__ import annotations

import io

import pytest
from support import networks

from chainer_hybridmem.training.session.guides import guide as guides
from chainer_hybridmem.training.session.guides.guide import (
    STALE_RUNS,
    TIMING_RUNS,
    PlanPace,
)
from chainer_hybridmem.training.session.planning.planning import Planning

LIMIT = 4_400_000  # bytes; Everything needs 5.2 MB in-core


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    """Other tests do not judge how busy the machine was: see conftest."""
    monkeypatch.setattr(guides, 'STALE_SHARE', 0.97)


def timed_pace():
    pace = PlanPace()
    for _ in range(TIMING_RUNS):
        pace.note_times([])
    assert pace.timed
    return pace


def runs_until_stale(pace, seconds, most=1000):
    return next((n for n in range(1, most) if pace.are_stale(seconds, 1.0)), None)


def test_times_are_stale_once_iterations_are_faster_than_their_bound():
    assert runs_until_stale(timed_pace(), 0.5) == STALE_RUNS
    assert runs_until_stale(timed_pace(), 1.0) is None
    assert runs_until_stale(timed_pace(), 0.99) is None  # as noise may be
    assert runs_until_stale(PlanPace(), 0.5) is None  # not timed yet


def test_where_timing_does_not_help_it_becomes_rare():
    pace = timed_pace()
    assert [runs_until_stale(pace, 0.5) for _ in range(3)] == [
        STALE_RUNS,
        2 * STALE_RUNS,
        4 * STALE_RUNS,
    ]


def test_a_session_times_again_by_itself_and_says_so(monkeypatch):
    bounds = iter([1e3])  # of the first times, as if the machine had been busy
    true = Planning._lower_bound_seconds

    def first_too_high(self, guide, problem):
        return next(bounds, None) or true(self, guide, problem)

    monkeypatch.setattr(Planning, '_find_faster', lambda *args: None)
    monkeypatch.setattr(Planning, '_lower_bound_seconds', first_too_high)
    told, reports = io.StringIO(), []
    networks.train(
        networks.Everything,
        networks.batches(30),
        memory_limit=LIMIT,
        progress=told,
        after=lambda session, i: reports.append(session.report()),
    )
    assert told.getvalue().count('the lower bound for the recorded times') >= 1
    stale = ['which are stale: iterations are faster' in text for text in reports]
    assert any(stale)
    assert 'for the recorded times' in reports[-1]
    assert '1000.000 s' not in reports[-1]
