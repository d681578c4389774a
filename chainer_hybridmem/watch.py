"""What iterations have run that nobody records, because nothing has had to leave.

Note: [quiet iterations]
    An iteration that nobody knows begins quietly: the hooks note which functions have
    run, by weak references, and nothing else. Most end so, wherever everything fits.
    When an allocation does not fit, the session catches up: the executor gets to know
    what those functions have left in the graph, as it would have after each of them,
    and the rest of the iteration is passive. Only then its kind is worth recording.
    Functions of quiet iterations stay noted as long as they live: a graph that the
    program keeps can be evicted, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

Reference = weakref.ref[Any]


class Watch:
    """Functions that have run in quiet iterations; weak references only.

    Attributes:
        functions (list): Of the iteration under way, in the order of their forward.
        nested (set of int): Which of them a backward function has called.
        ended (list): Those whose backward has come to its end.
        running (list): Those whose backward runs now, the inner one last.
    """

    __slots__ = ('_older', '_older_ended', 'ended', 'functions', 'nested', 'running')

    def __init__(self) -> None:
        self.functions: list[Reference] = []
        self.nested: set[int] = set()
        self.ended: list[Reference] = []
        self.running: list[Reference] = []
        self._older: list[Reference] = []
        self._older_ended: list[Reference] = []

    def begin(self) -> None:
        """Another iteration begins: what is noted belongs to older graphs."""
        self._older = _living(self._older, self.functions)
        self._older_ended = (
            _living(self._older_ended, self.ended) if self._older else []
        )
        self.functions, self.ended, self.running = [], [], []
        self.nested.clear()

    def take_older(self) -> tuple[list[Any], list[Any]]:
        """Living functions of older graphs, and which have run backward.

        They are forgotten here.
        """
        older, ended = self._older, self._older_ended
        self._older, self._older_ended = [], []
        return list(_alive(older)), list(_alive(ended))

    def take(self) -> tuple[list[tuple[int, Any]], list[Any], list[Any]]:
        """What the iteration under way has run; it is forgotten here.

        Returns:
            Functions with their numbers, -1 for nested ones; those whose backward has
            ended; those whose backward runs.
        """
        functions, ended, running = self.functions, self.ended, self.running
        nested = set(self.nested)
        self.functions, self.ended, self.running = [], [], []
        self.nested.clear()
        numbered = [
            (-1 if k in nested else k, function)
            for k, function in enumerate(reference() for reference in functions)
            if function is not None
        ]
        return numbered, list(_alive(ended)), list(_alive(running))


def _living(*references: list[Reference]) -> list[Reference]:
    return [one for many in references for one in many if one() is not None]


def _alive(references: list[Reference]) -> Iterator[Any]:
    for reference in references:
        function = reference()
        if function is not None:
            yield function
