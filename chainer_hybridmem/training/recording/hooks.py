"""When the session's hooks of one iteration are called.

The session's hooks bracket everything they do with :meth:`Hooks.enter` and
:meth:`Hooks.leave`, so that neither their time nor their allocations count as the
program's. An operation lasts from the hook before it to the hook before the next one:
what Chainer and the user do in between belongs to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from chainer_hybridmem import timing
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.training.devices.protocol import Device, Mark


@dataclasses.dataclass(slots=True)
class HookCall:
    """One hook call: its marks, and its positions in the raw event log."""

    entered: Mark
    left: Mark
    entered_seconds: float
    left_seconds: float
    first_event: int
    end_event: int


class Hooks:
    """Marks where each hook begins and ends.

    Args:
        device (Device): Tells the time, and counts events.

    Attributes:
        calls (list of HookCall): In order; the last one ends the iteration.
        starts (list of int): Hook before each operation.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls: list[HookCall] = []
        self.starts: list[int] = []
        self._after_backward: list[int] = []  # likewise, so far
        self._end: tuple[int, Mark] | None = None  # after which hook times end

    @property
    def newest(self) -> int:
        """Number of the newest hook."""
        return len(self.calls) - 1

    def enter(self) -> None:
        """The session's hook begins."""
        now, mark = timing.now(), self.device.clock.mark()
        position = self.device.memory.event_count
        self.calls.append(HookCall(mark, mark, now, now, position, position))

    def leave(self, starts_operation: bool = False) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        if starts_operation:
            self._after_backward.clear()  # that was not the end of backward
            self.starts.append(self.newest)
        call = self.calls[-1]
        call.end_event = self.device.memory.event_count
        call.left, call.left_seconds = self.device.clock.mark(), timing.now()

    def start_after_backward(self, exchanged_bytes: int | None) -> None:
        """An all-reduce, or the update after it, starts where the hook will end.

        Args:
            exchanged_bytes: What the all-reduce sends, and receives; None: it is the
                update.
        """
        del exchanged_bytes
        self._after_backward.append(self.newest)

    def end_times(self) -> None:
        """The program evaluates, until the hook that ends the iteration."""
        self._end = self.newest, self.device.clock.mark()

    def operations(self) -> list[tuple[int, int]]:
        """The hooks before and after each operation, the update last.

        To be called in the hook that ends the iteration.
        """
        # Without an all-reduce, the update runs between the last two hooks.
        return self.pair([*self.starts, *(self._after_backward or [self.newest - 1])])

    def pair(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The same of operations that start after these hooks."""
        return list(itertools.pairwise([*starts, self.newest]))

    def has_seen(self, profile: Profile) -> bool:
        """Whether it has seen the profile's operations; an all-reduce may not come."""
        return len(self.operations()) == len(profile.operations)

    def device_seconds(self, start: int, end: int) -> float:
        """Between two hooks, without those in between."""
        elapsed, calls = self.device.clock.elapsed, self.calls
        last, mark = self._end or (-1, None)
        return sum(
            elapsed(calls[h].left, mark if h == last else calls[h + 1].entered)
            for h in range(start, end)
        )

    def host_seconds(self, start: int, end: int) -> float:
        """To issue what is between two hooks; zero where that is computing."""
        if not self.device.clock.asynchronous:
            return 0.0
        calls = self.calls
        return sum(
            calls[h + 1].entered_seconds - calls[h].left_seconds
            for h in range(start, end)
        )
