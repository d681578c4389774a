"""What runs in place of Chainer's own while sessions are open: sums and forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from chainer import _backprop_utils

Sum = Callable[[list[Any]], Any]

chainers_sum: Sum = _backprop_utils._reduce


def use_sum(add_up: Sum) -> None:
    """Backward adds the gradients of a variable up with this from now on."""
    _backprop_utils._reduce = add_up


def holder(gradient: Any) -> list[Any]:
    """The list in which a variable holds its array, as its only item."""
    held: list[Any] = gradient._data
    return held


Forward = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]

_replaced: dict[type, tuple[Forward | None, Forward]] = {}  # own and other, by class


def replace_forwards(kinds: Iterable[type], make: Callable[[Forward], Forward]) -> None:
    """Gives classes another forward, until :func:`put_back_forwards`.

    Args:
        kinds: Classes of functions.
        make: Gets the forward of a class and returns the other one.
    """
    for kind in kinds:
        plain = kind.forward  # type: ignore[attr-defined]
        other = functools.wraps(plain)(make(plain))
        _replaced[kind] = vars(kind).get('forward'), other
        kind.forward = other  # type: ignore[attr-defined]


def put_back_forwards() -> None:
    """Undoes :func:`replace_forwards`, but for what the program has replaced since."""
    while _replaced:
        kind, (own, other) = _replaced.popitem()
        if vars(kind).get('forward') is other:
            if own is None:
                del kind.forward  # type: ignore[attr-defined]
            else:
                kind.forward = own  # type: ignore[attr-defined]
