"""Where arrays lie in the graph, present or away: attributes and variable nodes.

A key names one array that a function keeps: ``'name'`` for an attribute,
``'name.index'`` for an element of a list or tuple. Such a list or tuple is away while
any of its arrays is.

Note: [other arrays]
    The program may give a variable another array (``h.array = …``). Chainer puts that
    array into the node that retains it, and it is no part of a slot any more. While
    the former one is away, Chainer would take the node for one that retains nothing.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.training.chainer_access.graph.by_owner import ByOwner
from chainer_hybridmem.training.chainer_access.graph.function_nodes import (
    FRAMEWORK,
    array_types,
    target,
)
from chainer_hybridmem.training.devices.protocol import Array

# Most attributes have these types; no array has, which is cheaper to see than to ask.
_PLAIN = frozenset({bool, int, float, str, type(None)})


@dataclasses.dataclass(slots=True)
class _Elements:
    """A list or tuple that is away, because some of its arrays are.

    Attributes:
        values (list or tuple): With None in place of these arrays.
        missing (set of int): Their indexes.
    """

    values: Any
    missing: set[int]


# The away attributes of each function; None for a single array.
_away: ByOwner[dict[str, _Elements | None]] = ByOwner()


def list_away(owner: Any) -> list[str]:
    """Names of attributes that are away."""
    names = _away.get(owner) or ()
    return [name for name in names if name not in vars(owner)]


def is_attribute_away(owner: Any, name: str) -> bool:
    """Whether an attribute is away, or any array in it."""
    away = _away.get(owner)
    return away is not None and name in away and name not in vars(owner)


def attribute_arrays(
    function: Any, owns: Callable[[Any], bool]
) -> list[tuple[str, Array]]:
    """Arrays kept as attributes, also inside one list or tuple."""
    kinds, found = array_types(), []
    for name, value in vars(target(function)).items():
        if type(value) in _PLAIN or name in FRAMEWORK:
            continue
        if isinstance(value, kinds):
            if owns(value):
                found.append((name, value))
        elif type(value) in (list, tuple):
            for index, element in enumerate(value):
                if isinstance(element, kinds) and owns(element):
                    found.append((f'{name}.{index}', element))
    return found


def read_attribute(owner: Any, key: str) -> Any:
    """The array behind a key; restores it where it is away."""
    name, _, index = key.partition('.')
    value = getattr(owner, name)
    return value[int(index)] if index else value


def find_attribute(owner: Any, key: str) -> Any:
    """The array behind a key; None if it is away."""
    if '.' not in key:
        return vars(owner).get(key)
    name, _, index = key.partition('.')
    value = vars(owner).get(name)
    elements = None if name in vars(owner) else (_away.get(owner) or {}).get(name)
    if elements is not None:
        value = elements.values
    values = value if isinstance(value, (list, tuple)) else ()
    return values[int(index)] if int(index) < len(values) else None


def put_attribute(owner: Any, key: str, array: Array | None) -> None:
    """Puts an array behind a key; None takes it away."""
    name, _, index = key.partition('.')
    if index:
        _put_element(owner, name, int(index), array)
    elif array is not None:
        vars(owner)[name] = array
        (_away.get(owner) or {}).pop(name, None)
    else:
        vars(owner).pop(name, None)
        _note_away(owner, name, None)


def _put_element(owner: Any, name: str, index: int, array: Array | None) -> None:
    attributes = vars(owner)
    elements = None if name in attributes else (_away.get(owner) or {}).get(name)
    if elements is None:
        elements = _Elements(attributes[name], set())
    if type(elements.values) is list:
        elements.values[index] = array
    else:
        values = elements.values
        elements.values = (*values[:index], array, *values[index + 1 :])
    if array is None:
        elements.missing.add(index)
        _note_away(owner, name, elements)
        attributes.pop(name, None)
    else:
        elements.missing.discard(index)
        if not elements.missing:
            attributes[name] = elements.values
            (_away.get(owner) or {}).pop(name, None)


def _note_away(owner: Any, name: str, elements: _Elements | None) -> None:
    away = _away.get(owner)
    if away is None:
        away = _away[owner] = {}
    away[name] = elements


def is_shared(attributes: dict[str, Any], name: str) -> bool:
    """Whether others refer to the value of an attribute, too."""
    return name in attributes and sys.getrefcount(attributes[name]) > _ALONE


_attributes: dict[str, Any] = {'name': []}
_ALONE = sys.getrefcount(_attributes['name'])


Reference = weakref.ref[Any]


class Content:
    """What a session has found in a node, or has put there; see [other arrays].

    Attributes:
        array (weakref or None): None while the array is away.
    """

    __slots__ = ('array',)

    def __init__(self, array: Reference | None) -> None:
        self.array = array

    def is_replaced(self, node: Any) -> bool:
        """Whether the node has got another array since."""
        if _contents.get(node) is not self:
            return True
        known = None if self.array is None else self.array()
        return node._data is not None and node._data is not known


_contents: ByOwner[Content] = ByOwner()


def find_content(node: Any) -> Content:
    """The content of a node that retains an array; a new one for another array."""
    if vars(chainer.Variable)['_set_array'] is not _set_array:
        chainer.Variable._set_array = _set_array
    content = _contents.get(node)
    if content is None or content.array is None or content.array() is not node._data:
        content = _contents[node] = Content(weakref.ref(node._data))
    return content


def is_node_away(node: Any) -> bool:
    """Whether a session has taken away what a node retains."""
    if node._data is not None:
        return False
    content = _contents.get(node)
    return content is not None and content.array is None


def _set_array(variable: Any, array: Array | None, **options: Any) -> None:
    """``Variable._set_array``: the program gives a variable another array."""
    node = variable._node
    if node is not None and is_node_away(node):
        node._data = array
    _chainers_set_array(variable, array, **options)


_chainers_set_array = chainer.Variable._set_array
