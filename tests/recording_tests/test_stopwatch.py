"""What counts as an operation's time, on a device whose clock the test turns."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from chainer_hybridmem import timing
from chainer_hybridmem.recording import stopwatch


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
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> list[stopwatch.Times]:
    """An operation, one after a copy and a replay that needs a copy, and the update."""
    clock = Clock(asynchronous)
    device: Any = types.SimpleNamespace(clock=clock)
    monkeypatch.setattr(timing, 'now', clock.mark)
    watch = stopwatch.Stopwatch(device)
    assert watch.observes is not asynchronous
    watch.enter()
    clock.passes(0.25)()
    watch.leave(starts_operation=True)
    clock.passes(2.0)()
    watch.wait('swap-out', 3, clock.passes(16.0))  # an eviction, by an allocation
    watch.enter()
    clock.passes(0.5)()
    watch.wait('swap-in', 3, clock.passes(32.0))

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


def test_hooks_cost_operations_time_where_issuing_is_computing(monkeypatch):
    first, second, update = run_two_operations(False, monkeypatch)
    assert first == (0.25 + 2.0, 0.0, 64.0)  # its replay, without the copy
    assert second == (0.5 + 4.0, 0.0, 0.0)
    assert update == (0.125 + 1.0, 0.0, 0.0)


def test_hooks_are_the_hosts_work_where_it_only_issues(monkeypatch):
    first, second, update = run_two_operations(True, monkeypatch)
    assert first[:2] == (2.0 + 16.0, 0.25 + 2.0 + 16.0)
    assert second[:2] == (4.0, 0.5 + 32.0 + 64.0 + 128.0 + 4.0)
    assert update[:2] == (1.0, 0.125 + 1.0)


def test_what_fails_is_left_out_as_well(monkeypatch):
    clock = Clock(False)
    device: Any = types.SimpleNamespace(clock=clock)
    monkeypatch.setattr(timing, 'now', clock.mark)
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
    assert watch.times() == [(1.0, 0.0, 16.0)]
