"""Measures how much memory functions need in parts, during a recording.

Every function that has a rule is run in parts first, in more and more of them, and
everything that this leaves is undone; then it runs as it does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from chainer_hybridmem.devices.protocol import Array, Device
from chainer_hybridmem.records.profile import Split
from chainer_hybridmem.splitting import rules
from chainer_hybridmem.splitting.rules import Way

LEAST_SAVING = 0.02  # of the load, for which even more parts are tried


class Recording(Protocol):
    """Takes the results; the time and memory of trials must not count there."""

    def enter(self) -> None:
        """What follows is not the program's."""

    def leave(self) -> None:
        """The program goes on."""

    def note_split_trial(
        self, first_event: int, end_event: int, splits: Sequence[Split]
    ) -> None:
        """Takes the result for one function.

        Args:
            first_event: Events before the function.
            end_event: Events after it.
            splits: What its parts need; storages are missing.
        """


class Trials:
    """Tries functions in parts.

    Args:
        device: Where they run.
        recording: Of the iteration.
    """

    def __init__(self, device: Device, recording: Recording) -> None:
        self._device = device
        self._recording = recording
        self._loads: list[tuple[Way, int, int, tuple[int, ...]]] = []
        self._first_event = 0
        self._load_bytes = 0

    def begin(
        self,
        function: object,
        inputs: tuple[Array, ...],
        ways: Sequence[Way],
        restore: Callable[[], None],
    ) -> None:
        """A function is about to run.

        Args:
            function: Its forward has not been called.
            inputs: Its arrays.
            ways: To try.
            restore: Undoes what a forward has done to it.
        """
        self._recording.enter()
        self._loads = []
        useless = ''  # to cut it more
        for way in ways:
            if way.cut == useless:
                continue
            load = self._load(function, inputs, way, restore)
            if load is None:
                continue
            last = self._loads[-1] if self._loads else None
            self._loads.append((way, *load))
            more = last is not None and last[0].cut == way.cut
            if last is not None and more and load[0] > last[1] * (1 - LEAST_SAVING):
                useless = way.cut
        self._recording.leave()
        self._first_event = self._device.memory.event_count
        self._load_bytes = self._device.memory.used_bytes

    def _load(
        self,
        function: object,
        inputs: tuple[Array, ...],
        way: Way,
        restore: Callable[[], None],
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Bytes above the beginning: the most, at the end, and the most of stages."""
        device = self._device
        before = device.memory.used_bytes
        stages: list[int] = []

        def mark() -> None:
            stages.append(device.memory.window_peak_bytes - before)
            device.memory.reset_window()

        device.memory.reset_window()
        result = None
        try:
            with device.memory.attempt():
                outputs = rules.run(function, inputs, way, mark)
            mark()
            result = (max(stages), device.memory.used_bytes - before, tuple(stages))
            del outputs
        except MemoryError:
            pass
        restore()
        # Something else may have been evicted: then this is not the function's load.
        return result if device.memory.used_bytes == before else None

    def end(self, place: tuple[int, int, str]) -> None:
        """It has run as it does anyway.

        Args:
            place: Operation, which of its functions, class.
        """
        left_bytes = self._device.memory.used_bytes - self._load_bytes
        splits = [
            Split(*place, way.cut, way.parts, way.exact, 0, (), peak_bytes, stages)
            for way, peak_bytes, stays_bytes, stages in self._loads
            if stays_bytes == left_bytes  # else later operations would differ, too
        ]
        self._recording.note_split_trial(
            self._first_event, self._device.memory.event_count, splits
        )
