"""Another forward for classes of functions, while sessions are open."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

Forward = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]

_replaced: dict[type, tuple[Forward | None, Forward]] = {}  # own and other, by class


def replace(kinds: Iterable[type], make: Callable[[Forward], Forward]) -> None:
    """Gives classes another forward, until :func:`put_back`.

    Args:
        kinds: Classes of functions.
        make: Gets the forward of a class and returns the other one.
    """
    for kind in kinds:
        plain = kind.forward  # type: ignore[attr-defined]
        other = functools.wraps(plain)(make(plain))
        _replaced[kind] = vars(kind).get('forward'), other
        kind.forward = other  # type: ignore[attr-defined]


def put_back() -> None:
    """Undoes :func:`replace`, but for what the program has replaced since."""
    while _replaced:
        kind, (own, other) = _replaced.popitem()
        if vars(kind).get('forward') is other:
            if own is None:
                del kind.forward  # type: ignore[attr-defined]
            else:
                kind.forward = own  # type: ignore[attr-defined]
