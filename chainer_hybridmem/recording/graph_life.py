"""When the last graph of an iteration dies."""

from __future__ import annotations

import weakref
from typing import Any

from chainer_hybridmem.devices.protocol import Device


class GraphLife:
    """Watches the functions at which backward begins; a graph dies with its last one.

    Args:
        device (Device): Counts events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._end = -1
        self._watched: list[weakref.ref[Any]] = []
        self._reached: weakref.WeakSet[Any] = weakref.WeakSet()  # by backward

    def watch(self, function: Any) -> None:
        """Backward of a function begins; one that none has reached is another loss."""
        if function not in self._reached:

            def graph_died(_: Any) -> None:
                self._end = self._device.memory.event_count

            self._watched.append(weakref.ref(function, graph_died))
        for node in function.inputs:
            if node.creator_node is not None:
                self._reached.add(node.creator_node)

    def finish(self) -> int:
        """Ends watching; the events before the end, -1 if a graph lives on."""
        if any(reference() is not None for reference in self._watched):
            self._end = -1
        self._watched.clear()
        return self._end
