"""Brings back what no plan brings back, before backward needs it."""

from __future__ import annotations

from collections.abc import Collection

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.execution.live_map import LiveMap, State
from chainer_hybridmem.execution.live_maps import LiveMaps
from chainer_hybridmem.execution.movements import Movements
from chainer_hybridmem.execution.table import ActionTable


def find_next_use(live: LiveMap) -> int:
    """When backward needs a map: the later, the smaller."""
    uses = live.uses
    return max(uses) if uses else -1


class Prefetcher:
    """Starts swap-ins of stray maps as far as memory is free; see evictor.

    A stray map is away although no plan brings it back.

    Args:
        device (Device): Has the memory.
        maps (LiveMaps): All feature maps.
        movements (Movements): Starts the copies.

    Attributes:
        active (bool): Whether maps may be stray.
    """

    def __init__(self, device: Device, maps: LiveMaps, movements: Movements) -> None:
        self._device = device
        self._maps = maps
        self._movements = movements
        self._scheduled: Collection[int] = ()  # storages that a plan brings back
        self._queue: list[LiveMap] | None = None  # the next one last; None: not made
        self._load_before = 0  # of the operation under way
        self._transient_bytes = 0  # that a backward function takes at most
        self.active = False

    def begin(self, table: ActionTable | None) -> None:
        """Starts an iteration, with a plan or without."""
        self.active = table is None
        self._queue = None
        self.follow(table)

    def follow(self, table: ActionTable | None) -> None:
        """Maps are stray unless this plan brings them back."""
        self._scheduled = () if table is None else table.swapped

    def switch(self, table: ActionTable | None) -> None:
        """The iteration goes on with another plan, or with none."""
        self.active = True
        self._queue = None
        self.follow(table)

    def open_window(self) -> None:
        """What is taken from here on, the function under way takes."""
        self._device.memory.reset_window()
        self._load_before = self._device.memory.used_bytes

    def count_evicted(self, nbytes: int) -> None:
        """The function under way has taken the place of so much, which has left."""
        self._load_before -= nbytes

    def close_window(self) -> None:
        """The backward function under way has ended."""
        taken = self._device.memory.window_peak_bytes - self._load_before
        self._transient_bytes = max(self._transient_bytes, taken)

    def put_off(self, live: LiveMap) -> None:
        """A map that was on its way back leaves again: it comes back first."""
        if self._queue is not None:
            self._queue.append(live)

    def prefetch(self, serial: int) -> None:
        """Brings back what backward needs after a function, as far as memory is free.

        Args:
            serial: Of the function; what came later is not on the way.
        """
        if self._queue is None:
            self._queue = self._find_stray(serial)
        queue, device = self._queue, self._device
        if not queue:
            return
        free_bytes = (
            device.memory.limit_bytes - device.memory.used_bytes - self._transient_bytes
        )
        while queue:
            live = queue[-1]
            if live.state is State.AWAY and live.slots.are_alive():
                if live.nbytes > free_bytes:
                    return
                try:
                    with device.memory.without_reclaim():
                        self._movements.start_swap_in(live)
                except MemoryError:  # not in one piece
                    return
                free_bytes -= live.nbytes
            queue.pop()

    def _find_stray(self, serial: int) -> list[LiveMap]:
        scheduled = self._scheduled
        stray = [
            live
            for live in self._maps
            if live.state is State.AWAY
            and live.storage not in scheduled
            and -1 < find_next_use(live) <= serial
        ]
        stray.sort(key=find_next_use)
        return stray
