"""Functions whose feature maps a plan leaves alone.

Note: [idle functions]
    What they have left in the graph stays there, so there is no need to look for it:
    for a small function, that would take longer than its forward. It is looked for
    when memory is short all the same, when the iteration goes on with another plan or
    with none, and when the next iteration begins while the graph still lives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from chainer_hybridmem.execution.functions import LiveFunction
from chainer_hybridmem.execution.table import ActionTable


class IdleFunctions:
    """Takes note of them; see [idle functions].

    Args:
        complete (callable): Finds what a function has left in the graph, by operation,
            function and serial number.
        catch_up (callable): Is told of functions whose backward has run, or runs.
    """

    __slots__ = (
        '_busy', '_catch_up', '_complete', '_ended', '_found', '_noted', '_running',
    )  # fmt: skip

    def __init__(
        self,
        complete: Callable[[int, Any, int], None],
        catch_up: Callable[[list[Any], list[Any]], None],
    ) -> None:
        self._complete = complete
        self._catch_up = catch_up
        self._found: Callable[[Any], None] = lambda function: None
        self._busy: Collection[int] | None = None  # operations; None: all
        self._noted: list[tuple[int, int, LiveFunction]] = []
        self._ended: list[LiveFunction] = []
        self._running: list[LiveFunction] = []

    def tell_found(self, found: Callable[[Any], None]) -> None:
        """Calls this with each function that is idle no longer."""
        self._found = found

    def begin(self, table: ActionTable | None) -> None:
        """An iteration begins, with a plan or without; what was noted is known."""
        self._busy = None if table is None else table.busy

    @property
    def noted_any(self) -> bool:
        """Whether any was noted since its maps were last looked for."""
        return bool(self._noted)

    def leaves_alone(self, k: int) -> bool:
        """Whether the plan does nothing to what operation k leaves in the graph."""
        return self._busy is not None and k not in self._busy

    def note(self, k: int, serial: int, known: LiveFunction) -> None:
        """An idle function has run forward.

        Args:
            k: Its operation.
            serial: Its place in the order of functions.
            known: What is known of it.
        """
        self._noted.append((k, serial, known))

    def start_backward(self, known: LiveFunction) -> None:
        """The backward of an idle function begins."""
        self._running.append(known)

    def end_backward(self, known: LiveFunction) -> None:
        """It has ended."""
        self._running = [other for other in self._running if other is not known]
        self._ended.append(known)

    def know_all(self, older: bool = False) -> None:
        """Looks for what they have left; what follows is not idle.

        Args:
            older: Whether they belong to an older iteration.
        """
        noted, ended, running = self._noted, self._ended, self._running
        self._busy, self._noted, self._ended, self._running = None, [], [], []
        for k, serial, known in noted:
            function = known()
            if function is not None:
                self._complete(-1 if older else k, function, serial)
                self._found(function)
        self._catch_up(_living(ended), _living(running))


def _living(references: list[LiveFunction]) -> list[Any]:
    return [one for one in (reference() for reference in references) if one is not None]
