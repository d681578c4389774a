"""What forward functions have read, and whether the program changes it later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.devices.bits import fingerprint
from chainer_hybridmem.devices.protocol import Device, View
from chainer_hybridmem.execution.graph_slots import find_nothing, track_memory
from chainer_hybridmem.recording.running_maps import RunningMaps
from chainer_hybridmem.recording.steps import Step


class Reading:
    """A checksum of what a forward function has read.

    It is that of the whole allocation where the device knows it, else of the array.

    Args:
        device (Device): Where it is.
        array (Array): What is read.

    Attributes:
        allocation (int): Id of the allocation; 0 for what is not the device's.
    """

    def __init__(self, device: Device, array: Any) -> None:
        self._device = device
        owned = device.arrays.owns(array)
        self.allocation = device.arrays.allocation_id(array) if owned else 0
        self._memory: Callable[[], Any] = find_nothing
        if self.allocation:
            self._memory = track_memory(device, array)
        elif owned:
            self._memory = weakref.ref(array)
        self._before = self._checksum()

    def _checksum(self) -> int | None:
        """None once the memory is free."""
        memory = self._memory()
        if memory is None:
            return None
        if not self.allocation:
            return fingerprint(memory)
        whole = View(0, (self._device.arrays.root_bytes(memory),), (1,), '|u1')
        return fingerprint(self._device.arrays.restore(memory, whole))

    def changed(self) -> bool:
        """Whether the contents have changed since; False if the memory is gone."""
        now = self._checksum()
        return now is not None and now != self._before

    def may_have_changed(self) -> bool:
        """Like :meth:`changed`; True also if there is no memory for finding out."""
        try:
            with self._device.memory.attempt():
                return self.changed()
        except MemoryError:
            return True


class WrittenMemory:
    """Finds what the program has changed in place since a function has read it.

    Args:
        maps (RunningMaps): Tells which maps were written into after they had left.
    """

    def __init__(self, maps: RunningMaps) -> None:
        self._maps = maps
        # By allocation: a function, what it has read, and what is noted of a change.
        self._readings: dict[int, list[tuple[Step, Reading, int]]] = {}

    def watch(self, step: Step, reading: Reading, allocation: int) -> None:
        """Compares a reading before its map leaves, and at the end of forward.

        Args:
            step: The function that has read it; a change is noted there.
            reading: What it was.
            allocation: What is noted; ``OF_ATTRIBUTE`` for an attribute.
        """
        readings = self._readings.setdefault(reading.allocation, [])
        readings.append((step, reading, allocation))

    def look(self, allocation: int) -> None:
        """Compares the readings of a map while its memory is there.

        ``RunningMaps.is_rewritten`` tells what the program writes afterwards.
        """
        for step, reading, noted in self._readings.get(allocation, ()):
            if noted not in step.written and reading.may_have_changed():
                step.written.add(noted)

    def find(self) -> None:
        """Compares all readings, and forgets them."""
        for readings in self._readings.values():
            for step, reading, noted in readings:
                changed = reading.changed()
                if changed or self._maps.is_rewritten(reading.allocation):
                    step.written.add(noted)
        self.forget()

    def forget(self) -> None:
        """Drops all readings."""
        self._readings.clear()
