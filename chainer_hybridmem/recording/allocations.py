"""The allocations that the functions of one iteration read and make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.records.profile import Slot

NOT_OF_DEVICE = 0  # in place of an allocation id


class Allocations:
    """Identifies arrays by their allocation, and collects who uses each allocation.

    Args:
        device (Device): Owns the memory.

    Attributes:
        sizes (dict): Bytes of what is read, by allocation id.
        slots (dict): Where the graph keeps each allocation.
        uses (dict): Backward operations that read each allocation.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sizes: dict[int, int] = {}
        self.slots: dict[int, list[Slot]] = {}
        self.uses: dict[int, list[int]] = {}

    def identify(self, array: Any) -> int:
        """The allocation of an array; ``NOT_OF_DEVICE`` for other memory."""
        device = self._device
        if not device.arrays.owns(array):
            return NOT_OF_DEVICE
        allocation = device.arrays.allocation_id(array)
        if allocation not in self.sizes:
            self.sizes[allocation] = device.arrays.root_bytes(device.arrays.root(array))
        return allocation

    def add_slots(self, allocation: int, slots: Iterable[Slot]) -> None:
        """Notes slots of an allocation, each one once."""
        known = self.slots.setdefault(allocation, [])
        known += [slot for slot in slots if slot not in known]

    def add_use(self, allocation: int, operation: int) -> None:
        """Notes a backward operation that reads an allocation."""
        self.uses.setdefault(allocation, []).append(operation)
