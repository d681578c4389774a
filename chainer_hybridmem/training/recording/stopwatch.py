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
    Where issuing is computing, operations are timed by the clock, and then brought to
    what the thread has computed: while another program has the processor, the clock
    goes on. An all-reduce waits for other processes, and the update for data as well,
    so that the clock counts there.
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
    began = timing.spent()
    for _ in range(SAMPLES):
        watch.enter()
        watch.leave()
    return (timing.spent() - began) / SAMPLES


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
        self._spent: Seconds = {}  # by the thread until hooks end, but for waits
        self._idle = 0.0  # by the thread, in waits

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        if not self.calls:
            self._spent[-1] = timing.spent()
        super().enter()
        self._inside = True

    def leave(self, starts_operation: bool = False) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if not starts_operation:  # the update may begin
            self._spent[self.newest] = timing.spent() - self._idle
        super().leave(starts_operation)
        self._inside = False

    # -- reports of the executor ----------------------------------------------
    def move(self, operation: int, action: Callable[[], None]) -> None:
        hook = self.newest
        left_out = self._left_out[hook]
        taken = self._time(action)
        self._moved[hook] += taken - (self._left_out[hook] - left_out)

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        spent = timing.spent()
        if self._acts:
            self._waited += self._time(action)
        else:
            self._leave_out(action)
        self._idle += timing.spent() - spent

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
        return self._without_others(found) if self._computes else found

    def _without_others(self, found: list[Times]) -> list[Times]:
        """The times, as if no other program had run; see [busy machines]."""
        after = len(self.starts)  # the first operation after backward
        last, _ = self.operations()[after]
        # That hook is the operation's.
        seconds = sum(map(sum, found[:after])) + self._session_seconds(last)
        if seconds <= 0:
            return found
        own = self._hook_seconds * (last + 1)
        ratio = max(self._spent[last] - self._spent[-1] - own, 0.0) / seconds
        scaled = [Times(*(ratio * one for one in times)) for times in found[:after]]
        return [*scaled, *found[after:]]

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
