"""Tables of what is known about objects, which forget each one that dies."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


class Entry(weakref.ref[Any]):
    """A weak reference to an object; subclasses say what is known about it.

    Attributes:
        key (int): The identity of the object.
    """

    __slots__ = ('key',)

    key: int


Known = TypeVar('Known', bound=Entry)
Value = TypeVar('Value')


class Entries(Generic[Known]):
    """Maps objects to entries as long as the objects live.

    Functions may be equal to each other or unhashable, so the key is the identity. An
    entry goes while its object dies, before another one can have that identity. A
    look-up takes a third of the time that a ``WeakKeyDictionary`` needs.

    Attributes:
        by_id (dict): Entries by identity; what is not there is not known.
    """

    __slots__ = '_pop', 'by_id'

    def __init__(self) -> None:
        self.by_id: dict[int, Known] = {}
        self._pop = self.by_id.pop

    def forgetting(self, owner: Any) -> Callable[[Any], object]:
        """The callback of an object's entry, for its death.

        It runs no code of Python's: Ctrl-C would fall into that and be lost. And it is
        one object, where a partial is two: entries are many, and the collector counts.
        """
        return types.MethodType(self._pop, id(owner))  # the entry is the default

    def find(self, owner: Any) -> Known | None:
        """What is known of an object, if anything is."""
        return self.by_id.get(id(owner))

    def owners(self) -> Iterator[Any]:
        """Yields the objects that live."""
        for entry in list(self.by_id.values()):
            owner = entry()
            if owner is not None:
                yield owner

    def add(self, owner: Any, entry: Known) -> None:
        """Takes in an entry that is complete: an interrupt may come anywhere."""
        entry.key = id(owner)
        self.by_id[entry.key] = entry


class _Valued(Entry, Generic[Value]):
    __slots__ = ('value',)

    value: Value


class ByOwner(Entries[_Valued[Value]]):
    """Maps objects to values as long as the objects live."""

    __slots__ = ()

    def __setitem__(self, owner: Any, value: Value) -> None:
        entry = self.find(owner)
        if entry is None:
            entry = _Valued(owner, self.forgetting(owner))
            entry.value = value
            self.add(owner, entry)
        else:
            entry.value = value

    def get(self, owner: Any) -> Value | None:
        """The value of an object; None if it has none."""
        entry = self.by_id.get(id(owner))
        return None if entry is None else entry.value

    def __contains__(self, owner: Any) -> bool:
        return id(owner) in self.by_id
