"""Taking a profile apart into the events of each operation, and back together.

What adds or removes storages and events works on lists per operation; the
numbers that depend on positions (event indexes, storage ids, workspaces) are
computed once, by :func:`assemble`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from chainer_hybridmem.planning.records.profile import (
    Operation,
    Profile,
    Recipe,
    Split,
    Storage,
    measure_load,
)

GRAPH_END = 0
"""Stands in a list of events where the graph dies; no event is 0."""


def events_by_operation(profile: Profile) -> list[list[int]]:
    """Events of every operation, with :data:`GRAPH_END` where the graph dies."""
    groups = []
    for index in range(len(profile.operations)):
        last = index + 1 == len(profile.operations)
        first, end = profile.span_of(index)
        events = list(profile.events[first:end])
        offset = profile.graph_end_event - first
        if 0 <= offset < len(events) or (last and offset == len(events)):
            events.insert(offset, GRAPH_END)
        groups.append(events)
    return groups


def passing(events: Sequence[int]) -> set[int]:
    """Storages that one list of events both allocates and frees."""
    return {e - 1 for e in events if e > 0} & {-e - 1 for e in events if e < 0}


def assemble(
    profile: Profile,
    groups: Sequence[Sequence[int]],
    storages: Sequence[Storage | None],
    recipes: Sequence[Recipe],
    initial_bytes: int,
) -> Profile:
    """Puts a profile together again.

    Args:
        profile: Where operations, link and device come from.
        groups: Events of every operation, in terms of ``storages``.
        storages: By the id that ``groups``, the operations and ``recipes`` use;
            None for one that is not there any more.
        recipes: What can be replayed.
        initial_bytes: Load before the first operation.

    Returns:
        Profile: With storages renumbered and event positions filled in.
    """
    remaining = [i for i, storage in enumerate(storages) if storage is not None]
    number = {old: new for new, old in enumerate(remaining)}
    events, first_events, graph_end = _join(groups, number)
    kept = _renumber([s for s in storages if s is not None], events)
    ends = [*first_events[1:], len(events)]
    operations = tuple(
        _operation(op, first, events[first:end], kept, number)
        for op, first, end in zip(profile.operations, first_events, ends, strict=True)
    )
    splits = (_split(split, number) for split in profile.splits)
    return dataclasses.replace(
        profile,
        operations=operations,
        storages=tuple(kept),
        events=tuple(events),
        recipes=tuple(_recipe(recipe, number) for recipe in recipes),
        initial_bytes=initial_bytes,
        graph_end_event=graph_end,
        splits=tuple(split for split in splits if split is not None),
    )


def _join(
    groups: Sequence[Sequence[int]], number: dict[int, int]
) -> tuple[list[int], list[int], int]:
    """All events renumbered, the first one of each group, and where the graph dies."""
    events: list[int] = []
    first_events: list[int] = []
    graph_end = -1
    for group in groups:
        first_events.append(len(events))
        for event in group:
            if event == GRAPH_END:
                graph_end = len(events)
                continue
            new = number[abs(event) - 1] + 1
            events.append(new if event > 0 else -new)
    return events, first_events, len(events) if graph_end < 0 else graph_end


def _renumber(storages: Sequence[Storage], events: Sequence[int]) -> list[Storage]:
    """Storages with their place as id, and the positions of their events."""
    malloc = {e - 1: p for p, e in enumerate(events) if e > 0}
    free = {-e - 1: p for p, e in enumerate(events) if e < 0}
    return [
        dataclasses.replace(
            storage,
            id=new,
            allocated_at=malloc.get(new, -1),
            freed_at=free.get(new, -1),
        )
        for new, storage in enumerate(storages)
    ]


def _split(split: Split, number: dict[int, int]) -> Split | None:
    """The split with new ids; None if a storage of it is gone."""
    if not all(s in number for s in (split.first, *split.temporaries)):
        return None
    return dataclasses.replace(
        split,
        first=number[split.first],
        temporaries=tuple(number[s] for s in split.temporaries),
    )


def _operation(
    op: Operation,
    first: int,
    events: Sequence[int],
    storages: Sequence[Storage],
    number: dict[int, int],
) -> Operation:
    made = {e - 1 for e in events if e > 0} - passing(events)
    return dataclasses.replace(
        op,
        first_event=first,
        reads=tuple(number[s] for s in op.reads if s in number),
        writes=tuple(sorted(made)),
        workspace_bytes=measure_load(events, storages)[1],
    )


def _recipe(recipe: Recipe, number: dict[int, int]) -> Recipe:
    made = [
        (number[storage], source)
        for storage, source in zip(recipe.products, recipe.sources, strict=False)
        if storage in number
    ]
    made.sort(key=lambda pair: pair[0])
    return dataclasses.replace(
        recipe,
        inputs=tuple(sorted(number[s] for s in recipe.inputs if s in number)),
        products=tuple(storage for storage, _ in made),
        sources=tuple(source for _, source in made),
    )
