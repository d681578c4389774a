"""Brings feature maps back: copies them or makes them again.

Note: [bounded replays]
    A replay finds its inputs in the graph or among what the same chain has
    made; it recomputes on its own only if a plan has gone wrong. So a
    residual network never costs more than the plan says. Where it reads a view of what
    the plan keeps, the function that makes the view runs again, too: no plan names
    that, so its recipe is found as in [once more].

Note: [iterations that change]
    Recipes stay known with the function they belong to: what a plan has dropped is
    made again as that plan would, also after an iteration has left it. An iteration may
    go on with another plan: functions that have run follow the recipes of that one.

Note: [once more]
    As long as a graph lives, a backward may run over it once more: ``backward()``
    twice, or ``chainer.grad`` before it. What the plan has dropped for good is made
    again then, as long as no parameter has been updated: functions that no replay of
    the plan was to run get their recipes as they are now, for no exact replay depends
    on what forward has left in them. What no replay makes again (a dropout mask) has
    been copied out, if all such copies take a hundredth of the plan's time at most, and
    host memory is not limited.

Note: [later iterations]
    A second backward may come over a graph after an update (the two losses of a GAN).
    What has been dropped cannot be made again then, for parameters are others. Once a
    backward over an older graph has been seen, what it asks for is copied out instead
    of dropped. So is what functions read that a backward function has called, from the
    start. After updates the iteration is planned without recomputation. A function
    whose parameters have been updated since is never run again.

Note: [written meanwhile]
    The program may write into an array after a function has read it, and plain
    Chainer's backward reads what that function has made of it. So the recorded trial
    compares what functions have read once more when a map leaves or backward begins:
    nothing is recomputed from what has changed. In later iterations every map that a
    replay makes again is compared with what was dropped (fingerprints, [checked
    replays]). A function that did not draw random numbers when it was recorded may do
    so later: what it makes then is copied out instead of dropped. A replay runs under
    Chainer's configuration of its forward, and with as many threads of BLAS as the
    iteration has begun with: programs change them for backward, or for what loads data.

Note: [written sources]
    What stays for replays alone is no map: nobody looks whether the program writes into
    it. If a replay makes something else than forward, all that stays is given up, and
    the replay runs once more with what others make again. A device that compares later
    tells an error, as it does of maps.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from chainer_hybridmem import blas
from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.planning.records.plan import Replay
from chainer_hybridmem.planning.records.profile import Recipe, Slot, SlotKind
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.execution.ledger import LiveFunction
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.live_maps import LiveMaps
from chainer_hybridmem.training.execution.mover import Mover, Observers
from chainer_hybridmem.training.execution.table import ActionTable
from chainer_hybridmem.training.recompute import (
    drawing,
    dropout_states,
    fused_replays,
    trust,
)


@dataclasses.dataclass(slots=True)
class _Beginning:
    """What an iteration has begun with.

    Attributes:
        tables (list of ActionTable): The plans that it has followed, the last one
            first.
        updates (int): Of parameters, before it.
        threads (tuple of int): Of matrix products, see :mod:`.blas`.
    """

    tables: list[ActionTable]
    updates: int
    threads: blas.Threads


class Recipes:
    """Keeps what replays need from each function that runs.

    Args:
        device (Device): Where the feature maps are.
        maps (LiveMaps): Knows the functions, and what never leaves.

    Attributes:
        replayed (collection of int): Forward operations of this iteration that may be
            run again.
    """

    def __init__(self, device: Device, maps: LiveMaps) -> None:
        self._device = device
        self._maps = maps
        self._on_gpu = device.kind == 'cuda'
        if self._on_gpu:
            dropout_states.watch()
        self.replayed: Collection[int] = ()
        self._replayed_by_any: Collection[int] = ()  # plan that may be followed
        self._running: dict[int, LiveFunction] = {}  # by number, of this iteration
        self._count_updates: Callable[[], int] = lambda: 0
        self._beginnings: weakref.WeakKeyDictionary[Any, _Beginning] = (
            weakref.WeakKeyDictionary()
        )  # of iterations whose graphs live
        self._leaves: weakref.WeakKeyDictionary[Any, Array] = (
            weakref.WeakKeyDictionary()
        )  # what replays read in place of arrays that change, by node
        self._sources: weakref.WeakKeyDictionary[Any, Array] = (
            weakref.WeakKeyDictionary()
        )  # what the plan keeps for replays, by node
        self._drawn: Hashable = None  # before the forward under way

    # -- iterations -----------------------------------------------------------
    def begin(self, others: Iterable[ActionTable]) -> None:
        """Starts an iteration.

        Args:
            others: Plans with which the iteration may go on.
        """
        table = self._table
        tables = [*others] if table is None else [table, *others]
        replayed = [one.replayed for one in tables]
        alone = len(replayed) == 1  # as most: nothing is copied
        self._replayed_by_any = replayed[0] if alone else set().union(*replayed)
        self._running = {}
        self._follow()
        if table is not None:
            origin, updates = self._maps.ledger.origin, self._count_updates()
            threads = () if self._on_gpu else blas.count_threads()
            self._beginnings[origin] = _Beginning([table], updates, threads)

    def switch(self) -> None:
        """Goes on with another plan; see [iterations that change]."""
        self._follow()
        beginning = self._beginnings.get(self._maps.ledger.origin)
        if beginning is not None and self._table is not None:
            beginning.tables.insert(0, self._table)
        for number, known in self._running.items():
            if number in self.replayed and known() is not None:
                self._look_up(number, known)

    def end(self) -> None:
        """No plan is followed from here on."""
        self._follow()

    @property
    def _table(self) -> ActionTable | None:
        """The plan that is followed."""
        return self._maps.planned.table

    def _follow(self) -> None:
        self._sources.clear()
        self.replayed = () if self._table is None else self._replayed_by_any

    def ask_for_updates(self, count_updates: Callable[[], int]) -> None:
        """Says what counts updates of the model's parameters."""
        self._count_updates = count_updates

    # -- while forward runs ---------------------------------------------------
    def prepare(self, k: int, function: Any) -> None:
        """Before forward operation k: keeps the function as it is, with its recipe."""
        known = self._maps.functions.know(function)
        if trust.is_trusted(function):
            known.keep_pristine(graph.pristine(function))
        self._look_up(k, known)

    def _look_up(self, k: int, known: LiveFunction) -> None:
        table = self._table
        assert table is not None
        recipe = table.recipes.get(k)
        if recipe is not None:
            if known.pristine is None:  # it was trusted when the plan was made
                known.note_drawn()
            covered = [self._running.get(other) for other in recipe.covers[:-1]]
            known.follow(recipe, covered)
            known.forget_drawing_recipe()

    def start_drawing(self) -> None:
        """The forward begins: what is drawn from here on, it draws."""
        self._drawn = drawing.position(self._on_gpu)

    def finish_drawing(self, function: Any) -> None:
        """The forward has computed; see [written meanwhile]."""
        if drawing.position(self._on_gpu) != self._drawn:
            self._maps.functions.know(function).note_drawn()

    def guard_replay(self, function: Any) -> contextlib.AbstractContextManager[Any]:
        """Around a replay: cuDNN's generators and their ratios stay as they are.

        On the host, products run in as many threads as in forward.
        """
        if self._on_gpu:
            return dropout_states.set_back()
        beginning = self._find_beginning(self._maps.functions.know(function))
        return blas.use_threads(() if beginning is None else beginning.threads)

    def note_run(self, k: int, known: LiveFunction) -> None:
        """A function is operation k of this iteration."""
        self._running[k] = known

    def keep_leaves(self, k: int, function: Any) -> None:
        """Copies running statistics that the next forward changes.

        Args:
            k: Number of the operation; nothing is copied if no replay runs it.
            function: The function.
        """
        if k not in self.replayed:
            return
        for node in function.inputs:
            array = graph.node_array(node) if node.creator_node is None else None
            if array is None or owners.is_parameter(node):
                continue
            if self._device.arrays.allocation_id(array) in self._maps.permanent:
                # The device does not count the session's own copies.
                self._leaves[node] = contextvars.Context().run(array.copy)

    def keep_sources(self, k: int, function: Any) -> None:
        """Keeps what forward operation k has made, where the plan says so."""
        table = self._table
        if table is None:
            return
        for output in table.sources.get(k, ()):
            node = function.outputs[output]()
            array = None if node is None else graph.node_array(node)
            if array is not None:
                self._sources[node] = array

    def drop_sources(self, k: int) -> None:
        """Lets go of what the plan keeps for replays up to operation k only."""
        table = self._table
        if table is None:
            return
        for operation, output in table.source_drops.get(k, ()):
            known = self.find_running(operation)
            function = None if known is None else known()
            node = None if function is None else function.outputs[output]()
            if node is not None:  # else it is gone with its node
                self._sources.pop(node, None)

    def give_up_sources(self) -> None:
        """Replays make again what was kept for them."""
        self._sources.clear()

    @property
    def has_sources(self) -> bool:
        """Whether anything is kept for replays."""
        return bool(self._sources)

    def find_source(self, node: Any) -> Array | None:
        """What the plan keeps of a node for replays, if it is there."""
        return self._sources.get(node)

    # -- questions ------------------------------------------------------------
    @property
    def all_dead(self) -> bool:
        """Whether no function of the iteration is in a graph any more."""
        return all(known() is None for known in self._running.values())

    def find_running(self, operation: int) -> LiveFunction | None:
        """The function of this iteration with a number."""
        return self._running.get(operation)

    def find_leaf(self, node: Any) -> Array | None:
        """What replays read in place of a node's array."""
        return self._leaves.get(node)

    def find_maker(self, reference: graph.SlotRef) -> Any:
        """The function that makes an array again exactly, if there is one."""
        node = reference.node
        function = reference.function if node is None else node.creator_node
        recipe = self.recall_recipe(function)
        if recipe is None:
            return None
        # A replay begins with some attributes, as with the mask of a dropout.
        given = reference.slot.kind is SlotKind.ATTRIBUTE
        return None if given and reference.slot.key in recipe.attributes else function

    def find_planned_maker(self, live: LiveMap) -> tuple[Any, Slot] | None:
        """The function that the plan runs again for a map, and what the map is of it.

        No node of a map may lead there: a program can apply a function to the array.
        """
        for planned in () if self._table is None else self._table.recipes.values():
            known = self.find_running(planned.operation)
            if known is not None and live.storage in planned.products:
                function = known()
                recipe = self.recall_recipe(function)
                if recipe is None:
                    continue
                if live.slots.are_in(graph.target(function), recipe.attributes):
                    continue  # its replay begins with the map
                return function, planned.sources[planned.products.index(live.storage)]
        return None

    def recall_recipe(self, function: Any) -> Recipe | None:
        """How a function runs again exactly, if it can."""
        known = self._maps.functions.find(function)
        if known is None or known.recipe is None:
            known = self._recall(function)
        if known is None or known.pristine is None:  # no plan was followed then
            return None
        return known.recipe if known.recipe is not None and known.recipe.exact else None

    def _find_beginning(self, known: LiveFunction) -> _Beginning | None:
        """That of the iteration that has run a function, if it is known."""
        return None if known.origin is None else self._beginnings.get(known.origin)

    def _recall(self, function: Any) -> LiveFunction | None:
        """Finds the recipe of a function that no replay was to run; [once more]."""
        known = self._maps.ledger.find(function)
        if known is None:
            return None
        beginning = self._find_beginning(known)
        tables = () if beginning is None else beginning.tables
        found = (one.recipes.get(known.operation) for one in tables)
        recipe = next(filter(None, found), None)
        if beginning is None or recipe is None or known.drew:
            return known
        if not trust.is_trusted(function):
            return known
        others = recipe.covers[:-1]
        covered = self._find_before(function, known.origin, others)
        if len(covered) < len(others):
            return known
        # Which updates came before it became known is not known.
        if self._count_updates() != beginning.updates and any(
            owners.updates(one.inputs) for one in (function, *covered)
        ):
            return known
        known.note_parameters(function)
        if known.pristine is None:
            known.keep_pristine(graph.pristine_again(function, self._is_made))
        know = self._maps.functions.know
        recipe = self._with_given(function, recipe)
        known.follow(recipe, [know(one) for one in covered])
        return known

    def _with_given(self, function: Any, recipe: Recipe) -> Recipe:
        """A recipe that reads what the program has given to a function that has run."""
        keys = [key for key, _ in graph.attribute_arrays(function, self._is_made)]
        keys += [
            str(reference.slot.key)
            for live in self._maps.find(function)
            for reference in live.slots
            if reference.slot.kind is SlotKind.ATTRIBUTE
            and reference.function is function
        ]
        made = [s.key for s in recipe.sources if s.kind is SlotKind.ATTRIBUTE]
        given = set(keys).difference(made, recipe.attributes)
        attributes = (*recipe.attributes, *sorted(given))
        return dataclasses.replace(recipe, attributes=attributes)

    def _find_before(
        self, function: Any, origin: Any, operations: Sequence[int]
    ) -> list[Any]:
        """Functions of an iteration that a function is made of, by their numbers."""
        found: dict[int, Any] = {}
        waiting = [function] if operations else []
        for one in waiting:  # grows
            for node in one.inputs or ():
                maker = node.creator_node
                known = self._maps.ledger.find(maker)
                if known is None or known.origin is not origin:
                    continue
                if known.operation in operations and known.operation not in found:
                    found[known.operation] = maker
                    waiting.append(maker)
        return [found[k] for k in operations if k in found]

    def _is_made(self, value: Any) -> bool:
        arrays = self._device.arrays
        if not arrays.owns(value):
            return False
        return arrays.allocation_id(value) not in self._maps.permanent

    def find_sources(self, function: Any) -> list[Any]:
        """The nodes that a replay reads; none if the function cannot run again.

        Args:
            function: It runs again.
        """
        recipe = self.recall_recipe(function)
        known = self._maps.functions.find(function)
        if known is None or recipe is None:
            return []
        covered = known.find_covered()
        sources = []
        for other in (*covered, function):
            left = other is None or other.inputs is None
            if left or self._maps.functions.is_updated(other):
                return []
            sources += [
                node
                for node in other.inputs
                if not any(node.creator_node is before for before in covered)
            ]
        return sources


Asked = Callable[[Any, list[Slot]], None]


class Restorer:
    """Restores maps with a plan and without.

    Args:
        device (Device): Where the feature maps are.
        maps (LiveMaps): Finds them.
        mover (Mover): Copies them.
        recipes (Recipes): How to make them again.
        observers (Observers): Are told.
    """

    def __init__(
        self,
        device: Device,
        maps: LiveMaps,
        mover: Mover,
        recipes: Recipes,
        observers: Observers,
    ) -> None:
        self._device = device
        self._observers = observers
        self._maps = maps
        self._mover = mover
        self._recipes = recipes
        self._asked: Asked | None = None
        self._temporaries: dict[Any, Array] = {}  # what a chain has made, by node

    def tell_asked(self, asked: Asked) -> None:
        """Says which slots of a function the program reads while they are away."""
        self._asked = asked

    def bring_back(self, live: LiveMap) -> None:
        """Brings a map back now, whatever the plan says."""
        self._mover.counters.lose(lambda: self._bring_back(live))

    def _bring_back(self, live: LiveMap) -> None:
        live.finish_and_stay()
        if live.state is State.AWAY:
            self._mover.counters.count_restore()
            self._mover.start_swap_in(live)
        self._mover.finish_swap_in(live)
        if live.state is State.GONE:
            self._mover.counters.count_restore()
            try:
                for source in self._find_gone_sources(live):
                    self._make_again(source)
                    self._temporaries.clear()
                self._make_again(live)
            finally:
                self._temporaries.clear()

    def _find_gone_sources(self, live: LiveMap) -> list[LiveMap]:
        """Gone maps that a map is made of, in the order in which they are made.

        One after the other they need least memory: what is made can leave again.
        """
        found: dict[LiveMap, int] = {}
        waiting = [self.find_maker(live)]
        seen = {id(function) for function in waiting}
        for function in waiting:  # grows
            for node in self._recipes.find_sources(function):
                source = self._maps.find_of_node(node)
                if source is None and graph.node_array(node) is None:
                    maker = node.creator_node
                elif source is not None and source.state is State.GONE:
                    maker = self.find_maker(source)
                    known = self._maps.functions.find(maker)
                    found[source] = -1 if known is None else known.serial
                else:
                    continue
                if id(maker) not in seen:
                    seen.add(id(maker))
                    waiting.append(maker)
        return sorted(found, key=lambda source: found[source])

    def bring_back_read_by(self, function: Any) -> None:
        """Brings back what a function keeps, which is applied once more."""
        for live in self._maps.find(function):
            if live.state is not State.RESIDENT:
                self.bring_back(live)

    def answer_read(self, owner: Any, names: tuple[str, ...]) -> None:
        """The program reads what is away; it may write into it.

        Args:
            owner: What has the attributes or, if there are no names, a node.
            names: Attributes.
        """
        maps = [live for live in self._maps if live.slots.belong_to(owner, names)]
        held = []  # so that none leaves again for the next one
        for live in maps:
            if live.state is not State.RESIDENT:
                self.bring_back(live)
            held.append(live.slots.find_array())
            live.hand_out()
        function = graph.function_of(owner)
        if self._asked is not None and function is not None:
            slots = [slot for live in maps for slot in live.slots.name_all()]
            self._asked(function, slots)

    def give_up_sources(self) -> None:
        """Memory is short: replays make again what was kept for them."""
        self._recipes.give_up_sources()

    def find_maker(self, live: LiveMap) -> Any:
        """The function that makes the contents of a map again exactly, or None."""
        for reference in live.slots:
            function = self._recipes.find_maker(reference)
            if function is not None:
                return function
        planned = self._recipes.find_planned_maker(live)
        return None if planned is None else planned[0]

    # -- replays of the plan --------------------------------------------------
    def replay_all(self, replays: list[Replay], recipes: dict[int, Recipe]) -> None:
        """Runs the replays that a plan has before one operation.

        Args:
            replays: In order.
            recipes: By operation.
        """
        products: dict[int, Array] = {}
        try:
            for replay in replays:
                recipe = recipes[replay.operation]
                act = functools.partial(self._replay, replay, recipe, products)
                act = functools.partial(self._run_unless_written, act)
                self._observers.replay(replay.operation, act)
        finally:
            self._temporaries.clear()

    def _run_unless_written(self, act: Callable[[], None]) -> None:
        """Runs again what others have written into; see [written sources]."""
        may_be_written = self._recipes.has_sources
        try:
            act()
            return
        except SessionError:
            if not may_be_written:
                raise
        # Out here nothing holds what the first run has made.
        self._recipes.give_up_sources()
        self._temporaries.clear()
        act()

    def _replay(
        self, replay: Replay, recipe: Recipe, products: dict[int, Array]
    ) -> None:
        known = self._recipes.find_running(replay.operation)
        function = None if known is None else known()
        if known is None or function is None:
            return  # that part of the graph is gone, and not needed
        if known.forget_drawing_recipe():
            return  # what it has made comes back when it is read
        outputs, owner = self._run(function)
        for storage, source in zip(recipe.products, recipe.sources, strict=True):
            array = graph.product(source, function, outputs, owner)
            live = self._maps.planned.find(storage)
            if storage in replay.keeps and live is not None:
                self._take_in(live, array, function)
                self._mover.counters.count_recomputed(live.nbytes)
            else:
                products[storage] = array
        self._keep_outputs(function, outputs)
        for storage in replay.frees:
            self._free_product(products.pop(storage, None))

    def _free_product(self, array: Array | None) -> None:
        """Lets go of an array and of every view made of it."""
        if array is None:
            return
        allocation = self._device.arrays.allocation_id(array)
        for node, other in list(self._temporaries.items()):
            if self._device.arrays.allocation_id(other) == allocation:
                del self._temporaries[node]

    # -- one map --------------------------------------------------------------
    def _make_again(self, live: LiveMap) -> None:
        """Makes the contents of a map again by any of its references."""
        self._run_unless_written(functools.partial(self._make_by_any, live))

    def _make_by_any(self, live: LiveMap) -> None:
        for reference in live.slots:
            function = self._recipes.find_maker(reference)
            if function is not None:
                array = self._make(reference, function)
                break
        else:
            planned = self._recipes.find_planned_maker(live)
            if planned is None:
                raise _dropped_too_early(f'{live.nbytes} bytes')
            function, source = planned
            array = graph.product(source, function, *self._run(function))
        self._take_in(live, array, function)
        self._mover.counters.count_recomputed(live.nbytes)

    def _make(self, reference: graph.SlotRef, function: Any) -> Array:
        """Makes what belongs into a slot by its function."""
        if reference.node is not None:
            return self._find_input(reference.node)
        outputs, owner = self._run(function)
        return graph.product(reference.slot, function, outputs, owner)

    def _take_in(self, live: LiveMap, array: Array, function: Any) -> None:
        """Puts what a replay has made into a map.

        Raises:
            SessionError: If it is not what forward had made.
        """
        name = graph.function_name(function)
        message = (
            f'Run again, {name} has not made the same {live.nbytes} bytes as in '
            f'forward: an array that it reads has been changed in place since, or it '
            f'depends on something that has changed, such as the number of threads of '
            f'BLAS within a forward. Write into a copy, or use a planner that only '
            f'swaps, such as swap-opt.'
        )
        final = live.prints.final
        if live.refill(self._device.arrays.root(array), message):
            return
        if self._recipes.has_sources:
            live.refuse(final)
            raise SessionError(message)
        if not self._observers.judge:  # which will tell more
            raise SessionError(message)

    # -- one function ---------------------------------------------------------
    def _run(self, function: Any) -> tuple[Any, Any]:
        """Runs a forward again; returns its outputs and the object with attributes."""
        recipe = self._recipes.recall_recipe(function)
        known = self._maps.functions.know(function)
        before = known.pristine
        if known.recipe is None and known.drew:
            raise SessionError(
                f'{graph.function_name(function)} draws random numbers in this '
                f"iteration, or runs code that is not Chainer's, but did not when it "
                f'was recorded, and another feature map was to be recomputed from what '
                f'it makes. Use a planner that only swaps, such as swap-opt.'
            )
        if before is None or recipe is None:
            raise _dropped_too_early(graph.function_name(function))
        self._mover.counters.count_replay()
        covered = known.find_covered()
        again = [*covered, function]
        for other in again:
            self._refuse_updated(other)
        return self._observers.run_again(
            again, lambda: self._run_all(again, before, recipe)
        )

    def _run_all(
        self, functions: list[Any], before: graph.Pristine, recipe: Recipe
    ) -> tuple[Any, Any]:
        """Runs what a replay covers; returns as :meth:`_run`."""
        function = functions[-1]
        if recipe.covers:
            return fused_replays.run(functions, self._find_input, recipe.formula)
        inputs = tuple(self._find_input(node) for node in function.inputs)
        self._restore_attributes(function, recipe.attributes)
        with self._recipes.guard_replay(function):
            return graph.replay(
                before, function, recipe.attributes, inputs, self._device
            )

    def _refuse_updated(self, function: Any) -> None:
        """See [later iterations]."""
        if self._maps.functions.is_updated(function):
            raise SessionError(
                f'Parameters of {graph.function_name(function)} have been updated '
                f'since its forward, and a backward asks for a feature map that was to '
                f'be recomputed from them; run that backward in every iteration from '
                f'the start of the session, or use a planner that only swaps, such as '
                f'swap-opt.'
            )

    def _restore_attributes(self, function: Any, attributes: tuple[str, ...]) -> None:
        """Restores what a replay reads from a function, where a plan has not."""
        owner = graph.target(function)
        for live in self._maps.find(function) if attributes else ():
            away = live.state is not State.RESIDENT
            if away and live.slots.are_in(owner, attributes):
                self.bring_back(live)

    def _find_input(self, node: Any) -> Array:
        """The array of a node; see [bounded replays]."""
        array = self._recipes.find_leaf(node)
        if array is None:
            array = graph.node_array(node)
        if array is None:
            array = self._temporaries.get(node)
        if array is None:
            array = self._recipes.find_source(node)
        if array is not None:
            return array
        live = self._maps.find_of_node(node)
        if live is not None and live.state is not State.GONE:
            self.bring_back(live)
            return graph.retained_array(node)
        function = node.creator_node
        if function is None and live is not None:
            self._make_again(live)  # detached: another node has its maker
            return graph.retained_array(node)
        if function is None:
            raise SessionError(
                'An input of a recomputed function is not in memory any more; keep '
                'a reference to it until backward has finished.'
            )
        outputs, _ = self._run(function)
        self._keep_outputs(function, outputs)
        return self._temporaries[node]

    def _keep_outputs(self, function: Any, outputs: Any) -> None:
        """Keeps outputs that the graph does not have for the rest of the chain."""
        for reference, array in zip(function.outputs, outputs, strict=True):
            node = reference()
            if node is not None and graph.retained_array(node) is None:
                self._temporaries[node] = array


def _dropped_too_early(whose: str) -> SessionError:
    return SessionError(
        f'A feature map of {whose} is asked for once more after its last planned use, '
        f'and cannot be made again: it has been dropped. If backward was broken off, '
        f'run forward again first; if every iteration runs it twice, do so from the '
        f'start of the session.'
    )
