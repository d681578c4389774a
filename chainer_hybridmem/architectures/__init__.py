"""Architectures by name, for the commands, the examples and the benchmarks.

Every architecture is a :class:`chainer.Chain` that is called with a batch of
pictures ``x`` of shape ``(N, 3, H, W)`` (float32) and labels ``t`` of shape
``(N,)`` (int32), returns the scalar loss, and reports ``loss`` and ``accuracy``.

This module itself needs no Chainer; the family's module is imported by
:func:`make`.

    >>> from chainer_hybridmem import architectures
    >>> architectures.names()[:2]
    ['alexnet', 'googlenet']
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from chainer_hybridmem.errors import OptionError, UnknownNameError, nearest

if TYPE_CHECKING:
    import chainer

__all__ = ['insize', 'learning_rate', 'make', 'names']


class _Entry(NamedTuple):
    """Where a named architecture lives and the options that make it."""

    module: str
    attribute: str
    options: dict[str, Any]


def _resnet(blocks: tuple[int, ...], bottleneck: bool = True) -> _Entry:
    return _Entry('resnet', 'ResNet', {'blocks': blocks, 'bottleneck': bottleneck})


def _vgg(blocks: tuple[int, ...]) -> _Entry:
    return _Entry('vgg', 'VGG', {'blocks': blocks})


_ENTRIES = {
    'alexnet': _Entry('alexnet', 'AlexNet', {}),
    'googlenet': _Entry('googlenet', 'GoogLeNet', {}),
    'resnet18': _resnet((2, 2, 2, 2), bottleneck=False),
    'resnet34': _resnet((3, 4, 6, 3), bottleneck=False),
    'resnet50': _resnet((3, 4, 6, 3)),
    'resnet101': _resnet((3, 4, 23, 3)),
    'resnet152': _resnet((3, 8, 36, 3)),
    'vgg11': _vgg((1, 1, 2, 2, 2)),
    'vgg13': _vgg((2, 2, 2, 2, 2)),
    'vgg16': _vgg((2, 2, 3, 3, 3)),
    'vgg19': _vgg((2, 2, 4, 4, 4)),
}


def names() -> list[str]:
    """Returns the names that :func:`make` knows, family by family."""
    return list(_ENTRIES)


def make(name: str, n_class: int = 1000, **kwargs: Any) -> chainer.Chain:
    """Makes a freshly initialised network.

    Args:
        name: One of :func:`names`, or ``module:Class`` for a chain of your own.
            The module is looked up like any import, and in the current directory.
        n_class: Number of classes. A class of your own gets it only if its
            constructor takes an argument of this name.
        **kwargs: More options for the constructor, for instance
            ``blocks=(3, 4, 50, 3)`` for a deeper ResNet.

    Returns:
        The network, on the CPU.

    Raises:
        UnknownNameError: There is no such name, module or class.
        OptionError: A class of your own needs other arguments.
    """
    factory, options = _load(name)
    options = {**options, **kwargs}
    if _accepts(factory, 'n_class'):
        options['n_class'] = n_class
    if ':' in name:
        _check_arguments(name, factory, options)
    return _checked(name, factory(**options))


def insize(name: str) -> int:
    """Returns the picture size that an architecture was designed for, in pixels.

    Args:
        name: As for :func:`make`. For a class of your own it is its attribute
            ``insize``, or 224 without it.

    Raises:
        UnknownNameError: There is no such name, module or class.
    """
    return getattr(_load(name)[0], 'insize', 224)


def learning_rate(name: str) -> float:
    """Returns a rate of SGD with momentum at which training starts without diverging.

    Args:
        name: As for :func:`make`. For a class of your own it is its attribute
            ``learning_rate``, or 0.01 without it.

    Raises:
        UnknownNameError: There is no such name, module or class.
    """
    return getattr(_load(name)[0], 'learning_rate', 0.01)


def _load(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the class of an architecture and the options that make it."""
    if ':' in name:
        return _load_own(name), {}
    if name not in _ENTRIES:
        raise UnknownNameError(
            f'Unknown architecture {name!r}.{nearest(name.lower(), _ENTRIES)} Known '
            f'are {", ".join(_ENTRIES)}, and module:Class for a chain of your own.'
        )
    entry = _ENTRIES[name]
    module = importlib.import_module(f'{__name__}.{entry.module}')
    return getattr(module, entry.attribute), entry.options


def _checked(name: str, model: Any) -> chainer.Chain:
    import chainer

    if not isinstance(model, chainer.Link):
        raise UnknownNameError(
            f'{name!r} made a {type(model).__name__}, not a chainer.Chain; name a '
            f'class derived from chainer.Chain.'
        )
    return model


def _load_own(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(':')
    if not module_name or not attribute or module_name.startswith('.'):
        raise UnknownNameError(
            f'Architecture {name!r} is incomplete; write module:Class, for instance '
            f'mymodels:MyNet.'
        )
    module = _import_own(name, module_name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UnknownNameError(
            f'Architecture {name!r}: module {module_name!r} has no class {attribute!r}.'
        )
    return factory


def _import_own(name: str, module_name: str) -> Any:
    if os.getcwd() not in sys.path and '' not in sys.path:
        # A console script has its own folder there instead of the current one.
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ''
        if module_name != missing and not module_name.startswith(f'{missing}.'):
            raise  # the module exists, something that it imports does not
        advice = "it is looked for in the current directory and in Python's path."
        if module_name.endswith('.py'):
            attribute = name.partition(':')[2]
            advice = f'leave out .py: {module_name.removesuffix(".py")}:{attribute}.'
        raise UnknownNameError(
            f'Architecture {name!r}: there is no module {missing!r}; {advice}'
        ) from error


def _check_arguments(
    name: str, factory: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Refuses a constructor that needs more than it is given, or takes less."""
    parameters = inspect.signature(factory).parameters
    try:
        inspect.signature(factory).bind(**options)
        return
    except TypeError as error:
        why = str(error)
    attribute = name.partition(':')[2]
    given = ', '.join(options) or 'no arguments'
    close = difflib.get_close_matches('n_class', parameters, 1, 0.6)
    if close and 'n_class' not in parameters:
        remedy = f'call {close[0]!r} n_class, and it has what --n-class says'
    else:
        remedy = (
            f'only n_class is handed over, from --n-class; give the others defaults, '
            f'or name a function that makes the network: def make(n_class): return '
            f'{attribute}(...)'
        )
    raise OptionError(
        f'Architecture {name!r} is made with {given}, and its constructor is '
        f'{attribute}{inspect.signature(factory)}: {why}; {remedy}.'
    )


def _accepts(factory: Callable[..., Any], argument: str) -> bool:
    parameters = inspect.signature(factory).parameters.values()
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)
