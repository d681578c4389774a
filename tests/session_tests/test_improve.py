"""Plans that get better while training runs."""

from __future__ import annotations

import dataclasses
import threading

import chainer
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import PLANNERS
from chainer_hybridmem.planning.planners.uniform import swap_all
from chainer_hybridmem.planning.search import improvement

LIMIT = 4_000_000
ITERATIONS = 11


def train(wait=False, **options):
    """Trains; waits for the background search before the last iterations."""
    plans = []

    def after(session, i):
        plans.append(session and session.plan)
        if wait and i == ITERATIONS - 4:
            for search in session._planning.search.improvements:
                search.wait(600)

    if options:
        options['memory_limit'] = LIMIT
    data = networks.batches(ITERATIONS)
    outcome, session = networks.train(networks.Everything, data, after=after, **options)
    return outcome, plans, session


def improvements():
    return [t for t in threading.enumerate() if t.name == 'hybridmem-improvement']


@pytest.fixture
def lazy(monkeypatch):
    """A hybrid planner that is content with swapping everything."""

    def swaps(problem, limit_bytes, steps=0, time_budget=None, tolerance=0.0):
        return swap_all(problem, limit_bytes)

    planner = dataclasses.replace(PLANNERS['hybrid'], function=swaps)
    monkeypatch.setitem(PLANNERS, 'hybrid', planner)


def test_a_better_plan_is_adopted_and_numbers_stay_exact(lazy, monkeypatch):
    monkeypatch.setattr(improvement.Improvement.__init__, '__defaults__', (3,))
    expected, _, _ = train()
    result, plans, session = train(
        True, planner='hybrid', improve=True, arena=False, link_bandwidth='50MB/s'
    )
    networks.assert_same(expected, result)
    assert session.plan.options['improved']
    before = [p for p in plans if p is not None and 'improved' not in p.options][-1]
    assert session.plan.predicted_seconds < before.predicted_seconds
    figures = session.statistics()
    assert figures['peak_bytes'] <= LIMIT
    assert figures['evictions'] == figures['restores'] == figures['deviations'] == 0
    assert figures['predicted_peak_bytes'] == figures['guided_peak_bytes']
    assert not improvements()


def test_without_it_nothing_runs(lazy):
    _, _, session = train(planner='hybrid')
    assert session._planning.search.improvements == [] and not improvements()


def test_it_ends_with_the_session(lazy, monkeypatch):
    """Also in the middle of its work, and after an error."""
    monkeypatch.setattr(improvement, 'TOLERANCE', -1.0)  # never content
    monkeypatch.setattr(improvement.Improvement.__init__, '__defaults__', (10**9,))
    model = networks.Everything()
    optimizer = chainer.optimizers.SGD().setup(model)
    with pytest.raises(ZeroDivisionError):
        with hybridmem.optimize(model, LIMIT, improve=True) as session:
            for x, t in networks.batches(8):
                loss = model(x, t)
                model.cleargrads()
                loss.backward()
                del loss
                optimizer.update()
            session.finish_iteration()
            assert len(improvements()) == 1
            raise ZeroDivisionError
    assert not improvements()


def test_another_planner_has_nothing_to_go_on_with():
    with pytest.raises(OptionError, match="improve needs planner 'hybrid'"):
        hybridmem.optimize(networks.Everything(), LIMIT, 'pooch', improve=True)
