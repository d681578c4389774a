"""Parks and recalls parameters and optimizer states.

Note: [crossing]
    Parameters and optimizer states leave and return inside one iteration, the last
    ones in the hook behind the last backward function: no hook runs before the update.
    Every path that ends an iteration restores all arrays that are still away. Recorded
    iterations park states: what is freed and allocated for that is no part of the
    recording.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.chainer_access.owners import Owner
from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.execution.live_map import State
from chainer_hybridmem.execution.live_maps import LiveMaps
from chainer_hybridmem.execution.persistent import PersistentMap
from chainer_hybridmem.execution.restorer import Restorer
from chainer_hybridmem.execution.table import ActionTable


class Crossing:
    """Knows the arrays of owners that leave in this iteration.

    Args:
        device (Device): Where the arrays are.
        maps (LiveMaps): Is told which allocations stay.
        restorer (Restorer): Brings arrays back.
    """

    def __init__(self, device: Device, maps: LiveMaps, restorer: Restorer) -> None:
        self._device = device
        self._maps = maps
        self._restorer = restorer
        self._arrays: list[PersistentMap] = []
        self._by_node: weakref.WeakKeyDictionary[Any, PersistentMap] = (
            weakref.WeakKeyDictionary()
        )

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def begin(self, table: ActionTable | None, holders: Iterable[Owner]) -> None:
        """Starts an iteration.

        Args:
            table: Which arrays leave.
            holders: Owners of the parameters and optimizer states that may leave.
        """
        if table is None:
            return
        for owner in holders:
            storage, array = table.crossing.get(owner.label, -1), owner.get()
            if storage < 0 or array is None:
                continue
            live = PersistentMap(self._device, owner, array, self._recall)
            self._maps.planned.assign(live, storage)
            self._arrays.append(live)
            if owner.node is not None:
                self._by_node[owner.node] = live

    def switch(self) -> None:
        """Moves every array into another plan, which the iteration goes on with."""
        for live in self._arrays:
            self._maps.planned.move_by_label(live, live.label)

    def park(self, holders: Iterable[Owner]) -> None:
        """Moves arrays out for an iteration that is recorded, as far as they may.

        They are restored before the update if a table says where it is, else when the
        update reads them.
        """
        for owner in holders:
            array = owner.get()
            if array is None or array.nbytes < self._maps.minimum_map_bytes:
                continue
            live = PersistentMap(self._device, owner, array, self._recall)
            self._maps.note_parked(live.allocation)
            self._arrays.append(live)
            live.start_swap_out()
        array = None  # nothing but its owner has the last one
        for live in self._arrays:
            live.release()

    def _recall(self, live: PersistentMap) -> None:
        """Restores an array because the program reads it, or time is up."""
        live.stay()
        if live.state is not State.RESIDENT:
            self._restorer.bring_back(live)
            self._maps.note_permanent(live.allocation)
        if live.storage < 0:  # parked: no plan owns the copy
            self._maps.note_parked(live.allocation)
            live.host.close()

    def recall_read_by(self, function: Any) -> None:
        """Restores the parameters that a function reads."""
        for node in function.inputs if self._arrays else ():
            live = self._by_node.get(node)
            if live is not None:
                self._recall(live)

    def recall_all(self) -> None:
        """Restores every array: the update comes next."""
        for live in self._arrays:
            self._recall(live)

    def end(self) -> None:
        """Every array that crosses iterations is where its owner expects it."""
        with contextlib.ExitStack() as stack:  # one that fails does not stop the others
            for live in self._arrays:
                stack.callback(self._recall, live)
        self._arrays.clear()
        self._by_node.clear()
