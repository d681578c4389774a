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
    would, also after an iteration has left it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import graph, owners
from chainer_hybridmem.devices.protocol import Array, Device, HostCopy
from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.execution.feature_maps import LiveMap, State
from chainer_hybridmem.execution.persistent import PersistentMap
from chainer_hybridmem.execution.table import ActionTable
from chainer_hybridmem.plan import Replay
from chainer_hybridmem.profile import Recipe, SlotKind
from chainer_hybridmem.recompute import passes

if TYPE_CHECKING:
    from chainer_hybridmem.recording.observer import Observer

MINIMUM_MAP_BYTES = 4096  # smaller ones are noise: they stay


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


class Executor:
    """Executes one plan after the other on the graphs of one session.

    Args:
        device (Device): Where the feature maps are.
        minimum_map_bytes (int): Smaller maps are left alone.
    """

    def __init__(
        self, device: Device, minimum_map_bytes: int = MINIMUM_MAP_BYTES
    ) -> None:
        self.device = device
        self.minimum_map_bytes = minimum_map_bytes
        self.counters = Counters()
        self.observer: Observer | None = None
        self.permanent: set[int] = set()  # allocations that never leave
        self.pinned: set[int] = set()  # of these, what the graph refers to itself
        self.parked: set[int] = set()  # allocations before and after they were away
        self.spare: dict[Any, Any] = {}  # given up first when memory is short
        self._table: ActionTable | None = None
        self._by_allocation: dict[int, LiveMap] = {}
        self._by_function: weakref.WeakKeyDictionary[Any, list[LiveMap]] = (
            weakref.WeakKeyDictionary()
        )
        self._by_storage: dict[int, LiveMap] = {}
        self._crossing: list[PersistentMap] = []
        self._parameters: weakref.WeakKeyDictionary[Any, PersistentMap] = (
            weakref.WeakKeyDictionary()
        )  # by node
        self._by_node: weakref.WeakKeyDictionary[Any, LiveMap] = (
            weakref.WeakKeyDictionary()
        )
        self._copies: dict[int, HostCopy] = {}
        self._functions: dict[int, Any] = {}  # weak references
        self._pristine: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self._recipes: weakref.WeakKeyDictionary[Any, tuple[Recipe, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )  # with weak references to the functions that a pass covers
        self._temporaries: dict[Any, Array] = {}
        self._busy: set[LiveMap] = set()

    # -- iterations -----------------------------------------------------------
    def begin(
        self,
        table: ActionTable | None,
        copies: dict[int, HostCopy],
        holders: Iterable[owners.Owner] = (),
    ) -> None:
        """Starts an iteration.

        Args:
            table: What to do; None for passive mode.
            copies: Host copies by storage id, reused from iteration to
                iteration; new ones are added.
            holders: Who holds the parameters and optimizer states that may leave.
        """
        self.settle()
        self.counters = Counters()
        self._table = table
        self._copies = copies
        self._by_storage = {}
        self._functions = {}
        self.pinned.clear()
        self.parked.clear()
        for owner in holders:
            storage = -1 if table is None else table.crossing.get(owner.label, -1)
            self._expect(owner, storage)

    def _expect(self, owner: owners.Owner, storage: int) -> None:
        array = owner.get()
        if storage < 0 or array is None:
            return
        live = PersistentMap(self.device, owner, array, self._recall)
        live.storage, live.copy = storage, self._copies.get(storage)
        self._by_storage[storage] = live
        self._crossing.append(live)
        if owner.node is not None:
            self._parameters[owner.node] = live

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
        self._table = None

    def forget_dead(self) -> None:
        """Ends an iteration: forgets the maps of graphs that have died."""
        self._table = None
        self._bring_home()
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

    def settle(self) -> None:
        """Like :meth:`forget_dead`; living graphs keep what they need.

        A host copy that a living graph may still ask for is taken out of the
        plan's copies, so that nobody writes over it or gives it back.
        """
        self.forget_dead()
        for live in self._by_allocation.values():
            if live.storage >= 0 and self._copies.get(live.storage) is live.copy:
                self._copies.pop(live.storage, None)
            live.storage = -1
            live.outdated = True

    @staticmethod
    def _close_copy(live: LiveMap) -> None:
        if live.copy is not None:
            live.copy.close()
            live.copy = None

    def close(self) -> None:
        """Brings back whatever a living graph may still ask for."""
        self._table = None
        for live in list(self._by_allocation.values()):
            if live.alive() and live.state in (State.AWAY, State.COMING):
                self._restore(live)

    def abandon(self) -> None:
        """Lets go of every feature map as it is; what crosses iterations comes home."""
        self._table = None
        for live in self._by_allocation.values():
            live.forget()
        self._by_allocation.clear()
        self._by_storage.clear()
        self.spare.clear()
        self._bring_home()

    # -- what the hooks call --------------------------------------------------
    def before_forward(self, k: int, function: Any) -> None:
        """Before forward operation k issues anything."""
        if self._table is not None and not self._table.passive:
            self._pristine[function] = graph.pristine(function)
            recipe = self._table.recipes.get(k)
            if recipe is not None:
                covered = [self._functions.get(c) for c in recipe.covers[:-1]]
                self._recipes[function] = recipe, covered
            self._act(k)
        self.bring_back(function)

    def bring_back(self, function: Any) -> None:
        """A function that is applied once more finds its attributes."""
        for live in self.maps_of(function):
            if live.state not in (State.RESIDENT, State.LEAVING):
                self._restore(live)

    def complete(self, k: int, function: Any) -> None:
        """After forward operation k: finds what it left in the graph.

        Args:
            k: Its number; -1 for a function that a backward function has called, so
                that one can differentiate once more.
            function: The function.
        """
        device, table = self.device, self._table
        if k >= 0:
            self._functions[k] = weakref.ref(function)
        maps: list[LiveMap] = []
        for slot, owner, array in graph.find_slots(function, k, device.owns):
            allocation = device.allocation_id(array)
            if allocation in self.permanent and not owners.is_parameter(owner):
                self.pinned.add(allocation)
            if allocation == 0 or allocation in self.permanent:
                continue
            if slot.kind is SlotKind.ATTRIBUTE and passes.stays(
                function, str(slot.key)
            ):
                continue
            live = self._by_allocation.get(allocation)
            if live is None:
                live = self._returned(owner, array)
            if live is None:
                nbytes = device.root_bytes(device.root(array))
                if nbytes < self.minimum_map_bytes:
                    continue
                live = LiveMap(device, allocation, nbytes)
                self._by_allocation[allocation] = live
            if live.outdated:  # its memory serves another iteration: new contents
                live.renew(device.root(array))
                self._close_copy(live)
            reference = graph.SlotRef(slot, owner, device.capture(array))
            live.add(reference, device.root(array))
            if reference.node is not None:
                self._by_node[reference.node] = live
            if live not in maps:
                maps.append(live)
            if table is not None and live.storage < 0 and live.copy is None:
                storage = table.storage_of.get(slot, -1)
                if storage >= 0:
                    live.storage = storage
                    live.copy = self._copies.get(storage)
                    self._by_storage[storage] = live
        for node in graph.retained_inputs(function):  # evicted since it has run
            live = self._by_node.get(node) if node._data is None else None
            if live is not None and live not in maps:
                maps.append(live)
        if k < 0:  # it may keep the function that has called it, or what that reads
            maps.extend(live for live in self._busy if live not in maps)
            for live in maps:
                live.differentiated = True
        if maps:
            self._by_function[function] = maps

    def _returned(self, owner: Any, array: Array) -> LiveMap | None:
        """The map of a node if the array is that map, back in other memory."""
        live = self._by_node.get(owner)
        if live is not None and live.is_at(self.device.root(array)):
            return live
        return None

    def before_backward(self, k: int, function: Any) -> None:
        """Before backward operation k: acts, then makes sure nothing is missing."""
        if self._table is not None:
            self._act(k)
        for node in function.inputs if self._parameters else ():
            if node in self._parameters:
                self._recall(self._parameters[node])
        maps = self._by_function.get(function)
        if maps:
            self._busy = set(maps)
            for live in maps:
                if live.state not in (State.RESIDENT, State.LEAVING):
                    self._restore(live)

    def after_backward(self, k: int) -> None:
        """After backward operation k: drops what is not needed any more.

        Done here because Chainer's backward loop takes hold of the next
        function's inputs before that function's hook runs.
        """
        self._busy = set()
        table = self._table
        if table is None:
            return
        self._drop(k + 1)
        if self._crossing and k + 1 == table.update:  # see [crossing]
            self._act(k + 1)
            for live in self._crossing:
                self._recall(live)

    def maps_of(self, function: Any) -> list[LiveMap]:
        """Feature maps that a function's backward reads."""
        return self._by_function.get(function) or []

    # -- plan -----------------------------------------------------------------
    def _act(self, k: int) -> None:
        table, counters = self._table, self.counters
        assert table is not None
        if table.passive:
            return
        maps = self._by_storage
        for storage in table.swap_outs.get(k, ()):
            live = maps.get(storage)
            if live is not None:
                counters.swapped_out_bytes += self._start_swap_out(live)
                if live.copy is not None:
                    self._copies[storage] = live.copy
        for storage in table.releases.get(k, ()):
            if storage in maps:
                self._release(maps[storage])
        self._drop(k)
        if self.observer is not None:
            self.observer.released()
        for storage in table.swap_ins.get(k, ()):
            if storage in maps:
                counters.swapped_in_bytes += self._start_swap_in(maps[storage])
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
            if live.differentiated:  # a second backward is no part of the plan
                self._put_away(live)
            elif self._waits(live):
                assert self.observer is not None
                kind = 'swap-out' if live.state is State.LEAVING else 'swap-in'
                self.observer.wait(kind, live.storage, live.drop)
            else:
                live.drop()

    # Each of these is traced where somebody wants to know.
    def _waits(self, live: LiveMap) -> bool:
        """Whether a wait for a copy is to be traced; nothing keeps the copy."""
        if self.observer is None or live.transfer is None:
            return False
        return not live.transfer.done()

    def _start_swap_out(self, live: LiveMap) -> int:
        nbytes = live.start_swap_out()
        if nbytes and self.observer is not None and live.transfer is not None:
            self.observer.copy('swap-out', live.storage, live.transfer.span())
        return nbytes

    def _start_swap_in(self, live: LiveMap) -> int:
        nbytes = live.start_swap_in()
        if nbytes and self.observer is not None and live.transfer is not None:
            self.observer.copy('swap-in', live.storage, live.transfer.span())
        return nbytes

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
        reference = self._functions.get(replay.operation)
        function = reference() if reference is not None else None
        if function is None:
            return  # that part of the graph is gone: nobody needs it
        outputs, owner = self._run(function)
        for storage, source in zip(recipe.products, recipe.sources, strict=True):
            if source.kind is SlotKind.ATTRIBUTE:
                array = graph.read_attribute(owner, str(source.key))
            else:
                array = outputs[int(source.key)]
            live = self._by_storage.get(storage)
            if storage in replay.keeps and live is not None:
                live.refill(self.device.root(array))
                self.counters.recomputed_bytes += live.nbytes
            else:
                products[storage] = array
        for node_reference, array in zip(function.outputs, outputs, strict=True):
            node = node_reference()
            if node is not None and node._data is None:
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
        before = self._pristine.get(function)
        recipe, covered = self._recipes.get(function, (None, []))
        if before is None or recipe is None or not recipe.exact:
            raise SessionError(
                f'A feature map of {graph.function_name(function)} was dropped after '
                f'its last planned use and cannot be recomputed; run the iteration '
                f'that uses it twice from the start of the session.'
            )
        self.counters.replays += 1
        if recipe.covers:
            functions = [reference and reference() for reference in covered]
            return passes.run([*functions, function], self._materialise)
        inputs = tuple(self._materialise(node) for node in function.inputs)
        self._bring_back(function, recipe.attributes)
        return graph.replay(before, function, recipe.attributes, inputs, self.device)

    def _bring_back(self, function: Any, attributes: tuple[str, ...]) -> None:
        """Restores what a replay reads from a function, where a plan has not."""
        for live in self.maps_of(function) if attributes else ():
            if live.state not in (State.RESIDENT, State.LEAVING) and any(
                reference.slot.kind is SlotKind.ATTRIBUTE
                and reference.slot.key in attributes
                for reference in live.slots
            ):
                self._restore(live)

    def _materialise(self, node: Any) -> Array:
        """The array of a node; see [bounded replays]."""
        array = graph.node_array(node)
        if array is None:
            array = self._temporaries.get(node)
        if array is not None:
            return array
        live = self._by_node.get(node)
        if live is not None and live.state in (State.AWAY, State.COMING):
            self._restore(live)
            return node._data
        function = node.creator_node
        if function is None:
            raise SessionError(
                'An input of a recomputed function is not in memory any more; keep '
                'a reference to it until backward has finished.'
            )
        outputs, _ = self._run(function)
        for reference, output in zip(function.outputs, outputs, strict=True):
            made = reference()
            if made is not None and made._data is None:
                self._temporaries[made] = output
        return self._temporaries[node]

    # -- passive mode ---------------------------------------------------------
    def _restore(self, live: LiveMap) -> None:
        """Brings a map back now, whatever the plan said."""
        if live.state is State.AWAY:
            self.counters.restores += 1
            self.counters.swapped_in_bytes += self._start_swap_in(live)
        self._finish_swap_in(live)
        if live.state is State.GONE:
            self.counters.restores += 1
            self._recreate(live)

    def _recreate(self, live: LiveMap) -> None:
        try:
            for reference in live.slots:
                array = self._made_again(reference)
                if array is not None:
                    live.refill(self.device.root(array))
                    return
        finally:
            self._temporaries.clear()
        raise SessionError(
            f'A feature map of {live.nbytes} bytes was dropped after its last '
            f'planned use and is asked for again; run the iteration that uses it '
            f'twice from the start of the session.'
        )

    def _made_again(self, reference: graph.SlotRef) -> Array | None:
        """What belongs into a slot; None if the slot does not tell who makes it."""
        node, function = reference.node, reference.function
        if node is not None:
            return self._materialise(node) if node.creator_node is not None else None
        if function is None or function not in self._recipes:
            return None
        outputs, owner = self._run(function)
        return graph.product(reference.slot, function, outputs, owner)

    def reclaim(self, missing_bytes: int) -> None:
        """Frees device memory because an allocation does not fit.

        First releases what is being copied out anyway, then evicts resident
        maps; the earliest produced is needed last.
        """
        device = self.device
        goal = device.used_bytes - missing_bytes
        self.spare.clear()
        for state in (State.LEAVING, State.RESIDENT):
            for live in list(self._by_allocation.values()):
                if device.used_bytes <= goal:
                    return
                if live.state is state and live not in self._busy and live.alive():
                    self._evict(live)

    def _evict(self, live: LiveMap) -> None:
        self._put_away(live)
        self.counters.evictions += 1

    def _put_away(self, live: LiveMap) -> None:
        """Frees the device memory of a map that has to come back."""
        self.counters.swapped_out_bytes += self._start_swap_out(live)
        self._release(live)
        if live.storage >= 0 and live.copy is not None:
            self._copies[live.storage] = live.copy
