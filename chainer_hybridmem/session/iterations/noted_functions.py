"""The functions that quiet iterations have run, as weak references.

Note: [no backward]
    A program that only runs forward, as one that writes text, never ends an iteration.
    So references to functions that have died are let go of now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

Reference = weakref.ref[Any]
Older = tuple[Any, int, Reference]  # the iteration, the number, the function
PURGED = 4096  # references, from which on dead ones are looked for


class NotedFunctions:
    """Functions of quiet iterations; see :mod:`.quiet_iterations`.

    They stay noted as long as they live.

    Attributes:
        functions (list): Of the iteration under way, in the order of their forward,
            each with its number; -1 if a backward function has called it.
        nested (bool): Whether there are such.
        ended (list): Those whose backward has come to its end, unless they are known.
        running (list): Those whose backward runs now, the inner one last.
    """

    __slots__ = (
        '_front', '_iteration', '_older', '_older_ended', '_purge_at', 'ended',
        'functions', 'nested', 'running',
    )  # fmt: skip

    def __init__(self) -> None:
        self.functions: list[tuple[int, Reference]] = []
        self.nested = False
        self._purge_at = PURGED
        self.ended: list[Reference] = []
        self.running: list[Reference] = []
        self._front = 0  # of the functions, so many have been handed out
        self._iteration: Any = None  # that runs them
        self._older: list[Older] = []
        self._older_ended: list[Reference] = []

    def note_nested(self, function: Any) -> None:
        """A backward function calls a forward function."""
        self.nested = True
        self.functions.append((-1, weakref.ref(function)))

    def forget_dead(self) -> None:
        """Lets go of references to what has died, if there are many; [no backward]."""
        functions, front = self.functions, self._front
        if len(functions) < self._purge_at:
            return
        parts = (functions[:front], functions[front:])
        before, after = (
            [pair for pair in part if pair[1]() is not None] for part in parts
        )
        self._front = len(before)
        self.functions = before + after
        self._purge_at = max(PURGED, 2 * len(self.functions))

    def begin(self, iteration: Any) -> None:
        """Another iteration begins: what is noted belongs to older graphs.

        Args:
            iteration: Runs what is noted from here on.
        """
        last, self._iteration = self._iteration, iteration
        older = [one for one in self._older if one[2]() is not None]
        older.extend((last, k, f) for k, f in self.functions if f() is not None)
        self._older = older
        self._older_ended = _living(self._older_ended, self.ended) if older else []
        self._forget()

    def _forget(self) -> None:
        self.functions, self.ended, self.running = [], [], []
        self.nested = False
        self._front, self._purge_at = 0, PURGED

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
        return _numbered(self.functions[start:stop])

    def find_current(self) -> Any:
        """The function under way; None if it has died."""
        if self.running:
            return self.running[-1]()
        return self.functions[-1][1]() if self.functions else None

    @property
    def all_out(self) -> bool:
        """Whether everything but the last function has been handed out."""
        left = self._older or self.ended
        return not left and self._front >= len(self.functions) - 1

    def take_older(self, count: int) -> tuple[list[tuple[Any, int, Any]], list[Any]]:
        """Some living functions of older graphs, and which have run backward.

        They are forgotten here; those that have run first come first.

        Returns:
            Functions behind their iterations and their numbers, -1 for nested ones;
            of all older graphs, those whose backward has ended.
        """
        older, self._older = self._older[:count], self._older[count:]
        ended = list(_alive(self._older_ended))
        if not self._older:
            self._older_ended = []
        found = ((last, k, reference()) for last, k, reference in older)
        return [one for one in found if one[2] is not None], ended

    @property
    def older(self) -> int:
        """Functions of older graphs that have not been taken."""
        return len(self._older)

    def take(self) -> tuple[list[tuple[int, Any]], list[Any], list[Any]]:
        """What the iteration under way has run; it is forgotten here.

        Returns:
            Functions with their numbers, -1 for nested ones; those whose backward has
            ended; those whose backward runs.
        """
        functions, ended, running = self.functions, self.ended, self.running
        self._forget()
        return _numbered(functions), list(_alive(ended)), list(_alive(running))


def _numbered(functions: list[tuple[int, Reference]]) -> list[tuple[int, Any]]:
    """Those that are alive, with their numbers."""
    alive = ((k, reference()) for k, reference in functions)
    return [(k, function) for k, function in alive if function is not None]


def _living(*references: list[Reference]) -> list[Reference]:
    return [one for many in references for one in many if one() is not None]


def _alive(references: list[Reference]) -> Iterator[Any]:
    for reference in references:
        function = reference()
        if function is not None:
            yield function
