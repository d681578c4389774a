"""Swap-ins that were late begin earlier; numbers and limit stay."""

from __future__ import annotations

import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.recording.stopwatch import Lateness
from chainer_hybridmem.training.session.planning.planning import Planning

ITERATIONS = 20  # settled by the 15th, should the times change the plan
LIMIT = 4_400_000  # bytes; Everything needs 5.2 MB in-core
A_BIT, VERY = 1e-3, 10.0  # seconds; the latter is more than an iteration takes


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is followed, in order."""
    followed = []
    follow = Planning.follow

    def noted(self, guide, problem, plan, old=None):
        followed.append(plan)
        follow(self, guide, problem, plan, old)

    monkeypatch.setattr(Planning, 'follow', noted)
    return followed


class Late:
    """Compute has waited for the swap-in that is needed last."""

    def __init__(self):
        self.seconds = A_BIT
        self.watched = 0

    def late_seconds(self, lateness):
        self.watched += 1
        swapped = list(lateness.copy_seconds('swap-in'))
        return dict.fromkeys(swapped[-1:], self.seconds)


@pytest.fixture
def late(monkeypatch):
    late = Late()
    monkeypatch.setattr(Lateness, 'late_seconds', lambda self: late.late_seconds(self))
    return late


def run(data, **options):
    """Trains with every swap-in a computation ahead: there is room to move."""
    return networks.train(
        networks.Everything,
        data,
        **{
            'memory_limit': LIMIT,
            'planner': 'swap-all-unscheduled',
            'link_bandwidth': '200MB/s',
            'feedback': True,
            **options,
        },
    )


def positions(plan):
    return {m.storage: m.swap_in_before for m in plan.maps if m.action is Action.SWAP}


@pytest.mark.parametrize('arena', [True, False])
def test_late_swap_ins_begin_earlier(late, plans, data, in_core, arena):
    result, session = run(data, arena=arena)
    networks.assert_same(in_core, result)
    before, after = positions(plans[0]), positions(session.plan)
    assert before.keys() == after.keys()
    assert all(after[s] <= before[s] for s in before)
    assert after != before
    figures = session.statistics()
    assert figures['peak_bytes'] <= LIMIT
    assert figures['predicted_peak_bytes'] == figures['guided_peak_bytes'] <= LIMIT
    assert figures['evictions'] == figures['restores'] == figures['deviations'] == 0
    if arena:
        assert figures['footprint_bytes'] <= LIMIT


def test_it_settles(late, data):
    """Who cannot move any more is let be, however late it is."""
    late.seconds = VERY
    _, session = run(data, arena=False)
    last = [entry['plan'] for entry in networks.entries_of(session)[-4:]]
    assert last == [session.plan] * 4
    assert positions(last[0]) != positions(networks.entries_of(session)[3]['plan'])


def test_a_single_wait_is_chance(monkeypatch, plans, data):
    """Only every other iteration is late."""
    calls = []

    def late_seconds(self):
        calls.append(self)
        return dict.fromkeys(self.copy_seconds('swap-in'), VERY * (len(calls) % 2))

    monkeypatch.setattr(Lateness, 'late_seconds', late_seconds)
    _, session = run(data, arena=False)
    assert len(calls) > 4
    assert positions(session.plan) == positions(plans[0])


def test_nobody_is_watched_without_it(late, data):
    run(data, feedback=None)
    assert late.watched == 0


def test_capuchin_is_watched_unless_told_otherwise(late, data, in_core):
    result, session = run(data, planner='capuchin', feedback=None, memory_limit='4MB')
    networks.assert_same(in_core, result)
    assert session.plan.count(Action.SWAP) and late.watched
    late.watched = 0
    run(data, planner='capuchin', feedback=False, memory_limit='4MB')
    assert late.watched == 0


def test_the_link_is_what_the_copies_were(late, plans, data, in_core, monkeypatch):
    """The link gets ten times slower: predictions know it once a trigger has moved.

    In a time of its own: a busy machine is slower from the beginning.
    """
    take = Copies.take_stall_seconds
    calls = []

    def slower(self):
        calls.append(self)
        if len(calls) == 7:
            self._engine.throttle(20e6)
        return take(self)

    monkeypatch.setattr(Copies, 'take_stall_seconds', slower)
    result, session = run(data, arena=False)
    networks.assert_same(in_core, result)
    link = session.profile.link
    assert link.h2d_bytes_per_second < 60e6
    assert session.plan.predicted_seconds > plans[0].predicted_seconds
    assert session.plan.lower_bound_seconds <= session.plan.predicted_seconds


def test_a_traced_iteration_is_not_watched(late, data):
    with_trace = networks.Everything()
    optimizer = networks.chainer.optimizers.SGD(0.01).setup(with_trace)
    with hybridmem.optimize(
        with_trace, LIMIT, planner='swap-all', feedback=True, arena=False
    ) as session:
        for i, (x, t) in enumerate(data[:10]):
            loss = with_trace(x, t)
            with_trace.cleargrads()
            loss.backward()
            del loss
            optimizer.update()
            if i == 7:
                session.finish_iteration()
                seen = late.watched
                session.trace_iteration()
            if i == 8:
                session.finish_iteration()
                assert session.timeline is not None
                assert late.watched == seen


@pytest.mark.parametrize('value', ['on', 1, 0.05])
def test_values_that_are_none(value):
    with pytest.raises(OptionError, match=f'feedback is {value!r}'):
        hybridmem.optimize(networks.Everything(), LIMIT, feedback=value)
    with pytest.raises(OptionError, match='feedback'):
        hybridmem.HybridMemory(LIMIT, feedback=value)
