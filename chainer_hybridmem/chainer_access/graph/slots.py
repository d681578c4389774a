"""Reading and writing Chainer's graph.

A slot is one reference of the graph to an array. Chainer keeps feature maps in
three places: ``VariableNode._data``, ``FunctionNode._retained_output_data``
and plain attributes of functions (dropout masks, pooling indexes, softmax
outputs).

Note: [private data]
    ``node.data = None`` erases the shape and type that backward needs, so the
    private field is the one to clear.

Note: [weak references]
    Slots hold their owners weakly: whoever keeps a function node keeps the
    whole graph, and with it every feature map.

Note: [other arrays]
    The program may give a variable another array (``h.array = …``), which Chainer then
    puts into the node that retains it. That array is no part of a slot any more. While
    the former one is away, Chainer would take the node for one that retains nothing.

Note: [attributes that are away]
    A program may read what a function keeps, as an upsampling takes the indexes of a
    pooling. While such an array is away the function does not have the attribute, and
    Python asks ``__getattr__``, which brings it back. Where the class has a default of
    that name, :class:`_Default` stands in its place and does the same. A list or tuple
    is away while any of its arrays is; who else has it keeps them. What an old-style
    function keeps stays if others have that function, for it outlives the graph; so it
    does if the class answers for attributes itself and would not ask. It may give
    such an attribute another array, in backward or when it is applied once more: that
    one is no part of the slot any more. ``VariableNode.data`` brings back what a node
    retains, except for the loops of backward, which read it before any hook runs.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, Generic, TypeVar

import chainer
from chainer import _backprop, _backprop_utils
from chainer.graph_optimizations.static_graph import StaticScheduleFunction
from chainer.variable import VariableNode

from chainer_hybridmem.devices.protocol import Array, Device, View
from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.records.profile import Slot, SlotKind

Value = TypeVar('Value')
Forward = Callable[[Any, tuple[Array, ...]], tuple[Array, ...]]

# Attributes of function nodes that belong to Chainer, not to the function.
FRAMEWORK = frozenset(
    {'inputs', 'outputs', '_retained_output_data', '_function', '_weak_function'}
    | {'_chainerx_retained_inputs', '_chainerx_retained_outputs'}
    | {'_local_function_hooks'}
)


BringBack = weakref.WeakMethod[Callable[[Any, tuple[str, ...]], None]]


@dataclasses.dataclass(slots=True)
class _Elements:
    """A list or tuple that is away, because some of its arrays are.

    Attributes:
        values (list or tuple): With None in place of these.
        missing (set of int): Their indexes.
    """

    values: Any
    missing: set[int]


class _Entry(weakref.ref[Any], Generic[Value]):
    """A reference to an object, and what is known of it."""

    __slots__ = ('key', 'value')

    key: int
    value: Value


class ByOwner(Generic[Value]):
    """Values of objects as long as these live; functions may be equal or unhashable.

    A look-up takes a third of the time that a ``WeakKeyDictionary`` needs.
    """

    __slots__ = ('_entries', '_forget')

    def __init__(self) -> None:
        entries: dict[int, _Entry[Value]] = {}

        def forget(entry: Any) -> None:
            key = entry.key
            if entries.get(key) is entry:
                del entries[key]

        self._entries = entries
        self._forget = forget

    def __setitem__(self, owner: Any, value: Value) -> None:
        key = id(owner)
        entry = self._entries.get(key)
        if entry is not None:
            entry.value = value
            return
        entry = _Entry(owner, self._forget)
        entry.key, entry.value = key, value
        self._entries[key] = entry  # whole: an interrupt may come anywhere

    def get(self, owner: Any) -> Value | None:
        entry = self._entries.get(id(owner))
        return None if entry is None else entry.value

    def __contains__(self, owner: Any) -> bool:
        return id(owner) in self._entries


# What is away of functions, by attribute; None for a single array.
_away: ByOwner[dict[str, _Elements | None]] = ByOwner()
# What brings back attributes of a function, or what a node retains (no names).
_watchers: ByOwner[BringBack] = ByOwner()
_RETAINED = '_retained_output_data'


# How functions have run that have not run as a whole.
_forwards: ByOwner[Forward] = ByOwner()


def target(function: Any) -> Any:
    """The object with the attributes: old-style functions are wrapped."""
    return vars(function).get('_function') or function


def watch(owner: Any, bring_back: BringBack) -> None:
    """See [attributes that are away].

    Args:
        owner: A function, the wrapped old-style function, or a node.
        bring_back: Restores attributes of an owner by name, or what a node retains.
    """
    if vars(chainer.FunctionNode).get('__getattr__') is not _ask:
        for kind in (chainer.FunctionNode, chainer.Function):
            kind.__getattr__ = _ask
            kind.__delattr__ = _delete
            kind.__reduce_ex__ = _reduce
        VariableNode.data = VariableNode.data.getter(_node_data)
    _watchers[owner] = bring_back


def _bring_back(owner: Any, *names: str) -> None:
    """Brings back attributes of a function, or what a node retains.

    Raises:
        SessionError: If the session that has it is no more.
    """
    reference = _watchers.get(owner)
    bring_back = None if reference is None else reference()
    if bring_back is not None:
        bring_back(owner, names)
    if _is_away(owner, *names):
        whose = type(owner).__name__ if names else 'a variable'
        raise SessionError(
            f'A feature map of {whose} is not in memory any more: the session that let '
            f'it go has ended. Use a graph before its session ends.'
        )


def _is_away(owner: Any, *names: str) -> bool:
    if names:
        away = _away.get(owner) or {}
        return any(name in away and name not in vars(owner) for name in names)
    content = _contents.get(owner)
    return owner._data is None and content is not None and content.array is None


def _node_data(node: Any) -> Array | None:
    """``VariableNode.data``."""
    if node._data is None and _is_away(node) and not _is_loop(sys._getframe(1)):
        _bring_back(node)
    return node._data


def _delete(owner: Any, name: str) -> None:
    """``__delattr__`` of functions."""
    if _is_away(owner, name):
        _bring_back(owner, name)
    object.__delattr__(owner, name)


def _reduce(owner: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of functions: a copy has everything."""
    for name in list(_away.get(owner) or ()) if _copying is not owner else ():
        if _is_away(owner, name):
            _bring_back(owner, name)
    return object.__reduce_ex__(owner, protocol)


_copying: Any = None  # the function that is copied as it is


def _is_loop(frame: types.FrameType | None) -> bool:
    """Whether Chainer goes through the functions of a graph there."""
    while frame is not None and frame.f_code.co_name == '<listcomp>':
        frame = frame.f_back
    return frame is not None and frame.f_code in _LOOPS


BACKWARD_LOOP = _backprop._backprop_to_all.__code__
_LOOPS = (
    BACKWARD_LOOP,
    chainer.function_node._backprop.__code__,
)


def _ask(owner: Any, name: str) -> Any:
    """``__getattr__`` of functions."""
    if not name.startswith('__') and _is_away(owner, name):
        _bring_back(owner, name)
        if name in vars(owner):
            return vars(owner)[name]
    raise AttributeError(
        f'{type(owner).__name__!r} object has no attribute {name!r}',
        name=name,
        obj=owner,
    )


class _Default:
    """In place of a class's default value: that, unless an array is away."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is not None and _is_away(owner, self._name):
            return _ask(owner, self._name)
        return self._value


def _watch_default(kind: type, name: str) -> None:
    """Notices who asks for an attribute that the class has a default for."""
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            if not hasattr(value, '__get__'):
                setattr(base, name, _Default(name, value))
            return


def function_of(owner: Any) -> Any:
    """The function node that has an attribute or has made what a node retains.

    None if there is none any more.
    """
    if isinstance(owner, VariableNode):
        return owner.creator_node
    return owner if isinstance(owner, chainer.FunctionNode) else owner.node


def function_name(function: Any) -> str:
    """Name of the function's class, also for old-style functions."""
    return str(type(target(function)).__name__)


def refuse_static(function: Any) -> None:
    """Refuses what runs a recorded schedule instead of a graph.

    Raises:
        SessionError: If the function is part of a static chain.
    """
    if is_static(function) or chainer.config.schedule_func is not None:
        raise SessionError(
            'The model uses @static_graph: its schedule keeps every array to itself, '
            'and none can leave. Set chainer.config.use_static_graph = False, which '
            'runs the same network define-by-run.'
        )


def is_static(function: Any) -> bool:
    """Whether a function runs a schedule that @static_graph has recorded."""
    return type(function) is StaticScheduleFunction


def settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """Chainer's configuration, live: this thread's, and that of all threads.

    Looking a name up in both takes a tenth of what ``chainer.config`` takes.
    """
    return vars(chainer.config._local), vars(chainer.config._global)


def given_arrays(function: Any) -> list[str]:
    """Names of the arrays that a function has before its forward, such as a mask."""
    kinds = chainer.get_array_types()
    return [
        name
        for name, value in vars(target(function)).items()
        if isinstance(value, kinds)
    ]


def communicates(function: Any) -> bool:
    """Whether forward talks to other processes.

    They would have to answer at the same moment: each of them has a plan of its own.
    """
    own = target(function)
    return any(
        type(part).__module__.partition('.')[0] == 'chainermn'
        for part in (own, *vars(own).values())
    )


def add_local_hook(function: Any, hook: chainer.FunctionHook) -> None:
    """Calls a hook in the backward of a function, in whatever thread that is."""
    hooks = function._local_function_hooks
    if hooks is None:
        hooks = function._local_function_hooks = collections.OrderedDict()
    hooks[hook.name] = hook


def backward_runs() -> bool:
    """Whether a backward function is among the callers."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _backprop_utils.backprop_step.__code__:
            return True
        frame = frame.f_back
    return False


def is_unfinished(function: Any) -> bool:
    """Whether a function that has been called is in no graph: it has failed."""
    return function is None or function.inputs is None


@dataclasses.dataclass(slots=True)
class _Content:
    """What a session has found in a node, or has put there; see [other arrays].

    Attributes:
        array (weakref or None): None while it is away.
    """

    array: weakref.ref[Any] | None


_contents: ByOwner[_Content] = ByOwner()


def _content_of(node: Any) -> _Content:
    """Of a node that retains an array now: a new one if that is another array."""
    if vars(VariableNode)['_update_data_info'] is not _take_over:
        VariableNode._update_data_info = _take_over
    content = _contents.get(node)
    if content is None or content.array is None or content.array() is not node._data:
        content = _contents[node] = _Content(weakref.ref(node._data))
    return content


def _take_over(node: Any, array: Array | None) -> None:
    """``VariableNode._update_data_info``: a variable has another array."""
    content = _contents.get(node)
    if content is not None and content.array is None and node._data is None:
        node._data = array
    _chainers_update(node, array)


_chainers_update = VariableNode._update_data_info


class SlotRef:
    """A live slot: its owner (weakly), and how the array looks at its storage.

    Attributes:
        slot (Slot): Its name in the profile.
        view (View): Layout of the array in its allocation.
        attribute (str or None): Where a function has it, ``'name'`` or
            ``'name.index'``; None for a node.
    """

    __slots__ = ('_array', '_content', '_owner', 'attribute', 'slot', 'view')

    def __init__(self, slot: Slot, owner: Any, view: View) -> None:
        self.slot = slot
        self.view = view
        self._owner = weakref.ref(owner)
        self._array: weakref.ref[Any] | None = None  # of an attribute that is there
        self._content: _Content | None = None  # of a node
        self.attribute: str | None = None
        if slot.kind is SlotKind.RETAINED:
            self.attribute = f'{_RETAINED}.{slot.key}'
        elif slot.kind is SlotKind.ATTRIBUTE:
            self.attribute = str(slot.key)
        if self.attribute is None:
            self._content = None if owner._data is None else _content_of(owner)
        else:
            self._array = weakref.ref(read_attribute(owner, self.attribute))

    @property
    def node(self) -> Any:
        """The variable node, if it is one and still alive."""
        owner = self._owner()
        if self.slot.kind in (SlotKind.INPUT, SlotKind.OUTPUT):
            return owner
        return None

    @property
    def function(self) -> Any:
        """The function node whose own slot it is, if there is one and it is alive."""
        owner = self._owner()
        if owner is None or self.node is not None:
            return None
        return function_of(owner)

    @property
    def place(self) -> tuple[object, ...]:
        """The same for references that are one and the same field."""
        if self.slot.kind in (SlotKind.INPUT, SlotKind.OUTPUT):
            return (self._owner,)
        return self._owner, self.slot.kind, self.slot.key

    def put(self, array: Array | None) -> None:
        """Fills or clears the slot; nothing happens if its owner is dead."""
        owner = self._owner()
        if owner is None:
            return
        array_or_none = None if array is None else weakref.ref(array)
        if self.attribute is None:
            content = self._content
            if content is None:
                owner._data = array  # Note: [private data]
            elif not self._has_other(owner, content):
                owner._data = array
                content.array = array_or_none
        elif self.replaced():
            return
        elif array is not None or not self.shared():
            _put_attribute(owner, self.attribute, array)
            self._array = array_or_none

    def get(self) -> Array | None:
        """The array in the slot; None if it is cleared or its owner dead."""
        owner = self._owner()
        if owner is None:
            return None
        if self.attribute is None:
            content = self._content
            other = content is not None and self._has_other(owner, content)
            return None if other else owner._data
        array = _present_attribute(owner, self.attribute)
        same = self._array is not None and array is self._array()
        return array if same else None

    def replaced(self) -> bool:
        """Whether the owner has another array; see [other arrays]."""
        owner = self._owner()
        if owner is None:
            return False
        if self.attribute is None:
            return self._content is not None and self._has_other(owner, self._content)
        array = _present_attribute(owner, self.attribute)
        if self._array is None:
            return array is not None
        return array is None or array is not self._array()

    def shared(self) -> bool:
        """Whether others have the list or tuple that the array is in."""
        owner = self._owner()
        if owner is None or self.attribute is None:
            return False
        name, _, index = self.attribute.partition('.')
        return bool(index) and _is_shared(vars(owner), name)

    @staticmethod
    def _has_other(node: Any, content: _Content) -> bool:
        if _contents.get(node) is not content:
            return True
        known = None if content.array is None else content.array()
        return node._data is not None and node._data is not known

    def is_of(self, owner: Any, names: Collection[str]) -> bool:
        """Whether it is in one of the owner's attributes, or what a node retains."""
        if self._owner() is not owner:
            return False
        name = None if self.attribute is None else self.attribute.partition('.')[0]
        return name in names if names else name is None

    def alive(self) -> bool:
        """Whether the owner is still part of a graph."""
        return self._owner() is not None

    def held(self) -> bool:
        """Whether a live Variable has the array, too."""
        node = self.node
        variable = None if node is None else node.get_variable_or_none()
        return variable is not None and variable._data[0] is not None


def _put_attribute(owner: Any, key: str, array: Array | None) -> None:
    name, _, index = key.partition('.')
    if index:
        _put_element(owner, name, int(index), array)
    elif array is not None:
        vars(owner)[name] = array
        (_away.get(owner) or {}).pop(name, None)
    else:
        vars(owner).pop(name, None)
        _take_away(owner, name, None)


def _take_away(owner: Any, name: str, elements: _Elements | None) -> None:
    away = _away.get(owner)
    if away is None:
        away = _away[owner] = {}
    away[name] = elements
    _watch_default(type(owner), name)


def _put_element(owner: Any, name: str, index: int, array: Array | None) -> None:
    """Of a list or tuple."""
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
        _take_away(owner, name, elements)
        attributes.pop(name, None)
    else:
        elements.missing.discard(index)
        if not elements.missing:
            attributes[name] = elements.values
            (_away.get(owner) or {}).pop(name, None)


def _is_shared(attributes: dict[str, Any], name: str) -> bool:
    """Whether others have a list or tuple, too."""
    return name in attributes and sys.getrefcount(attributes[name]) > _ALONE


_attributes: dict[str, Any] = {'name': []}
_ALONE = sys.getrefcount(_attributes['name'])


def read_attribute(owner: Any, key: str) -> Any:
    """The value behind an attribute key, ``'name'`` or ``'name.index'``."""
    name, _, index = key.partition('.')
    value = getattr(owner, name)
    return value[int(index)] if index else value


def _present_attribute(owner: Any, key: str) -> Any:
    """Like :func:`read_attribute`; None if it is away."""
    if '.' not in key:
        return vars(owner).get(key)
    name, _, index = key.partition('.')
    value = vars(owner).get(name)
    elements = None if name in vars(owner) else (_away.get(owner) or {}).get(name)
    if elements is not None:
        value = elements.values
    values = value if isinstance(value, (list, tuple)) else ()
    return values[int(index)] if int(index) < len(values) else None


def _answers_itself(kind: type, name: str) -> bool:
    """Whether a class would not ask us for an attribute that is away."""
    answers = _answers.setdefault(kind, {})
    if name not in answers:
        answers[name] = _looks_itself(kind, name)
    return answers[name]


_answers: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


def _looks_itself(kind: type, name: str) -> bool:
    if getattr(kind, '__getattr__', _ask) is not _ask:
        return True
    if getattr(kind, '__getattribute__', None) is not object.__getattribute__:
        return True
    value = inspect.getattr_static(kind, name, None)
    return type(value) is not _Default and hasattr(value, '__get__')


def attribute_arrays(
    function: Any, owns: Callable[[Any], bool]
) -> Iterator[tuple[str, Array]]:
    """Arrays kept as attributes, also inside one list or tuple."""
    for name, value in vars(target(function)).items():
        if name in FRAMEWORK:
            continue
        if owns(value):
            yield name, value
        elif type(value) in (list, tuple):
            for index, element in enumerate(value):
                if owns(element):
                    yield f'{name}.{index}', element


def find_slots(
    function: Any, operation: int, owns: Callable[[Any], bool]
) -> Iterator[tuple[Slot, Any, Array]]:
    """Every array that a function has left in the graph.

    To be called after ``FunctionNode.apply`` has returned, at the next hook:
    retained data is set only after the forward hooks have run.

    Yields:
        Slot, its owner and the array.
    """
    inputs = function.inputs or ()
    for index in function._input_indexes_to_retain or ():
        if index < len(inputs) and owns(inputs[index]._data):
            yield (
                Slot(operation, SlotKind.INPUT, index),
                inputs[index],
                inputs[index]._data,
            )
    retained = vars(function).get(_RETAINED) or ()
    for position, index in enumerate(function._output_indexes_to_retain or ()):
        if position >= len(retained):
            break
        if owns(retained[position]):
            slot = Slot(operation, SlotKind.RETAINED, position)
            yield slot, function, retained[position]
        node = function.outputs[index]()
        if node is not None and owns(node._data):
            yield Slot(operation, SlotKind.OUTPUT, index), node, node._data
    if _is_shared(vars(function), '_function'):  # it outlives the graph
        return
    owner = target(function)
    for key, array in list(attribute_arrays(function, owns)):  # which holds them
        name, _, index = key.partition('.')
        shared = index and _is_shared(vars(owner), name)
        if not shared and not _answers_itself(type(owner), name):
            yield Slot(operation, SlotKind.ATTRIBUTE, key), owner, array


def product(slot: Slot, function: Any, outputs: Any, made: Any) -> Array:
    """What a replay has made for one of a function's own slots.

    Args:
        slot: A retained output or an attribute.
        function: The function in the graph.
        outputs: Output arrays of the replay.
        made: The object with its attributes.
    """
    if slot.kind is SlotKind.RETAINED:
        return outputs[function._output_indexes_to_retain[int(slot.key)]]
    return read_attribute(made, str(slot.key))


def retained_inputs(function: Any) -> list[Any]:
    """Variable nodes of the inputs that backward reads."""
    inputs = function.inputs or ()
    kept = function._input_indexes_to_retain or ()
    return [inputs[index] for index in kept if index < len(inputs)]


def output_arrays(function: Any) -> list[Array | None]:
    """Output arrays that are still reachable through the graph or the user."""
    result = []
    for reference in function.outputs or ():
        node = reference()
        result.append(None if node is None else node_array(node))
    return result


def retained_array(node: Any) -> Array | None:
    """The array that a variable node itself holds now; brings nothing back."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class Pristine:
    """A function as it was before its forward, to be run again.

    Attributes:
        function (FunctionNode): A copy.
        settings (dict): Chainer's configuration at that moment.
    """

    function: Any
    settings: dict[str, Any]

    def copied(self) -> Any:
        """Another copy, which may run."""
        return _copy(self.function)


_settings: dict[str, Any] = {}  # the last ones, which most functions share


def _configuration() -> dict[str, Any]:
    """All settings of Chainer as they are now, for this thread."""
    global _settings
    config = chainer.config
    now = {**vars(config._global), **vars(config._local)}
    if now != _settings:
        _settings = now
    return _settings


@contextlib.contextmanager
def _configured(settings: dict[str, Any]) -> Iterator[None]:
    """Runs under other settings of Chainer."""
    local = vars(chainer.config._local)
    before = dict(local)
    local.update(settings)
    try:
        yield
    finally:
        local.clear()
        local.update(before)


def pristine(function: Any) -> Pristine:
    """A function as it is before its forward runs."""
    return Pristine(_copy(function), _configuration())


_COPYING = (
    *('__copy__', '__new__', '__reduce__', '__reduce_ex__'),
    *('__getstate__', '__setstate__', '__slots__'),
)


@functools.cache
def _copies_by_fields(kind: Hashable) -> bool:
    """Whether copies of a class's objects are objects with the same fields."""
    assert isinstance(kind, type)
    own = (vars(base).get(name) for base in kind.__mro__[:-1] for name in _COPYING)
    is_plain = all(method is None or method is _reduce for method in own)
    return is_plain and kind.__module__.partition('.')[0] == 'chainer'


def _copy_as_it_is(function: Any) -> Any:
    global _copying
    kind: Any = type(function)
    if _copies_by_fields(kind):
        result = object.__new__(kind)
        vars(result).update(vars(function))
        return result
    _copying = function
    try:
        return copy.copy(function)
    finally:
        _copying = None


def _copy(function: Any) -> Any:
    result = _copy_as_it_is(function)
    wrapped = vars(function).get('_function')
    if wrapped is not None:
        result._function = _copy_as_it_is(wrapped)
    attributes = vars(target(result))
    for name in _away.get(target(function)) or ():
        attributes.setdefault(name, None)
    for name, value in attributes.items():
        if type(value) is list:  # replays do not write into the function's
            attributes[name] = list(value)
    return result


def set_forward(function: Any, forward: Forward) -> None:
    """Says how a function has run if not as a whole: its replays do the same.

    Args:
        function: In the graph.
        forward: Takes a copy of it, and the input arrays.
    """
    _forwards[function] = forward


def replay(
    before: Pristine, live: Any, attributes: tuple[str, ...],
    inputs: tuple[Array, ...], device: Device,
) -> tuple[tuple[Array, ...], Any]:  # fmt: skip
    """Runs a forward again without touching the graph, hooks or statistics.

    Arrays that the function had before its forward (running statistics) are
    copied, so that updating them in place has no effect. It runs in parts if
    the first one did.

    Args:
        before: What :func:`pristine` returned.
        live: The function in the graph.
        attributes: Names taken over from ``live``, such as a dropout mask.
        inputs: Input arrays.
        device: Device of the arrays.

    Returns:
        Output arrays and the object with the attributes.
    """
    clone = before.copied()
    settings = {**before.settings, 'in_recomputing': True, 'enable_backprop': False}
    owner = target(clone)
    if owner is not clone:
        owner._node = weakref.ref(clone)
    for key, array in list(attribute_arrays(clone, device.owns)):
        _put_attribute(owner, key, array.copy())
    for key in attributes:
        _put_attribute(owner, key, read_attribute(target(live), key))
    with (
        _configured(settings),
        chainer.using_device(chainer.backend.get_device_from_array(*inputs)),
    ):
        forward = _forwards.get(live)
        outputs = clone.forward(inputs) if forward is None else forward(clone, inputs)
    return outputs, owner
