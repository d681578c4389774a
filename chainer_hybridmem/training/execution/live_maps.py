"""Every feature map of the running graph, with a plan or without.

Note: [older graphs]
    Maps stay known as long as any part of the graph that uses them lives, so a second
    backward over an older graph finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.devices.protocol import Array, Device, HostCopy
from chainer_hybridmem.training.execution.ledger import Ledger
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.table import ActionTable
from chainer_hybridmem.training.recompute import fused_replays


class PlannedMaps:
    """The plan that is followed, the map of each of its storages, and its host copy.

    Attributes:
        table (ActionTable or None): The plan; None if there is none.
    """

    def __init__(self) -> None:
        self.table: ActionTable | None = None
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
        self.table = table
        self._maps = {}
        self._copies = copies

    def end(self) -> None:
        """No plan is followed, and no map gets a storage from here on."""
        self.table = None
        self._former = {}

    def forget(self) -> None:
        """Forgets every map."""
        self._maps.clear()

    def find(self, storage: int) -> LiveMap | None:
        """The map of a storage, if the iteration has made it."""
        return self._maps.get(storage)

    def find_all(self, storages: Iterable[int]) -> list[LiveMap]:
        """The maps of storages, as far as the iteration has made them."""
        return list(filter(None, map(self._maps.get, storages)))

    def assign_by_slot(self, live: LiveMap, slot: Slot) -> None:
        """Gives a map the storage that the plan has for a slot, if it has one.

        The first map of a storage has it: what was one array when the plan was made may
        be two, and they share no space on the host.
        """
        if self.table is not None:
            storage = self.table.storage_of.get(slot, -1)
            if storage >= 0 and storage not in self._maps:
                self.assign(live, storage)

    def assign(self, live: LiveMap, storage: int) -> None:
        """Makes a map that storage of the plan."""
        assert self.table is not None
        copy = self._copies.get(storage)
        live.follow(storage, self.table.tiers.get(storage), copy)
        self._maps[storage] = live

    def is_for_good(self, live: LiveMap) -> bool:
        """Whether the plan drops a map and never makes it again."""
        return self.table is not None and live.storage in self.table.for_good

    def is_unique(self, live: LiveMap) -> bool:
        """Whether the plan drops a map for good that no replay makes again."""
        return self.table is not None and live.storage in self.table.unique

    # -- host copies ----------------------------------------------------------
    def keep_copy(self, live: LiveMap) -> None:
        """Keeps the host copy of a map for later iterations."""
        if live.storage >= 0 and live.host.copy is not None:
            self._copies[live.storage] = live.host.copy

    def hand_over(self, maps: Iterable[LiveMap]) -> None:
        """Leaves maps, with their host copies, to graphs that live on.

        Later iterations neither write over such a copy nor give it back.
        """
        for live in maps:
            if live.storage >= 0 and self._copies.get(live.storage) is live.host.copy:
                self._copies.pop(live.storage, None)
            live.begin_iteration()

    # -- another plan ---------------------------------------------------------
    def switch(self, table: ActionTable, copies: dict[int, HostCopy]) -> None:
        """Goes on with another plan; its maps are still to be moved into it."""
        self._former, self._copies = self._copies, copies
        self.table = table
        self._maps = {}

    def move_by_slots(self, live: LiveMap) -> None:
        """Moves a map of this iteration into the plan now followed, by its slots."""
        assert self.table is not None
        storage_of = self.table.storage_of
        storages = (storage_of.get(slot, -1) for slot in live.slots.name_present())
        storage = next((storage for storage in storages if storage >= 0), -1)
        self.move(live, -1 if storage in self._maps else storage)

    def move_by_label(self, live: LiveMap, label: str) -> None:
        """Moves a parameter or state into the plan now followed, by its name."""
        assert self.table is not None
        self.move(live, self.table.crossing.get(label, -1))

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


# Iterations have the same slots: their maps share what names one.
_find_slot = functools.lru_cache(maxsize=1 << 14)(Slot)
PURGED_MAPS = 4096  # known ones, from which on dead ones are forgotten


class LiveMaps:
    """Finds maps by allocation, function and node.

    Args:
        device (Device): Where the feature maps are.
        minimum_map_bytes (int): Smaller maps are left alone.

    Attributes:
        ledger (Ledger): The functions that have run.
        functions (LiveFunctions): Those that are known.
        planned (PlannedMaps): The maps that the plan decides about, by storage.
        permanent (set of int): Allocations that never leave.
        pinned (set of int): Of these, what the graph refers to itself.
        parked (set of int): Allocations before and after they were away.
    """

    def __init__(self, device: Device, minimum_map_bytes: int) -> None:
        self._device = device
        self.minimum_map_bytes = minimum_map_bytes
        self.ledger = Ledger()
        self.functions = self.ledger.functions
        self.planned = PlannedMaps()
        self.permanent: set[int] = set()
        self.pinned: set[int] = set()
        self.parked: set[int] = set()
        self._by_allocation: dict[int, LiveMap] = {}
        self._outliving: Collection[Slot] = ()
        self._purge_at = PURGED_MAPS
        self._bring_back: graph.BringBack | None = None

    def __iter__(self) -> Iterator[LiveMap]:
        return iter(self._by_allocation.values())

    def answer_reads(self, bring_back: graph.BringBack) -> None:
        """Says what brings a map back that the program reads while it is away."""
        self._bring_back = bring_back

    def keep_resident(self, allocations: Iterable[int]) -> None:
        """Says which allocations never leave."""
        self.permanent = set(allocations)

    def note_permanent(self, allocation: int) -> None:
        """This allocation never leaves either."""
        self.permanent.add(allocation)

    def note_parked(self, allocation: int) -> None:
        """This allocation is one before or after an array was away."""
        self.parked.add(allocation)

    # -- iterations -----------------------------------------------------------
    def begin_iteration(self, outliving: Collection[Slot]) -> None:
        """Starts an iteration.

        Args:
            outliving: Slots of maps that later iterations will ask for.
        """
        self._outliving = outliving
        self.pinned.clear()
        self.parked.clear()

    def end_iteration(self) -> None:
        """All maps belong to older graphs from here on."""
        self.planned.hand_over(self)

    def switch(self, outliving: Collection[Slot]) -> None:
        """Moves every map into another plan; argument as of begin_iteration()."""
        self._outliving = outliving
        for live in self:
            for slot in live.slots.name_present():
                self._expect_use(live, slot)
            self.planned.move_by_slots(live)

    def forget_dead(self) -> None:
        """Forgets the maps of graphs that have died, and what has become permanent."""
        for allocation, live in list(self._by_allocation.items()):
            stays = allocation in self.permanent and self._let_stay(live)
            if not stays and live.slots.are_alive():
                continue
            live.forget()
            del self._by_allocation[allocation]

    def _let_stay(self, live: LiveMap) -> bool:
        """Puts back what an iteration has made and now stays, as a lazy parameter.

        Returns:
            bool: Whether the graph has it.
        """
        for reference in live.slots:
            array = graph.node_array(reference.node)
            if array is not None:
                live.renew(self._device.arrays.root(array))
                return True
        live.finish_and_stay()
        return live.state is State.RESIDENT

    def forget_all(self) -> None:
        """Lets go of every map as it is."""
        for live in self:
            live.finish_and_stay()
            live.forget()
        self._by_allocation.clear()
        self.planned.forget()

    # -- functions ------------------------------------------------------------
    def find_left(self, k: int, function: Any, serial: int) -> list[LiveMap]:
        """Finds the maps that a function has left in the graph.

        Args:
            k: Number of the operation.
            function: The function.
            serial: Its place in the order of functions.
        """
        if len(self._by_allocation) >= self._purge_at:
            self.forget_dead()
            self._purge_at = 2 * len(self._by_allocation) + PURGED_MAPS
        device_arrays, maps = self._device.arrays, []
        live = last = None
        for kind, key, owner, array in graph.find_slots(function, device_arrays.owns):
            # A retained output is in two slots, one after the other.
            if array is not last or kind is not SlotKind.OUTPUT:
                live = self._find_or_make(function, kind, key, owner, array)
                last = array
            if live is None:
                continue
            slot = _find_slot(k, kind, key)
            view = device_arrays.capture(array)
            reference = graph.refer(slot, owner, view, self._bring_back)
            live.add(reference)
            live.expect_read(serial)
            self._expect_use(live, slot)
            if type(reference) is graph.NodeRef:
                reference.content.known = live
            if live not in maps:
                maps.append(live)
            if live.storage < 0:
                if live.host.copy is not None:
                    live.host.close()  # no plan owns it, and it is worth nothing now
                self.planned.assign_by_slot(live, slot)
        return maps

    def find_evicted(self, function: Any) -> Iterator[LiveMap]:
        """Finds maps that backward reads and that have left since forward has run."""
        for node in graph.retained_inputs(function):
            if graph.retained_array(node) is None:
                live = self.find_of_node(node)
                if live is not None:
                    yield live

    def _expect_use(self, live: LiveMap, slot: Slot) -> None:
        if slot in self._outliving:
            live.outlive()

    def _find_or_make(
        self, function: Any, kind: SlotKind, key: int | str, owner: Any, array: Array
    ) -> LiveMap | None:
        """The feature map that an array in the graph is, if it is one."""
        device = self._device
        allocation = device.arrays.allocation_id(array)
        if kind is SlotKind.INPUT and owners.is_parameter(owner):
            self.permanent.add(allocation)  # it may have been made just now
            return None
        if allocation in self.permanent:
            self.pinned.add(allocation)
            return None
        if allocation == 0:
            return None
        attribute = kind is SlotKind.ATTRIBUTE
        if attribute and fused_replays.stays(function, str(key)):
            return None
        live = self._by_allocation.get(allocation)
        if live is None and not attribute:
            live = self._find_returned(owner, array)
        if live is None:
            nbytes = device.arrays.root_bytes(device.arrays.root(array))
            if nbytes < self.minimum_map_bytes:
                return None
            live = LiveMap(device, allocation, nbytes)
            self._by_allocation[allocation] = live
        return live

    def _find_returned(self, owner: Any, array: Array) -> LiveMap | None:
        """The map of a node if the array is that map, back in other memory."""
        live = self.find_of_node(owner)
        if live is not None and live.slots.find_root() is self._device.arrays.root(
            array
        ):
            return live
        return None

    # -- questions ------------------------------------------------------------
    def find(self, function: Any) -> Sequence[LiveMap]:
        """Feature maps that a function's backward reads."""
        known = self.functions.find(function)
        return () if known is None else known.maps

    def find_of_node(self, node: Any) -> LiveMap | None:
        """The map that a node's array is, wherever its contents are."""
        content = graph.find_known_content(node)
        live: LiveMap | None = None if content is None else content.known
        if live is None or self._by_allocation.get(live.allocation) is not live:
            return None  # or another session's
        return live

    def misses(self, function: Any) -> bool:
        """Whether what backward reads of a function that is not known is away."""
        return any(True for _ in self.find_evicted(function))

    @property
    def knows_any(self) -> bool:
        """Whether any feature map is known."""
        return bool(self._by_allocation)

    @property
    def all_present(self) -> bool:
        """Whether every map that is known is where the graph expects it."""
        return all(live.state is State.RESIDENT for live in self)

    @property
    def have_pending_backward(self) -> bool:
        """Whether a backward that has not come yet will read one of them."""
        return any(live.uses and live.slots.are_alive() for live in self)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all maps on the device; between iterations those of older graphs."""
        return sum(live.nbytes for live in self if not live.is_away)

    @property
    def held_bytes(self) -> int:
        """Bytes of maps on the device that the program holds in variables."""
        return sum(
            live.nbytes for live in self if not live.is_away and live.slots.are_held()
        )

    def find_living(self) -> list[LiveMap]:
        """Maps that living graphs have, also those that the device has not."""
        return [live for live in self if live.slots.are_alive()]

    def count_small(self) -> tuple[int, int]:
        """Number and bytes of what the graph keeps and is too small to leave.

        It is not noted while functions run, so all that are known are looked at.
        """
        arrays, sizes = self._device.arrays, {}
        for function in self.functions.owners():
            if graph.is_unfinished(function):
                continue
            for _, _, owner, array in graph.find_slots(function, arrays.owns):
                allocation = arrays.allocation_id(array)
                if allocation in self.permanent or owners.is_parameter(owner):
                    continue
                nbytes = arrays.root_bytes(arrays.root(array))
                if allocation and nbytes < self.minimum_map_bytes:
                    sizes[allocation] = nbytes
        return len(sizes), sum(sizes.values())

    def is_rewritten(self, allocation: int) -> bool:
        """Whether the program has changed a map whose memory does not tell it.

        It has let go of that since, or has given the variable another array.
        """
        live = self._by_allocation.get(allocation)
        if live is None:
            return False
        return live.prints.is_rewritten() or live.slots.are_replaced()
