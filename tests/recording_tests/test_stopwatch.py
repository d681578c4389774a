"""What counts as an operation's time, on a device whose clock the test turns."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from chainer_hybridmem import timing
from chainer_hybridmem.training.recording import stopwatch

NOTHING = types.SimpleNamespace(event_count=0)  # is allocated


class Clock:
    """Seconds that pass where the test lets them pass.

    Args:
        asynchronous: Whether issuing is not computing.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def passes(self, seconds: float) -> Callable[[], None]:
        """Something that takes so long."""

        def act() -> None:
            self.now += seconds

        return act


def run_two_operations(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch, hook_seconds: float = 0.0
) -> list[stopwatch.Times]:
    """An operation, one after moves and a replay that needs a copy, and the update."""
    clock = Clock(asynchronous)
    device: Any = types.SimpleNamespace(clock=clock, memory=NOTHING)
    monkeypatch.setattr(timing, 'now', clock.mark)
    monkeypatch.setattr(timing, 'delayed', lambda: 0.0)
    watch = stopwatch.Stopwatch(device, hook_seconds)
    watch.enter()
    clock.passes(0.25)()
    watch.leave(starts_operation=True)
    clock.passes(2.0)()
    watch.wait('swap-out', 3, clock.passes(16.0))  # an eviction, by an allocation
    watch.enter()
    clock.passes(0.5)()

    def move() -> None:
        clock.passes(0.0625)()
        watch.wait('swap-in', 3, clock.passes(32.0))

    watch.move(1, move)

    def replay() -> None:
        clock.passes(64.0)()
        watch.wait('swap-in', 4, clock.passes(128.0))

    watch.replay(0, replay)
    watch.leave(starts_operation=True)
    clock.passes(4.0)()
    watch.enter()
    clock.passes(0.125)()  # before the update
    watch.leave(starts_operation=False)
    clock.passes(1.0)()
    watch.enter()
    return watch.times()


def test_hooks_moves_and_replays_are_told_apart(monkeypatch):
    first, second, update = run_two_operations(False, monkeypatch)
    assert first == pytest.approx((2.0, 0.0, 64.0, 0.25, 0.0))  # without the copy
    assert second == pytest.approx((4.0, 0.0, 0.0, 0.5, 0.0625))
    assert update == pytest.approx((1.0, 0.0, 0.0, 0.125, 0.0))


def test_issuing_is_told_apart_from_hooks_where_a_device_computes(monkeypatch):
    first, second, update = run_two_operations(True, monkeypatch)
    assert first == (2.0 + 16.0, 2.0 + 16.0, 0.0, 0.25, 0.0)
    assert second == (4.0, 4.0, 0.0, 0.5, 0.0625)
    assert update == (1.0, 1.0, 0.0, 0.125, 0.0)


def test_what_the_stopwatch_takes_itself_is_no_work_of_hooks(monkeypatch):
    plain = run_two_operations(True, monkeypatch)
    found = run_two_operations(True, monkeypatch, hook_seconds=0.0625)
    assert [one.session_seconds for one in found] == [
        one.session_seconds - 0.0625 for one in plain
    ]


def test_another_program_that_has_the_processor_is_left_out(monkeypatch):
    """The clock goes on, also in the update, which may wait for data."""
    clock = Clock(False)
    device: Any = types.SimpleNamespace(clock=clock, memory=NOTHING)
    others = [0.0]
    monkeypatch.setattr(timing, 'now', clock.mark)
    monkeypatch.setattr(timing, 'delayed', lambda: others[0])
    watch = stopwatch.Stopwatch(device)
    for starts in (True, True, False):
        watch.enter()
        watch.leave(starts)
        clock.passes(6.0)()
        others[0] += 3.0
    watch.enter()
    assert [one.device_seconds for one in watch.times()] == [3.0, 3.0, 3.0]


def test_what_fails_is_left_out_as_well(monkeypatch):
    clock = Clock(False)
    device: Any = types.SimpleNamespace(clock=clock, memory=NOTHING)
    monkeypatch.setattr(timing, 'now', clock.mark)
    monkeypatch.setattr(timing, 'delayed', lambda: 0.0)
    watch = stopwatch.Stopwatch(device)
    watch.enter()

    def fail() -> None:
        clock.passes(8.0)()
        raise MemoryError

    with pytest.raises(MemoryError):
        watch.replay(0, fail)
    watch.replay(0, clock.passes(16.0))
    watch.leave(starts_operation=False)
    clock.passes(1.0)()
    watch.enter()
    assert watch.times() == [(1.0, 0.0, 16.0, 0.0, 0.0)]
