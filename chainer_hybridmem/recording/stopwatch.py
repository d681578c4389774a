"""Measures the times of a guided iteration's operations.

Profiling swaps every feature map, which makes operations slower than they are
under a plan: colder caches, copies beside them. So guided iterations are timed once
more, between the same hooks as the recording.

Note: [hooks cost time]
    Where issuing is computing, the session's hooks stand between operations, and an
    iteration is longer by what they cost. A hook belongs to the operation that it is
    called before. Time in which it waits for copies or runs replays is left out: the
    simulator adds it for any plan. Replays have times of their own: beside the copies
    and the other processes of an iteration they take longer than in a trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chainer_hybridmem import timing
from chainer_hybridmem.devices.protocol import Device, Mark, Span
from chainer_hybridmem.execution.mover import Observer
from chainer_hybridmem.records.profile import Profile


class Times(NamedTuple):
    """How long one operation took."""

    device_seconds: float  # copies excluded
    host_seconds: float  # to issue it, hooks included; zero where that is computing
    replay_seconds: float = 0.0  # of its replay, waits excluded; zero without any


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


class Stopwatch(Hooks, Observer):
    """Times one iteration.

    Args:
        device (Device): Tells the time.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._issued: list[float] = []  # when the host entered each hook
        self._planned: list[float] = []  # seconds of waits and replays in each hook
        self._acts = False  # a wait or replay is under way
        self._replays: dict[int, float] = {}  # seconds by operation
        self._waited = 0.0  # seconds, within replays

    @property
    def observes(self) -> bool:
        """Whether it has to know of waits and replays."""
        return not self.device.clock.asynchronous

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        self._issued.append(timing.now())
        self._planned.append(0.0)
        super().enter()

    # -- reports of the executor ----------------------------------------------
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
        self._replays[operation] = self._replays.get(operation, 0.0) + taken

    def _leave_out(self, action: Callable[[], None]) -> float:
        """Does something whose time is not the hook's, nor of any operation."""
        hook = len(self._planned) - 1
        self._acts = True
        began = self.device.clock.mark()
        try:
            action()
        finally:
            self._acts = False
            taken = self.device.clock.elapsed(began, self.device.clock.mark())
            self._planned[hook] += taken
        return taken

    def _time(self, action: Callable[[], None]) -> float:
        """Does something within a replay; returns the seconds that it has taken."""
        began = self.device.clock.mark()
        action()
        return self.device.clock.elapsed(began, self.device.clock.mark())

    # -- result ---------------------------------------------------------------
    def times(self) -> list[Times]:
        """Times of every operation, the update last.

        To be called in the hook that ends the iteration, when the device has
        finished its work.
        """
        return [
            Times(
                self._device_seconds(start, end),
                self._host_seconds(start, end),
                self._replays.get(k, 0.0),
            )
            for k, (start, end) in enumerate(self.operations())
        ]

    def _device_seconds(self, start: int, end: int) -> float:
        elapsed = self.device.clock.elapsed
        if self.observes:  # [hooks cost time]
            seconds = elapsed(self.entered[start], self.entered[end])
            return max(seconds - sum(self._planned[start:end]), 0.0)  # rounding
        return sum(
            elapsed(self.left[h], self.entered[h + 1]) for h in range(start, end)
        )

    def _host_seconds(self, start: int, end: int) -> float:
        if self.observes:
            return 0.0
        return self._issued[end] - self._issued[start]


class Lateness(Observer):
    """Watches one iteration.

    Costs two marks per wait and one per iteration. The results are there once the
    device has finished the iteration's work.

    Args:
        device (Device): Tells the time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._origin = device.clock.mark()
        self._copies: list[tuple[str, int, Span]] = []
        self._waits: list[tuple[int, Mark, Mark]] = []

    def copy(self, kind: str, storage: int, span: Span) -> None:
        self._copies.append((kind, storage, span))

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        start = self._device.clock.mark()
        action()
        if kind == 'swap-in':
            self._waits.append((storage, start, self._device.clock.mark()))

    def late_seconds(self) -> dict[int, float]:
        """Seconds that compute waited for swap-ins, by storage."""
        elapsed = self._device.clock.elapsed
        return {storage: elapsed(start, end) for storage, start, end in self._waits}

    def copy_seconds(self, kind: str) -> dict[int, float]:
        """Seconds of the copies of one kind, by storage."""
        result = {}
        for other, storage, span in self._copies:
            if other == kind:
                start, end = span.after(self._origin)
                result[storage] = end - start
        return result
