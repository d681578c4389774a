"""What a session remembers of very many iterations."""

from __future__ import annotations

import dataclasses
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.training.devices.protocol import PlaceFigures, PoolFigures
from chainer_hybridmem.training.execution.mover import Counters
from chainer_hybridmem.training.session.guides.guide import PlanArena
from chainer_hybridmem.training.session.iterations.iteration_history import (
    IterationHistory,
)
from chainer_hybridmem.training.session.results import collect_statistics
from chainer_hybridmem.training.session.setting.planning_time import PlanningTime

NEWEST = 1000  # as the docstrings say


class Device:
    """Whose figures are set by hand."""

    host_bytes = disk_bytes = peak_bytes = highest_bytes = 0

    @property
    def memory(self) -> Any:
        return self

    copies = offsets = memory

    def figures(self) -> PlaceFigures:
        return PlaceFigures(0, 0, 0)

    place_figures = figures

    def pool_figures(self) -> PoolFigures:
        return PoolFigures(0, 0, 0, 0, 0)

    def take_stall_seconds(self) -> float:
        return 0.0


class Long:
    """A history, and everything that was ever added to it."""

    def __init__(self) -> None:
        self.device: Any = Device()
        self.history = IterationHistory(self.device)
        self.added: list[dict[str, Any]] = []

    def add(
        self,
        plan: Plan | None,
        guided: bool,
        verified: bool = False,
        evaluates: bool = False,
    ) -> None:
        rng = random.Random(len(self.added))
        for name in ('host_bytes', 'disk_bytes', 'peak_bytes'):
            setattr(self.device, name, rng.randrange(10**6))
        device = self.device
        device.highest_bytes = max(device.highest_bytes, device.peak_bytes)
        splitter: Any = SimpleNamespace(used={}, inexact=0)
        entry = self.history.add(
            (0.0, 0.0),
            rng.random(),
            rng.random(),
            Counters(),
            plan,
            guided,
            0,
            splitter,
            verified,
            evaluates,
        )
        self.added.append(dict(entry))

    def figures(self, plan: Plan | None) -> dict[str, Any]:
        guide: Any = SimpleNamespace(
            plan=plan,
            problem=None,
            arena=PlanArena(),
            spent=PlanningTime(),
            find_host_bytes=lambda: None,
        )
        options: Any = SimpleNamespace(
            planner='', limit_bytes=0, host_limit_bytes=None, arena=False
        )
        return collect_statistics(options, '', self.history, guide)

    def check(self, plan: Plan) -> None:
        """Numbers and maxima are over all, medians over the newest."""
        figures, added = self.figures(plan), self.added
        guided = [e for e in added if e['guided']]
        guided = [e for e in guided if not e['verified']] or guided
        ours = [e for e in guided if e['plan'] is plan] or guided or added
        assert figures['iterations'] == len(added)
        assert figures['guided_iterations'] == sum(bool(e['guided']) for e in added)
        assert figures['verified_iterations'] == sum(bool(e['verified']) for e in added)
        assert figures['peak_bytes'] == max(e['peak_bytes'] for e in added)
        assert figures['footprint_bytes'] == max(e['footprint_bytes'] for e in added)
        for name in ('host_bytes', 'disk_bytes'):
            assert figures[name] == max(e[name] for e in ours)
        assert figures['guided_peak_bytes'] == max(e['peak_bytes'] for e in ours)
        ours = ours[-NEWEST:]
        alone = [e for e in ours if not e['evaluates']] or ours
        seconds = [e['seconds'] for e in alone]
        assert figures['iteration_seconds'] == statistics.median(seconds)


@pytest.fixture
def plans() -> list[Plan]:
    profile = toys.chain()
    return [make_plan(profile, limit) for limit in ('45MiB', '50MiB')]


def test_a_long_run_is_remembered_in_little_memory(plans: list[Plan]) -> None:
    long = Long()
    for _ in range(3):
        long.add(None, guided=False)
    for _ in range(3):
        long.add(plans[0], guided=True, verified=True)
        long.check(plans[0])
    for i in range(4 * NEWEST):
        long.add(plans[0], guided=True, evaluates=i % 7 == 0)
        if i % 500 == 0:
            long.check(plans[0])
    assert NEWEST <= len(long.history.entries) <= 2 * NEWEST
    alone = [e for e in long.added[-NEWEST:] if not e['evaluates']]
    assert len(long.history.guided(plans[0])) == len(alone) > NEWEST / 2
    assert long.history.entries[-1]['seconds'] == long.added[-1]['seconds']


def test_guided_iterations_are_not_forgotten_over_others(plans: list[Plan]) -> None:
    long = Long()
    for i in range(5):
        long.add(plans[i % 2], guided=True)
    for _ in range(3 * NEWEST):
        long.add(None, guided=False)
    for plan in plans:
        long.check(plan)


def test_plans_that_nothing_follows_any_more_are_let_go(plans: list[Plan]) -> None:
    long = Long()
    for _ in range(5):
        long.add(plans[0], guided=True)
    for _ in range(3 * NEWEST):
        long.add(plans[1], guided=True)
    long.check(plans[1])
    assert all(e['plan'] is not plans[0] for e in long.history.entries)
    assert all(e['plan'] is not plans[0] for e in long.history._maxima)


def test_a_plan_predicted_anew_is_the_same_plan(plans: list[Plan]) -> None:
    long = Long()
    for plan in (plans[1], plans[0], plans[0]):
        long.add(plan, guided=True)
    timed = dataclasses.replace(plans[0], predicted_seconds=1.0)
    before = [e for e in long.added if e['plan'] is plans[0]]
    figures = long.figures(timed)
    assert figures['iterations'] == 3
    for name in ('peak_bytes', 'host_bytes', 'disk_bytes'):
        largest = max(e[name] for e in before)
        assert figures['guided_peak_bytes' if name == 'peak_bytes' else name] == largest
    median = statistics.median(e['seconds'] for e in before)
    assert figures['iteration_seconds'] == median

    long.add(timed, guided=True)
    figures = long.figures(timed)
    assert figures['iteration_seconds'] == long.added[-1]['seconds']
    largest = max(e['peak_bytes'] for e in (*before, long.added[-1]))
    assert figures['guided_peak_bytes'] == largest


def test_steps_are_whole_and_lie_after_the_last_recording(plans: list[Plan]) -> None:
    long = Long()
    for number in range(9):
        long.add(plans[0], guided=True, verified=number == 8)
    entries = long.history.entries
    for number, entry in enumerate(entries):
        entry['state'] = 'profiling' if number == 1 else 'guided'

    def find(iterations: int) -> list[list[int]]:
        steps = long.history.find_steps(iterations)
        return [[entries.index(entry) for entry in step] for step in steps]

    assert find(2) == [[5, 6], [3, 4]]  # what is verified takes its time
    assert find(7) == [[2, 3, 4, 5, 6, 7, 8]]  # there is no other
    assert find(8) == []


def test_the_time_between_iterations_belongs_to_the_step(plans: list[Plan]) -> None:
    """Of a step, it is where it was least; how long the newest one is, is not known."""
    history = IterationHistory(Device())  # type: ignore[arg-type]
    splitter: Any = SimpleNamespace(used={}, inexact=0)
    now = others = 0.0
    for rest, delayed in ((1.0, 0.0), (8.0, 2.0), (2.0, 0.5), (4.0, 1.0), (16.0, 0.0)):
        figures = Counters(), plans[0], True, 0, splitter, False, True
        history.add((now, now - others), 3.0, 2.0, *figures)
        now, others = now + 3.0 + rest, others + 1.0 + delayed
    rests = [entry['rest_seconds'] for entry in history.entries]
    own = [entry['own_rest_seconds'] for entry in history.entries]
    assert (rests, own) == ([1.0, 8.0, 2.0, 4.0, 0.0], [1.0, 6.0, 1.5, 3.0, 0.0])
    assert history.find_least_rest(1) == 1.0
    assert history.find_least_rest(2) == 4.5
    assert history.find_least_rest(5) == 0.0
