"""Measures the times of a guided iteration's operations.

Profiling swaps every feature map, which makes operations slower than they are
under a plan: colder caches, copies beside them. So guided iterations are timed once
more, between the same hooks as the recording.

Note: [hooks cost time]
    The session's hooks run in the program's thread, which computes, or issues what a
    GPU computes: an iteration is longer by what they cost, and plain Chainer has none
    of it. So their time is told apart. A hook belongs to the operation that it is
    called before. What a hook takes to move maps is told by itself, for another plan
    moves others. Time in which it waits for copies or runs replays is left out: the
    simulator adds it for any plan. Replays have times of their own: beside the copies
    and the other processes of an iteration they take longer than in a trial.

Note: [busy machines]
    While another program has the processor, the clock goes on: where issuing is
    computing, all operations are shortened by the share of such delays in the
    iteration. Waits count: an all-reduce waits for other processes, and the update for
    data as well.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from chainer_hybridmem import timing
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution.mover import Observer
from chainer_hybridmem.training.recording.hooks import Hooks

Seconds = dict[int, float]


class Times(NamedTuple):
    """How long one operation took."""

    device_seconds: float  # copies and hooks excluded
    host_seconds: float  # to issue it, hooks excluded; zero where that is computing
    replay_seconds: float = 0.0  # of its replay, waits excluded; zero without any
    session_seconds: float = 0.0  # of hooks; waits, replays and moves excluded
    move_seconds: float = 0.0  # of the moves before it, waits excluded


SAMPLES = 64  # of what the stopwatch itself takes in a hook


def measure_hook(device: Device) -> float:
    """Seconds that a stopwatch takes in each hook."""
    watch = Stopwatch(device)
    began = timing.undelayed()
    for _ in range(SAMPLES):
        watch.enter()
        watch.leave()
    return (timing.undelayed() - began) / SAMPLES


class Stopwatch(Hooks, Observer):
    """Times one iteration.

    Args:
        device (Device): Tells the time.
        hook_seconds (float): What it takes itself in each hook.
    """

    follows = False

    def __init__(self, device: Device, hook_seconds: float = 0.0) -> None:
        super().__init__(device)
        self._hook_seconds = hook_seconds
        self._computes = not device.clock.asynchronous  # or it issues only
        self._left_out: Seconds = collections.defaultdict(float)  # in hooks
        self._evicted: Seconds = collections.defaultdict(float)  # after hooks
        self._moved: Seconds = collections.defaultdict(float)  # in hooks
        self._replays: Seconds = collections.defaultdict(float)  # of operations
        self._inside = False  # of a hook
        self._acts = False  # a wait or replay is under way
        self._waited = 0.0  # seconds, within replays
        self._delayed = timing.delayed()

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        super().enter()
        self._inside = True

    def leave(self, starts_operation: bool = False) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        super().leave(starts_operation)
        self._inside = False

    # -- reports of the executor ----------------------------------------------
    def move(self, operation: int, action: Callable[[], None]) -> None:
        hook = self.newest
        left_out = self._left_out[hook]
        taken = self._time(action)
        self._moved[hook] += taken - (self._left_out[hook] - left_out)

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        if self._acts:
            self._waited += self._time(action)
        else:
            self._leave_out(action)

    def replay(self, operation: int, action: Callable[[], None]) -> None:
        if self._acts:
            action()
            return
        waited = self._waited
        taken = self._leave_out(action) - (self._waited - waited)
        if self._computes:
            self._replays[operation] += taken

    def _leave_out(self, action: Callable[[], None]) -> float:
        """Does something whose time is not the hook's, nor of any operation."""
        hook = self.newest
        where = self._left_out if self._inside else self._evicted
        self._acts = True
        began = timing.now()
        try:
            action()
        finally:
            self._acts = False
            taken = timing.now() - began
            where[hook] += taken
        return taken

    def _time(self, action: Callable[[], None]) -> float:
        """Does something; returns the seconds that it has taken."""
        began = timing.now()
        action()
        return timing.now() - began

    # -- result ---------------------------------------------------------------
    def times(self) -> list[Times]:
        """Times of every operation, the update last.

        To be called in the hook that ends the iteration, when the device has
        finished its work.
        """
        found = [
            Times(
                self.device_seconds(start, end),
                self.host_seconds(start, end),
                self._replays[k],
                sum(map(self._session_seconds, range(start, end))),
                sum(self._moved[h] for h in range(start, end)),
            )
            for k, (start, end) in enumerate(self.operations())
        ]
        share = self._find_undelayed_share() if self._computes else 1.0
        return [Times(*(share * one for one in times)) for times in found]

    def _find_undelayed_share(self) -> float:
        """Of the iteration's time; see [busy machines]."""
        whole = self.calls[-1].entered_seconds - self.calls[0].entered_seconds
        delayed = timing.delayed() - self._delayed
        return 1.0 - min(delayed / whole, 1.0) if whole > 0 else 1.0

    def device_seconds(self, start: int, end: int) -> float:
        """See :class:`.Hooks`; without what has left in between."""
        seconds = super().device_seconds(start, end)
        if self._computes:
            seconds -= sum(self._evicted[h] for h in range(start, end))
        return max(seconds, 0.0)  # rounding

    def _session_seconds(self, hook: int) -> float:
        """Of one hook."""
        call = self.calls[hook]
        seconds = call.left_seconds - call.entered_seconds
        others = self._left_out[hook] + self._moved[hook] + self._hook_seconds
        return max(seconds - others, 0.0)
