"""What an iteration asks of the graphs of those before it.

Parameters may be others by then: what it asks for must not be recomputed, and must not
be dropped. Which iterations are asked, only later ones tell, so this is learnt for all
that begin alike (program_habits, [habits of a family]).
"""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.execution import Executor
from chainer_hybridmem.execution.functions import LiveFunction
from chainer_hybridmem.records.profile import Slot
from chainer_hybridmem.session.guides.known_signatures import KnownSignatures
from chainer_hybridmem.session.iterations.iteration import Iteration


class OlderGraphs:
    """Finds out which iteration has run a function.

    Args:
        executor (Executor): Knows functions and their maps.
        signatures (KnownSignatures): Learns what is asked for.
    """

    def __init__(self, executor: Executor, signatures: KnownSignatures) -> None:
        self._executor = executor
        self._signatures = signatures
        executor.tell_asked(self._note_read)

    def find_forward(self, iteration: Iteration, function: Any) -> int:
        """The forward operation of a backward function; -1 if it is none of these.

        Args:
            iteration: The one under way.
            function: Its backward is about to run.
        """
        known = self._executor.functions.find(function)
        if known is None or known.origin is None:
            return -1
        if known.origin is iteration:
            return known.operation
        updated = self._executor.functions.is_updated(function)
        self._outlive(known, _name_maps(known), updated)
        return -1

    def _note_read(self, function: Any, slots: list[Slot]) -> None:
        """The program reads what the graph keeps: later iterations must not drop it."""
        known = self._executor.functions.find(function)
        if known is not None and known.origin is not None:
            self._outlive(known, slots, updated=False)

    def _outlive(self, known: LiveFunction, slots: list[Slot], updated: bool) -> None:
        operations = known.origin.following.operations
        if operations:
            self._signatures.outlive(operations[0], slots, updated)


def _name_maps(known: LiveFunction) -> list[Slot]:
    """Where a function of an iteration has its feature maps."""
    return [
        slot for live in known.maps for slot in live.slots.name_made_by(known.operation)
    ]
