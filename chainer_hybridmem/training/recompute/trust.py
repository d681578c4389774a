"""Which functions may be run again.

Note: [trust]
    A replay must have no effect but its result, and no trial can show that: a function
    may count in a list of its link, draw from a generator of its own, or write to a
    file. Chainer's own functions are known to have none, as long as all that they run
    is Chainer's own code ([own code]), and none is the program's (``F.forget``,
    samplers). All others are never run again unless the program declares their class:
    :func:`recomputable`. Even then, a trial that changes what the function can reach
    is an error.
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

from chainer_hybridmem.errors import OptionError, SessionError
from chainer_hybridmem.training.chainer_access import graph, own_code
from chainer_hybridmem.training.recompute import effects

Kind = TypeVar('Kind', bound=type)
_CALLS_THE_PROGRAM = (Forget,)
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
    if not own_code.FORWARDS.isdisjoint(vars(own)):  # of this object alone
        return False
    return kind in _declared or (
        own_code.is_of_chainer(kind)
        and not issubclass(kind, _CALLS_THE_PROGRAM)
        and not own_code.find_foreign(kind)
    )


def may_write_over(function: Any) -> bool:
    """Whether a backward may write over what its function keeps.

    Old-style ones of Chainer do (``F.hinge``), others of Chainer do not.
    """
    own = graph.target(function)
    return own is not function or not own_code.is_of_chainer(graph.kind_of(own))


def describe_untrusted(function: Any) -> str:
    """The name of a function that may not be run again, with code that is in its way.

    Returns:
        str: Such as ``'Sigmoid (Sigmoid.forward_cpu is from train.py, line 9)'``.
    """
    name, kind = graph.function_name(function), graph.kind_of(graph.target(function))
    foreign = own_code.find_foreign(kind)
    return f'{name} ({foreign})' if foreign else name


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


def _is_harmless(value: Any) -> bool:
    """Whether a value that a function of Chainer keeps runs no code of the program."""
    if isinstance(value, _PLAIN) or type(value).__module__.startswith('cupy'):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_harmless(element) for element in value)
    if isinstance(value, dict):
        return all(_is_harmless(element) for element in value.values())
    if callable(value):
        return own_code.is_own(value)
    return own_code.is_of_chainer(type(value))
