"""Whether a kept signature and its profile belong together and name arrays only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from chainer_hybridmem import files
from chainer_hybridmem.records.profile import Operation, Phase, Profile, Slot, SlotKind
from chainer_hybridmem.session.guides.operation_key import OperationKey

_ATTRIBUTE = re.compile(r'(?!__)[^\W\d]\w*(\.\d{1,6})?')


def check_profile(signature: list[OperationKey], profile: Profile) -> None:
    """The profile is one of these operations, and names nothing but arrays.

    Raises:
        FormatError: With the operation, recipe or slot.
    """
    operations = profile.operations
    if (
        profile.first_update != len(signature)
        or operations[-1].phase is not Phase.UPDATE
    ):
        raise files.broken(
            'guide',
            f'{profile.first_update} operations are recorded for {len(signature)} keys',
        )
    for op, key in zip(operations, signature, strict=False):
        if not _is_recording(op, key):
            raise files.broken('guide', f'operation {op.index} ({op.label}) is {key}')
    for recipe in profile.recipes:
        if len(recipe.sources) != len(recipe.products):
            raise files.broken('guide', f'recipe {recipe} makes something else')
    for slot in _list_slots(profile):
        check_slot(slot, len(signature))


def _is_recording(op: Operation, key: OperationKey) -> bool:
    """Whether an operation of a profile looks like this."""
    if _is_backward(key):
        forward = key[1] if isinstance(key[1], int) else -1
        return op.phase is Phase.BACKWARD and op.forward == forward
    specs = tuple(
        f'{np.dtype(char).name}[{",".join(map(str, shape))}]'
        for shape, char in _inputs(key)
    )
    return op.phase is Phase.FORWARD and op.specs == specs


def _list_slots(profile: Profile) -> Iterator[Slot]:
    """All slots of a profile, and the attributes that its recipes read."""
    for recipe in profile.recipes:
        yield from recipe.sources
        for name in recipe.attributes:
            yield Slot(recipe.operation, SlotKind.ATTRIBUTE, name)
    for storage in profile.storages:
        yield from storage.slots


def check_slot(slot: Slot, n_operations: int) -> None:
    """An array of a function has an index, or a name that is none of Python's own."""
    if slot.kind is SlotKind.ATTRIBUTE:
        fits = isinstance(slot.key, str) and _ATTRIBUTE.fullmatch(slot.key) is not None
    else:
        fits = type(slot.key) is int and slot.key >= 0
    if not (fits and 0 <= slot.operation < n_operations):
        raise files.broken('guide', f'{slot} is no place for an array')


def _is_backward(key: OperationKey) -> bool:
    return len(key) == 2 and isinstance(key[1], int | str)


def read_key(row: Any) -> OperationKey:
    """An operation as a session knows it, from its JSON form."""
    name, *rest = row
    if not isinstance(name, str):
        raise TypeError(f'the name of a function was expected, got {name!r}')
    if _is_backward(tuple(row)) and name == 'backward':
        return name, rest[0]
    given = [part for part in rest if isinstance(part, str)]
    inputs = rest[: len(rest) - len(given)]  # they come first
    for shape, char in inputs:
        sizes = isinstance(shape, list) and all(type(n) is int for n in shape)
        if not (sizes and isinstance(char, str)):
            raise TypeError(f'shape and type were expected, got {shape!r}, {char!r}')
    return name, *((tuple(shape), char) for shape, char in inputs), *given


def _inputs(key: OperationKey) -> list[tuple[Any, str]]:
    """Shape and type of each input of a forward operation."""
    return [part for part in key[1:] if not isinstance(part, str)]
