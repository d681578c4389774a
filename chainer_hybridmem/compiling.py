"""Tells users that they wait for compilation, as on the first run on a machine.

This module imports no compiler: :mod:`.jit` tells it when one is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chainer_hybridmem import timing

LEAST_SECONDS = 0.5  # of compiling; what takes less is not worth a line
MESSAGE = (
    'compiling, which takes ten to thirty seconds on the first run after an '
    'installation or an upgrade; later runs find the result, and so do those after '
    'hybridmem doctor'
)
_tellers: list[Callable[[str], None]] = []  # the last one is told


@contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """A context in which a long compilation is reported, in one line.

    Args:
        tell: Takes the line.
    """
    _tellers.append(tell)
    try:
        yield
    finally:
        _tellers.remove(tell)


class CompileTime:
    """How long this process has been compiling; tells it once if that is long."""

    def __init__(self) -> None:
        self._depth = 0
        self._began = self._seconds = 0.0
        self._told = False

    def begin(self) -> None:
        """A function is about to be compiled, perhaps for one that is being so."""
        if not self._depth:
            self._began = timing.now()
        self._depth += 1
        seconds = self._seconds + timing.now() - self._began
        if seconds >= LEAST_SECONDS and _tellers and not self._told:
            self._told = True
            _tellers[-1](MESSAGE)

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        running = timing.now() - self._began if self._depth else 0.0
        return self._seconds + running

    def end(self) -> None:
        """It is compiled."""
        self._depth -= 1
        if not self._depth:
            self._seconds += timing.now() - self._began
