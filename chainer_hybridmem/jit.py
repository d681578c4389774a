"""Compiled functions with a cache on disk where one can be written.

The first use of a function on a machine compiles it, which takes seconds; the
cache makes that once per installation. A read-only installation without a
home directory compiles in every process instead of failing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar('Function', bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[Function], Function]:
    """Decorates a function to be compiled, for one signature or any."""

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(*signature, cache=True)(function))
        except RuntimeError:  # nowhere to write a cache
            return cast(Function, numba.njit(*signature)(function))

    return decorate


def callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function to be called from C code, at its ``address``."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.cfunc(signature, cache=True)(function)
        except RuntimeError:
            return numba.cfunc(signature)(function)

    return decorate
