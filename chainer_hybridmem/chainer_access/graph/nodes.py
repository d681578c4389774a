"""Variable nodes: the array that each one retains.

Note: [other arrays]
    The program may give a variable another array (``h.array = …``). Chainer puts that
    array into the node that retains it, and it is no part of a slot any more. While
    the former one is away, Chainer would take the node for one that retains nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import chainer

from chainer_hybridmem.chainer_access.graph.by_owner import ByOwner
from chainer_hybridmem.devices.protocol import Array

Reference = weakref.ref[Any]


class Content:
    """What a session has found in a node, or has put there; see [other arrays].

    Attributes:
        array (weakref or None): None while the array is away.
    """

    __slots__ = ('array',)

    def __init__(self, array: Reference | None) -> None:
        self.array = array

    def change(self, array: Reference | None) -> None:
        """Notes that the session has filled the node; None if it has emptied it."""
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
    if node._data is not None or id(node) not in _contents.by_id:
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


def retained_array(node: Any) -> Array | None:
    """The array that a variable node itself holds now; restores nothing."""
    array: Array | None = node._data
    return array


def node_array(node: Any) -> Array | None:
    """The array of a variable node, from the node or its live Variable."""
    if node is None:
        return None
    if node._data is not None:
        return node._data
    variable = node.get_variable_or_none()
    return None if variable is None else variable.array
