"""Hook and memory events of one iteration, turned into a profile.

The session's hooks bracket everything they do with :meth:`Recorder.enter` and
:meth:`Recorder.leave`, so that neither their time nor their allocations count
as the program's. An operation lasts from the hook before it to the hook
before the next one: what Chainer and the user do in between belongs to it.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.chainer_access.owners import Owner, is_parameter
from chainer_hybridmem.devices.protocol import Array, Device, Mark
from chainer_hybridmem.execution.executor import MINIMUM_MAP_BYTES, Executor
from chainer_hybridmem.execution.live_map import LiveMap
from chainer_hybridmem.recompute import passes, trust
from chainer_hybridmem.recording.together import count_together, small_ones
from chainer_hybridmem.recording.verification import (
    Reading,
    Verdict,
    Walker,
    verify,
    verify_pass,
)
from chainer_hybridmem.records.profile import (
    Category,
    Link,
    Operation,
    Phase,
    Profile,
    Recipe,
    Slot,
    SlotKind,
    Split,
    Storage,
)

SMALLEST_COPY_BYTES = 4096  # smaller inputs are parameters or noise
IN_GRAPH = -1  # the source of an input that the graph holds itself


@dataclasses.dataclass
class _Hook:
    """One hook call: marks and positions in the raw event log."""

    entered: Mark
    left: Mark
    entered_seconds: float
    left_seconds: float
    first_event: int
    end_event: int


@dataclasses.dataclass
class _Step:
    """One operation as it was seen."""

    label: str
    phase: Phase
    hook: int  # the hook call before it
    forward: int
    specs: tuple[str, ...]
    reads: tuple[int, ...] = ()  # allocation ids
    products: tuple[tuple[int, Slot], ...] = ()
    input_nodes: tuple[tuple[int, int | None], ...] = ()  # allocation id, source
    verdict: Verdict | None = None  # of running the whole forward again
    passes: list[tuple[tuple[int, ...], Verdict]] = dataclasses.field(
        default_factory=list
    )  # operations covered, best first
    written: set[int] = dataclasses.field(default_factory=set)  # of what it reads


# An operation, what it has read, and what is written if that changes: an allocation,
# or 0 for an attribute.
_Kept = tuple[_Step, Reading, int]


class Recorder:
    """Records one iteration.

    Args:
        device (Device): Counts memory and tells time.
        executor (Executor): Knows the feature maps of the running graph.
        trial (bool): Whether every forward function is replayed once to see
            if that is exact.
        draft (bool): Whether the iteration runs without any plan: then nothing
            is known about what the user holds, and everything counts as
            releasable after its last use.

    Attributes:
        together (bool): Whether small arrays may be counted together, where there are
            too many; see :mod:`.together`.
        untrusted (set of str): Names of functions that may not be run again.
        spans (list): Functions tried in parts: raw events from when they begin to when
            they end, and what was found out, storages missing.
    """

    def __init__(
        self, device: Device, executor: Executor, trial: bool, draft: bool
    ) -> None:
        self.device = device
        self.executor = executor
        self.trial = trial
        self.draft = draft
        self.together = True
        self._hooks: list[_Hook] = []
        self._steps: list[_Step] = []
        self._graph_end = -1
        self._held: tuple[int, Any, tuple[Array, ...]] | None = None
        self._pristine: Any = None
        self._reading: list[Reading] = []
        self._given: list[Reading] = []  # attributes from which the function starts
        self._readings: dict[int, list[_Kept]] = {}  # by allocation id
        self._watched: list[Any] = []  # weak references to where backward begins
        self._reached: weakref.WeakSet[Any] = weakref.WeakSet()  # by what ran backward
        self._functions: dict[int, Any] = {}  # weak references; some die at once
        self._slots: dict[int, list[Slot]] = {}  # by allocation id
        self._uses: dict[int, list[int]] = {}  # backward, by allocation id
        self._before: set[str] = set()
        self._sizes: dict[int, int] = {}  # of what is read
        self._positions: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._chains: list[tuple[Any, list[Any]]] = []
        self._walker: Any = Walker(device) if trial else None
        if trial:
            executor.watch_leaving(self._look_at_leaving)
        self.untrusted: set[str] = set()
        self.spans: list[tuple[int, int, Sequence[Split]]] = []
        device.start_events()
        self.initial_bytes = device.used_bytes

    def leave_plan(self) -> None:
        """The iteration runs without a plan from here on: this is a draft."""
        self.draft = True

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        mark, now = self.device.mark(), time.perf_counter()
        position = self.device.event_count
        self._hooks.append(_Hook(mark, mark, now, now, position, position))

    def leave(self) -> None:
        """The session's hook ends."""
        hook = self._hooks[-1]
        hook.end_event = self.device.event_count
        hook.left, hook.left_seconds = self.device.mark(), time.perf_counter()

    def forward_starts(
        self, label: str, function: Any, specs: tuple[str, ...], inputs: Any
    ) -> None:
        """Before a forward function runs."""
        reads = tuple(self._identify(x) for x in inputs)
        hook = len(self._hooks) - 1
        self._steps.append(_Step(label, Phase.FORWARD, hook, -1, specs, reads))
        if self.trial:
            self._pristine = graph.pristine(function)
            self._reading = [Reading(self.device, x) for x in inputs]
        given = dict(graph.attribute_arrays(function, self.device.owns))
        self._before = set(given)
        if self.trial:
            self._given = [Reading(self.device, array) for array in given.values()]

    def _identify(self, array: Any) -> int:
        device = self.device
        if not device.owns(array):
            return 0
        allocation = device.allocation_id(array)
        if allocation not in self._sizes:
            self._sizes[allocation] = device.root_bytes(device.root(array))
        return allocation

    def forward_ran(self, inputs: tuple[Array, ...]) -> None:
        """After a forward function has run; its inputs are held for a trial."""
        if not self.trial:
            return
        step = self._steps[-1]
        step.written.update(r.allocation for r in self._reading if r.changed())
        self._given = [reading for reading in self._given if not reading.changed()]
        if not step.written:
            self._held = (len(self._steps) - 1, self._pristine, inputs)

    def forward_complete(self, k: int, function: Any) -> None:
        """After the function has left its arrays in the graph."""
        step, device = self._steps[k], self.device
        self._functions[k] = weakref.ref(function)
        self._positions[function] = k
        self._keep_readings(step, function)
        for live in self.executor.maps.find(function):
            slots = self._slots.setdefault(live.allocation, [])
            slots += [slot for slot in live.slots.name_present() if slot not in slots]
        made = {
            name: array
            for name, array in graph.attribute_arrays(function, device.owns)
            if name not in self._before
        }
        step.products = tuple(self._products(k, function, made))
        if self._held is not None and self._held[0] == k:
            _, before, inputs = self._held
            self._held = None
            self._try(step, before, function, inputs, made)

    def _try(
        self,
        step: _Step,
        before: Any,
        function: Any,
        inputs: tuple[Array, ...],
        made: dict[str, Array],
    ) -> None:
        """Finds out how the function's products can be made again."""
        arrays = dict(zip(function.inputs, inputs, strict=True))
        whole = True

        def fetch(node: Any) -> Array:
            for source in (arrays, self.executor.evictor.spare):
                if node in source:
                    return source[node]
            array = graph.node_array(node)
            if array is None:
                raise passes.NoPassError('an input has left')
            return array

        if not trust.may_replay(function):
            self.untrusted.add(graph.function_name(function))
            self._forget_chains()
            return
        for functions in passes.candidates(function):
            if not all(other in self._positions for other in functions):
                continue
            verdict = verify_pass(functions, fetch, self.device, self._walker)
            if verdict is None or not verdict.exact:
                continue
            covers = tuple(sorted(self._positions[other] for other in functions))
            step.passes.append((covers, verdict))
            whole = whole and len(functions) > 1
            self._hold(functions, arrays)
        if whole:
            with trust.effects_refused(function):
                step.verdict = verify(
                    before, function, inputs, made, self.device, self._walker
                )
            for name in step.verdict.attributes if step.verdict else ():
                self._given.append(Reading(self.device, made[name]))
        for reading in self._given:
            self._keep((step, reading, 0))
        self._forget_chains()

    def _hold(self, functions: tuple[Any, ...], arrays: dict[Any, Array]) -> None:
        """Keeps copies of what a longer pass would start with.

        In this iteration every map leaves after its last use; the addition or
        ReLU that follows would find nothing to compare with. The copies are
        given up as soon as memory is short.
        """
        device, spare = self.device, self.executor.evictor.spare
        if device.kind != 'host' or not passes.may_go_on(functions[-1]):
            return
        nodes = passes.outside_inputs(functions)
        for node in nodes:
            array = arrays.get(node)
            if array is None or node in spare or array.nbytes < SMALLEST_COPY_BYTES:
                continue  # copied before, or a parameter that stays
            if device.used_bytes + 3 * array.nbytes > device.limit_bytes:
                return
            try:
                spare[node] = array.copy(order='K')
            except MemoryError:  # the pass that needs it is not tried
                return
        self._chains.append((functions[-1].outputs[0], nodes))

    def _forget_chains(self) -> None:
        """Gives up copies for outputs that nothing can use any more."""
        alive = []
        for reference, nodes in self._chains:
            node = reference()
            if node is not None and graph.node_array(node) is not None:
                alive.append((reference, nodes))
        self._chains = alive
        needed = {node for _, nodes in alive for node in nodes}
        spare = self.executor.evictor.spare
        for node in [node for node in spare if node not in needed]:
            del spare[node]

    def _products(
        self, k: int, function: Any, made: dict[str, Array]
    ) -> list[tuple[int, Slot]]:
        result, identify = [], self.device.allocation_id
        for index, array in enumerate(graph.output_arrays(function)):
            if array is not None and self.device.owns(array):
                result.append((identify(array), Slot(k, SlotKind.OUTPUT, index)))
        for name, array in made.items():
            result.append((identify(array), Slot(k, SlotKind.ATTRIBUTE, name)))
        return [(allocation, slot) for allocation, slot in result if allocation]

    def backward_starts(self, label: str, function: Any, forward: int) -> None:
        """Before a backward function runs."""
        if not any(step.phase is Phase.BACKWARD for step in self._steps):
            self._forward_ends()
        self._watch(function)
        hook = len(self._hooks) - 1
        k = len(self._steps)
        self._steps.append(_Step(label, Phase.BACKWARD, hook, forward, ()))
        reads = [live.allocation for live in self.executor.maps.find(function)]
        self._steps[-1].reads = tuple(reads)
        for allocation in reads:
            self._uses.setdefault(allocation, []).append(k)

    def label_of(self, forward: int, otherwise: str) -> str:
        """Label of a forward operation of this iteration."""
        return self._steps[forward].label if forward >= 0 else otherwise

    def _watch(self, function: Any) -> None:
        """Finds out when the last of the iteration's graphs dies."""
        if function not in self._reached:  # another loss

            def graph_died(_: Any) -> None:
                self._graph_end = self.device.event_count

            self._watched.append(weakref.ref(function, graph_died))
        for node in function.inputs:
            if node.creator_node is not None:
                self._reached.add(node.creator_node)

    def _forward_ends(self) -> None:
        """Which inputs a replay will find."""
        self._chains.clear()  # their nodes would keep the graph
        self.executor.evictor.spare.clear()
        self.executor.watch_leaving(None)
        self._find_written()
        for k, reference in self._functions.items():
            step, function = self._steps[k], reference()
            if function is None or function.inputs is None:
                continue
            step.input_nodes = tuple(
                (allocation, self._source(node))
                for allocation, node in zip(step.reads, function.inputs, strict=False)
            )

    def _keep_readings(self, step: _Step, function: Any) -> None:
        """For :meth:`_find_written`; a replay reads copies of running statistics."""
        readings, self._reading = self._reading, []
        if readings and function.inputs is not None:
            for node, reading in zip(function.inputs, readings, strict=True):
                allocation = reading.allocation
                if is_parameter(node) or allocation not in self.executor.maps.permanent:
                    self._keep((step, reading, allocation))

    def _keep(self, kept: _Kept) -> None:
        self._readings.setdefault(kept[1].allocation, []).append(kept)

    def _look_at_leaving(self, live: LiveMap) -> None:
        """Finds what the program has written into a map while its memory is there.

        What it writes afterwards, :meth:`LiveMaps.is_rewritten` tells.
        """
        readings = list(self._readings.get(live.allocation, ()))
        readings += [
            (self._steps[-1], reading, live.allocation)
            for reading in self._reading  # of a function that is not complete
            if reading.allocation == live.allocation
        ]
        for step, reading, allocation in readings:
            if allocation not in step.written and _may_have_changed(reading):
                step.written.add(allocation)

    def written_slots(self) -> set[Slot]:
        """Of the maps that the program has changed in place."""
        written = {a for step in self._steps for a in step.written}
        return {slot for a in written for slot in self._slots.get(a, ())}

    def _find_written(self) -> None:
        """What the program has changed in place since a function has read it."""
        for kept in self._readings.values():
            for step, reading, allocation in kept:
                if reading.changed() or self.executor.maps.is_rewritten(
                    reading.allocation
                ):
                    step.written.add(allocation)
        self._readings.clear()

    def _source(self, node: Any) -> int | None:
        """Where a replay gets the array of a node from.

        Returns:
            ``IN_GRAPH`` (or the model), the forward operation to replay before, or
            None: nowhere; what only a user's Variable holds may be gone in another
            iteration.
        """
        retained = graph.retained_array(node) is not None
        in_graph = retained or self.executor.maps.knows(node)
        if in_graph or is_parameter(node):
            return IN_GRAPH
        creator = node.creator_node
        return None if creator is None else self._positions.get(creator)

    # -- result ---------------------------------------------------------------
    def discard(self) -> None:
        """Ends the recording; nobody wants it."""
        self._held = self._walker = None
        self._watched.clear()
        self._chains.clear()
        self._readings.clear()
        self.executor.evictor.spare.clear()
        self.executor.watch_leaving(None)
        self.device.take_events()

    def build(
        self,
        link: Link,
        description: dict[str, Any],
        kinds: dict[int, Category],
        owners: dict[int, Owner] | None = None,
    ) -> Profile:
        """The profile; to be called at the start of the next iteration.

        Args:
            link: The measured link.
            description: Name, kind and versions of the device.
            kinds: What the model's own allocations hold.
            owners: Who holds its parameters and optimizer states, by allocation id.
        """
        self._held = self._walker = None
        if any(reference() is not None for reference in self._watched):
            self._graph_end = -1
        self._watched.clear()
        self._chains.clear()
        self.executor.evictor.spare.clear()
        self.executor.watch_leaving(None)
        raw = np.array(self.device.take_events(), np.int64).reshape(-1, 2)
        return _Builder(self, raw, kinds, owners or {}).build(link, description)


def _may_have_changed(reading: Reading) -> bool:
    """Also if there is no memory for finding out."""
    try:
        return reading.changed()
    except MemoryError:
        return True


class _Builder:
    """Sorts a recording into a profile."""

    def __init__(
        self,
        recorder: Recorder,
        raw: np.ndarray,  # (n, 2) int64, events and bytes
        kinds: dict[int, Category],
        owners: dict[int, Owner],
    ) -> None:
        self.kinds = kinds
        self.owners = owners
        self.recorder = recorder
        self.hooks = recorder._hooks
        self.steps = list(recorder._steps)
        self.raw = raw
        self.sizes = dict(recorder._sizes)
        # The last hook is the one that ended the iteration; the one before is
        # the last backward's: the update runs between them.
        update = _Step('update', Phase.UPDATE, len(self.hooks) - 2, -1, ())
        self.steps.append(update)

    def build(self, link: Link, description: dict[str, Any]) -> Profile:
        self._sort_events()
        self._make_storages()
        operations = tuple(self._operation(k) for k in range(len(self.steps)))
        return Profile(
            operations=operations,
            storages=tuple(self.storages),
            events=tuple(self.events),
            recipes=tuple(self._recipes()),
            initial_bytes=self.recorder.initial_bytes,
            graph_end_event=self.graph_end,
            link=link,
            device=description,
            splits=tuple(self._splits()),
        )

    def _splits(self) -> Iterator[Split]:
        """Ways in parts that need less than the function as a whole."""
        for first, end, tried in self.recorder.spans:
            events = self.events[self._position(first) : self._position(end)]
            freed = {-event - 1 for event in events if event < 0}
            made = [event - 1 for event in events if event > 0]
            passing = [s for s in made if s in freed]
            load = peak = 0
            for event in events:
                nbytes = self.storages[abs(event) - 1].nbytes
                load += nbytes if event > 0 else -nbytes
                peak = max(peak, load)
            for split in tried:
                if split.peak_bytes < peak:
                    yield dataclasses.replace(
                        split, first=made[0], temporaries=tuple(passing)
                    )

    def _sort_events(self) -> None:
        """Leaves out what the hooks themselves have allocated, and what they park.

        Where there are too many small arrays, they are counted together.
        """
        allocations, which = np.unique(np.abs(self.raw[:, 0]), return_inverse=True)
        which = which.reshape(-1)
        parked = self.recorder.executor.maps.parked
        managed = np.isin(allocations, list(parked))
        managed[which[self._in_hooks() & (self.raw[:, 0] > 0)]] = True
        end = self.hooks[-1].first_event
        self.kept = np.flatnonzero(~managed[which[:end]])
        self.moved = np.arange(len(self.kept) + 1)
        hidden = {*parked, *allocations[managed].tolist()}
        named = [a for a in self._named() if a in self.owners or a not in hidden]
        for event, nbytes in self.raw[np.isin(np.abs(self.raw[:, 0]), named)].tolist():
            self.sizes[abs(event)] = nbytes
        self._number(named)
        died = self.recorder._graph_end
        self.graph_end = self._position(died) if died >= 0 else len(self.events)
        self.first_event = [
            self._position(self.hooks[step.hook].end_event) for step in self.steps
        ]
        self.first_event[0] = 0

    def _in_hooks(self) -> np.ndarray:
        """Which events have happened inside of the session's hooks."""
        changes = np.zeros(len(self.raw) + 1, np.int64)
        np.add.at(changes, [hook.first_event for hook in self.hooks], 1)
        np.add.at(changes, [hook.end_event for hook in self.hooks], -1)
        return np.cumsum(changes)[:-1] > 0

    def _number(self, named: list[int]) -> None:
        """Storages in the order in which they come, then those without an event."""
        raw = self.raw[self.kept]
        allocations, first, which = np.unique(
            np.abs(raw[:, 0]), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        ids = np.empty_like(order)
        ids[order] = np.arange(len(order))
        storage = ids[which.reshape(-1)]
        allocations = allocations[order]
        nbytes = np.zeros(len(order), np.int64)
        nbytes[storage] = raw[:, 1]
        events = np.where(raw[:, 0] > 0, storage + 1, -(storage + 1))
        known = [*named, *self.kinds, *self._touched()]
        small = np.zeros(len(order), bool)
        if self.recorder.together:
            small = small_ones(nbytes, np.isin(allocations, known))
            small[storage[self._in_spans()]] = False
        sizes: list[int] = []
        if small.any():
            cuts = [hook.end_event for hook in self.hooks]
            cuts += [max(0, self.recorder._graph_end)]
            together = count_together(
                events, nbytes, small, np.searchsorted(self.kept, cuts)
            )
            sizes, self.moved = together.sizes, together.moved
            events = np.array(together.events, np.int64)
        apart = np.flatnonzero(~small)
        # allocation id -> storage id; what stands for many has numbers below zero
        self.index: dict[int, int] = {}
        for allocation in (*allocations[apart].tolist(), *named):
            self.index.setdefault(allocation, len(self.index))
        self.sizes.update(
            zip(allocations[apart].tolist(), nbytes[apart].tolist(), strict=True)
        )
        numbers = np.full(len(order) + len(sizes), -1, np.int64)
        numbers[apart] = np.arange(len(apart))
        numbers[len(order) :] = len(self.index) + np.arange(len(sizes))
        for stand_in, size in enumerate(sizes):
            self.index[-1 - stand_in] = len(self.index)
            self.sizes[-1 - stand_in] = size
        number = numbers[np.abs(events) - 1] + 1
        self.events = np.where(events > 0, number, -number).tolist()

    def _in_spans(self) -> np.ndarray:
        """Which kept events belong to functions that were tried in parts."""
        changes = np.zeros(len(self.kept) + 1, np.int64)
        for first, end, _ in self.recorder.spans:
            changes[np.searchsorted(self.kept, first)] += 1
            changes[np.searchsorted(self.kept, end)] -= 1
        return np.cumsum(changes)[:-1] > 0

    def _position(self, raw_position: int) -> int:
        """Where the events from a raw one on are in the profile."""
        return int(self.moved[np.searchsorted(self.kept, raw_position)])

    def _named(self) -> list[int]:
        """Allocations that are storages even without an event."""
        recorded = (*self.recorder._slots, *self._read_ids())
        return [*(a for a in recorded if a), *self.owners]

    def _touched(self) -> Iterator[int]:
        """Allocations that recipes may name."""
        for step in self.steps:
            yield from step.written
            yield from (allocation for allocation, _ in step.products)
            yield from (allocation for allocation, _ in step.input_nodes)

    def _read_ids(self) -> list[int]:
        return [a for step in self.steps for a in step.reads]

    def _operation_at(self, position: int) -> int:
        return bisect.bisect_right(self.first_event, position) - 1

    def _make_storages(self) -> None:
        n = len(self.index)
        malloc, free = [-1] * n, [-1] * n
        for position, event in enumerate(self.events):
            (malloc if event > 0 else free)[abs(event) - 1] = position
        reads: list[list[int]] = [[] for _ in range(n)]
        for k, step in enumerate(self.steps):
            if step.phase is Phase.FORWARD:
                for allocation in set(step.reads):
                    if allocation in self.index:
                        reads[self.index[allocation]].append(k)
        self.backward_of: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            self.backward_of.setdefault(step.forward, []).append(k)
        self.storages: list[Storage] = []
        for allocation, i in self.index.items():
            producer = self._operation_at(malloc[i]) if malloc[i] >= 0 else -1
            slots = tuple(self.recorder._slots.get(allocation, ()))
            uses = tuple(self.recorder._uses.get(allocation, ()))
            self.storages.append(
                Storage(
                    id=i,
                    nbytes=self.sizes.get(allocation, 0),
                    category=self.kinds.get(
                        allocation, self._category(producer, slots, free[i])
                    ),
                    label=self.steps[producer].label if producer >= 0 else 'input',
                    producer=producer,
                    allocated_at=malloc[i],
                    freed_at=free[i],
                    forward_uses=tuple(reads[i]),
                    backward_uses=uses,
                    releasable_from=self._releasable(producer, reads[i], free[i]),
                    slots=slots,
                )
            )
            if allocation in self.owners:
                self.storages[i] = self._owned(allocation, self.storages[i])

    def _owned(self, allocation: int, storage: Storage) -> Storage:
        """A parameter or optimizer state by its name, with its uses if it may move."""
        owner = self.owners[allocation]
        nbytes = storage.nbytes or owner.nbytes
        storage = dataclasses.replace(
            storage, nbytes=nbytes, category=owner.category, label=owner.label
        )
        if storage.producer >= 0 or nbytes < MINIMUM_MAP_BYTES:
            return storage
        uses = {k for op in storage.forward_uses for k in self.backward_of.get(op, ())}
        pinned = allocation in self.recorder.executor.maps.pinned
        return dataclasses.replace(
            storage,
            backward_uses=tuple(sorted({*uses, len(self.steps) - 1})),
            releasable_from=-1 if pinned else max([-1, *storage.forward_uses]) + 1,
        )

    def _category(self, producer: int, slots: tuple[Slot, ...], free: int) -> Category:
        if producer < 0:
            return Category.INPUT
        if slots:
            return Category.FEATURE_MAP
        if self.steps[producer].phase is Phase.BACKWARD and (
            free < 0 or self._operation_at(free) > producer
        ):
            return Category.GRADIENT
        return Category.WORKSPACE

    def _releasable(self, producer: int, reads: list[int], free: int) -> int:
        last_use = max([producer, *reads]) + 1
        if self.recorder.draft:
            return last_use
        if free < 0:
            return -1
        return max(last_use, self._operation_at(free) + 1)

    def _operation(self, k: int) -> Operation:
        step = self.steps[k]
        end = self.steps[k + 1].hook if k + 1 < len(self.steps) else len(self.hooks) - 1
        device = self.recorder.device
        spans = [(self.hooks[h], self.hooks[h + 1]) for h in range(step.hook, end)]
        last = self.first_event[k + 1] if k + 1 < len(self.steps) else len(self.events)
        events = self.events[self.first_event[k] : last]
        writes = {e - 1 for e in events if e > 0} - {-e - 1 for e in events if e < 0}
        return Operation(
            index=k,
            label=step.label,
            phase=step.phase,
            device_seconds=sum(device.elapsed(a.left, b.entered) for a, b in spans),
            host_seconds=(
                sum(b.entered_seconds - a.left_seconds for a, b in spans)
                if device.asynchronous
                else 0.0
            ),
            reads=tuple(self.index[a] for a in step.reads if a in self.index),
            writes=tuple(sorted(writes)),
            workspace_bytes=self._workspace(events),
            specs=step.specs,
            forward=step.forward,
            first_event=self.first_event[k],
        )

    def _workspace(self, events: list[int]) -> int:
        load = peak = 0
        for event in events:
            nbytes = self.storages[abs(event) - 1].nbytes
            load += nbytes if event > 0 else -nbytes
            peak = max(peak, load)
        return peak - max(load, 0)

    def _recipes(self) -> list[Recipe]:
        self.written = {
            self.index[allocation]
            for step in self.steps
            for allocation in step.written
            if allocation in self.index
        }
        recipes: dict[int, Recipe] = {}
        for k, step in enumerate(self.steps):
            for covers, verdict in step.passes:
                if not any(self._is_map(c) for c in covers[:-1]):
                    recipes[k] = self._recipe(k, covers, verdict, recipes)
                    break
            else:
                if step.verdict is not None:
                    recipes[k] = self._recipe(k, (), step.verdict, recipes)
        return list(recipes.values())

    def _is_map(self, k: int) -> bool:
        """Whether backward reads an output of an operation."""
        return any(
            slot.kind is SlotKind.OUTPUT and self.recorder._slots.get(allocation)
            for allocation, slot in self.steps[k].products
        )

    def _recipe(
        self,
        k: int,
        covers: tuple[int, ...],
        verdict: Verdict,
        before: dict[int, Recipe],
    ) -> Recipe:
        """The recipe of operation k, by a pass or by its whole forward.

        Exact only if its inputs are: they are in the graph, or are made again by
        operations ``before``, as views are that no function has retained.
        """
        exact = {
            IN_GRAPH,
            *covers,
            *(o for o, recipe in before.items() if recipe.exact),
        }
        covered = [self.steps[c] for c in covers or (k,)]
        inside = {
            allocation
            for step in covered[:-1]
            for allocation, slot in step.products
            if slot.kind is SlotKind.OUTPUT
        }
        inputs = {
            self.index[allocation]
            for step in covered
            for allocation, _ in step.input_nodes
            if allocation in self.index and allocation not in inside
        }
        made = {
            self.index[allocation]: slot
            for allocation, slot in reversed(self.steps[k].products)
            if allocation in self.index
            and self.storages[self.index[allocation]].producer == k
            and (slot.kind is SlotKind.OUTPUT or not covers or slot.key in verdict.made)
        }
        inputs.update(
            storage
            for storage, slot in made.items()
            if slot.kind is SlotKind.ATTRIBUTE and slot.key in verdict.attributes
        )
        unwritten = self.written.isdisjoint({*inputs, *made})
        unwritten = unwritten and not any(0 in step.written for step in covered)
        reachable = all(
            step.input_nodes and all(source in exact for _, source in step.input_nodes)
            for step in covered
        )
        return Recipe(
            operation=k,
            inputs=tuple(sorted(inputs)),
            products=tuple(sorted(made)),
            sources=tuple(made[storage] for storage in sorted(made)),
            attributes=verdict.attributes,
            seconds=verdict.seconds(self.recorder.device),
            peak_bytes=verdict.peak_bytes,
            exact=verdict.exact and unwritten and reachable,
            covers=covers,
        )
