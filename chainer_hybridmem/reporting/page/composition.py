"""What memory is made of, at the highest moment of every operation under a plan.

The walk is that of :mod:`.records.validation`; every change of the
load is written down, so that the parts of a moment add up to its load to the byte.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, Plan
from chainer_hybridmem.planning.records.profile import Category, Profile, Recipe
from chainer_hybridmem.planning.records.splits import in_parts
from chainer_hybridmem.planning.records.validation import Walk

REPLAY, REST = 'replay', 'rest'
GROUPS = (
    'parameter',
    'optimizer state',
    'gradient',
    'input',
    REST,
    'other map',
    'workspace',
    REPLAY,
    FOR_REPLAYS,
    'recompute',
    'swap',
    'keep',
)
"""Kinds of memory, from the bottom of a picture to its top."""

_OF_CATEGORY = {category: category.value for category in Category} | {
    Category.FEATURE_MAP: 'other map'
}
Stay = tuple[int, int]


class Presence(NamedTuple):
    """A storage while it is there.

    Attributes:
        storage (int): Its id.
        group (str): One of :data:`GROUPS`.
        stays (list of tuple): First operation at whose highest moment it is there, and
            the one after the last.
    """

    storage: int
    group: str
    stays: list[Stay]


@dataclasses.dataclass(frozen=True)
class Composition:
    """The highest moment of each of n operations.

    Attributes:
        load_bytes (ndarray): (n,) load, as ``check_plan`` gives it.
        group_bytes (dict): (n,) bytes of each of :data:`GROUPS`; they add up to the
            load.
        replay_bytes (ndarray): (n,) of the group of replays, those of the replay that
            is under way: what it makes and its workspace.
        replayed (ndarray): (n,) forward operation that is replayed at that moment; -1
            for none.
        presences (list of Presence): Storages that are there at some highest moment.
    """

    load_bytes: np.ndarray
    group_bytes: dict[str, np.ndarray]
    replay_bytes: np.ndarray
    replayed: np.ndarray
    presences: list[Presence]


def compose(profile: Profile, plan: Plan) -> Composition:
    """Walks through a plan.

    Args:
        profile: The recorded iteration.
        plan: A plan for it.

    Raises:
        PlanError: If the plan cannot be executed.
    """
    journal = _Journal(in_parts(profile, plan.parts), plan)
    loads = journal.run()
    return _read(journal, np.array(loads, np.int64))


class _Change(NamedTuple):
    storage: int
    group: str
    gained: bool


class _Moment(NamedTuple):
    """A moment: changes before it, and the replay that is under way."""

    changes: int
    load_bytes: int
    replay_bytes: int
    replayed: int


class _Journal(Walk):
    """Writes down every change of the load, and each operation's highest moment."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        self.changes = [
            _Change(storage.id, self._group(storage.id), True)
            for storage in profile.storages
            if storage.allocated_at < 0
        ]
        self.moments: list[_Moment] = []
        self._highest = _Moment(0, -1, 0, -1)
        self._replaying = -1  # the forward operation that is replayed

    def _group(self, storage: int) -> str:
        item, entry = self.profile.storages[storage], self.entries.get(storage)
        if storage in self.passing:
            return REPLAY
        if storage in self.sources:
            return FOR_REPLAYS
        if entry is None or item.persistent:
            return _OF_CATEGORY[item.category]
        return entry.action.value

    def _gain(self, storage: int) -> None:
        super()._gain(storage)
        self.changes.append(_Change(storage, self._group(storage), True))

    def _lose(self, storage: int) -> None:
        super()._lose(storage)
        self.changes.append(_Change(storage, '', False))

    def _raised(self, highest: int, replay_bytes: int = 0) -> int:
        load = self.load + replay_bytes
        if load > self._highest.load_bytes:
            replayed = self._replaying if replay_bytes else -1
            self._highest = _Moment(len(self.changes), load, replay_bytes, replayed)
        return super()._raised(highest, replay_bytes)

    def _check_sources(self, recipe: Recipe, k: int) -> None:
        self._replaying = recipe.operation
        super()._check_sources(recipe, k)

    def _before(self, k: int) -> int:
        self._highest = _Moment(0, -1, 0, -1)
        return super()._before(k)

    def _during(self, k: int) -> int:
        highest = super()._during(k)
        self.moments.append(self._highest)
        return highest


def _read(journal: _Journal, loads: np.ndarray) -> Composition:
    """The journal as arrays: one pass over its changes."""
    profile, n = journal.profile, len(loads)
    ends = [moment.changes for moment in journal.moments]
    group_bytes: dict[str, np.ndarray] = {
        group: np.zeros(n + 1, np.int64) for group in GROUPS
    }
    presences: dict[tuple[int, str], Presence] = {}
    # A replay may make again what is there: its own goes first.
    present: dict[int, list[tuple[str, int]]] = {}

    def note(storage: int, group: str, first: int, last: int) -> None:
        if first == last:
            return
        nbytes = profile.storages[storage].nbytes
        group_bytes[group][first] += nbytes
        group_bytes[group][last] -= nbytes
        key = storage, group
        known = presences.setdefault(key, Presence(storage, group, []))
        known.stays.append((first, last))

    for number, change in enumerate(journal.changes):
        first = bisect.bisect_right(ends, number)
        if change.gained:
            present.setdefault(change.storage, []).append((change.group, first))
        else:
            group, since = present[change.storage].pop()
            note(change.storage, group, since, first)
    for storage, stack in present.items():
        for group, since in stack:
            note(storage, group, since, n)
    columns: dict[str, np.ndarray] = {
        group: np.cumsum(column)[:n] for group, column in group_bytes.items()
    }
    replays = np.array([moment.replay_bytes for moment in journal.moments], np.int64)
    columns[REPLAY] = columns[REPLAY] + replays
    columns[REST] = loads - sum(columns.values())
    return Composition(
        load_bytes=loads,
        group_bytes=columns,
        replay_bytes=replays,
        replayed=np.array([moment.replayed for moment in journal.moments], np.int64),
        presences=list(presences.values()),
    )
