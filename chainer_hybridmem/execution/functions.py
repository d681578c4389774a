"""What is known of the functions of the running graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.chainer_access import graph, owners

if TYPE_CHECKING:
    from chainer_hybridmem.execution.live_map import LiveMap
    from chainer_hybridmem.records.profile import Recipe


class LiveFunction(graph.Entry):
    """A reference to a function, with what is known of it as long as it lives.

    Attributes:
        serial (int): In the order in which functions have run; -1 before that.
        operation (int): Number in the iteration that has run it; -1 if it has none.
        origin (object): The iteration that has run it.
        maps (sequence of LiveMap): Feature maps that its backward reads.
        updates (tuple of int): How often its parameters had been updated when it ran.
        pristine (Pristine or None): As it was before its forward.
        recipe (Recipe or None): How a replay makes again what it has made.
        covered (list of LiveFunction or None): The other functions that this replay
            runs.
        drew (bool): Whether it has drawn random numbers, or may have.
    """

    __slots__ = (
        'covered', 'drew', 'maps', 'operation', 'origin', 'pristine', 'recipe',
        'serial', 'updates',
    )  # fmt: skip

    serial: int
    operation: int
    origin: Any
    maps: Sequence[LiveMap]
    updates: tuple[int, ...] | None
    pristine: graph.Pristine | None
    recipe: Recipe | None
    covered: Sequence[LiveFunction | None]
    drew: bool

    def belong_to(self, origin: Any, operation: int) -> None:
        """Is an operation of an iteration."""
        self.operation, self.origin = operation, origin

    def note_run(self, function: Any, serial: int) -> None:
        """Has run, and what it has left in the graph is about to be known."""
        self.serial = serial
        self.note_parameters(function)

    def note_parameters(self, function: Any) -> None:
        """Has run just now: parameters are those of this moment."""
        if self.updates is None:
            self.updates = owners.updates(function.inputs)

    def note_maps(self, maps: Sequence[LiveMap]) -> None:
        """Its backward reads these maps."""
        self.maps = maps

    def note_drawn(self) -> None:
        """Has drawn random numbers, or may have."""
        self.drew = True

    def keep_pristine(self, pristine: graph.Pristine) -> None:
        """Can run again as it is before its forward."""
        self.pristine = pristine

    def follow(self, recipe: Recipe, covered: Sequence[LiveFunction | None]) -> None:
        """Runs again as a recipe of the plan says.

        Args:
            recipe: How.
            covered: The other functions that this replay runs.
        """
        self.covered = covered
        self.recipe = recipe

    def forget_drawing_recipe(self) -> bool:
        """Forgets a recipe that would draw other numbers; whether that is so."""
        if not self.drew:
            return False
        if self.recipe is not None and self.recipe.attributes:
            return False  # a replay begins with its mask
        self.recipe = None
        return True


class LiveFunctions(graph.Entries[LiveFunction]):
    """Known functions, by identity."""

    __slots__ = ()

    def know(self, function: Any) -> LiveFunction:
        """What is known of a function; from now on something is."""
        entry = self.find(function)
        if entry is None:
            entry = LiveFunction(function, self._forget)
            entry.serial = entry.operation = -1
            entry.maps = entry.covered = ()
            entry.origin = entry.updates = entry.pristine = entry.recipe = None
            entry.drew = False
            self.add(function, entry)
        return entry

    def is_known(self, function: Any) -> bool:
        """Whether it is known what a function has left in the graph."""
        known = self.find(function)
        return known is not None and known.serial >= 0

    def is_updated(self, function: Any) -> bool:
        """Whether parameters of a function have been updated since its forward."""
        known = self.find(function)
        if known is None or known.updates is None:
            return False
        return known.updates != owners.updates(function.inputs)
