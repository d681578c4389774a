"""Which functions may be run again.

Note: [trust]
    A replay must have no effect but its result, and no trial can show that: a function
    may count in a list of its link, draw from a generator of its own, or write to a
    file. Chainer's own functions are known to have none, once those that call the
    program's code (``F.forget``, samplers) are left out. Functions of the program are
    never run again unless it declares their class: :func:`recomputable`. Even then, a
    trial that changes what the function can reach is an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import types
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import chainer
import numpy as np
from chainer.functions.util.forget import Forget

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.recompute import effects

Kind = TypeVar('Kind', bound=type)
_PACKAGE = 'chainer'
_CALLS_THE_PROGRAM = (Forget,)
_FORWARDS = ('forward', 'forward_cpu', 'forward_gpu')
# Their values never run code of the program.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(np.generic, np.dtype, np.ndarray, types.BuiltinFunctionType, types.ModuleType),
    *(type, weakref.ref),
)
_declared: weakref.WeakSet[type] = weakref.WeakSet()


def recomputable(kind: Kind) -> Kind:
    """Declares that functions of a class may be run again; also as a decorator.

    What such a function returns must depend on nothing but its inputs, its own
    attributes and Chainer's configuration, and running it must change nothing else:
    no list or average of a link, no generator but NumPy's global one. Chainer's own
    functions need no declaration; without one, what functions of the program make is
    kept or swapped.

    >>> @hybridmem.recomputable
    ... class Square(chainer.FunctionNode):
    ...     ...

    Args:
        kind: A class derived from ``chainer.FunctionNode`` or ``chainer.Function``.
            Classes derived from it are not declared with it.

    Returns:
        type: The same class.

    Raises:
        OptionError: If it is no such class.
    """
    functions = (chainer.FunctionNode, chainer.Function)
    if not isinstance(kind, type) or not issubclass(kind, functions):
        raise OptionError(
            f'recomputable is given {kind!r}; a class derived from '
            f'chainer.FunctionNode or chainer.Function is needed.'
        )
    _declared.add(kind)
    return kind


def is_declared(function: Any) -> bool:
    """Whether the program has declared the class of a function."""
    return graph.kind_of(graph.target(function)) in _declared


def may_replay(function: Any) -> bool:
    """Whether a function may be run again; see [trust]."""
    if not is_trusted(function):
        return False
    values = vars(graph.target(function)).items()
    return is_declared(function) or all(
        _is_harmless(value) for name, value in values if name not in graph.FRAMEWORK
    )


def is_trusted(function: Any) -> bool:
    """Whether the code of a function may be run again, with any inputs."""
    own = graph.target(function)
    kind = graph.kind_of(own)
    if 'forward' in vars(own):  # of this object alone
        return False
    return kind in _declared or (
        _is_of_chainer(kind)
        and not issubclass(kind, _CALLS_THE_PROGRAM)
        and all(_is_own(getattr(kind, name)) for name in _FORWARDS)
    )


def may_copy(function: Any) -> bool:
    """Whether a copy of a function has no effects, such as those of a ``__del__``."""
    kind = graph.kind_of(graph.target(function))
    return _is_of_chainer(kind) or kind in _declared


def _is_own(method: Any) -> bool:
    """Whether a method of Chainer's class is Chainer's, and not put there since."""
    module = getattr(method, '__module__', None) or ''
    return module.partition('.')[0] in (_PACKAGE, 'chainer_hybridmem')


@contextlib.contextmanager
def effects_refused(function: Any) -> Iterator[None]:
    """Around runs of a function that the program has declared.

    Raises:
        SessionError: If they change what the function can reach.
    """
    if not is_declared(function):
        yield
        return
    # What is looked at with is ours: the host device does not count it.
    before = contextvars.Context().run(_surroundings, function)
    yield
    after = contextvars.Context().run(_surroundings, function)
    changed = effects.changed(before, after)
    if changed:
        raise SessionError(
            f'{graph.function_name(function)} is declared recomputable, but running '
            f'it again has changed {", ".join(changed)}, and the numbers of this '
            f'iteration are wrong. Take the declaration back, or let forward change '
            f'nothing.'
        )


def _surroundings(function: Any) -> dict[str, Any]:
    own, name = graph.target(function), graph.function_name(function)
    return effects.surroundings(
        [(name, own), (f'class {name}', graph.class_values(own))]
    )


def _is_of_chainer(kind: type) -> bool:
    return kind.__module__.partition('.')[0] == _PACKAGE


def _is_harmless(value: Any) -> bool:
    """Whether a value that a function of Chainer keeps runs no code of the program."""
    if isinstance(value, _PLAIN) or type(value).__module__.startswith('cupy'):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_harmless(element) for element in value)
    if isinstance(value, dict):
        return all(_is_harmless(element) for element in value.values())
    if callable(value):
        module = getattr(value, '__module__', None) or ''
        return module.partition('.')[0] in (_PACKAGE, 'numpy', 'cupy')
    return _is_of_chainer(type(value))
