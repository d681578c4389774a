"""Where a function keeps arrays as attributes, present or away.

A key names one array that a function keeps: ``'name'`` for an attribute,
``'name.index'`` for an element of a list or tuple. Such a list or tuple is away while
any of its arrays is.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.training.chainer_access.graph.by_owner import ByOwner
from chainer_hybridmem.training.chainer_access.graph.function_nodes import (
    ARRAY,
    FRAMEWORK,
    may_have_arrays,
    role_of,
    roles,
    target,
)
from chainer_hybridmem.training.devices.protocol import Array

BringBack = weakref.WeakMethod[Callable[[Any, tuple[str, ...]], None]]


@dataclasses.dataclass(slots=True)
class _Elements:
    """A list or tuple that is away, because some of its arrays are.

    Attributes:
        values (list or tuple): With None in place of these arrays.
        missing (set of int): Their indexes.
    """

    values: Any
    missing: set[int]


class _AwayAttributes(dict[str, _Elements | None]):
    """The attributes of a function that are away; None for a single array."""

    bring_back: BringBack | None = None


_away: ByOwner[_AwayAttributes] = ByOwner()


def _away_of(owner: Any) -> dict[str, _Elements | None]:
    away = _away.get(owner)
    return {} if away is None else away


def find_restorer(owner: Any) -> BringBack | None:
    """What restores attributes of a function that are away."""
    away = _away.get(owner)
    return None if away is None else away.bring_back


def away_values(owner: Any) -> dict[str, Any]:
    """Attributes that are away: None, or a list or tuple with None for what is."""
    return {
        name: None if elements is None else elements.values
        for name, elements in _away_of(owner).items()
        if name not in vars(owner)
    }


def is_attribute_away(owner: Any, name: str) -> bool:
    """Whether an attribute is away, or any array in it."""
    return name in _away_of(owner) and name not in vars(owner)


def attribute_arrays(
    function: Any, owns: Callable[[Any], bool]
) -> list[tuple[str, Array]]:
    """Arrays kept as attributes, also inside one list or tuple."""
    found: list[tuple[str, Array]] = []
    kept_by = target(function)
    if not may_have_arrays(kept_by):
        return found
    own = vars(kept_by)
    names = list(itertools.filterfalse(FRAMEWORK.__contains__, own))
    values = list(map(own.__getitem__, names))
    pairs = zip(names, values, strict=True)
    may_have = map(role_of, map(type, values))  # else it is OTHER
    for name, value in itertools.compress(pairs, may_have):
        if roles[type(value)] == ARRAY:
            if owns(value):
                found.append((name, value))
        elif ARRAY in map(role_of, map(type, value)):
            for index, element in enumerate(value):
                if roles[type(element)] == ARRAY and owns(element):
                    found.append((f'{name}.{index}', element))
    return found


def read_attribute(owner: Any, key: str) -> Any:
    """The array behind a key; restores it where it is away, not what lies beside it."""
    array = find_attribute(owner, key)
    if array is None:
        name, _, index = key.partition('.')
        value = getattr(owner, name)
        array = value[int(index)] if index else value
    return array


def find_attribute(owner: Any, key: str) -> Any:
    """The array behind a key; None if it is away."""
    own = vars(owner)
    if '.' not in key:
        return own.get(key)
    name, _, index = key.partition('.')
    values = own.get(name)
    if name not in own:
        elements = _away_of(owner).get(name)
        values = None if elements is None else elements.values
    i = int(index)
    has_it = isinstance(values, (list, tuple)) and i < len(values)
    return values[i] if has_it else None


def put_attribute(owner: Any, key: str, array: Array) -> None:
    """Puts an array behind a key."""
    name, _, index = key.partition('.')
    if index:
        _put_element(owner, name, int(index), array)
    else:
        vars(owner)[name] = array
        _away_of(owner).pop(name, None)


def take_attribute(owner: Any, key: str, bring_back: BringBack | None) -> None:
    """Takes the array behind a key away.

    Args:
        owner: A function.
        key: Of the array.
        bring_back: Restores attributes of an owner by name.
    """
    name, _, index = key.partition('.')
    away = _away.get(owner)
    if away is None:
        away = _away[owner] = _AwayAttributes()
    away.bring_back = bring_back
    if index:
        elements = _put_element(owner, name, int(index), None)
        away[name] = elements
        vars(owner).pop(name, None)
    else:
        vars(owner).pop(name, None)
        away[name] = None


def _put_element(owner: Any, name: str, index: int, array: Array | None) -> _Elements:
    attributes = vars(owner)
    elements = None if name in attributes else _away_of(owner).get(name)
    if elements is None:
        elements = _Elements(attributes[name], set())
    if type(elements.values) is list:
        elements.values[index] = array
    else:
        values = elements.values
        elements.values = (*values[:index], array, *values[index + 1 :])
    if array is None:
        elements.missing.add(index)
    else:
        elements.missing.discard(index)
        if not elements.missing:
            attributes[name] = elements.values
            _away_of(owner).pop(name, None)
    return elements


def is_shared(attributes: dict[str, Any], name: str) -> bool:
    """Whether others refer to the value of an attribute, too."""
    return name in attributes and sys.getrefcount(attributes[name]) > _ALONE


_attributes: dict[str, Any] = {'name': []}
_ALONE = sys.getrefcount(_attributes['name'])
