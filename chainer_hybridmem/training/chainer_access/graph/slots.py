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
from chainer_hybridmem.training.chainer_access.graph.places import (
    Content,
    attribute_arrays,
    find_attribute,
    find_content,
    is_shared,
    put_attribute,
    read_attribute,
)
from chainer_hybridmem.training.devices.protocol import Array, View

Found = tuple[Slot, Any, Array]  # a slot, its owner, the array
_RETAINED = '_retained_output_data'


class SlotRef:
    """A live slot: its owner (weakly), and how the array looks at its storage.

    Attributes:
        owner (weakref): A node or a function; dead once it is in no graph any more.
        slot (Slot): Its name in the profile.
        view (View): Layout of the array in its allocation.
        attribute (str or None): Where a function has it, ``'name'`` or
            ``'name.index'``; None for a node.
    """

    __slots__ = ('_array', '_content', 'attribute', 'owner', 'slot', 'view')

    def __init__(self, slot: Slot, owner: Any, view: View) -> None:
        self.slot = slot
        self.view = view
        self.owner = weakref.ref(owner)
        self._array: weakref.ref[Any] | None = None  # of an attribute that is there
        self._content: Content | None = None  # of a node
        self.attribute: str | None = None
        if slot.kind is SlotKind.RETAINED:
            self.attribute = f'{_RETAINED}.{slot.key}'
        elif slot.kind is SlotKind.ATTRIBUTE:
            self.attribute = str(slot.key)
        if self.attribute is None:
            self._content = None if owner._data is None else find_content(owner)
        else:
            self._array = weakref.ref(read_attribute(owner, self.attribute))

    @property
    def node(self) -> Any:
        """The variable node, if it is one and still alive."""
        owner = self.owner()
        if self.slot.kind in (SlotKind.INPUT, SlotKind.OUTPUT):
            return owner
        return None

    @property
    def function(self) -> Any:
        """The function node whose own slot it is, if there is one and it is alive."""
        owner = self.owner()
        if owner is None or self.node is not None:
            return None
        return function_of(owner)

    @property
    def place(self) -> tuple[object, ...]:
        """The same for references that are one and the same field."""
        if self.slot.kind in (SlotKind.INPUT, SlotKind.OUTPUT):
            return (self.owner,)
        return self.owner, self.slot.kind, self.slot.key

    def put(self, array: Array | None) -> None:
        """Fills or clears the slot; nothing happens if its owner is dead."""
        owner = self.owner()
        if owner is None:
            return
        array_or_none = None if array is None else weakref.ref(array)
        if self.attribute is None:
            content = self._content
            if content is None:
                owner._data = array  # Note: [private data]
            elif not content.is_replaced(owner):
                owner._data = array
                content.array = array_or_none
        elif self.replaced():
            return
        elif array is not None or not self.shared():
            if array is None:
                open_door(owner, self.attribute.partition('.')[0])
            put_attribute(owner, self.attribute, array)
            if array is not None:
                close_door(owner)
            self._array = array_or_none

    def get(self) -> Array | None:
        """The array in the slot; None if it is cleared or its owner dead."""
        owner = self.owner()
        if owner is None:
            return None
        if self.attribute is None:
            content = self._content
            other = content is not None and content.is_replaced(owner)
            return None if other else owner._data
        array = find_attribute(owner, self.attribute)
        same = self._array is not None and array is self._array()
        return array if same else None

    def replaced(self) -> bool:
        """Whether the owner has another array; see places, [other arrays]."""
        owner = self.owner()
        if owner is None:
            return False
        if self.attribute is None:
            return self._content is not None and self._content.is_replaced(owner)
        array = find_attribute(owner, self.attribute)
        if self._array is None:
            return array is not None
        return array is None or array is not self._array()

    def shared(self) -> bool:
        """Whether others have the list or tuple that the array is in."""
        owner = self.owner()
        if owner is None or self.attribute is None:
            return False
        name, _, index = self.attribute.partition('.')
        return bool(index) and is_shared(vars(owner), name)

    def is_of(self, owner: Any, names: Collection[str]) -> bool:
        """Whether it is in one of the owner's attributes, or what a node retains."""
        if self.owner() is not owner:
            return False
        name = None if self.attribute is None else self.attribute.partition('.')[0]
        return name in names if names else name is None

    def held(self) -> bool:
        """Whether a live Variable has the array, too."""
        node = self.node
        variable = None if node is None else node.get_variable_or_none()
        return variable is not None and variable._data[0] is not None


def find_slots(
    function: Any, operation: int, owns: Callable[[Any], bool]
) -> list[Found]:
    """Every array that a function has left in the graph.

    To be called after ``FunctionNode.apply`` has returned, at the next hook:
    retained data is set only after the forward hooks have run.

    Returns:
        Slots with their owners and arrays.
    """
    found: list[Found] = []
    inputs = function.inputs or ()
    for index in function._input_indexes_to_retain or ():
        array = inputs[index]._data if index < len(inputs) else None
        if array is not None and owns(array):
            slot = Slot(operation, SlotKind.INPUT, index)
            found.append((slot, inputs[index], array))
    indexes = function._output_indexes_to_retain
    if indexes:
        _find_outputs(function, indexes, operation, owns, found)
    if not is_shared(vars(function), '_function'):  # else it outlives the graph
        _find_attributes(target(function), operation, owns, found)
    return found


def _find_outputs(
    function: Any,
    indexes: Collection[int],
    operation: int,
    owns: Callable[[Any], bool],
    found: list[Found],
) -> None:
    """Retained outputs: the function has a reference, and the node has another."""
    retained = vars(function).get(_RETAINED) or ()
    leaves = may_leave(function, _RETAINED)
    for position, (index, array) in enumerate(zip(indexes, retained, strict=False)):
        if leaves and owns(array):
            slot = Slot(operation, SlotKind.RETAINED, position)
            found.append((slot, function, array))
        node = function.outputs[index]()
        array = None if node is None else node._data
        if array is not None and owns(array):
            found.append((Slot(operation, SlotKind.OUTPUT, index), node, array))


def _find_attributes(
    owner: Any, operation: int, owns: Callable[[Any], bool], found: list[Found]
) -> None:
    """Attributes that may leave; see doors, [attributes that are away]."""
    for key, array in attribute_arrays(owner, owns):
        name = key
        if '.' in key:
            name = key.partition('.')[0]
            if is_shared(vars(owner), name):
                continue
        if may_leave(owner, name):
            found.append((Slot(operation, SlotKind.ATTRIBUTE, key), owner, array))
