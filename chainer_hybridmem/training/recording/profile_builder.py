"""Sorts a recording of one training iteration into a profile."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.profile import (
    AFTER_BACKWARD,
    MINIMUM_MAP_BYTES,
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
    measure_load,
)
from chainer_hybridmem.planning.records.splits import IN_PLACE
from chainer_hybridmem.training.recording.steps import (
    IN_GRAPH,
    OF_ATTRIBUTE,
    Recording,
    Step,
)
from chainer_hybridmem.training.recording.trials import TrialResult


class ProfileBuilder:
    """Makes the profile of one iteration.

    Args:
        recording (Recording): What was seen.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._steps = recording.steps
        self._numbered = NumberedEvents(recording)
        self._backward_of: dict[int, list[int]] = {}
        for k, step in enumerate(self._steps):
            self._backward_of.setdefault(step.forward, []).append(k)
        self._after_backward = {
            k for k, step in enumerate(self._steps) if step.phase in AFTER_BACKWARD
        }
        self._storages = self._make_storages()

    def build(self, link: Link, description: dict[str, Any]) -> Profile:
        """The profile.

        Args:
            link: The measured link.
            description: Name, kind and versions of the device.
        """
        recording, numbered = self._recording, self._numbered
        died = recording.graph_end
        recipes = RecipeBuilder(recording, numbered.index, self._storages)
        return Profile(
            operations=tuple(self._make_operation(k) for k in range(len(self._steps))),
            storages=tuple(self._storages),
            events=tuple(numbered.events),
            recipes=recipes.build(),
            initial_bytes=recording.initial_bytes,
            graph_end_event=(
                numbered.find_position(died) if died >= 0 else len(numbered.events)
            ),
            link=link,
            device=description,
            splits=tuple(self._list_splits()),
        )

    def _find_operation(self, position: int) -> int:
        """The operation to which an event belongs; -1 for none."""
        if position < 0:
            return -1
        return bisect.bisect_right(self._numbered.firsts, position) - 1

    # -- storages ---------------------------------------------------------------
    def _make_storages(self) -> list[Storage]:
        numbered, owners = self._numbered, self._recording.model.owners
        malloc, free = [-1] * len(numbered.index), [-1] * len(numbered.index)
        for position, event in enumerate(numbered.events):
            (malloc if event > 0 else free)[abs(event) - 1] = position
        reads = self._list_forward_uses()
        storages = []
        for allocation, i in numbered.index.items():
            storage = self._make_storage(allocation, malloc[i], free[i], reads[i])
            if allocation in owners:
                storage = self._name_owned(allocation, storage)
            storages.append(storage)
        return storages

    def _list_forward_uses(self) -> list[list[int]]:
        """Forward operations that read each storage."""
        index = self._numbered.index
        uses: list[list[int]] = [[] for _ in index]
        for k, step in enumerate(self._steps):
            if step.phase is Phase.FORWARD:
                for allocation in set(step.reads):
                    if allocation in index:
                        uses[index[allocation]].append(k)
        return uses

    def _make_storage(
        self, allocation: int, malloc: int, free: int, reads: list[int]
    ) -> Storage:
        """One storage.

        Args:
            allocation: What it is.
            malloc: Position of its malloc; -1 if it was there before.
            free: Position of its free; -1 if it outlives the iteration.
            reads: Forward operations that read it.
        """
        recording = self._recording
        producer = self._find_operation(malloc)
        slots = tuple(recording.allocations.slots.get(allocation, ()))
        kind = recording.model.kinds.get(allocation)
        if kind is None:
            kind = self._find_category(producer, slots, free)
        return Storage(
            id=self._numbered.index[allocation],
            nbytes=self._numbered.sizes.get(allocation, 0),
            category=kind,
            label=self._find_label(allocation, producer),
            producer=producer,
            allocated_at=malloc,
            freed_at=free,
            forward_uses=tuple(reads),
            backward_uses=tuple(recording.allocations.uses.get(allocation, ())),
            releasable_from=self._find_releasable(allocation, producer, reads, free),
            slots=slots,
        )

    def _name_owned(self, allocation: int, storage: Storage) -> Storage:
        """A parameter or optimizer state by its name, with its uses if it may move."""
        model = self._recording.model
        owner = model.owners[allocation]
        nbytes = storage.nbytes or owner.nbytes
        storage = dataclasses.replace(
            storage, nbytes=nbytes, category=owner.category, label=owner.label
        )
        if storage.producer >= 0 or nbytes < MINIMUM_MAP_BYTES:
            return storage
        uses = {k for op in storage.forward_uses for k in self._backward_of.get(op, ())}
        pinned = allocation in model.pinned
        return dataclasses.replace(
            storage,
            backward_uses=tuple(sorted(uses | self._after_backward)),
            releasable_from=-1 if pinned else max([-1, *storage.forward_uses]) + 1,
        )

    def _find_label(self, allocation: int, producer: int) -> str:
        if producer >= 0:
            return self._steps[producer].label
        return self._recording.model.labels.get(allocation, Category.INPUT.value)

    def _find_category(
        self, producer: int, slots: tuple[Slot, ...], free: int
    ) -> Category:
        if producer < 0:
            return Category.INPUT
        if slots:
            return Category.FEATURE_MAP
        if self._steps[producer].phase is Phase.BACKWARD and (
            free < 0 or self._find_operation(free) > producer
        ):
            return Category.GRADIENT
        return Category.WORKSPACE

    def _find_releasable(
        self, allocation: int, producer: int, reads: list[int], free: int
    ) -> int:
        last_use = max([producer, *reads]) + 1
        if self._recording.draft:
            # The model holds what it made in an iteration whose graph still lives.
            return -1 if allocation in self._recording.model.kinds else last_use
        if free < 0:
            return -1
        freed = self._find_operation(free)
        uses = self._recording.allocations.uses.get(allocation, ())
        if uses and uses[0] == last_use and freed <= uses[-1] + 1:
            return uses[-1] + 1  # it has died when it was dropped
        return max(last_use, freed + 1)

    # -- operations -------------------------------------------------------------
    def _make_operation(self, k: int) -> Operation:
        step, index = self._steps[k], self._numbered.index
        hooks, bounds = self._recording.hooks, self._recording.bounds[k]
        events = self._numbered.list_events(k)
        writes = {e - 1 for e in events if e > 0} - {-e - 1 for e in events if e < 0}
        _, workspace_bytes = measure_load(events, self._storages)
        return Operation(
            index=k,
            label=step.label,
            phase=step.phase,
            device_seconds=hooks.device_seconds(*bounds),
            host_seconds=hooks.host_seconds(*bounds),
            reads=tuple(index[a] for a in step.reads if a in index),
            writes=tuple(sorted(writes)),
            workspace_bytes=workspace_bytes,
            specs=step.specs,
            forward=step.forward,
            first_event=self._numbered.firsts[k],
            exchanged_bytes=step.exchanged_bytes,
        )

    def _list_splits(self) -> Iterator[Split]:
        """Splits that need less memory than the function as a whole."""
        find_position = self._numbered.find_position
        for span in self._recording.spans:
            first, end = find_position(span.first_event), find_position(span.end_event)
            events = self._numbered.events[first:end]
            freed = {-event - 1 for event in events if event < 0}
            made = [event - 1 for event in events if event > 0]
            passing = tuple(storage for storage in made if storage in freed)
            peak, _ = measure_load(events, self._storages)
            for split in span.splits:
                if split.cut == IN_PLACE:
                    yield from self._complete_sum(split, made)
                elif split.peak_bytes < peak:
                    yield dataclasses.replace(split, first=made[0], temporaries=passing)

    def _complete_sum(self, split: Split, made: Sequence[int]) -> Iterator[Split]:
        """With the gradient that is freed right after; see [sums in place]."""
        events, storages = self._numbered.events, self._storages
        total = max((storages[i] for i in made), key=lambda storage: storage.nbytes)
        after = total.allocated_at + 1
        if after == len(events) or after in self._numbered.firsts or events[after] > 0:
            return
        freed = storages[-events[after] - 1]
        if freed.nbytes == total.nbytes:
            temporaries = (freed.id,)
            yield dataclasses.replace(split, first=total.id, temporaries=temporaries)


# -- recipes ------------------------------------------------------------------
class RecipeBuilder:
    """Makes the recipes of a profile.

    Args:
        recording (Recording): One iteration.
        index (dict): Storage id by allocation id.
        storages (sequence of Storage): By id.
    """

    def __init__(
        self, recording: Recording, index: dict[int, int], storages: Sequence[Storage]
    ) -> None:
        self._recording = recording
        self._steps = recording.steps
        self._index = index
        self._storages = storages
        self._exact: set[int] = set()  # operations so far whose recipes are
        self._written = {
            index[allocation]
            for step in self._steps
            for allocation in step.written
            if allocation in index
        }

    def build(self) -> tuple[Recipe, ...]:
        """For each operation the longest fused replay, else the whole forward."""
        recipes = []
        for k, step in enumerate(self._steps):
            chosen = self._choose(step)
            if chosen is not None:
                recipe = self._make(k, *chosen)
                recipes.append(recipe)
                if recipe.exact:
                    self._exact.add(k)
        return tuple(recipes)

    def _choose(self, step: Step) -> tuple[tuple[int, ...], TrialResult] | None:
        """What the recipe covers, nothing for a whole forward, and its trial."""
        for covers, result in step.fused:
            if not any(self._has_map(c) for c in covers[:-1]):
                return covers, result
        return None if step.whole is None else ((), step.whole)

    def _has_map(self, k: int) -> bool:
        """Whether backward reads an output of an operation."""
        return any(
            slot.kind is SlotKind.OUTPUT
            and self._recording.allocations.slots.get(allocation)
            for allocation, slot in self._steps[k].products
        )

    def _make(self, k: int, covers: tuple[int, ...], result: TrialResult) -> Recipe:
        """The recipe of operation k.

        Args:
            k: The operation.
            covers: Operations of a fused replay; empty for the whole forward.
            result: Of its trial.
        """
        covered = [self._steps[c] for c in covers or (k,)]
        made = self._find_made(k, bool(covers), result)
        inputs = self._find_inputs(covered)
        inputs.update(
            storage
            for storage, slot in made.items()
            if slot.kind is SlotKind.ATTRIBUTE and slot.key in result.attributes
        )
        return Recipe(
            operation=k,
            inputs=tuple(sorted(inputs)),
            products=tuple(sorted(made)),
            sources=tuple(made[storage] for storage in sorted(made)),
            attributes=result.attributes,
            seconds=result.seconds(self._recording.hooks.device),
            peak_bytes=result.peak_bytes,
            exact=(
                result.exact
                and self._written.isdisjoint({*inputs, *made})
                and not any(OF_ATTRIBUTE in step.written for step in covered)
                and self._can_reach_inputs(covers, covered)
            ),
            covers=covers,
            formula=result.formula,
        )

    def _find_inputs(self, covered: Sequence[Step]) -> set[int]:
        """Storages that the operations read, but for outputs between them."""
        inside = {
            allocation
            for step in covered[:-1]
            for allocation, slot in step.products
            if slot.kind is SlotKind.OUTPUT
        }
        return {
            self._index[allocation]
            for step in covered
            for allocation, _ in step.input_nodes
            if allocation in self._index and allocation not in inside
        }

    def _find_made(self, k: int, fused: bool, result: TrialResult) -> dict[int, Slot]:
        """Storages that the recipe makes, each with the first slot that shows it."""
        return {
            self._index[allocation]: slot
            for allocation, slot in reversed(self._steps[k].products)
            if allocation in self._index
            and self._storages[self._index[allocation]].producer == k
            and (slot.kind is SlotKind.OUTPUT or not fused or slot.key in result.made)
        }

    def _can_reach_inputs(
        self, covers: tuple[int, ...], covered: Sequence[Step]
    ) -> bool:
        """Whether a replay finds all inputs with the same bits.

        They are in the graph, or earlier exact recipes make them: views, for
        instance, that no function has retained.
        """
        sources = {IN_GRAPH, *covers, *self._exact}
        return all(
            step.input_nodes
            and all(source in sources for _, source in step.input_nodes)
            for step in covered
        )


# -- events of storages with numbers ------------------------------------------
class _Kept(NamedTuple):
    """The events that count, with storages numbered by their first event.

    Attributes:
        events (ndarray): (m,) int64, as in a profile.
        allocations (ndarray): (n,) int64, id of each storage's allocation.
        nbytes (ndarray): (n,) int64, its size.
    """

    events: np.ndarray
    allocations: np.ndarray
    nbytes: np.ndarray


class NumberedEvents:
    """The events of a profile, and its storages by allocation.

    Events of allocations that the session's own hooks have made, or that it parks, are
    left out. Where there are too many small arrays, they are counted together.

    Args:
        recording (Recording): One iteration.

    Attributes:
        events (list of int): ``+(id + 1)`` per malloc, ``-(id + 1)`` per free of a
            storage.
        index (dict): Storage id by allocation id. What stands for many small
            allocations has ids below zero.
        sizes (dict): Bytes by allocation id.
        firsts (list of int): Where the events of each operation begin.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._raw = recording.raw_events
        self._kept = np.zeros(0, np.int64)  # positions of raw events that count
        self._moved = np.zeros(
            1, np.int64
        )  # where the events from each of these on are
        self.events: list[int] = []
        self.index: dict[int, int] = {}
        self.sizes = dict(recording.allocations.sizes)
        self._number(self._leave_out_ours())
        self.firsts = [
            self.find_position(recording.hooks.calls[start].end_event)
            for start, _ in recording.bounds
        ]
        self.firsts[0] = 0

    def find_position(self, raw_position: int) -> int:
        """Where the events from a raw one on are in the profile."""
        return int(self._moved[np.searchsorted(self._kept, raw_position)])

    def list_events(self, k: int) -> list[int]:
        """The events of operation k."""
        last = k + 1 == len(self.firsts)
        end = len(self.events) if last else self.firsts[k + 1]
        return self.events[self.firsts[k] : end]

    # -- which events count -----------------------------------------------------
    def _leave_out_ours(self) -> list[int]:
        """Finds the events that count; returns allocations that are always storages."""
        recording, raw = self._recording, self._raw
        owners, parked = recording.model.owners, recording.model.parked
        allocations, which = np.unique(np.abs(raw[:, 0]), return_inverse=True)
        which = which.reshape(-1)
        ours = np.isin(allocations, list(parked))
        ours[which[self._find_in_hooks() & (raw[:, 0] > 0)]] = True
        end = recording.hooks.calls[-1].first_event
        self._kept = np.flatnonzero(~ours[which[:end]])
        self._moved = np.arange(len(self._kept) + 1)
        hidden = {*parked, *allocations[ours].tolist()}
        named = [a for a in self._list_named() if a in owners or a not in hidden]
        for event, nbytes in raw[np.isin(np.abs(raw[:, 0]), named)].tolist():
            self.sizes[abs(event)] = nbytes
        return named

    def _find_in_hooks(self) -> np.ndarray:
        """Which raw events have happened inside of the session's hooks."""
        hooks = self._recording.hooks.calls
        return _find_inside(
            len(self._raw),
            [hook.first_event for hook in hooks],
            [hook.end_event for hook in hooks],
        )

    def _find_in_spans(self) -> np.ndarray:
        """Which kept events belong to functions that were tried in parts."""
        spans = self._recording.spans
        return _find_inside(
            len(self._kept),
            np.searchsorted(self._kept, [span.first_event for span in spans]),
            np.searchsorted(self._kept, [span.end_event for span in spans]),
        )

    def _list_named(self) -> list[int]:
        """Allocations that are storages even without an event."""
        steps = self._recording.steps
        read = [allocation for step in steps for allocation in step.reads]
        recorded = (*self._recording.allocations.slots, *read)
        return [*(a for a in recorded if a), *self._recording.model.owners]

    def _list_touched(self) -> Iterator[int]:
        """Allocations that recipes may name."""
        for step in self._recording.steps:
            yield from step.written
            yield from (allocation for allocation, _ in step.products)
            yield from (allocation for allocation, _ in step.input_nodes)

    # -- numbers ----------------------------------------------------------------
    def _number(self, named: list[int]) -> None:
        """Numbers storages in the order of their first event, then those without."""
        kept = _order_storages(self._raw[self._kept])
        small = self._find_small(kept, named)
        events, sizes = kept.events, list[int]()
        if small.any():
            events, sizes = self._merge_small(kept, small)
        apart = np.flatnonzero(~small)
        for allocation in (*kept.allocations[apart].tolist(), *named):
            self.index.setdefault(allocation, len(self.index))
        self.sizes.update(
            zip(
                kept.allocations[apart].tolist(),
                kept.nbytes[apart].tolist(),
                strict=True,
            )
        )
        numbers = np.full(len(small) + len(sizes), -1, np.int64)
        numbers[apart] = np.arange(len(apart))
        numbers[len(small) :] = len(self.index) + np.arange(len(sizes))
        for stand_in, size in enumerate(sizes):
            self.index[-1 - stand_in] = len(self.index)
            self.sizes[-1 - stand_in] = size
        number = numbers[np.abs(events) - 1] + 1
        self.events = np.where(events > 0, number, -number).tolist()

    def _find_small(self, kept: _Kept, named: list[int]) -> np.ndarray:
        """Which storages are counted together, (n,) bool."""
        if not self._recording.merges_small:
            return np.zeros(len(kept.nbytes), bool)
        known = [*named, *self._recording.model.kinds, *self._list_touched()]
        small = find_small(kept.nbytes, np.isin(kept.allocations, known))
        small[np.abs(kept.events[self._find_in_spans()]) - 1] = False
        return small

    def _merge_small(
        self, kept: _Kept, small: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Events with few large storages for many small ones, and their sizes."""
        cuts = [hook.end_event for hook in self._recording.hooks.calls]
        cuts += [max(0, self._recording.graph_end)]
        merged = count_together(
            kept.events, kept.nbytes, small, np.searchsorted(self._kept, cuts)
        )
        self._moved = merged.moved
        return np.array(merged.events, np.int64), merged.sizes


def _order_storages(raw: np.ndarray) -> _Kept:
    allocations, first, which = np.unique(
        np.abs(raw[:, 0]), return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    ids = np.empty_like(order)
    ids[order] = np.arange(len(order))
    storage = ids[which.reshape(-1)]
    nbytes = np.zeros(len(order), np.int64)
    nbytes[storage] = raw[:, 1]
    events = np.where(raw[:, 0] > 0, storage + 1, -(storage + 1))
    return _Kept(events, allocations[order], nbytes)


def _find_inside(
    length: int, firsts: np.ndarray | list[int], ends: np.ndarray | list[int]
) -> np.ndarray:
    """Which positions lie inside of any range, (length,) bool."""
    changes = np.zeros(length + 1, np.int64)
    np.add.at(changes, firsts, 1)
    np.add.at(changes, ends, -1)
    return np.cumsum(changes)[:-1] > 0


# -- many small arrays, counted together ----------------------------------------
MOST_APART = 10_000  # storages without a name; up to so many are all kept apart
LARGEST_APART = 1_000  # of more, those that are


class Together(NamedTuple):
    """Events of which some stand for many.

    Attributes:
        events (list of int): ``+(id + 1)`` per malloc, ``-(id + 1)`` per free; ids from
            the number of storages on are new ones, in order.
        sizes (list of int): Bytes of each new storage.
        moved (ndarray): (n + 1,) where the events from each position on are now.
    """

    events: list[int]
    sizes: list[int]
    moved: np.ndarray


def find_small(nbytes: np.ndarray, named: np.ndarray) -> np.ndarray:
    """Which storages are counted together: none, unless there are too many.

    Args:
        nbytes: (n,) int64, of each storage.
        named: (n,) bool, whether a plan, a recipe or an operation names it.

    Returns:
        ndarray: (n,) bool.
    """
    unnamed = np.flatnonzero(~named)
    small = np.zeros(len(nbytes), bool)
    if len(unnamed) > MOST_APART:
        sizes = nbytes[unnamed]
        place = len(sizes) - LARGEST_APART - 1
        small[unnamed] = sizes <= np.partition(sizes, place)[place]
    return small


def count_together(
    events: np.ndarray, nbytes: np.ndarray, small: np.ndarray, cuts: np.ndarray
) -> Together:
    """Replaces the events of small storages by few that have the same load.

    A program that loops over boxes or words with NumPy makes a hundred thousand arrays
    an iteration. No plan decides about them; only their load counts. Between two events
    that matter, their mallocs and frees are a *run*. Two figures of a run are enough:
    how high it reaches above its start, and how much it leaves. So the load of every
    operation stays the same to the byte, under every plan.

    Events matter if a plan or a recipe names their storage, or if it is one of the
    largest. So do the beginning of an operation and the end of the graph.

    Args:
        events: (n,) int64, as in :class:`.profile.Profile`.
        nbytes: Bytes of each storage, int64.
        small: Which storages are counted together, bool.
        cuts: Positions, up to n, at which a run must not go on.
    """
    n = len(events)
    storage = np.abs(events) - 1
    inside = small[storage]
    cut = np.zeros(n + 1, bool)
    cut[cuts] = True
    follows = np.concatenate([[False], inside[:-1]])
    begins = inside & (cut[:n] | ~follows)
    runs = _runs(events[inside], nbytes[storage[inside]], begins[inside])
    made, sizes = _stand_ins(*runs, len(nbytes))
    result: list[int] = []
    kept = np.flatnonzero(~inside | begins)
    counts = np.zeros(n + 1, np.int64)
    numbers = iter(made)
    for position, event in zip(kept.tolist(), events[kept].tolist(), strict=True):
        before = len(result)
        if inside[position]:
            result += next(numbers)
        else:
            result.append(event)
        counts[position + 1] = len(result) - before
    return Together(result, sizes, np.cumsum(counts))


def _runs(
    events: np.ndarray, nbytes: np.ndarray, begins: np.ndarray
) -> tuple[int, list[int], list[int]]:
    """Load before the first run; rise and change of each run."""
    if not len(events):
        return 0, [], []
    born = np.isin(-events, events[events > 0])
    before = int(nbytes[(events < 0) & ~born].sum())
    change = np.where(events > 0, nbytes, -nbytes)
    load = np.cumsum(change)
    first = np.flatnonzero(begins)
    start = load[first] - change[first]
    rise = np.maximum.reduceat(load, first) - start
    left = load[np.append(first[1:], len(load)) - 1] - start
    return before, rise.tolist(), left.tolist()


def _stand_ins(
    before: int, rises: list[int], changes: list[int], first_id: int
) -> tuple[list[list[int]], list[int]]:
    """Events of each run, and the sizes of the storages in them.

    What a run leaves lies on a stack; a later run that frees takes from its top.
    """
    sizes: list[int] = []
    passing: list[list[int]] = []
    born: list[list[int]] = [[] for _ in rises]
    freed: list[list[int]] = [[] for _ in rises]
    stack = [(-1, before)] if before else []

    def new(nbytes: int) -> int:
        sizes.append(nbytes)
        return first_id + len(sizes)

    for run, (rise, change) in enumerate(zip(rises, changes, strict=True)):
        event = new(rise) if rise > max(change, 0) else 0
        passing.append([event, -event] if event else [])
        if change > 0:
            stack.append((run, change))
        while change < 0:
            since, nbytes = stack.pop()
            gone = min(nbytes, -change)
            change += gone
            if gone < nbytes:
                stack.append((since, nbytes - gone))
            event = new(gone)
            freed[run].append(-event)
            if since >= 0:
                born[since].append(event)
    for since, nbytes in stack:
        if since >= 0:
            born[since].append(new(nbytes))
    every = zip(passing, freed, born, strict=True)
    return [p + f + b for p, f, b in every], sizes
