"""Sorts a recording of one training iteration into a profile."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from chainer_hybridmem.recording.loads import measure_load
from chainer_hybridmem.recording.numbered_events import NumberedEvents
from chainer_hybridmem.recording.recipe_builder import RecipeBuilder
from chainer_hybridmem.recording.steps import Recording
from chainer_hybridmem.records.profile import (
    AFTER_BACKWARD,
    MINIMUM_MAP_BYTES,
    Category,
    Link,
    Operation,
    Phase,
    Profile,
    Slot,
    Split,
    Storage,
)


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

    def _list_changes(self, events: Iterable[int]) -> Iterator[int]:
        """Bytes by which each event changes the load."""
        storages = self._storages
        for event in events:
            nbytes = storages[abs(event) - 1].nbytes
            yield nbytes if event > 0 else -nbytes

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
            return last_use
        if free < 0:
            return -1
        freed = self._find_operation(free)
        uses = self._recording.allocations.uses.get(allocation, ())
        if uses and uses[0] == last_use and freed <= uses[-1] + 1:
            return uses[-1] + 1  # it has died when it was dropped
        return max(last_use, freed + 1)

    # -- operations -------------------------------------------------------------
    def _make_operation(self, k: int) -> Operation:
        step, device = self._steps[k], self._recording.device
        hooks, index = self._recording.hooks, self._numbered.index
        last = k + 1 == len(self._steps)
        end = len(hooks) - 1 if last else self._steps[k + 1].hook
        spans = [(hooks[h], hooks[h + 1]) for h in range(step.hook, end)]
        events = self._numbered.list_events(k)
        writes = {e - 1 for e in events if e > 0} - {-e - 1 for e in events if e < 0}
        peak, left = measure_load(self._list_changes(events))
        return Operation(
            index=k,
            label=step.label,
            phase=step.phase,
            device_seconds=sum(
                device.clock.elapsed(a.left, b.entered) for a, b in spans
            ),
            host_seconds=(
                sum(b.entered_seconds - a.left_seconds for a, b in spans)
                if device.clock.asynchronous
                else 0.0
            ),
            reads=tuple(index[a] for a in step.reads if a in index),
            writes=tuple(sorted(writes)),
            workspace_bytes=peak - max(left, 0),
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
            peak, _ = measure_load(self._list_changes(events))
            for split in span.splits:
                if split.peak_bytes < peak:
                    yield dataclasses.replace(split, first=made[0], temporaries=passing)
