"""What a session tells as planning time is all the time it spends on plans."""

from __future__ import annotations

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import io
from collections import Counter
from typing import Any

import chainer
import pytest
from support import networks

from chainer_hybridmem import timing
from chainer_hybridmem.training.recording import Recorder
from chainer_hybridmem.training.recording.allocation_log import AllocationLog
from chainer_hybridmem.training.session import session as session_module
from chainer_hybridmem.training.session.guides import guide
from chainer_hybridmem.training.session.planning import plan_maker, planning
from chainer_hybridmem.training.session.setting import planning_time
from chainer_hybridmem.units import format_seconds

# Seconds that each step takes on a clock that nothing else moves.
SECONDS = {
    'build': 1000.0,
    'problem': 200.0,
    'timed problem': 90.0,
    'planner': 30.0,
    'arena': 4.0,
    'log': 0.5,
    'keep': 7.0,
}


TICK = 2.0**-20


class Clock:
    """A clock that steps move, and every look a little."""

    def __init__(self) -> None:
        self.seconds = 5.0
        self.steps: Counter[str] = Counter()

    def now(self) -> float:
        """Seconds."""
        self.seconds += TICK
        return self.seconds

    def slow(self, step: str, function: Any) -> Any:
        """The function, which takes the step's seconds."""

        def slowly(*args: Any, **kwargs: Any) -> Any:
            self.seconds += SECONDS[step]
            self.steps[step] += 1
            return function(*args, **kwargs)

        return slowly

    def take(self) -> float:
        """Seconds of the steps since the last call."""
        seconds = sum(SECONDS[step] * n for step, n in self.steps.items())
        self.steps.clear()
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, 'now', clock.now)
    for step, owner, name in (
        ('build', Recorder, 'build'),
        ('problem', guide.Guide, 'make_problem'),
        ('timed problem', guide.Guide, 'make_timed_problem'),
        ('planner', plan_maker, 'make_plan'),
        ('arena', plan_maker, 'lay_out'),
        ('log', AllocationLog, 'finish'),
        ('keep', session_module.Session, '_keep'),
    ):
        slow = clock.slow(step, getattr(owner, name))
        if isinstance(owner, type):
            slow = _method(slow)
        monkeypatch.setattr(owner, name, slow)
    return clock


def _method(function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def test_every_step_is_told(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, 'LEAST_GAIN', -0.5)  # a plan is made of new times
    told = io.StringIO()
    model = networks.Everything()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    every = 0.0
    seen: dict[str, str] = {}
    took: dict[str, float] = {}
    with hybridmem.optimize(model, '1GB', planner='swap-all', progress=told) as session:
        for batch in networks.batches(11):
            networks.iterate(model, optimizer, *batch)
            session.finish_iteration()
            lines = told.getvalue().splitlines()
            told.seek(0)
            told.truncate()
            for line in lines:
                for word in ('planned in', 'arena:', 'timed:'):
                    if word in line:
                        assert word not in seen
                        seen[word] = line
                        took[word] = clock.take()
                        every += took[word]
        assert session.statistics()['planning_seconds'] == pytest.approx(every, abs=0.1)
        report = session.report()
    assert took['planned in'] >= 3 * 1000 + 200 + 30 + 7
    assert f'planned in {format_seconds(took["planned in"])} ' in seen['planned in']
    assert took['arena:'] == 2 * 0.5 + 4
    assert f'found in {format_seconds(took["arena:"])}' in seen['arena:']
    assert took['timed:'] >= 90 + 30 + 7
    assert f'found in {format_seconds(took["timed:"])}' in seen['timed:']
    (row,) = (line for line in report.splitlines() if line.startswith('planning'))
    assert format_seconds(every) in row


def test_time_is_counted_once_where_steps_are_nested(clock: Clock) -> None:
    own = planning_time.PlanningTime()
    with own.counted():
        clock.seconds += 1
        with own.counted():
            clock.seconds += 2
            assert own.seconds == pytest.approx(3, abs=0.1)
        clock.seconds += 4
    clock.seconds += 8  # the program's
    assert own.seconds == own.tell() == pytest.approx(7, abs=0.1)
    own.add(16)
    assert own.tell() == 16
    assert own.seconds == pytest.approx(23, abs=0.1)
