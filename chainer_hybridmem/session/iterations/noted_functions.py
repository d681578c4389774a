"""The functions that quiet iterations have run, as weak references."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

Reference = weakref.ref[Any]


class NotedFunctions:
    """Functions of quiet iterations; see :mod:`.quiet_iterations`.

    They stay noted as long as they live.

    Attributes:
        functions (list): Of the iteration under way, in the order of their forward.
        nested (set of int): Which of them a backward function has called.
        ended (list): Those whose backward has come to its end, unless they are known.
        running (list): Those whose backward runs now, the inner one last.
    """

    __slots__ = (
        '_front', '_older', '_older_ended', 'ended', 'functions', 'nested', 'running',
    )  # fmt: skip

    def __init__(self) -> None:
        self.functions: list[Reference] = []
        self.nested: set[int] = set()
        self.ended: list[Reference] = []
        self.running: list[Reference] = []
        self._front = 0  # of the functions, so many have been handed out
        self._older: list[Reference] = []
        self._older_ended: list[Reference] = []

    def note_nested(self, function: Any) -> None:
        """A backward function calls a forward function."""
        self.nested.add(len(self.functions))
        self.functions.append(weakref.ref(function))

    def begin(self) -> None:
        """Another iteration begins: what is noted belongs to older graphs."""
        self._older = _living(self._older, self.functions)
        self._older_ended = (
            _living(self._older_ended, self.ended) if self._older else []
        )
        self._forget()

    def _forget(self) -> None:
        self.functions, self.ended, self.running = [], [], []
        self.nested.clear()
        self._front = 0

    def next_ended(self, count: int) -> list[Any]:
        """Some functions whose backward has ended; they are handed out once."""
        ended, self.ended = self.ended[:count], self.ended[count:]
        return list(_alive(ended))

    def living_running(self) -> list[Any]:
        """Functions whose backward runs now."""
        return list(_alive(self.running))

    def next_functions(self, count: int) -> list[tuple[int, Any]]:
        """The next functions with their numbers, in order; they are handed out once.

        The last one may still run: it is left.
        """
        start = self._front
        stop = self._front = max(start, min(start + count, len(self.functions) - 1))
        numbered = zip(range(start, stop), self.functions[start:stop], strict=True)
        alive = ((k, reference()) for k, reference in numbered)
        return [(k, function) for k, function in alive if function is not None]

    def find_current(self) -> Any:
        """The function under way; None if it has died."""
        references = self.running or self.functions
        return references[-1]() if references else None

    @property
    def all_out(self) -> bool:
        """Whether everything but the last function has been handed out."""
        return not self.ended and self._front >= len(self.functions) - 1

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
        self._forget()
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
