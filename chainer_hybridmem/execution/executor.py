"""Plan to actions on the live graph. The executor never decides.

It knows every feature map of the running graph, with a plan or without. What the
plan does not cover is passive mode: evict when an allocation does not fit,
bring back before backward needs it.

Note: [bounded replays]
    A replay finds its inputs in the graph or among what the same chain has
    made; it recomputes on its own only if a plan has gone wrong. So a
    residual network never costs more than the plan says.

Note: [crossing]
    Parameters and optimizer states leave and return inside one iteration, the last
    ones in the hook behind the last backward function: no hook runs before the update.
    Whatever ends an iteration brings home what is not there. Recorded iterations park
    states: what is freed and allocated for that is no part of the recording.

Note: [iterations that change]
    Maps stay known as long as any part of the graph that uses them lives, so a
    second backward over an older graph finds them. Recipes stay known with the
    function they belong to: what a plan has dropped is made again as that plan
    would, also after an iteration has left it. An iteration may go on with another
    plan: that plan's maps are found by their slots, and what should have left, leaves.

Note: [later iterations]
    A second backward may come over a graph after an update (the two losses of a GAN).
    What has been dropped cannot be made again then, for parameters are others. Once a
    backward over an older graph has been seen, what it asks for is copied out instead
    of dropped (so is what functions read that a backward function has called, from the
    start); after updates the iteration is planned without recomputation. A function
    whose parameters have been updated since is never run again.

Note: [passive mode]
    Backward uses maps in the reverse order of the functions that retain them, so the
    map whose last user came first is needed last: it is evicted first. Maps of older
    graphs come before those of younger ones. What a live Variable holds cannot go, and
    what turns out to be held otherwise is put back at once. While one map leaves, the
    copy of the next one begins; in backward what is needed next comes back as far
    as memory is free, and is the first to go again.

Note: [written meanwhile]
    The program may write into an array after a function has read it, and plain
    Chainer's backward reads what that function has made of it. So the recorded trial
    compares what functions have read once more when backward begins: nothing is
    recomputed from what has changed. In later iterations every map that a replay makes
    again is compared with what was dropped (feature_maps, [checked replays]). A
    function that did not draw random numbers when it was recorded may do so later: what
    it makes then is copied out instead of dropped. A replay runs under Chainer's
    configuration of its forward.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.chainer_access import graph, owners
from chainer_hybridmem.devices.protocol import Array, Device, HostCopy
from chainer_hybridmem.errors import SessionError, SwapStoreError
from chainer_hybridmem.execution.feature_maps import LiveMap, State
from chainer_hybridmem.execution.functions import LiveFunction, LiveFunctions
from chainer_hybridmem.execution.persistent import PersistentMap
from chainer_hybridmem.execution.table import ActionTable
from chainer_hybridmem.recompute import drawing, fused_replays, trust
from chainer_hybridmem.records.plan import Replay
from chainer_hybridmem.records.profile import Recipe, Slot, SlotKind

if TYPE_CHECKING:
    from chainer_hybridmem.execution.observer import Observer
    from chainer_hybridmem.execution.verifier import Verifier

MINIMUM_MAP_BYTES = 4096  # smaller ones are noise: they stay
PURGED_MAPS = 4096  # known ones, from which on dead ones are forgotten


class Counters:
    """What one iteration has moved.

    Attributes:
        swapped_out_bytes (int): Copied to the host.
        swapped_in_bytes (int): Copied to the device.
        recomputed_bytes (int): Made again by replays.
        replays (int): Forward operations run again.
        evictions (int): Maps evicted because memory was short.
        restores (int): Maps brought back without a plan.
    """

    def __init__(self) -> None:
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.recomputed_bytes = 0
        self.replays = 0
        self.evictions = 0
        self.restores = 0


@dataclasses.dataclass(frozen=True)
class Shortage:
    """What was in memory when an allocation could not be made to fit, in bytes.

    Attributes:
        used_bytes (int): Everything.
        busy_bytes (int): Feature maps that the running function reads.
        held_bytes (int): Feature maps that the program holds itself.
        stuck_bytes (int): Feature maps that could not be copied out.
    """

    used_bytes: int
    busy_bytes: int
    held_bytes: int
    stuck_bytes: int


class Executor:
    """Executes one plan after the other on the graphs of one session.

    Args:
        device (Device): Where the feature maps are.
        minimum_map_bytes (int): Smaller maps are left alone.
        may_drop (bool): Whether maps that the host has no room for may be dropped and
            made again without a plan.
    """

    def __init__(
        self,
        device: Device,
        minimum_map_bytes: int = MINIMUM_MAP_BYTES,
        may_drop: bool = False,
    ) -> None:
        self.device = device
        self.minimum_map_bytes = minimum_map_bytes
        self._may_drop = may_drop
        self.counters = Counters()
        self.observer: Observer | None = None
        self.verifier: Verifier | None = None
        self.asked: Callable[[Any, list[Slot]], None] | None = None  # see _fetch
        self._leaving: Callable[[LiveMap], None] | None = None  # see watch_leaving
        self.permanent: set[int] = set()  # allocations that never leave
        self.pinned: set[int] = set()  # of these, what the graph refers to itself
        self.parked: set[int] = set()  # allocations before and after they were away
        self.spare: dict[Any, Any] = {}  # given up first when memory is short
        self._table: ActionTable | None = None
        self._by_allocation: dict[int, LiveMap] = {}
        self._by_storage: dict[int, LiveMap] = {}
        self._crossing: list[PersistentMap] = []
        self._parameters: weakref.WeakKeyDictionary[Any, PersistentMap] = (
            weakref.WeakKeyDictionary()
        )  # by node
        self._by_node: graph.ByOwner[LiveMap] = graph.ByOwner()
        self._copies: dict[int, HostCopy] = {}
        self.functions = LiveFunctions()
        self._running: dict[int, LiveFunction] = {}  # by number, of this iteration
        self._drawn: Hashable = None  # see drawing.position, before a forward
        self._on_gpu = device.kind == 'cuda'
        self._temporaries: dict[Any, Array] = {}
        self._busy: set[LiveMap] = set()  # read by a backward function under way
        self._leaves: weakref.WeakKeyDictionary[Any, Array] = (
            weakref.WeakKeyDictionary()
        )  # what replays read in place of arrays that change, by node
        self._serial = 0
        self._stuck: set[LiveMap] = set()  # cannot go in this operation
        self._found_held: set[LiveMap] = set()  # nor these, while the program has them
        self._stray = False  # whether maps may be away that no plan brings back
        self._coming_back: list[LiveMap] | None = None  # the next one last
        self._load_before = 0
        self._transient_bytes = 0  # that a backward function takes at most
        self._may_switch = False
        self._outliving: Collection[Slot] = ()
        self._watched: Collection[Slot] | None = None
        self._purge_at = PURGED_MAPS
        self.shortage: Shortage | None = None
        self._bring_back: graph.BringBack = weakref.WeakMethod(self._fetch)

    # -- iterations -----------------------------------------------------------
    def begin(
        self,
        table: ActionTable | None,
        copies: dict[int, HostCopy],
        holders: Iterable[owners.Owner] = (),
        may_switch: bool = False,
        outliving: Collection[Slot] = (),
        watched: Collection[Slot] | None = None,
    ) -> None:
        """Starts an iteration.

        Args:
            table: What to do; None for passive mode.
            copies: Host copies by storage id, reused from iteration to
                iteration; new ones are added.
            holders: Who holds the parameters and optimizer states that may leave.
            may_switch: Whether the iteration may go on with another plan.
            outliving: Slots of maps that later iterations will ask for.
            watched: Slots of maps that the program may write into; None: of all.
        """
        self.settle()
        self._watched = watched
        self._may_switch = may_switch
        self._outliving = outliving
        self._busy.clear()
        self._stray = table is None
        self._coming_back = None
        self.counters = Counters()
        self._table = table
        self._copies = copies
        self._by_storage = {}
        self._running = {}
        self.pinned.clear()
        self.parked.clear()
        for owner in holders:
            storage = -1 if table is None else table.crossing.get(owner.label, -1)
            self._expect(owner, storage)
        self._clear_older(table)

    def _clear_older(self, table: ActionTable | None) -> None:
        """Begins to copy out older graphs' maps: a plan will need their memory."""
        if table is None or table.passive:
            return
        for live in self._candidates():
            if not live.present_slots():
                self._start_swap_out(live)

    @property
    def older_bytes(self) -> int:
        """Of older graphs' maps on the device."""
        maps = self._by_allocation.values()
        away = (State.AWAY, State.GONE)
        return sum(live.nbytes for live in maps if live.state not in away)

    def _expect(self, owner: owners.Owner, storage: int) -> None:
        array = owner.get()
        if storage < 0 or array is None:
            return
        live = PersistentMap(self.device, owner, array, self._recall)
        self._assign(live, storage)
        self._crossing.append(live)
        if owner.node is not None:
            self._parameters[owner.node] = live

    def _assign(self, live: LiveMap, storage: int) -> None:
        """A map is that storage of the plan now followed."""
        assert self._table is not None
        live.storage = storage
        live.tier = self._table.tiers.get(storage)
        self._by_storage[storage] = live
        if live.copy is None:
            live.copy = self._copies.get(storage)

    def park(self, holders: Iterable[owners.Owner]) -> None:
        """Moves arrays out for an iteration that is recorded, as far as they may.

        They come home before the update if a table says where it is, else when the
        update asks for them.
        """
        for owner in holders:
            array = owner.get()
            if array is None or array.nbytes < self.minimum_map_bytes:
                continue
            live = PersistentMap(self.device, owner, array, self._recall)
            self.parked.add(live.allocation)
            self._crossing.append(live)
            live.start_swap_out()
        array = None  # nothing but its owner has the last one
        for live in self._crossing:
            live.release()

    def _recall(self, live: PersistentMap) -> None:
        """Brings an array home because somebody asks for it, or time is up."""
        live.stay()
        if live.state is not State.RESIDENT:
            self._restore(live)
            self.permanent.add(live.allocation)
        if live.storage < 0:  # parked: no plan owns the copy
            self.parked.add(live.allocation)
            self._close_copy(live)

    def _bring_home(self) -> None:
        """Everything that crosses iterations is where its owner expects it."""
        with contextlib.ExitStack() as stack:  # one that fails does not stop the others
            for live in self._crossing:
                stack.callback(self._recall, live)
        self._crossing.clear()
        self._parameters.clear()

    def leave_plan(self) -> None:
        """Ends guidance for the rest of the iteration: passive from here on."""
        self._table = self._watched = None
        for live in self._by_allocation.values():
            live.watched = True
        self._stray, self._coming_back = True, None

    def switch(
        self,
        table: ActionTable,
        copies: dict[int, HostCopy],
        k: int,
        outliving: Collection[Slot] = (),
        watched: Collection[Slot] | None = None,
    ) -> None:
        """Goes on with another plan, for iterations that begin like this one.

        Args:
            table: What to do from here on; what it has done by now is done.
            copies: Its host copies by storage id.
            k: The next operation.
            outliving: As for :meth:`begin`.
            watched: As for :meth:`begin`.
        """
        self._outliving, self._watched = outliving, watched
        former, self._copies = self._copies, copies
        self._table, self._by_storage = table, {}
        self._stray, self._coming_back = True, None
        for number, live_function in self._running.items():
            function = live_function()
            if function is not None:
                self._know_recipe(number, function)
        for live in self._by_allocation.values():
            self._adopt(live, former)
        for live in self._crossing:
            storage = table.crossing.get(live.label, -1)
            self._take_copy(live, former, storage)
        self._clear_older(table)
        self._catch_up(table, k)

    def _adopt(self, live: LiveMap, former: dict[int, HostCopy]) -> None:
        """A map of this iteration gets the storage of the plan now followed."""
        assert self._table is not None
        storages = (
            self._table.storage_of.get(slot, -1) for slot in live.present_slots()
        )
        storage = next((storage for storage in storages if storage >= 0), -1)
        for slot in live.present_slots():
            self._expect_use(live, slot)
        taken = storage in self._by_storage
        self._take_copy(live, former, -1 if taken else storage)

    def _take_copy(
        self, live: LiveMap, former: dict[int, HostCopy], storage: int
    ) -> None:
        if live.storage >= 0 and former.get(live.storage) is live.copy:
            former.pop(live.storage, None)
        live.storage, live.tier = -1, None
        if storage < 0:
            return
        unused, copy = self._copies.get(storage), live.copy
        self._assign(live, storage)
        if copy is not None and unused is not copy:
            if unused is not None:
                unused.close()
            self._copies[storage] = copy

    def _catch_up(self, table: ActionTable, k: int) -> None:
        """What a plan has let go before operation k goes now."""
        for actions, act in (
            (table.swap_outs, self._start_swap_out),
            (table.releases, self._release),
            (table.drops, self._let_go),
        ):
            for position in sorted(p for p in actions if p < k):
                for storage in actions[position]:
                    live = self._by_storage.get(storage)
                    if live is not None:
                        act(live)

    @property
    def knows_maps(self) -> bool:
        """Whether any feature map is known."""
        return bool(self._by_allocation)

    @property
    def all_present(self) -> bool:
        """Whether every map that is known is where the graph expects it."""
        return all(live.present for live in self._by_allocation.values())

    @property
    def serial(self) -> int:
        """Of the function that has become known last, or of a later one."""
        return self._serial

    def is_known(self, function: Any) -> bool:
        """Whether it is known what a function has left in the graph."""
        known = self.functions.get(function)
        return known is not None and known.serial >= 0

    def complete_late(self, k: int, function: Any, serial: int) -> None:
        """Like :meth:`complete`, for a function that has run before others known.

        Args:
            k: Its number.
            function: The function.
            serial: Its place in the order in which functions have run.
        """
        latest = max(self._serial, serial)
        self._serial = serial - 1
        try:
            self.complete(k, function)
        finally:
            self._serial = latest

    def pass_by(self, function: Any) -> None:
        """Before a forward function of which nothing is to be known."""
        self._stuck.clear()
        self._found_held.clear()
        self.restore_maps(function)

    def misses(self, function: Any) -> bool:
        """Whether what backward reads of a function that is not known is away."""
        return any(
            graph.retained_array(node) is None and node in self._by_node
            for node in graph.retained_inputs(function)
        )

    def before_unknown(self) -> None:
        """Before a backward function that is not known and misses nothing."""
        self._stuck.clear()
        self._found_held.clear()
        self._prefetch(self._serial)
        self.open_window()

    def open_window(self) -> None:
        """What is taken from here on, the function under way takes."""
        self.device.reset_window()
        self._load_before = self.device.used_bytes

    def catch_up(self, ended: Iterable[Any], running: Iterable[Any]) -> None:
        """Backward functions have run before their maps were known.

        Args:
            ended: Functions whose backward has come to its end.
            running: Those whose backward runs now.
        """
        for function in ended:
            known = self.functions.get(function)
            if known is not None:
                for live in known.maps:
                    live.uses.discard(known.serial)
        for function in running:
            self._busy.update(self.maps_of(function))

    def forget_dead(self) -> None:
        """Ends an iteration: forgets the maps of graphs that have died.

        And parameters that were made in it: a link that learns its size from its first
        input had none when the iteration began.
        """
        self._table = None
        self._bring_home()
        self._forget_maps()

    def _forget_maps(self) -> None:
        for allocation, live in list(self._by_allocation.items()):
            if allocation in self.permanent:
                self._let_stay(live)
            elif live.alive():
                continue
            live.forget()
            del self._by_allocation[allocation]
            if live.storage < 0:  # no plan owns its copy
                self._close_copy(live)

    def _let_stay(self, live: LiveMap) -> None:
        """What an iteration has made and now stays, such as a lazy parameter."""
        for reference in live.slots:
            array = graph.node_array(reference.node)
            if array is not None:
                live.renew(self.device.root(array))
                return

    @staticmethod
    def _close_copy(live: LiveMap) -> None:
        if live.copy is not None:
            live.copy.close()
            live.copy = None

    def settle(self) -> None:
        """Like :meth:`forget_dead`; living graphs keep what they need.

        A host copy that a living graph may still ask for is taken out of the
        plan's copies, so that nobody writes over it or gives it back.
        """
        self.forget_dead()
        for live in self._by_allocation.values():
            if live.storage >= 0 and self._copies.get(live.storage) is live.copy:
                self._copies.pop(live.storage, None)
            live.begin_iteration()

    def clear(self) -> None:
        """Copies out what is left of older graphs, so that no recording counts it."""
        candidates = list(self._candidates())
        for live in candidates:
            self._start_swap_out(live)
        for live in candidates:
            self._evict(live)

    def close(self) -> None:
        """Brings back whatever a living graph may still ask for, or makes it again."""
        self._table = None
        for live in list(self._by_allocation.values()):
            if live.alive():
                # Whoever asks for what does not come back is told.
                with contextlib.suppress(SessionError, MemoryError):
                    self._restore(live)

    def drop_graphs(self) -> None:
        """Frees the maps of graphs with which the program does not go on.

        What it holds in variables is its own.
        """
        self._busy.clear()
        self._stuck.clear()
        for live in self._candidates():
            with contextlib.suppress(SwapStoreError):
                live.drop()

    def abandon(self) -> None:
        """Lets go of every feature map as it is; what crosses iterations comes home."""
        self._table = None
        for live in self._by_allocation.values():
            live.stay()
            live.forget()
        self._by_allocation.clear()
        self._by_storage.clear()
        self.spare.clear()
        self._bring_home()

    # -- what the hooks call --------------------------------------------------
    def before_forward(self, k: int, function: Any) -> None:
        """Before forward operation k issues anything."""
        self._stuck.clear()
        self._found_held.clear()
        self._drawn = None
        table = self._table
        if table is not None and (self._may_switch or not table.passive):
            # Replays run functions that no plan names, if these make only views.
            again = bool(table.replayed) or self._may_replay(k)
            if again:
                self.functions.know(function).pristine = graph.pristine(function)
                self._know_recipe(k, function)
            self._act(k)
            if again:
                self._drawn = drawing.position(self._on_gpu)
        self.restore_maps(function)

    def restore_maps(self, function: Any) -> None:
        """A function that is applied once more finds its attributes."""
        for live in self.maps_of(function):
            if not live.present:
                self._restore(live)

    def _know_recipe(self, k: int, function: Any) -> None:
        assert self._table is not None
        recipe = self._table.recipes.get(k)
        if recipe is not None:
            known = self.functions.know(function)
            if not trust.is_trusted(function):  # it was when the plan was made
                known.drew = True
            known.covered = [self._running.get(c) for c in recipe.covers[:-1]]
            known.recipe = recipe
            _would_draw(known)

    def after_forward(self, function: Any) -> None:
        """After a forward function has computed; see [written meanwhile]."""
        drawn = self._drawn
        if drawn is not None and drawing.position(self._on_gpu) != drawn:
            self.functions.know(function).drew = True

    @property
    def graph_is_dead(self) -> bool:
        """Whether no function of the iteration is in a graph any more."""
        self.spare.clear()  # it holds nodes
        return all(known() is None for known in self._running.values())

    def complete(self, k: int, function: Any) -> None:
        """After forward operation k: finds what it left in the graph.

        Args:
            k: Its number; -1 for a function that a backward function has called, so
                that one can differentiate once more.
            function: The function.
        """
        device, table = self.device, self._table
        known = self.functions.know(function)
        if k >= 0:
            self._running[k] = known
        self._serial += 1
        known.serial = self._serial
        known.updates = owners.updates(function.inputs)
        if known.recipe is not None and self._may_replay(k):
            self._keep_leaves(function)
        if len(self._by_allocation) >= self._purge_at:
            self._forget_maps()
            self._purge_at = 2 * len(self._by_allocation) + PURGED_MAPS
        maps: list[LiveMap] = []
        for slot, owner, array in graph.find_slots(function, k, device.owns):
            live = self._map_for(function, slot, owner, array)
            if live is None:
                continue
            reference = graph.SlotRef(slot, owner, device.capture(array))
            live.add(reference, device.root(array))
            graph.watch(owner, self._bring_back)
            if live.storage < 0:  # no plan owns its copy, which is worth nothing now
                self._close_copy(live)
            live.uses.add(self._serial)
            self._expect_use(live, slot)
            if reference.node is not None:
                self._by_node[reference.node] = live
            if live not in maps:
                maps.append(live)
            if table is not None and live.storage < 0:
                storage = table.storage_of.get(slot, -1)
                if storage >= 0:
                    self._assign(live, storage)
        if _would_draw(known):
            for live in maps:  # nobody makes them again
                live.outlives = True
        for node in graph.retained_inputs(function):  # evicted since it has run
            away = graph.retained_array(node) is None
            found = self._by_node.get(node) if away else None
            if found is not None and found not in maps:
                maps.append(found)
        if k < 0:  # it may keep the function that has called it, or what that reads
            maps.extend(live for live in self._busy if live not in maps)
            for live in maps:
                live.outlives = True
        known.maps = maps
        if self.verifier is not None:
            self.verifier.made(maps)

    def _expect_use(self, live: LiveMap, slot: Slot) -> None:
        """What earlier iterations tell about a map."""
        live.outlives = live.outlives or slot in self._outliving
        live.watched |= self._watched is None or slot in self._watched

    def written_slots(self) -> set[Slot]:
        """Of the maps of this iteration that the program has written into."""
        maps = self._by_allocation.values()
        return {s for live in maps if live.is_rewritten() for s in live.present_slots()}

    def _may_replay(self, k: int) -> bool:
        """Whether operation k may be run again in this iteration."""
        if self._may_drop or self._may_switch or self._table is None:
            return True
        return k in self._table.replayed

    def _map_for(
        self, function: Any, slot: Slot, owner: Any, array: Array
    ) -> LiveMap | None:
        """The feature map that an array in the graph is, if it is one."""
        device = self.device
        allocation = device.allocation_id(array)
        if owners.is_parameter(owner):
            self.permanent.add(allocation)  # it may have been made just now
        elif allocation in self.permanent:
            self.pinned.add(allocation)
        if allocation == 0 or allocation in self.permanent:
            return None
        if slot.kind is SlotKind.ATTRIBUTE and fused_replays.stays(
            function, str(slot.key)
        ):
            return None
        live = self._by_allocation.get(allocation)
        if live is None and slot.kind is not SlotKind.ATTRIBUTE:
            live = self._returned(owner, array)
        if live is None:
            nbytes = device.root_bytes(device.root(array))
            if nbytes < self.minimum_map_bytes:
                return None
            live = LiveMap(device, allocation, nbytes)
            live.watched = self._watched is None
            self._by_allocation[allocation] = live
        return live

    def _keep_leaves(self, function: Any) -> None:
        """Running statistics that a function reads: the next forward changes them."""
        for node in function.inputs:
            array = graph.node_array(node) if node.creator_node is None else None
            if array is None or owners.is_parameter(node):
                continue
            if self.device.allocation_id(array) in self.permanent:
                # What is ours does not count.
                self._leaves[node] = contextvars.Context().run(array.copy)

    def _returned(self, owner: Any, array: Array) -> LiveMap | None:
        """The map of a node if the array is that map, back in other memory."""
        live = self._by_node.get(owner)
        if live is not None and live.is_at(self.device.root(array)):
            return live
        return None

    def before_backward(self, k: int, function: Any) -> None:
        """Before backward operation k: acts, then makes sure nothing is missing."""
        self._stuck.clear()
        self._found_held.clear()
        if self.verifier is not None:
            self.verifier.backward_runs(self._by_allocation.values())
        if self._table is not None:
            self._act(k)
        for node in function.inputs if self._parameters else ():
            if node in self._parameters:
                self._recall(self._parameters[node])
        maps = self.maps_of(function)
        self._busy.update(maps)
        for live in maps:
            if live.vacated:
                live.move_back()
            if not live.present:
                self._restore(live)
        if self._stray:
            known = self.functions.get(function)
            self._prefetch(-1 if known is None else known.serial)
            self.open_window()
        if self.verifier is not None:
            self.verifier.reads(k, function, maps)

    def after_backward(self, k: int, function: Any) -> None:
        """After backward operation k: drops what is not needed any more.

        Done here because Chainer's backward loop takes hold of the next
        function's inputs before that function's hook runs.
        """
        known = self.functions.get(function)
        maps = () if known is None else known.maps
        if self.verifier is not None:
            self.verifier.has_read(k, function, maps)
        for live in maps:
            assert known is not None
            live.leave_replaced()
            live.uses.discard(known.serial)
            self._busy.discard(live)
        if self._stray:
            taken = self.device.window_peak_bytes - self._load_before
            self._transient_bytes = max(self._transient_bytes, taken)
        table = self._table
        if table is None:
            return
        self._drop(k + 1)
        if self._crossing and k + 1 == table.update:  # see [crossing]
            self._act(k + 1)
            for live in self._crossing:
                self._recall(live)

    def maps_of(self, function: Any) -> Sequence[LiveMap]:
        """Feature maps that a function's backward reads."""
        known = self.functions.get(function)
        return () if known is None else known.maps

    def rewritten(self, allocation: int) -> bool:
        """Whether the program has changed a map whose memory does not tell it.

        It has let go of that since, or has given the variable another array.
        """
        live = self._by_allocation.get(allocation)
        if live is None:
            return False
        return live.is_rewritten() or any(s.node and s.replaced() for s in live.slots)

    def knows(self, node: Any) -> bool:
        """Whether a node's array is a feature map, wherever its contents are."""
        return node in self._by_node

    # -- plan -----------------------------------------------------------------
    def _act(self, k: int) -> None:
        table = self._table
        assert table is not None
        if table.passive:
            return
        maps = self._by_storage
        for storage in table.swap_outs.get(k, ()):
            live = maps.get(storage)
            if live is not None:
                self._start_swap_out(live)
        for storage in table.releases.get(k, ()):
            if storage in maps:
                self._release(maps[storage])
                self._tell_leaving(maps[storage])
                maps[storage].vacate()
        self._drop(k)
        if self.observer is not None:
            self.observer.released()
        for storage in table.swap_ins.get(k, ()):
            if storage in maps:
                self._start_swap_in(maps[storage])
        for storage in table.needs.get(k, ()):
            if storage in maps:
                self._finish_swap_in(maps[storage])
        replays = table.replays.get(k)
        if replays:
            self._replay_all(replays, table)

    def _drop(self, k: int) -> None:
        table = self._table
        assert table is not None
        for storage in table.drops.get(k, ()):
            live = self._by_storage.get(storage)
            if live is None:
                continue
            if live.outlives:  # see [later iterations]
                self._put_away(live)
            elif self._waits(live):
                assert self.observer is not None
                kind = 'swap-out' if live.state is State.LEAVING else 'swap-in'
                self.observer.wait(kind, live.storage, live.drop)
            else:
                self._let_go(live)

    def _let_go(self, live: LiveMap) -> None:
        if self.verifier is not None:
            self.verifier.leaves(live)
        live.drop()

    def _maker(self, reference: graph.SlotRef) -> Any:
        """The function that makes an array again exactly, if there is one."""
        node = reference.node
        function = reference.function if node is None else node.creator_node
        known = self.functions.get(function)
        recipe = None if known is None else known.recipe
        if known is None or recipe is None or not recipe.exact:
            return None
        if known.pristine is None:  # no plan was followed then
            return None
        # A replay begins with some attributes, as with the mask of a dropout.
        given = reference.slot.kind is SlotKind.ATTRIBUTE
        return None if given and reference.slot.key in recipe.attributes else function

    # Each of these is traced where somebody wants to know.
    def _waits(self, live: LiveMap) -> bool:
        """Whether a wait for a copy is to be traced; nothing keeps the copy."""
        if self.observer is None or live.transfer is None:
            return False
        return not live.transfer.done()

    def _start_swap_out(self, live: LiveMap) -> None:
        if self.verifier is not None:
            self.verifier.leaves(live)
        self._tell_leaving(live)
        nbytes = live.start_swap_out()
        self.counters.swapped_out_bytes += nbytes
        if live.storage >= 0 and live.copy is not None:
            self._copies[live.storage] = live.copy
        if nbytes and self.observer is not None and live.transfer is not None:
            self.observer.copy('swap-out', live.storage, live.transfer.span())

    def watch_leaving(self, look: Callable[[LiveMap], None] | None) -> None:
        """Lets a recording look at every map before it leaves; None ends that."""
        self._leaving = look

    def _tell_leaving(self, live: LiveMap) -> None:
        if self._leaving is not None and live.present:
            self._leaving(live)

    def _start_swap_in(self, live: LiveMap) -> None:
        nbytes = live.start_swap_in()
        self.counters.swapped_in_bytes += nbytes
        if nbytes and self.observer is not None and live.transfer is not None:
            self.observer.copy('swap-in', live.storage, live.transfer.span())

    def _release(self, live: LiveMap) -> None:
        if self._waits(live):
            assert self.observer is not None
            self.observer.wait('swap-out', live.storage, live.release)
        else:
            live.release()

    def _finish_swap_in(self, live: LiveMap) -> None:
        if live.state is State.COMING and self.observer is not None:
            if live.storage >= 0:
                self.observer.use(live.storage)
            if self._waits(live):
                self.observer.wait('swap-in', live.storage, live.finish_swap_in)
                return
        live.finish_swap_in()

    def _replay_all(self, replays: list[Replay], table: ActionTable) -> None:
        products: dict[int, Array] = {}
        try:
            for replay in replays:
                recipe = table.recipes[replay.operation]
                if self.observer is None:
                    self._replay(replay, recipe, products)
                else:
                    self.observer.replay(
                        replay.operation,
                        functools.partial(self._replay, replay, recipe, products),
                    )
        finally:
            self._temporaries.clear()

    def _replay(
        self, replay: Replay, recipe: Recipe, products: dict[int, Array]
    ) -> None:
        known = self._running.get(replay.operation)
        function = None if known is None else known()
        if known is None or function is None:
            return  # that part of the graph is gone: nobody needs it
        if _would_draw(known):
            return  # what it has made comes back when it is read
        outputs, owner = self._run(function)
        for storage, source in zip(recipe.products, recipe.sources, strict=True):
            if source.kind is SlotKind.ATTRIBUTE:
                array = graph.read_attribute(owner, str(source.key))
            else:
                array = outputs[int(source.key)]
            live = self._by_storage.get(storage)
            if storage in replay.keeps and live is not None:
                self._take_in(live, array, function)
                self.counters.recomputed_bytes += live.nbytes
            else:
                products[storage] = array
        for node_reference, array in zip(function.outputs, outputs, strict=True):
            node = node_reference()
            if node is not None and graph.retained_array(node) is None:
                self._temporaries[node] = array
        for storage in replay.frees:
            self._free_product(products.pop(storage, None))

    def _free_product(self, array: Array | None) -> None:
        """Lets go of an array and of every view made of it."""
        if array is None:
            return
        allocation = self.device.allocation_id(array)
        for node, other in list(self._temporaries.items()):
            if self.device.allocation_id(other) == allocation:
                del self._temporaries[node]

    def _run(self, function: Any) -> tuple[Any, Any]:
        known = self.functions.know(function)
        before, recipe = known.pristine, known.recipe
        if recipe is None and known.drew:
            raise SessionError(
                f'{graph.function_name(function)} draws random numbers in this '
                f'iteration, but did not when it was recorded, and another feature map '
                f'was to be recomputed from what it makes. Use a planner that only '
                f'swaps, such as swap-opt.'
            )
        if before is None or recipe is None or not recipe.exact:
            raise _dropped_too_early(graph.function_name(function))
        self.counters.replays += 1
        functions = [None if other is None else other() for other in known.covered]
        for other in (*functions, function):
            self._refuse_updated(other)
        verifier = self.verifier
        again = [*functions, function]
        with verifier.replay(again) if verifier else contextlib.nullcontext():
            if recipe.covers:
                return fused_replays.run(again, self._materialise)
            inputs = tuple(self._materialise(node) for node in function.inputs)
            self._restore_attributes(function, recipe.attributes)
            return graph.replay(
                before, function, recipe.attributes, inputs, self.device
            )

    def _take_in(self, live: LiveMap, array: Array, function: Any) -> None:
        """Puts what a replay has made into a map.

        Raises:
            SessionError: If it is not what forward had made.
        """
        name = graph.function_name(function)
        message = (
            f'Run again, {name} has not made the same {live.nbytes} bytes as in '
            f'forward: an array that it reads has been changed in place since, or it '
            f'depends on something that has changed. Write into a copy, or use a '
            f'planner that only swaps, such as swap-opt.'
        )
        same = live.refill(self.device.root(array), message)
        if not same and self.verifier is None:  # which will tell more
            raise SessionError(message)

    def is_updated(self, function: Any) -> bool:
        """Whether parameters of a function have been updated since its forward."""
        known = self.functions.get(function)
        if known is None or known.updates is None:
            return False
        return known.updates != owners.updates(function.inputs)

    def _refuse_updated(self, function: Any) -> None:
        """See [later iterations]."""
        if self.is_updated(function):
            raise SessionError(
                f'Parameters of {graph.function_name(function)} have been updated '
                f'since its forward, and a backward asks for a feature map that was to '
                f'be recomputed from them; run that backward in every iteration from '
                f'the start of the session, or use a planner that only swaps, such as '
                f'swap-opt.'
            )

    def _fetch(self, owner: Any, names: tuple[str, ...]) -> None:
        """The program reads what is away; it may write into it.

        Args:
            owner: Who has the attributes or, if there are no names, a node.
            names: Attributes.
        """
        maps = [
            live for live in self._by_allocation.values() if live.is_of(owner, names)
        ]
        for live in maps:
            if not live.present:
                self._restore(live)
            live.hand_out()
        function = graph.function_of(owner)
        if self.asked is not None and function is not None:
            self.asked(function, [slot.slot for live in maps for slot in live.slots])

    def _restore_attributes(self, function: Any, attributes: tuple[str, ...]) -> None:
        """Restores what a replay reads from a function, where a plan has not."""
        owner = graph.target(function)
        for live in self.maps_of(function) if attributes else ():
            if not live.present and live.is_of(owner, attributes):
                self._restore(live)

    def _materialise(self, node: Any) -> Array:
        """The array of a node; see [bounded replays]."""
        if node in self._leaves:
            return self._leaves[node]
        array = graph.node_array(node)
        if array is None:
            array = self._temporaries.get(node)
        if array is not None:
            return array
        live = self._by_node.get(node)
        if live is not None and live.state is not State.GONE:
            self._restore(live)
            return graph.retained_array(node)
        function = node.creator_node
        if function is None and live is not None:
            self._refill(live)  # detached: another node has its maker
            return graph.retained_array(node)
        if function is None:
            raise SessionError(
                'An input of a recomputed function is not in memory any more; keep '
                'a reference to it until backward has finished.'
            )
        outputs, _ = self._run(function)
        for reference, output in zip(function.outputs, outputs, strict=True):
            made = reference()
            if made is not None and graph.retained_array(made) is None:
                self._temporaries[made] = output
        return self._temporaries[node]

    # -- passive mode ---------------------------------------------------------
    def _restore(self, live: LiveMap) -> None:
        """Brings a map back now, whatever the plan said."""
        live.stay()
        if live.state is State.AWAY:
            self.counters.restores += 1
            self._start_swap_in(live)
        self._finish_swap_in(live)
        if live.state is State.GONE:
            self.counters.restores += 1
            self._recreate(live)

    def _recreate(self, live: LiveMap) -> None:
        try:
            self._refill(live)
        finally:
            self._temporaries.clear()

    def _refill(self, live: LiveMap) -> None:
        """Makes the contents of a map again by any of its references."""
        live.require_contents()
        for reference in live.slots:
            function = self._maker(reference)
            if function is not None:
                array = self._made_again(reference, function)
                self._take_in(live, array, function)
                return
        raise _dropped_too_early(f'{live.nbytes} bytes')

    def _made_again(self, reference: graph.SlotRef, function: Any) -> Array:
        """What belongs into a slot, made by its function."""
        if reference.node is not None:
            return self._materialise(reference.node)
        outputs, owner = self._run(function)
        return graph.product(reference.slot, function, outputs, owner)

    def _prefetch(self, serial: int) -> None:
        """Brings back what backward needs after a function, as far as memory is free.

        Args:
            serial: Of the function; what came later is not on the way.
        """
        if self._coming_back is None:
            away = [
                live
                for live in self._by_allocation.values()
                if self._is_stray(live) and -1 < _needed_at(live) <= serial
            ]
            away.sort(key=_needed_at)
            self._coming_back = away
        queue, device = self._coming_back, self.device
        free_bytes = device.limit_bytes - device.used_bytes - self._transient_bytes
        while queue:
            live = queue[-1]
            if live.state is State.AWAY and live.alive():
                if live.nbytes > free_bytes:
                    return
                try:
                    with device.without_reclaim():
                        self._start_swap_in(live)
                except MemoryError:  # not in one piece
                    return
                free_bytes -= live.nbytes
            queue.pop()

    def _is_stray(self, live: LiveMap) -> bool:
        """Whether a map is away and no plan brings it back."""
        table = self._table
        scheduled = table is not None and live.storage in table.swapped
        return live.state is State.AWAY and not scheduled

    def reclaim(self, missing_bytes: int) -> None:
        """Frees device memory because an allocation does not fit.

        First releases what is being copied out anyway, then evicts; see
        [passive mode].
        """
        device = self.device
        goal = device.used_bytes - missing_bytes
        self.spare.clear()
        leaving = [
            live
            for live in self._by_allocation.values()
            if live.state is State.LEAVING and live not in self._busy
        ]
        candidates = itertools.chain(leaving, self._candidates())
        failure: SwapStoreError | None = None
        while device.used_bytes > goal:
            live = next(candidates, None)
            if live is None:
                break
            try:
                self._evict(live)
            except SwapStoreError as error:  # another one may get through
                failure = error
                self._stuck.add(live)
        if device.used_bytes > goal:
            self._forget_maps()  # copies on their way to what has died
        if device.used_bytes > goal:
            self.shortage = self._take_stock()
            if failure is not None:
                raise failure
        elif self._table is None:
            self._begin_next(candidates, missing_bytes)

    def _candidates(self) -> Iterator[LiveMap]:
        """What can go; the one that is needed last comes first."""
        for state in (State.RESIDENT, State.COMING):
            maps = [m for m in self._by_allocation.values() if m.state is state]
            for live in sorted(maps, key=lambda live: (live.sticks, _needed_at(live))):
                if live in self._busy or live in self._stuck or live.state is not state:
                    continue
                if live in self._found_held and not live.exclusive():
                    continue
                if live.alive() and not live.held():
                    yield live

    def _begin_next(self, candidates: Iterator[LiveMap], wanted_bytes: int) -> None:
        """Begins to copy out what will have to go next."""
        for live in candidates:
            if wanted_bytes <= 0 or live.state is not State.RESIDENT:
                return
            try:
                self._start_swap_out(live)
            except SwapStoreError:
                return
            wanted_bytes -= live.nbytes

    def _evict(self, live: LiveMap) -> None:
        if live.state is State.COMING:
            self._finish_swap_in(live)
            if self._coming_back is not None:
                self._coming_back.append(live)
        self._put_away(live)
        self._drop_exact(live)
        if live.returned():
            self._found_held.add(live)
        elif live.state is State.RESIDENT:
            self._stuck.add(live)
        elif live.uses or live.present_slots():  # else it is what an iteration left
            self.counters.evictions += 1

    def _put_away(self, live: LiveMap) -> None:
        """Frees the device memory of a map that has to come back."""
        self._start_swap_out(live)
        self._release(live)

    def _drop_exact(self, live: LiveMap) -> None:
        """Drops a map that the host has no room for, if it can be made again."""
        stays = live.state is State.RESIDENT and live.copy is None
        if stays and any(self._maker(slot) is not None for slot in live.slots):
            self._let_go(live)

    def _take_stock(self) -> Shortage:
        resident = [
            live
            for live in self._by_allocation.values()
            if live.state in (State.RESIDENT, State.LEAVING) and live.alive()
        ]
        busy = sum(live.nbytes for live in resident if live in self._busy)
        held = sum(
            live.nbytes
            for live in resident
            if live not in self._busy and (live.held() or live.sticks)
        )
        stuck = sum(live.nbytes for live in resident) - busy - held
        return Shortage(self.device.used_bytes, busy, held, stuck)


def _would_draw(known: LiveFunction) -> bool:
    """Whether a replay would draw other numbers; there is none then."""
    if not known.drew:
        return False
    if known.recipe is not None and known.recipe.attributes:
        return False  # a replay begins with its mask
    known.recipe = None
    return True


def _needed_at(live: LiveMap) -> int:
    """When backward needs a map: the later, the smaller."""
    return max(live.uses, default=-1)


def _dropped_too_early(whose: str) -> SessionError:
    return SessionError(
        f'A feature map of {whose} is asked for once more after its last planned use, '
        f'and cannot be made again: it has been dropped. If backward was broken off, '
        f'run forward again first; if every iteration runs it twice, do so from the '
        f'start of the session.'
    )
