"""The functions of the running graph: noted when they run, known when it matters.

Note: [noted functions]
    To look for what a function has left in the graph takes longer than the forward of a
    small one. So where nothing is to be done about that, a function is noted, by a weak
    reference: in a quiet iteration every one, under a plan those whose maps it leaves
    alone. Noted functions become known, and their maps are looked for, when memory is
    short all the same, when the iteration goes on with another plan or with none, and
    when an iteration that is not quiet begins while the graph still lives. They stay
    noted as long as they live: a graph that the program keeps can be evicted, too.

Note: [no backward]
    A program that only runs forward, as one that writes text, never ends an iteration.
    So references to functions that have died are let go of now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem.training.chainer_access import graph, owners

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.profile import Recipe
    from chainer_hybridmem.training.execution.live_map import LiveMap


Reference = weakref.ref[Any]
Noted = tuple[int, int, Reference]  # its operation, its serial number, the function
PURGED = 4096  # noted functions, from which on dead ones are looked for


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

    def find_covered(self) -> list[Any]:
        """The other functions that its replay runs; None for what has died."""
        return [None if other is None else other() for other in self.covered]

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
        entry = self.by_id.get(id(function))
        if entry is None:
            entry = LiveFunction(function, self.forgetting(function))
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

    def may_read(self, live: LiveMap) -> bool:
        """Whether a backward that has not run yet may read a map."""
        return any(
            known.serial in live.uses
            and (function := known()) is not None
            and graph.may_go_back(function)
            for known in list(self.by_id.values())  # collecting garbage forgets some
        )

    def is_updated(self, function: Any) -> bool:
        """Whether parameters of a function have been updated since its forward."""
        known = self.find(function)
        if known is None or known.updates is None:
            return False
        return known.updates != owners.updates(function.inputs)


class Ledger:
    """Functions that have run: first noted, then known; see [noted functions].

    Attributes:
        functions (LiveFunctions): Those that are known.
        serial (int): Of the function that has run last.
        forwards (dict): Operation of each function of the iteration under way, by its
            identity. What has died leaves its number here, and no living function has
            the same identity unless it has run later.
        noted (list): Functions of the iteration under way, in the order of their
            forward; their operation is -1 if a backward function has called them.
        nested (bool): Whether there are such.
        ended (list): Noted functions whose backward has come to its end.
        running (list): Those whose backward runs now, the inner one last.
        origin (object): The iteration under way.
    """

    __slots__ = (
        '_front', '_older', '_older_ended', '_purge_at', 'ended', 'forwards',
        'functions', 'nested', 'noted', 'origin', 'running', 'serial',
    )  # fmt: skip

    def __init__(self) -> None:
        self.functions = LiveFunctions()
        self.serial = 0
        self.forwards: dict[int, int] = {}
        self.origin: Any = None
        self._older: list[tuple[Any, Noted]] = []  # behind the iteration that ran it
        self._older_ended: list[Reference] = []
        self._forget()

    def _forget(self) -> None:
        self.noted: list[Noted] = []
        self.ended: list[Reference] = []
        self.running: list[Reference] = []
        self.nested = False
        self._front = 0  # of the noted functions, so many have been handed out
        self._purge_at = PURGED

    def begin(self, origin: Any) -> None:
        """Another iteration begins: what is noted belongs to older graphs.

        Args:
            origin: Runs what is noted from here on.
        """
        last, self.origin = self.origin, origin
        older = [one for one in self._older if one[1][2]() is not None]
        older.extend((last, one) for one in self.noted if one[2]() is not None)
        self._older = older
        ended = [*self._older_ended, *self.ended] if older else ()
        self._older_ended = [one for one in ended if one() is not None]
        self.forwards = {}
        self._forget()

    # -- what runs ------------------------------------------------------------
    def note(self, k: int, function: Any) -> Reference:
        """A function runs forward; nothing is done about what it leaves.

        Args:
            k: Its operation; -1 if a backward function has called it.
            function: The function.

        Returns:
            weakref.ref: To the function.
        """
        self.serial = serial = self.serial + 1
        reference = weakref.ref(function)
        self.noted.append((k, serial, reference))
        return reference

    def note_nested(self, function: Any) -> None:
        """A backward function calls a forward function."""
        self.nested = True
        self.note(-1, function)

    def number(self, known: LiveFunction, function: Any, serial: int = -1) -> None:
        """Gives a known function its place in the order of functions.

        Args:
            known: What is known of it.
            function: The function.
            serial: Its place; -1 if it has run after all others.
        """
        if serial < 0:
            serial = self.serial + 1
        self.serial = max(self.serial, serial)
        known.note_run(function, serial)

    def start_backward(self, function: Any) -> None:
        """The backward of a noted function begins."""
        self.running.append(weakref.ref(function))

    def end_backward(self, function: Any) -> None:
        """A backward function has ended, which was noted when it began, if it still is.

        Once all are known, none of them runs as a noted one.
        """
        if self.running and self.running[-1]() is function:
            self.ended.append(self.running.pop())

    def forget_dead(self) -> None:
        """Lets go of references to what has died, if there are many; [no backward]."""
        noted, front = self.noted, self._front
        if len(noted) < self._purge_at:
            return
        before, after = (
            [one for one in part if one[2]() is not None]
            for part in (noted[:front], noted[front:])
        )
        self._front = len(before)
        self.noted = before + after
        self._purge_at = max(PURGED, 2 * len(self.noted))

    # -- what is to be known --------------------------------------------------
    def take_ended(self, count: int) -> list[Any]:
        """Some functions whose backward has ended; they are handed out once."""
        ended, self.ended = self.ended[:count], self.ended[count:]
        return list(_alive(ended))

    def find_running(self) -> list[Any]:
        """Noted functions whose backward runs now."""
        return list(_alive(self.running))

    def take_next(self, count: int) -> list[tuple[int, int, Any]]:
        """The next functions with their numbers, in order; they are handed out once.

        The last one may still run: it is left.
        """
        start = self._front
        stop = self._front = max(start, min(start + count, len(self.noted) - 1))
        return _living(self.noted[start:stop])

    def take_older(
        self, count: int
    ) -> tuple[list[tuple[Any, int, int, Any]], list[Any]]:
        """Some living functions of older graphs, and which have run backward.

        They are forgotten here; those that have run first come first.

        Returns:
            Functions behind their iterations and their numbers; of all older graphs,
            those whose backward has ended.
        """
        older, self._older = self._older[:count], self._older[count:]
        ended = list(_alive(self._older_ended))
        if not self._older:
            self._older_ended = []
        found = ((last, k, serial, one()) for last, (k, serial, one) in older)
        return [entry for entry in found if entry[3] is not None], ended

    def take(self) -> tuple[list[tuple[int, int, Any]], list[Any], list[Any]]:
        """What is noted of the iteration under way; it is forgotten here.

        Returns:
            Functions with their numbers; those whose backward has ended; those whose
            backward runs.
        """
        noted, ended, running = self.noted, self.ended, self.running
        self._forget()
        return _living(noted), list(_alive(ended)), list(_alive(running))

    # -- questions ------------------------------------------------------------
    @property
    def older(self) -> int:
        """Functions of older graphs that have not been taken."""
        return len(self._older)

    @property
    def all_out(self) -> bool:
        """Whether everything but the last function has been handed out."""
        return not (self._older or self.ended) and self._front >= len(self.noted) - 1

    @property
    def all_dead(self) -> bool:
        """Whether none that is noted is in a graph any more."""
        return all(one() is None for _, _, one in self.noted)

    def find(self, function: Any) -> LiveFunction | None:
        """What is known of a function, also if the iteration under way has noted it.

        Returns:
            LiveFunction or None: Of one that was noted, which is known from now on but
            for its maps; None if it is of no operation.
        """
        known = self.functions.find(function)
        if known is not None:
            return known
        k = self.forwards.get(id(function), -1)
        if k < 0 or self.origin is None:
            return None
        known = self.functions.know(function)
        known.belong_to(self.origin, k)
        return known

    def find_current(self) -> Any:
        """The noted function under way; None if it has died."""
        if self.running:
            return self.running[-1]()
        return self.noted[-1][2]() if self.noted else None


def _living(noted: list[Noted]) -> list[tuple[int, int, Any]]:
    """Those that are alive, with their numbers."""
    found = ((k, serial, one()) for k, serial, one in noted)
    return [entry for entry in found if entry[2] is not None]


def _alive(references: list[Reference]) -> Iterator[Any]:
    for reference in references:
        function = reference()
        if function is not None:
            yield function
