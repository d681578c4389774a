"""Where a variable node keeps what it retains, present or away.

Note: [other arrays]
    The program may give a variable another array (``h.array = …``). Chainer puts that
    array into the node that retains it, and it is no part of a slot any more. While
    the former one is away, Chainer would take the node for one that retains nothing.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import chainer
from chainer.variable import VariableNode

from chainer_hybridmem.training.chainer_access.graph.by_owner import Entries, Entry
from chainer_hybridmem.training.chainer_access.graph.doors import (
    have_restored,
    is_loop,
    refuse_read,
)
from chainer_hybridmem.training.chainer_access.graph.places import BringBack
from chainer_hybridmem.training.devices.protocol import Array


class Content(Entry):
    """What a session has found in a node, or has put there; see [other arrays].

    Attributes:
        array (weakref or None): None while the array is away.
        is_former (bool): Whether another content has been found since.
        bring_back (WeakMethod or None): Restores what the node retains.
        known (object): What the session has noted of the array; None if nothing.
    """

    __slots__ = 'array', 'bring_back', 'is_former', 'known'

    array: weakref.ref[Any] | None
    is_former: bool
    bring_back: BringBack | None
    known: Any

    def is_replaced(self, node: Any) -> bool:
        """Whether the node has got another array since."""
        if self.is_former:
            return True
        array = node._data
        if array is None:
            return False
        return self.array is None or array is not self.array()


_contents: Entries[Content] = Entries()
find_known_content = _contents.find


def find_content(node: Any) -> Content:
    """The content of a node that retains an array; a new one for another array."""
    former = _contents.find(node)
    if former is not None:
        if former.array is not None and former.array() is node._data:
            return former
        former.is_former = True
    if VariableNode.data.fget is not _read_node:
        VariableNode.data = VariableNode.data.getter(_read_node)
    if vars(chainer.Variable)['_set_array'] is not _set_array:
        chainer.Variable._set_array = _set_array
    content = Content(node, _contents.forgetting(node))
    content.array = weakref.ref(node._data)
    content.is_former = False
    content.bring_back = content.known = None
    _contents.add(node, content)
    return content


def is_node_away(node: Any) -> bool:
    """Whether a session has taken away what a node retains."""
    if node._data is not None:
        return False
    content = _contents.find(node)
    return content is not None and content.array is None


def _read_node(node: Any) -> Array | None:
    """``VariableNode.data``."""
    if node._data is None and is_node_away(node) and not is_loop(sys._getframe(1)):
        content = _contents.find(node)
        have_restored(None if content is None else content.bring_back, node)
        if is_node_away(node):
            refuse_read('a variable')
    return node._data


def _set_array(variable: Any, array: Array | None, **options: Any) -> None:
    """``Variable._set_array``: the program gives a variable another array."""
    node = variable._node
    if node is not None and is_node_away(node):
        node._data = array
    _chainers_set_array(variable, array, **options)


_chainers_set_array = chainer.Variable._set_array
