"""Calls whose arrays are the session's own and do not count as the program's."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')


def call_uncounted(
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Calls a function whose NumPy arrays do not count.

    The host device counts the allocations of a context; a fresh one has
    NumPy's own handler.
    """
    return contextvars.Context().run(lambda: function(*args, **kwargs))
