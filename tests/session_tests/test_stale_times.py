"""A bound is for the times that were recorded; a run that is faster has other ones."""

from __future__ import annotations

from support import networks

from chainer_hybridmem.training.session.planning.planning import Planning
from chainer_hybridmem.training.session.report import STALE

LIMIT = 4_400_000  # bytes; Everything needs 5.2 MB in-core


def test_a_report_says_that_times_are_stale_until_they_are_taken_again(monkeypatch):
    bounds = iter([1e3])  # of the first times, as if the machine had been busy
    true = Planning._lower_bound_seconds

    def first_too_high(self, guide, problem):
        return next(bounds, None) or true(self, guide, problem)

    monkeypatch.setattr(Planning, '_find_faster', lambda *args: None)
    monkeypatch.setattr(Planning, '_lower_bound_seconds', first_too_high)
    reports = []

    def after(session, number):
        reports.append(session.report())
        if sum(STALE in text for text in reports) == 1:
            session.retime()

    networks.train(
        networks.Everything, networks.batches(30), memory_limit=LIMIT, after=after
    )
    assert any('1000.000 s' in text and STALE in text for text in reports)
    assert '1000.000 s' not in reports[-1]
