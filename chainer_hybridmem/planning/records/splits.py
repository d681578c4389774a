"""Profiles of which some functions run in parts.

The recording has tried what functions need in parts (:class:`.profile.Split`); a plan
names those that it takes so (:class:`.plan.Part`). Here sizes of temporaries change
and nothing else: events, storages and operations keep their numbers.

Note: [sums in place]
    A sum of two gradients may take the place of one of them. Then that one is freed
    just before the sum is there instead of just after it: two events change places.
"""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.errors import OptionError, PlanError
from chainer_hybridmem.planning.records.plan import Part
from chainer_hybridmem.planning.records.profile import (
    Operation,
    Profile,
    Split,
    Storage,
    measure_load,
)

Splitting = bool | str
EXACT = 'exact'
IN_PLACE = 'in place'  # what is cut of a sum: nothing


def check_splitting(splitting: Splitting) -> Splitting:
    """Refuses what is neither a bool nor ``'exact'``.

    Raises:
        OptionError: With the value.
    """
    if isinstance(splitting, bool) or splitting == EXACT:
        return splitting
    raise OptionError(
        f'splitting is {splitting!r}; True, False or {EXACT!r} is needed.'
    )


def part_of(split: Split) -> Part:
    """How a plan names this way."""
    return Part(
        split.operation,
        split.function,
        split.name,
        split.cut,
        split.parts,
        split.exact,
    )


def in_parts(profile: Profile, parts: tuple[Part, ...]) -> Profile:
    """The profile with some functions in parts.

    One temporary of each function is as large as the function's highest load in parts
    wants, the others are empty. Times stay: they are not measured in parts.

    Args:
        profile: A recorded iteration; some of the parts may be in it already.
        parts: At most one for each function.

    Raises:
        PlanError: If the profile does not know one of them.
    """
    if not parts:
        return profile
    known = {part_of(split): split for split in profile.splits}
    storages, events = list(profile.storages), list(profile.events)
    peaks: dict[int, int] = {}  # of forward functions
    for part in parts:
        split = known.get(part)
        if split is None:
            raise PlanError(
                f'The plan runs {part.name} of operation {part.operation} in '
                f'{part.parts} parts along {part.cut}, of which the profile knows '
                'nothing; record or plan again.'
            )
        if split.cut == IN_PLACE:
            _replace(split, storages, events)
            continue
        for index, nbytes in _sizes(profile, split).items():
            storages[index] = dataclasses.replace(storages[index], nbytes=nbytes)
        if split.operation < profile.first_backward:
            peaks[split.operation] = split.peak_bytes
    # A replay runs in the parts its forward ran in; a pass is no such replay.
    recipes = tuple(
        dataclasses.replace(
            recipe, peak_bytes=min(recipe.peak_bytes, peaks[recipe.operation])
        )
        if recipe.operation in peaks and not recipe.covers
        else recipe
        for recipe in profile.recipes
    )
    cut = {part.operation for part in parts}
    profile = dataclasses.replace(profile, events=tuple(events))
    operations = tuple(
        _with_workspace(profile, storages, op) if op.index in cut else op
        for op in profile.operations
    )
    places = {(part.operation, part.function) for part in parts}
    return dataclasses.replace(
        profile,
        operations=operations,
        storages=tuple(storages),
        recipes=recipes,
        functions_in_parts=tuple(sorted({*profile.functions_in_parts, *places})),
    )


def is_about(profile: Profile, split: Split, moment: int) -> bool:
    """Whether parts lower the load after an event."""
    lives = [profile.storages[s] for s in split.temporaries]
    if split.cut == IN_PLACE:
        return profile.storages[split.first].allocated_at <= moment < lives[0].freed_at
    return any(s.allocated_at <= moment < s.freed_at for s in lives)


def _replace(split: Split, storages: list[Storage], events: list[int]) -> None:
    """See [sums in place]."""
    total, gradient = storages[split.first], storages[split.temporaries[0]]
    born, gone = total.allocated_at, gradient.freed_at
    if gone < born:
        return  # it has been so already
    events[born], events[gone] = events[gone], events[born]
    storages[total.id] = dataclasses.replace(total, allocated_at=gone)
    storages[gradient.id] = dataclasses.replace(gradient, freed_at=born)


def _sizes(profile: Profile, split: Split) -> dict[int, int]:
    """Bytes of each of the function's temporaries, if it runs in parts."""
    begin = profile.storages[split.first].allocated_at
    _, end = profile.span_of(split.operation)
    sizes = dict.fromkeys(split.temporaries, 0)
    alive: dict[int, int] = {}  # what else there is above the function's beginning
    most: dict[int, int] = {}
    load = 0
    for position in range(begin, end):
        storage = abs(profile.events[position]) - 1
        born = profile.events[position] > 0
        if storage not in sizes:
            nbytes = profile.storages[storage].nbytes
            load += nbytes if born else -nbytes
        elif born:
            alive[storage] = load
        else:
            most[storage] = alive.pop(storage)
        for other in alive:
            alive[other] = max(alive[other], load)
    stands_in = max(most, key=lambda storage: most[storage])
    sizes[stands_in] = max(0, split.peak_bytes - most[stands_in])
    return sizes


def _with_workspace(
    profile: Profile, storages: list[Storage], op: Operation
) -> Operation:
    begin, end = profile.span_of(op.index)
    _, workspace_bytes = measure_load(profile.events[begin:end], storages)
    return dataclasses.replace(op, workspace_bytes=workspace_bytes)
