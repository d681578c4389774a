"""Finds what running a function again has changed."""

from __future__ import annotations

import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import chainer
import numpy as np

from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.devices.bits import fingerprint

MOST_DEPTH = 12  # of attributes of attributes
MOST_VALUES = 10_000  # looked at for one function or model
_NOT_FOLLOWED = (
    *(type, types.ModuleType, types.FunctionType),
    *(chainer.Variable, chainer.variable.VariableNode),
)
_AWAY = object()  # the value of an attribute that has left memory
_GENERATORS = (np.random.RandomState, np.random.Generator, np.random.BitGenerator)


def surroundings(roots: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by name: of the global generators, and of all that objects can reach.

    Attributes, lists, dictionaries, arrays and generators are followed; parameters that
    are no roots, variables of modules, files and what compiled code keeps are not.

    Args:
        roots: Objects with their names, such as a model or a function.
    """
    state: Any = np.random.get_state()
    result: dict[str, Any] = {
        "NumPy's random state": (state[1].tobytes(), *state[2:]),
        "Python's random state": random.getstate(),
    }
    seen: set[int] = set()
    for name, root in roots:
        if isinstance(root, chainer.Variable):
            root = owners.held_array(root)
        result.update(_reached(name, root, seen, MOST_DEPTH))
    return result


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the values that differ, of those that are in memory both times."""
    both = *before.items(), *after.items()
    away = {name for name, value in both if value is _AWAY}
    inside = tuple(f'{name}{mark}' for name in away for mark in ('/', ','))
    return [
        name
        for name, value in before.items()
        if after.get(name) != value and name not in away and not name.startswith(inside)
    ]


def _reached(
    name: str, value: Any, seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        yield name, value
        return
    if id(value) in seen or depth < 0 or len(seen) > MOST_VALUES:
        return
    seen.add(id(value))
    if isinstance(value, chainer.get_array_types()):
        yield name, (value.shape, value.dtype, fingerprint(value))
    elif isinstance(value, np.generic):
        yield name, value.tobytes()
    elif isinstance(value, random.Random):
        yield name, value.getstate()
    elif isinstance(value, _GENERATORS):
        yield name, _state(value)
    else:
        yield from _inside(name, value, seen, depth - 1)


def _state(generator: Any) -> str:
    if isinstance(generator, np.random.RandomState):
        name, words, *rest = generator.get_state()
        return repr((name, np.asarray(words).tobytes(), rest))
    return repr(getattr(generator, 'bit_generator', generator).state)


def _inside(
    name: str, value: Any, seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """What a list, a dictionary or an object has."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple, set, frozenset)):
        yield f'{name}, length', len(value)
        parts = enumerate(value)
    elif isinstance(value, dict):
        yield f'{name}, keys', [str(key) for key in value]
        parts = value.items()
    elif isinstance(value, _NOT_FOLLOWED):
        return
    elif isinstance(value, types.MethodType):
        yield from _reached(name, value.__self__, seen, depth)
    elif hasattr(value, '__dict__') and not callable(getattr(value, '__get__', None)):
        private = graph.FRAMEWORK
        parts = [part for part in vars(value).items() if part[0] not in private]
        for key in graph.away_values(value):
            yield f'{name}/{key}', _AWAY
    for key, part in parts:
        inner = name if key == owners.CHILDREN else f'{name}/{key}'
        yield from _reached(inner, part, seen, depth)
