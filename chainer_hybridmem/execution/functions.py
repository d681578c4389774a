"""What is known of the functions of the running graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chainer_hybridmem.chainer_access.graph import Pristine
    from chainer_hybridmem.execution.live_map import LiveMap
    from chainer_hybridmem.records.profile import Recipe


class LiveFunction(weakref.ref[Any]):
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
        'covered', 'drew', 'key', 'maps', 'operation', 'origin', 'pristine', 'recipe',
        'serial', 'updates',
    )  # fmt: skip

    key: int
    serial: int
    operation: int
    origin: Any
    maps: Sequence[LiveMap]
    updates: tuple[int, ...] | None
    pristine: Pristine | None
    recipe: Recipe | None
    covered: Sequence[LiveFunction | None]
    drew: bool


class LiveFunctions:
    """Known functions, by identity: old-style ones may be equal or unhashable."""

    def __init__(self) -> None:
        entries: dict[int, LiveFunction] = {}

        def forget(entry: Any) -> None:
            key = entry.key
            if entries.get(key) is entry:
                del entries[key]

        self._entries = entries
        self._forget = forget

    def get(self, function: Any) -> LiveFunction | None:
        """What is known of a function, if anything is."""
        return self._entries.get(id(function))

    def know(self, function: Any) -> LiveFunction:
        """What is known of a function; from now on something is."""
        key = id(function)
        entry = self._entries.get(key)
        if entry is None:
            entry = LiveFunction(function, self._forget)
            entry.key, entry.serial, entry.operation = key, -1, -1
            entry.maps = entry.covered = ()
            entry.origin = entry.updates = entry.pristine = entry.recipe = None
            entry.drew = False
            self._entries[key] = entry  # whole: an interrupt may come anywhere
        return entry

    def __iter__(self) -> Iterator[LiveFunction]:
        return iter(list(self._entries.values()))
