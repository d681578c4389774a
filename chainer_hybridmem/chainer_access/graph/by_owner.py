"""A table of what is known about objects, which forgets each one that dies."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar('Value')


class _Entry(weakref.ref[Any], Generic[Value]):
    """A weak reference to an object, and what is known about it."""

    __slots__ = ('key', 'value')

    key: int
    value: Value


class ByOwner(Generic[Value]):
    """Maps objects to values as long as the objects live.

    Functions may be equal to each other or unhashable, so the key is the identity. A
    look-up takes a third of the time that a ``WeakKeyDictionary`` needs.
    """

    __slots__ = ('_entries', '_forget')

    def __init__(self) -> None:
        entries: dict[int, _Entry[Value]] = {}

        def forget(entry: Any) -> None:
            key = entry.key
            if entries.get(key) is entry:
                del entries[key]

        self._entries = entries
        self._forget = forget

    def __setitem__(self, owner: Any, value: Value) -> None:
        key = id(owner)
        entry = self._entries.get(key)
        if entry is not None:
            entry.value = value
            return
        entry = _Entry(owner, self._forget)
        entry.key, entry.value = key, value
        self._entries[key] = entry  # complete: an interrupt may come anywhere

    def get(self, owner: Any) -> Value | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(owner))
        return None if entry is None else entry.value

    def __contains__(self, owner: Any) -> bool:
        return id(owner) in self._entries
