"""Names and storages of a page, each there once; columns hold their places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.records.profile import Category, Storage
from chainer_hybridmem.reporting.page.figures import shown_name


def storage_name(storage: Storage) -> str:
    """The name of a storage; what is no input and has no name gets that of its kind."""
    unnamed = storage.producer < 0 and storage.label == Category.INPUT.value
    return storage.category.value if unnamed else storage.label


class Tables:
    """What the columns of all runs refer to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._name_places: dict[str, int] = {}
        self._storages: list[Storage] = []
        self._storage_places: dict[tuple[int, int], int] = {}

    def place_name(self, text: str) -> int:
        """Finds the place of a text in the table of names, or adds it."""
        text = shown_name(text)
        place = self._name_places.setdefault(text, len(self.names))
        if place == len(self.names):
            self.names.append(text)
        return place

    def place_names(self, texts: Iterable[str]) -> list[int]:
        """The place of each name."""
        return [self.place_name(text) for text in texts]

    def place_storage(self, storage: Storage) -> int:
        """The place of a storage; one that is smaller in parts has two of them."""
        key = storage.id, storage.nbytes
        place = self._storage_places.setdefault(key, len(self._storages))
        if place == len(self._storages):
            self._storages.append(storage)
        return place

    def storage_columns(self) -> dict[str, list[Any]]:
        """The table of storages, once all of them have a place."""
        return {
            'id': [storage.id for storage in self._storages],
            'name': self.place_names(map(storage_name, self._storages)),
            'producer': [storage.producer for storage in self._storages],
            'bytes': [storage.nbytes for storage in self._storages],
            'category': [storage.category.value for storage in self._storages],
        }
