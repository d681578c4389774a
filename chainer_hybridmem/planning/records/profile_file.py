"""Profiles as versioned JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records.profile import (
    FORMULAS,
    Link,
    MoveCost,
    Profile,
    Split,
)
from chainer_hybridmem.planning.records.splits import IN_PLACE

FORMAT = 'chainer_hybridmem/profile'
VERSION = 1


def serialise_profile(profile: Profile) -> str:
    """The JSON text of a profile."""
    return files.serialise(profile, FORMAT, VERSION)


def parse_profile(text: str) -> Profile:
    """Reads what :func:`serialise_profile` has written.

    Raises:
        FormatError: If the text is no such file, or the profile contradicts itself.
    """
    profile = files.read_record(Profile, text, FORMAT, VERSION)
    check_profile(profile)
    return profile


def check_profile(profile: Profile) -> None:
    """Refuses a profile whose parts contradict each other.

    Raises:
        FormatError: Naming the first contradiction found.
    """
    if not profile.operations:
        raise _broken('it has no operation')
    if not isinstance(profile.device, dict):
        raise _broken(f'its device is {profile.device!r}')
    total = profile.initial_bytes + sum(s.nbytes for s in profile.storages)
    if not 0 <= profile.initial_bytes <= total < 2**62:
        raise _broken(f'its storages have {total} bytes in all')
    _check_operations(profile)
    _check_storages(profile)
    _check_events(profile)
    _check_recipes(profile)
    _check_splits(profile)
    _check_functions_in_parts(profile)
    _check_move_cost(profile.move_cost)
    for link in (profile.link, profile.disk_link):
        if link is not None and (wrong := find_wrong_figure(link)):
            raise _broken(wrong)


def _check_operations(profile: Profile) -> None:
    n_storages = len(profile.storages)
    previous = 0
    for index, op in enumerate(profile.operations):
        if not previous <= op.first_event <= len(profile.events):
            raise _broken(
                f'operation {index} starts at event {op.first_event} of '
                f'{len(profile.events)}',
            )
        previous = op.first_event
        if op.index != index:
            raise _broken(f'operation {index} says it is {op.index}')
        if not (0 <= op.device_seconds < 1e9):
            raise _broken(f'operation {index} takes {op.device_seconds} seconds')
        if not (0 <= op.host_seconds < 1e9):
            raise _broken(f'operation {index} is issued in {op.host_seconds} seconds')
        if not 0 <= op.session_seconds < 1e9:
            raise _broken(
                f'operation {index} costs the session {op.session_seconds} seconds'
            )
        if not 0 <= op.workspace_bytes < files.LARGEST_SIZE:
            raise _broken(f'operation {index} has {op.workspace_bytes} bytes workspace')
        if not 0 <= op.exchanged_bytes < files.LARGEST_SIZE:
            raise _broken(f'operation {index} exchanges {op.exchanged_bytes} bytes')
        if not -1 <= op.forward < index:
            raise _broken(f'operation {index} differentiates operation {op.forward}')
        if not all(0 <= s < n_storages for s in (*op.reads, *op.writes)):
            raise _broken(
                f'operation {index} touches storages {op.reads} and {op.writes} of '
                f'{n_storages}',
            )


def _check_move_cost(cost: MoveCost) -> None:
    for name, seconds in dataclasses.asdict(cost).items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
            raise _broken(f'its {name} is {seconds!r}')


def _check_storages(profile: Profile) -> None:
    n_ops = len(profile.operations)
    after = set(range(min(profile.first_update, n_ops - 1), n_ops))
    for index, storage in enumerate(profile.storages):
        if storage.id != index or not 0 <= storage.nbytes < files.LARGEST_SIZE:
            raise _broken(f'storage {index} is {storage}')
        if list(storage.backward_uses) != sorted(set(storage.backward_uses)):
            raise _broken(f'storage {index} is used at {storage.backward_uses}')
        uses = (storage.producer, *storage.forward_uses, *storage.backward_uses)
        if not all(-1 <= use < n_ops for use in uses):
            raise _broken(f'storage {index} is used by {uses}')
        if not -1 <= storage.releasable_from <= n_ops:
            raise _broken(f'storage {index} is {storage}')
        if not all(0 <= slot.operation < n_ops for slot in storage.slots):
            raise _broken(f'storage {index} has slots {storage.slots}')
        if storage.persistent and not after.issubset(storage.backward_uses):
            raise _broken(
                f'storage {index} ({storage.category.value}) is used by operations '
                f'{storage.backward_uses}; those after backward are {sorted(after)}',
            )
    persistent_bytes = sum(s.nbytes for s in profile.persistent_storages())
    if persistent_bytes > profile.initial_bytes:
        raise _broken(
            f'it starts with {profile.initial_bytes} bytes, its parameters and '
            f'optimizer states alone have {persistent_bytes}',
        )


def _check_events(profile: Profile) -> None:
    """Each storage is allocated once at most, and freed once while it is there."""
    events = profile.events
    if not 0 <= profile.graph_end_event <= len(events):
        raise _broken(
            f'its graph ends at event {profile.graph_end_event} of {len(events)}',
        )
    allocated = [-1] * len(profile.storages)
    freed = [-1] * len(profile.storages)
    for position, event in enumerate(events):
        if type(event) is not int or not 0 < abs(event) <= len(allocated):
            raise _broken(f'event {position} is {event!r}: there is no such storage')
        moments = allocated if event > 0 else freed
        if moments[abs(event) - 1] >= 0:
            raise _broken(f'event {position} ({event}) comes twice')
        moments[abs(event) - 1] = position
    for storage, begin, end in zip(profile.storages, allocated, freed, strict=True):
        if (storage.allocated_at, storage.freed_at) != (begin, end):
            raise _broken(
                f'storage {storage.id} lives from event {storage.allocated_at} to '
                f'{storage.freed_at}, its events are {begin} and {end}',
            )
        if 0 <= end < begin:
            raise _broken(f'storage {storage.id} is freed before it is allocated')


def _check_recipes(profile: Profile) -> None:
    n_ops, n_storages = len(profile.operations), len(profile.storages)
    seen = set()
    for recipe in profile.recipes:
        if recipe.operation in seen:
            raise _broken(f'operation {recipe.operation} has two recipes')
        seen.add(recipe.operation)
        touched = (*recipe.inputs, *recipe.products)
        if not all(0 <= s < n_storages for s in touched):
            raise _broken(f'recipe {recipe} names unknown storages')
        if len(recipe.sources) != len(recipe.products):
            raise _broken(f'recipe {recipe} makes something else')
        possible = 0 <= recipe.seconds < 1e9
        possible = possible and 0 <= recipe.peak_bytes < files.LARGEST_SIZE
        if not (possible and 0 <= recipe.operation < n_ops):
            raise _broken(f'recipe {recipe} is out of range')
        covers = recipe.covers
        if covers and not (
            covers[0] >= 0
            and covers[-1] == recipe.operation
            and all(a < b for a, b in itertools.pairwise(covers))
        ):
            raise _broken(f'recipe {recipe} covers {covers}')
        if not 0 <= recipe.formula < FORMULAS or (recipe.formula and not covers):
            raise _broken(f'recipe {recipe} has formula {recipe.formula}')
        for source in recipe.inputs:
            if profile.storages[source].producer > recipe.operation:
                raise _broken(
                    f'operation {recipe.operation} needs storage {source}, which '
                    f'is produced later: the dependencies have a cycle',
                )


def _check_splits(profile: Profile) -> None:
    """What a function runs with is allocated in its operation, and freed there."""
    n_ops, n_storages = len(profile.operations), len(profile.storages)
    for split in profile.splits:
        made = (split.first, *split.temporaries)
        possible = 0 <= split.operation < n_ops and split.function >= 0
        possible = possible and bool(split.temporaries)
        possible = possible and split.parts > (0 if split.cut == IN_PLACE else 1)
        possible = possible and 0 <= split.peak_bytes < files.LARGEST_SIZE
        if not possible or not all(0 <= s < n_storages for s in made):
            raise _broken(f'{split} is out of range')
        begin, end = profile.span_of(split.operation)
        if split.cut == IN_PLACE:
            _check_sum(profile, split, range(begin, end))
            continue
        for s in made:
            storage = profile.storages[s]
            gone = s not in split.temporaries or begin <= storage.freed_at < end
            if not (begin <= storage.allocated_at < end and gone):
                raise _broken(
                    f'storage {s} lives from event {storage.allocated_at} to '
                    f'{storage.freed_at}, but {split} is about events {begin} to {end}',
                )


def _check_sum(profile: Profile, split: Split, events: range) -> None:
    """See [sums in place] in :mod:`.splits`."""
    total, gradient = (profile.storages[s] for s in (split.first, split.temporaries[0]))
    born, gone = total.allocated_at, gradient.freed_at
    beside = abs(born - gone) == 1 and {born, gone} <= set(events)
    if not beside or gradient.allocated_at > min(born, gone):
        raise _broken(
            f'storage {total.id} is there at event {born} and storage {gradient.id} is '
            f'gone at event {gone}, but {split} is a sum that replaces it'
        )


def _check_functions_in_parts(profile: Profile) -> None:
    for operation, function in profile.functions_in_parts:
        if not 0 <= operation < len(profile.operations) or function < 0:
            raise _broken(f'function {function} of operation {operation} is missing')


def find_wrong_figure(link: Link) -> str:
    """What a link cannot have, in words; empty if it is possible."""
    for name, value in dataclasses.asdict(link).items():
        if name == 'ranks':
            fits = type(value) is int and value >= 1
            rule = 'a whole number, one or more'
        elif name.endswith('_share'):
            fits, rule = 0 < value <= 1, 'above zero and at most one'
        elif name.endswith('_per_second'):
            fits, rule = 0 < value < math.inf, 'above zero and finite'
        else:
            fits, rule = 0 <= value < math.inf, 'zero or more, and finite'
        if not fits:
            return f'its link has {name} {value}; it must be {rule}'
    return ''


def _broken(why: str) -> FormatError:
    return files.broken('profile', why)
