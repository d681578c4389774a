"""Seconds that a session itself spends on plans, so that it can tell all of them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from chainer_hybridmem.jit import clock

Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')


def outside_limit(
    function: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Calls a function whose NumPy arrays do not count.

    The host device counts the allocations of a context; a fresh one has
    NumPy's own handler.
    """
    return contextvars.Context().run(lambda: function(*args, **kwargs))


Owner = TypeVar('Owner')
Work = TypeVar('Work', bound='Timed')
Rest = ParamSpec('Rest')


class PlanningTime:
    """What the plans of one signature have cost.

    Building profiles and problems counts, as well as planning, laying out, checking
    and keeping.
    """

    def __init__(self) -> None:
        self._seconds = self._told_seconds = self._started = 0.0
        self._depth = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what happens inside; may be nested."""
        if not self._depth:
            self._started = clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._seconds += clock() - self._started

    def add(self, seconds: float) -> None:
        """Counts seconds that were spent elsewhere."""
        self._seconds += seconds

    @property
    def seconds(self) -> float:
        """All seconds so far."""
        running = clock() - self._started if self._depth else 0.0
        return self._seconds + running

    def tell(self) -> float:
        """Seconds since the last call, or since the beginning."""
        seconds = self.seconds
        untold, self._told_seconds = seconds - self._told_seconds, seconds
        return untold


class Timed(Protocol):
    """What planning time is spent on: a guide."""

    spent: PlanningTime


def count_time(
    method: Callable[Concatenate[Owner, Work, Rest], Result],
) -> Callable[Concatenate[Owner, Work, Rest], Result]:
    """Decorates a method that works for a guide: its seconds are planning time."""

    @functools.wraps(method)
    def counted(
        self: Any, guide: Work, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> Result:
        with guide.spent.counted():
            return method(self, guide, *args, **kwargs)

    return counted
