"""References of the graph to arrays.

A slot is one reference of the graph to an array. Chainer keeps feature maps in
three places: ``VariableNode._data``, ``FunctionNode._retained_output_data``
and plain attributes of functions (dropout masks, pooling indexes, softmax
outputs).

Note: [private data]
    ``node.data = None`` erases the shape and type that backward needs, so the
    private field is the one to clear.

Note: [weak references]
    Slots hold their owners weakly: a reference to a function node keeps the whole
    graph, and with it every feature map.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from chainer_hybridmem.planning.records.profile import Slot, SlotKind
from chainer_hybridmem.training.chainer_access.graph.doors import (
    close_door,
    may_leave,
    open_door,
)
from chainer_hybridmem.training.chainer_access.graph.function_nodes import (
    function_of,
    target,
)
from chainer_hybridmem.training.chainer_access.graph.nodes import Content, find_content
from chainer_hybridmem.training.chainer_access.graph.places import (
    BringBack,
    attribute_arrays,
    find_attribute,
    is_shared,
    put_attribute,
    read_attribute,
    take_attribute,
)
from chainer_hybridmem.training.devices.protocol import Array, View

Found = tuple[SlotKind, int | str, Any, Array]  # kind and key of a slot, owner, array
_RETAINED = '_retained_output_data'


class _Ref:
    """A live slot: its owner (weakly), and how the array looks at its storage.

    Attributes:
        owner (weakref): A node or a function; dead once it is in no graph any more.
        slot (Slot): Its name in the profile.
        view (View): Layout of the array in its allocation.
    """

    __slots__ = 'owner', 'slot', 'view'

    def __init__(self, slot: Slot, owner: weakref.ref[Any], view: View) -> None:
        self.slot = slot
        self.view = view
        self.owner = owner

    @property
    def node(self) -> Any:
        """The variable node, if it is one and still alive."""
        return None

    @property
    def function(self) -> Any:
        """The function node whose own slot it is, if there is one and it is alive."""
        return None

    def shared(self) -> bool:
        """Whether others have the list or tuple that the array is in."""
        return False

    def held(self) -> bool:
        """Whether a live Variable has the array, too."""
        return False


class NodeRef(_Ref):
    """What a variable node retains.

    Attributes:
        content (Content): Of the node.
    """

    __slots__ = ('content',)

    def __init__(
        self, slot: Slot, owner: Any, view: View, bring_back: BringBack | None
    ) -> None:
        self.content: Content = find_content(owner)
        self.content.bring_back = bring_back
        super().__init__(slot, self.content, view)

    @property
    def node(self) -> Any:
        return self.owner()

    @property
    def place(self) -> tuple[object, ...]:
        """The same for references that are one and the same field."""
        return (self.owner,)

    def put(self, array: Array | None) -> None:
        """Fills or clears the slot; nothing happens if its owner is dead."""
        node, content = self.owner(), self.content
        if node is not None and not content.is_replaced(node):
            node._data = array  # Note: [private data]
            content.array = None if array is None else weakref.ref(array)

    def get(self) -> Array | None:
        """The array in the slot; None if it is cleared or its owner dead."""
        node = self.owner()
        if node is None or self.content.is_replaced(node):
            return None
        array: Array | None = node._data
        return array

    def replaced(self) -> bool:
        """Whether the owner has another array; see nodes, [other arrays]."""
        node = self.owner()
        return node is not None and self.content.is_replaced(node)

    def is_of(self, owner: Any, names: Collection[str]) -> bool:
        """Whether it is in one of the owner's attributes, or what a node retains."""
        return not names and self.owner() is owner

    def held(self) -> bool:
        node = self.owner()
        variable = None if node is None else node.get_variable_or_none()
        return variable is not None and variable._data[0] is not None


class AttributeRef(_Ref):
    """What a function keeps as an attribute; methods as of :class:`NodeRef`.

    Attributes:
        attribute (str): Where the function has it, ``'name'`` or ``'name.index'``.
    """

    __slots__ = '_array', '_bring_back', 'attribute'

    def __init__(
        self, slot: Slot, owner: Any, view: View, bring_back: BringBack | None
    ) -> None:
        super().__init__(slot, weakref.ref(owner), view)
        self._bring_back = bring_back
        self.attribute = str(slot.key)
        if slot.kind is SlotKind.RETAINED:
            self.attribute = f'{_RETAINED}.{slot.key}'
        # None while it is away.
        self._array: weakref.ref[Any] | None = weakref.ref(
            read_attribute(owner, self.attribute)
        )

    @property
    def function(self) -> Any:
        owner = self.owner()
        return None if owner is None else function_of(owner)

    @property
    def place(self) -> tuple[object, ...]:
        return self.owner, self.slot.kind, self.slot.key

    def put(self, array: Array | None) -> None:
        owner = self.owner()
        if owner is None or self.replaced():
            return
        if array is not None:
            put_attribute(owner, self.attribute, array)
            close_door(owner)
            self._array = weakref.ref(array)
        elif not self.shared():
            open_door(owner, self.attribute.partition('.')[0])
            take_attribute(owner, self.attribute, self._bring_back)
            self._array = None

    def get(self) -> Array | None:
        owner = self.owner()
        if owner is None:
            return None
        array = find_attribute(owner, self.attribute)
        same = self._array is not None and array is self._array()
        return array if same else None

    def replaced(self) -> bool:
        owner = self.owner()
        if owner is None:
            return False
        array = find_attribute(owner, self.attribute)
        if self._array is None:
            return array is not None
        return array is None or array is not self._array()

    def shared(self) -> bool:
        owner = self.owner()
        if owner is None:
            return False
        name, _, index = self.attribute.partition('.')
        return bool(index) and is_shared(vars(owner), name)

    def is_of(self, owner: Any, names: Collection[str]) -> bool:
        return self.owner() is owner and self.attribute.partition('.')[0] in names


SlotRef = NodeRef | AttributeRef


def refer(
    slot: Slot, owner: Any, view: View, bring_back: BringBack | None = None
) -> SlotRef:
    """A reference to an array that its owner has.

    Args:
        slot: Its name in the profile.
        owner: A node, a function, or the old-style function that one wraps.
        view: How the array looks at its allocation.
        bring_back: Is called when the array is read while it is away; see doors,
            [attributes that are away].
    """
    is_node = slot.kind is SlotKind.INPUT or slot.kind is SlotKind.OUTPUT
    return (NodeRef if is_node else AttributeRef)(slot, owner, view, bring_back)


def find_slots(function: Any, owns: Callable[[Any], bool]) -> list[Found]:
    """Every array that a function has left in the graph.

    To be called after ``FunctionNode.apply`` has returned, at the next hook:
    retained data is set only after the forward hooks have run.

    Returns:
        Kinds and keys of slots, their owners and arrays.
    """
    found: list[Found] = []
    inputs = function.inputs or ()
    for index in function._input_indexes_to_retain or ():
        array = inputs[index]._data if index < len(inputs) else None
        if array is not None and owns(array):
            found.append((SlotKind.INPUT, index, inputs[index], array))
    indexes = function._output_indexes_to_retain
    if indexes:
        _find_outputs(function, indexes, owns, found)
    own = target(function)
    if own is function or not is_shared(vars(function), '_function'):
        _find_attributes(own, owns, found)  # else it outlives the graph
    return found


def _find_outputs(
    function: Any,
    indexes: Collection[int],
    owns: Callable[[Any], bool],
    found: list[Found],
) -> None:
    """Retained outputs: the function has a reference, and the node has another."""
    retained = vars(function).get(_RETAINED) or ()
    leaves = may_leave(function.__class__, _RETAINED)
    for position, (index, array) in enumerate(zip(indexes, retained, strict=False)):
        if leaves and owns(array):
            found.append((SlotKind.RETAINED, position, function, array))
        node = function.outputs[index]()
        array = None if node is None else node._data
        if array is not None and owns(array):
            found.append((SlotKind.OUTPUT, index, node, array))


def _find_attributes(
    owner: Any, owns: Callable[[Any], bool], found: list[Found]
) -> None:
    """Attributes that may leave; see doors, [attributes that are away]."""
    for key, array in attribute_arrays(owner, owns):
        name = key
        if '.' in key:
            name = key.partition('.')[0]
            if is_shared(vars(owner), name):
                continue
        if may_leave(owner.__class__, name):
            found.append((SlotKind.ATTRIBUTE, key, owner, array))
