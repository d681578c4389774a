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
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.training.devices.protocol import Device, Mark
from chainer_hybridmem.training.execution.mover import Observer

Seconds = dict[int, float]


class Times(NamedTuple):
    """How long one operation took."""

    device_seconds: float  # copies and hooks excluded
    host_seconds: float  # to issue it, hooks excluded; zero where that is computing
    replay_seconds: float = 0.0  # of its replay, waits excluded; zero without any
    session_seconds: float = 0.0  # of hooks; waits, replays and moves excluded
    move_seconds: float = 0.0  # of the moves before it, waits excluded


class Hooks:
    """Marks where the session's hooks of one iteration begin and end.

    Args:
        device (Device): Tells the time.

    Attributes:
        entered (list of Mark): Where each hook began.
        left (list of Mark): Where each hook ended.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.entered: list[Mark] = []
        self.left: list[Mark] = []
        self.starts: list[int] = []  # hook before each operation
        self._after_backward: list[int] = []  # likewise, so far

    def enter(self) -> None:
        """The session's hook begins."""
        self.entered.append(self.device.clock.mark())

    def leave(self, starts_operation: bool) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if starts_operation:
            self._after_backward.clear()  # that was not the end of backward
            self.starts.append(len(self.left))
        self.left.append(self.device.clock.mark())

    def start_after_backward(self) -> None:
        """An all-reduce, or the update after it, starts where the hook will end."""
        self._after_backward.append(len(self.left))

    def operations(self) -> list[tuple[int, int]]:
        """The hooks before and after each operation, the update last.

        To be called in the hook that ends the iteration.
        """
        # Without an all-reduce, the update runs between the last two hooks.
        starts = [*self.starts, *(self._after_backward or [len(self.left) - 1])]
        return list(zip(starts, [*starts[1:], len(self.left)], strict=True))

    def has_seen(self, profile: Profile) -> bool:
        """Whether it has seen the profile's operations; an all-reduce may not come."""
        return len(self.operations()) == len(profile.operations)


SAMPLES = 64  # of what the stopwatch itself takes in a hook


def measure_hook(device: Device) -> float:
    """Seconds that a stopwatch takes in each hook."""
    watch = Stopwatch(device)
    began = timing.spent()
    for _ in range(SAMPLES):
        watch.enter()
        watch.leave(starts_operation=False)
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
        self._issued: list[float] = []  # when the host entered each hook
        self._returned: list[float] = []  # when it left it
        if self._computes:  # that is the device's time
            self._issued, self._returned = self.entered, self.left
        self._left_out: Seconds = collections.defaultdict(float)  # in hooks
        self._evicted: Seconds = collections.defaultdict(float)  # after hooks
        self._moved: Seconds = collections.defaultdict(float)  # in hooks
        self._replays: Seconds = collections.defaultdict(float)  # of operations
        self._acts = False  # a wait or replay is under way
        self._waited = 0.0  # seconds, within replays
        self._spent: Seconds = {}  # by the thread until hooks end, but for waits
        self._idle = 0.0  # by the thread, in waits

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        if not self._computes:
            self._issued.append(timing.now())
        elif not self.entered:
            self._spent[-1] = timing.spent()
        super().enter()

    def leave(self, starts_operation: bool) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if self._computes and not starts_operation:  # the update may begin
            self._spent[len(self.left)] = timing.spent() - self._idle
        super().leave(starts_operation)
        if not self._computes:
            self._returned.append(timing.now())

    # -- reports of the executor ----------------------------------------------
    def move(self, operation: int, action: Callable[[], None]) -> None:
        hook = len(self.entered) - 1
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
        hook = len(self.entered) - 1
        where = self._left_out if len(self.left) == hook else self._evicted
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
                self._device_seconds(start, end),
                self._host_seconds(start, end),
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

    def _device_seconds(self, start: int, end: int) -> float:
        elapsed = self.device.clock.elapsed
        seconds = sum(
            elapsed(self.left[h], self.entered[h + 1]) for h in range(start, end)
        )
        if self._computes:
            seconds -= sum(self._evicted[h] for h in range(start, end))
        return max(seconds, 0.0)  # rounding

    def _host_seconds(self, start: int, end: int) -> float:
        if self._computes:
            return 0.0
        return sum(self._issued[h + 1] - self._returned[h] for h in range(start, end))

    def _session_seconds(self, hook: int) -> float:
        """Of one hook."""
        seconds = self._returned[hook] - self._issued[hook]
        others = self._left_out[hook] + self._moved[hook] + self._hook_seconds
        return max(seconds - others, 0.0)
