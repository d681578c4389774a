"""The live maps that the plan now followed decides about, by storage."""

from __future__ import annotations

from collections.abc import Iterable

from chainer_hybridmem.devices.protocol import HostCopy
from chainer_hybridmem.execution.live_map import LiveMap
from chainer_hybridmem.execution.table import ActionTable
from chainer_hybridmem.records.profile import Slot


class PlannedMaps:
    """Finds the map of each storage, and its host copy from earlier iterations."""

    def __init__(self) -> None:
        self._table: ActionTable | None = None
        self._maps: dict[int, LiveMap] = {}
        self._copies: dict[int, HostCopy] = {}
        self._former: dict[int, HostCopy] = {}  # copies of the plan followed before

    def begin(self, table: ActionTable | None, copies: dict[int, HostCopy]) -> None:
        """Starts an iteration.

        Args:
            table: The plan; None if there is none.
            copies: Host copies by storage, reused from iteration to iteration; new ones
                are added.
        """
        self._table = table
        self._maps = {}
        self._copies = copies

    def end(self) -> None:
        """No map gets a storage from here on."""
        self._table = None
        self._former = {}

    def forget(self) -> None:
        """Forgets every map."""
        self._maps.clear()

    def find(self, storage: int) -> LiveMap | None:
        """The map of a storage, if the iteration has made it."""
        return self._maps.get(storage)

    def meet(self, live: LiveMap, slot: Slot) -> None:
        """A map that has no storage yet is found in a slot."""
        if self._table is not None:
            storage = self._table.storage_of.get(slot, -1)
            if storage >= 0:
                self.assign(live, storage)

    def assign(self, live: LiveMap, storage: int) -> None:
        """Makes a map that storage of the plan."""
        assert self._table is not None
        copy = self._copies.get(storage)
        live.follow(storage, self._table.tiers.get(storage), copy)
        self._maps[storage] = live

    # -- host copies ----------------------------------------------------------
    def keep_copy(self, live: LiveMap) -> None:
        """Keeps the host copy of a map for later iterations."""
        if live.storage >= 0 and live.host.copy is not None:
            self._copies[live.storage] = live.host.copy

    def hand_over_copies(self, maps: Iterable[LiveMap]) -> None:
        """Leaves their host copies to maps of graphs that live on.

        Later iterations neither write over such a copy nor give it back.
        """
        for live in maps:
            if live.storage >= 0 and self._copies.get(live.storage) is live.host.copy:
                self._copies.pop(live.storage, None)

    # -- another plan ---------------------------------------------------------
    def switch(self, table: ActionTable, copies: dict[int, HostCopy]) -> None:
        """Goes on with another plan; its maps are still to be moved into it."""
        self._former, self._copies = self._copies, copies
        self._table = table
        self._maps = {}

    def move_by_slots(self, live: LiveMap) -> None:
        """Moves a map of this iteration into the plan now followed, by its slots."""
        assert self._table is not None
        storage_of = self._table.storage_of
        storages = (storage_of.get(slot, -1) for slot in live.slots.name_present())
        storage = next((storage for storage in storages if storage >= 0), -1)
        self.move(live, -1 if storage in self._maps else storage)

    def move_by_label(self, live: LiveMap, label: str) -> None:
        """Moves a parameter or state into the plan now followed, by its name."""
        assert self._table is not None
        self.move(live, self._table.crossing.get(label, -1))

    def move(self, live: LiveMap, storage: int) -> None:
        """Makes a map of the former plan a storage of this one, with its host copy.

        Args:
            live: The map.
            storage: Its id in the plan now followed; -1 if that does not have it.
        """
        copy, former = live.host.copy, self._former
        if live.storage >= 0 and former.get(live.storage) is copy:
            former.pop(live.storage, None)
        live.leave_plan()
        if storage < 0:
            return
        unused = self._copies.get(storage)
        self.assign(live, storage)
        if copy is not None and unused is not copy:
            if unused is not None:
                unused.close()
            self._copies[storage] = copy
