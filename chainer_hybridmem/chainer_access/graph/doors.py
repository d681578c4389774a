"""Reading an array that is away restores it first.

Note: [attributes that are away]
    A program may read what a function keeps, as an upsampling takes the indexes of a
    pooling. While such an array is away the function does not have the attribute, so
    Python calls ``__getattr__``, which restores it. Where the class has a default of
    that name, :class:`_Default` takes its place and does the same.

    What others can reach without the function's attribute stays: a shared list, or
    anything of an old-style function that outlives its graph. An array also stays if
    the class answers for attributes itself and would not call ``__getattr__`` here.
    The program may give such an attribute another array, in backward or when it applies
    the function once more. That array is no part of the slot any more.

    ``VariableNode.data`` restores what a node retains. The loops of backward are the
    exception: they read it before any hook runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import chainer
from chainer import _backprop, _backprop_utils
from chainer.variable import VariableNode

from chainer_hybridmem.chainer_access.graph.attributes import (
    is_attribute_away,
    list_away,
)
from chainer_hybridmem.chainer_access.graph.by_owner import ByOwner
from chainer_hybridmem.chainer_access.graph.nodes import is_node_away
from chainer_hybridmem.devices.protocol import Array
from chainer_hybridmem.errors import SessionError

BringBack = weakref.WeakMethod[Callable[[Any, tuple[str, ...]], None]]

# What restores attributes of a function, or what a node retains (no names).
_watchers: ByOwner[BringBack] = ByOwner()


def watch(owner: Any, bring_back: BringBack) -> None:
    """Restores arrays of an owner when they are read; see [attributes that are away].

    Args:
        owner: A function, the wrapped old-style function, or a node.
        bring_back: Restores attributes of an owner by name, or what a node retains.
    """
    if vars(chainer.FunctionNode).get('__getattr__') is not _ask:
        for kind in (chainer.FunctionNode, chainer.Function):
            kind.__getattr__ = _ask
            kind.__delattr__ = _delete
            kind.__reduce_ex__ = _reduce
        VariableNode.data = VariableNode.data.getter(_read_node)
    _watchers[owner] = bring_back


def _bring_back(owner: Any, *names: str) -> None:
    """Restores attributes of a function, or what a node retains.

    Raises:
        SessionError: If the session that took the array away is no more.
    """
    reference = _watchers.get(owner)
    bring_back = None if reference is None else reference()
    if bring_back is not None:
        bring_back(owner, names)
    if _is_away(owner, names):
        whose = type(owner).__name__ if names else 'a variable'
        raise SessionError(
            f'A feature map of {whose} is not in memory any more: the session that let '
            f'it go has ended. Use a graph before its session ends, or begin the '
            f'session with keep_graph=True.'
        )


def _is_away(owner: Any, names: tuple[str, ...]) -> bool:
    if names:
        return any(is_attribute_away(owner, name) for name in names)
    return is_node_away(owner)


# -- methods that take the place of Chainer's ---------------------------------
def _read_node(node: Any) -> Array | None:
    """``VariableNode.data``."""
    if node._data is None and is_node_away(node) and not is_loop(sys._getframe(1)):
        _bring_back(node)
    return node._data


def _ask(owner: Any, name: str) -> Any:
    """``__getattr__`` of functions."""
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
    """``__delattr__`` of functions."""
    if is_attribute_away(owner, name):
        _bring_back(owner, name)
    object.__delattr__(owner, name)


def _reduce(owner: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of functions: a copy has everything."""
    for name in list_away(owner) if _copying is not owner else ():
        if is_attribute_away(owner, name):
            _bring_back(owner, name)
    return object.__reduce_ex__(owner, protocol)


class _Default:
    """In place of a class's default value: that, unless an array is away."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is not None and is_attribute_away(owner, self._name):
            return _ask(owner, self._name)
        return self._value


def watch_default(kind: type, name: str) -> None:
    """Restores an attribute also where its class has a default for it."""
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            if not hasattr(value, '__get__'):
                setattr(base, name, _Default(name, value))
            return


# -- classes that answer themselves -------------------------------------------
_answers: ByOwner[dict[str, bool]] = ByOwner()  # by class, by attribute


def answers_itself(kind: type, name: str) -> bool:
    """Whether a class would not call our ``__getattr__`` for an away attribute."""
    answers = _answers.get(kind)
    if answers is None:
        answers = _answers[kind] = {}
    answer = answers.get(name)
    if answer is None:
        answer = answers[name] = _looks_itself(kind, name)
    return answer


def _looks_itself(kind: type, name: str) -> bool:
    if getattr(kind, '__getattr__', _ask) is not _ask:
        return True
    if getattr(kind, '__getattribute__', None) is not object.__getattribute__:
        return True
    value = inspect.getattr_static(kind, name, None)
    return type(value) is not _Default and hasattr(value, '__get__')


# -- copies that restore nothing ----------------------------------------------
_COPYING = (
    *('__copy__', '__new__', '__reduce__', '__reduce_ex__'),
    *('__getstate__', '__setstate__', '__slots__'),
)
_copying: Any = None  # the function that is copied as it is


def copy_as_it_is(function: Any) -> Any:
    """Copies a function; what is away stays away."""
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


@functools.cache
def _copies_by_fields(kind: Hashable) -> bool:
    """Whether copies of a class's objects are objects with the same fields."""
    assert isinstance(kind, type)
    own = (vars(base).get(name) for base in kind.__mro__[:-1] for name in _COPYING)
    is_plain = all(method is None or method is _reduce for method in own)
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
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _backprop_utils.backprop_step.__code__:
            return True
        frame = frame.f_back
    return False
