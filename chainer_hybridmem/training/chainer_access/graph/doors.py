"""Reading an array that is away restores it first.

Note: [attributes that are away]
    A program may read what a function keeps, as an upsampling takes the indexes of a
    pooling. While such an array is away the function does not have the attribute, and
    is of a class like its own, a door: Python calls ``__getattr__`` of that, which
    restores it. Where the class has a default of that name, the door has a
    :class:`_Default` in its place, which does the same. Only functions that miss
    something have a door: with a ``__getattr__`` of Chainer's class, every access to
    an attribute of any function would take several times as long.

    What others can reach without the function's attribute stays: a shared list, or
    anything of an old-style function that outlives its graph. An array also stays if
    the class answers for attributes itself and would not call ``__getattr__`` here.
    The program may give such an attribute another array, in backward or when it applies
    the function once more. That array is no part of the slot any more.

    ``VariableNode.data`` restores what a node retains (nodes). The loops of backward
    are the exception: they read it before any hook runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Hashable
from typing import Any, NoReturn

import chainer
from chainer import _backprop, _backprop_utils

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.training.chainer_access.graph.places import (
    BringBack,
    away_values,
    find_restorer,
    is_attribute_away,
)


def have_restored(bring_back: BringBack | None, owner: Any, *names: str) -> None:
    """Has attributes of a function restored, or what a node retains."""
    restore = None if bring_back is None else bring_back()
    if restore is not None:
        restore(owner, names)


def refuse_read(whose: str) -> NoReturn:
    """Refuses to read what nobody brings back.

    Raises:
        SessionError: The session that took the array away is no more.
    """
    raise SessionError(
        f'A feature map of {whose} is not in memory any more: the session that let '
        f'it go has ended. Use a graph before its session ends, or begin the '
        f'session with keep_graph=True.'
    )


def _bring_back(owner: Any, name: str) -> None:
    """Restores an attribute of a function.

    Raises:
        SessionError: If the session that took the array away is no more.
    """
    have_restored(find_restorer(owner), owner, name)
    if is_attribute_away(owner, name):
        refuse_read(type(owner).__name__)


# -- doors --------------------------------------------------------------------
_DOOR = '_hybridmem_door'  # of a class: its door
_IS_DOOR = '_hybridmem_is_door'


def kind_of(function: Any) -> Any:
    """The class of a function, or of an old-style one; also while it has a door."""
    kind = type(function)
    return kind.__bases__[0] if _IS_DOOR in vars(kind) else kind


def class_values(function: Any) -> dict[str, Any]:
    """What the class of a function has of its own, by name, without its door."""
    return {
        name: value for name, value in vars(kind_of(function)).items() if name != _DOOR
    }


def open_door(owner: Any, name: str) -> None:
    """Restores an attribute when it is read, from before it leaves."""
    kind = kind_of(owner)
    door = vars(kind).get(_DOOR)
    if door is None:
        door = _make_door(kind)
    if hasattr(kind, name) and name not in vars(door):
        setattr(door, name, _Default(kind, name))
    if type(owner) is not door:
        owner.__class__ = door


def close_door(owner: Any) -> None:
    """Lets an owner be of its own class again, if it has all its attributes."""
    if not away_values(owner):
        kind = kind_of(owner)
        if type(owner) is not kind:
            owner.__class__ = kind


def _make_door(kind: type) -> type:
    names = {
        '__slots__': (),
        '__module__': kind.__module__,
        '__qualname__': kind.__qualname__,
        '__getattr__': _ask,
        '__delattr__': _delete,
        '__reduce_ex__': _reduce,
        _IS_DOOR: True,
    }
    door = type(kind.__name__, (kind,), names)
    setattr(kind, _DOOR, door)
    return door


class _Default:
    """In place of a class's default value: that, unless an array is away."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind = kind
        self._name = name

    def __get__(self, owner: Any, door: type | None = None) -> Any:
        if owner is not None and is_attribute_away(owner, self._name):
            return _ask(owner, self._name)
        return getattr(self._kind, self._name)


def _ask(owner: Any, name: str) -> Any:
    """``__getattr__`` of a door."""
    if not name.startswith('__') and is_attribute_away(owner, name):
        _bring_back(owner, name)
        if name in vars(owner):
            return vars(owner)[name]
    raise AttributeError(
        f'{type(owner).__name__!r} object has no attribute {name!r}',
        name=name,
        obj=owner,
    )


def _delete(owner: Any, name: str) -> None:
    """``__delattr__`` of a door."""
    if is_attribute_away(owner, name):
        _bring_back(owner, name)
    kind_of(owner).__delattr__(owner, name)


def _reduce(owner: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a door: a copy has everything."""
    for name in away_values(owner):
        _bring_back(owner, name)
    owner.__class__ = kind_of(owner)
    return owner.__reduce_ex__(protocol)


# -- classes without a door ---------------------------------------------------
@functools.lru_cache(maxsize=4096)  # of few classes, as a rule
def may_leave(kind: Hashable, name: str) -> bool:
    """Whether doors of functions of a class would restore an attribute.

    They would if no other code answers for it.

    Args:
        kind: The class of a function, or its door.
        name: Of the attribute.
    """
    assert isinstance(kind, type)
    is_door = _IS_DOOR in vars(kind)
    return not _answers_itself(kind.__bases__[0] if is_door else kind, name)


_NOTICES = '__getattribute__', '__init_subclass__'  # methods that notice a door


def _answers_itself(kind: type, name: str) -> bool:
    find = inspect.getattr_static
    if type(kind) is not type or hasattr(kind, '__getattr__'):
        return True
    if any(find(kind, method) is not find(object, method) for method in _NOTICES):
        return True
    return hasattr(find(kind, name, None), '__get__')


# -- copies that restore nothing ----------------------------------------------
_COPYING = (
    *('__copy__', '__new__', '__reduce__', '__reduce_ex__'),
    *('__getstate__', '__setstate__', '__slots__'),
)


def copy_as_it_is(function: Any) -> Any:
    """Copies a function; what is away stays away."""
    kind, door = kind_of(function), type(function)
    if _copies_by_fields(kind):
        result = object.__new__(kind)
        vars(result).update(vars(function))
        return result
    function.__class__ = kind
    try:
        return copy.copy(function)
    finally:
        function.__class__ = door


@functools.cache
def _copies_by_fields(kind: Hashable) -> bool:
    """Whether copies of a class's objects are objects with the same fields."""
    assert isinstance(kind, type)
    own = (vars(base).get(name) for base in kind.__mro__[:-1] for name in _COPYING)
    is_plain = all(method is None for method in own)
    return is_plain and kind.__module__.partition('.')[0] == 'chainer'


BACKWARD_LOOP = _backprop._backprop_to_all.__code__
_LOOPS = (BACKWARD_LOOP, chainer.function_node._backprop.__code__)


def is_loop(frame: types.FrameType | None) -> bool:
    """Whether a frame belongs to Chainer's walk through the functions of a graph."""
    while frame is not None and frame.f_code.co_name == '<listcomp>':
        frame = frame.f_back
    return frame is not None and frame.f_code in _LOOPS


def backward_runs() -> bool:
    """Whether a backward function is among the callers."""
    return frame_of(_backprop_utils.backprop_step, sys._getframe(1)) is not None


def frame_of(function: Any, frame: types.FrameType | None) -> types.FrameType | None:
    """The frame in which a function runs, among a frame and its callers.

    Chainer does not tell hooks that something has ended with an error: who counts what
    begins and ends counts wrong from then on.
    """
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


def find_running_link() -> chainer.Link | None:
    """The innermost link whose call is under way in this thread."""
    frame = frame_of(_call_link, sys._getframe(1))
    return None if frame is None else frame.f_locals.get('self')


_call_link = chainer.Link.__call__
