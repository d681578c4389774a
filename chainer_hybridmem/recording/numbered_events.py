"""From raw events of allocations to events of storages with numbers.

Events of allocations that the session's own hooks have made, or that it parks, are
left out. Where there are too many small arrays, they are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.recording.small_arrays import count_together, find_small
from chainer_hybridmem.recording.steps import Recording


class _Kept(NamedTuple):
    """The events that count, with storages numbered by their first event.

    Attributes:
        events (ndarray): (m,) int64, as in a profile.
        allocations (ndarray): (n,) int64, id of each storage's allocation.
        nbytes (ndarray): (n,) int64, its size.
    """

    events: np.ndarray
    allocations: np.ndarray
    nbytes: np.ndarray


class NumberedEvents:
    """The events of a profile, and its storages by allocation.

    Args:
        recording (Recording): One iteration.

    Attributes:
        events (list of int): ``+(id + 1)`` per malloc, ``-(id + 1)`` per free of a
            storage.
        index (dict): Storage id by allocation id. What stands for many small
            allocations has ids below zero.
        sizes (dict): Bytes by allocation id.
        firsts (list of int): Where the events of each operation begin.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._raw = recording.raw_events
        self._kept = np.zeros(0, np.int64)  # positions of raw events that count
        self._moved = np.zeros(
            1, np.int64
        )  # where the events from each of these on are
        self.events: list[int] = []
        self.index: dict[int, int] = {}
        self.sizes = dict(recording.allocations.sizes)
        self._number(self._leave_out_ours())
        self.firsts = [
            self.find_position(recording.hooks[step.hook].end_event)
            for step in recording.steps
        ]
        self.firsts[0] = 0

    def find_position(self, raw_position: int) -> int:
        """Where the events from a raw one on are in the profile."""
        return int(self._moved[np.searchsorted(self._kept, raw_position)])

    def list_events(self, k: int) -> list[int]:
        """The events of operation k."""
        last = k + 1 == len(self.firsts)
        end = len(self.events) if last else self.firsts[k + 1]
        return self.events[self.firsts[k] : end]

    # -- which events count -----------------------------------------------------
    def _leave_out_ours(self) -> list[int]:
        """Finds the events that count; returns allocations that are always storages."""
        recording, raw = self._recording, self._raw
        owners, parked = recording.model.owners, recording.model.parked
        allocations, which = np.unique(np.abs(raw[:, 0]), return_inverse=True)
        which = which.reshape(-1)
        ours = np.isin(allocations, list(parked))
        ours[which[self._find_in_hooks() & (raw[:, 0] > 0)]] = True
        end = recording.hooks[-1].first_event
        self._kept = np.flatnonzero(~ours[which[:end]])
        self._moved = np.arange(len(self._kept) + 1)
        hidden = {*parked, *allocations[ours].tolist()}
        named = [a for a in self._list_named() if a in owners or a not in hidden]
        for event, nbytes in raw[np.isin(np.abs(raw[:, 0]), named)].tolist():
            self.sizes[abs(event)] = nbytes
        return named

    def _find_in_hooks(self) -> np.ndarray:
        """Which raw events have happened inside of the session's hooks."""
        hooks = self._recording.hooks
        return _find_inside(
            len(self._raw),
            [hook.first_event for hook in hooks],
            [hook.end_event for hook in hooks],
        )

    def _find_in_spans(self) -> np.ndarray:
        """Which kept events belong to functions that were tried in parts."""
        spans = self._recording.spans
        return _find_inside(
            len(self._kept),
            np.searchsorted(self._kept, [span.first_event for span in spans]),
            np.searchsorted(self._kept, [span.end_event for span in spans]),
        )

    def _list_named(self) -> list[int]:
        """Allocations that are storages even without an event."""
        steps = self._recording.steps
        read = [allocation for step in steps for allocation in step.reads]
        recorded = (*self._recording.allocations.slots, *read)
        return [*(a for a in recorded if a), *self._recording.model.owners]

    def _list_touched(self) -> Iterator[int]:
        """Allocations that recipes may name."""
        for step in self._recording.steps:
            yield from step.written
            yield from (allocation for allocation, _ in step.products)
            yield from (allocation for allocation, _ in step.input_nodes)

    # -- numbers ----------------------------------------------------------------
    def _number(self, named: list[int]) -> None:
        """Numbers storages in the order of their first event, then those without."""
        kept = _order_storages(self._raw[self._kept])
        small = self._find_small(kept, named)
        events, sizes = kept.events, list[int]()
        if small.any():
            events, sizes = self._merge_small(kept, small)
        apart = np.flatnonzero(~small)
        for allocation in (*kept.allocations[apart].tolist(), *named):
            self.index.setdefault(allocation, len(self.index))
        self.sizes.update(
            zip(
                kept.allocations[apart].tolist(),
                kept.nbytes[apart].tolist(),
                strict=True,
            )
        )
        numbers = np.full(len(small) + len(sizes), -1, np.int64)
        numbers[apart] = np.arange(len(apart))
        numbers[len(small) :] = len(self.index) + np.arange(len(sizes))
        for stand_in, size in enumerate(sizes):
            self.index[-1 - stand_in] = len(self.index)
            self.sizes[-1 - stand_in] = size
        number = numbers[np.abs(events) - 1] + 1
        self.events = np.where(events > 0, number, -number).tolist()

    def _find_small(self, kept: _Kept, named: list[int]) -> np.ndarray:
        """Which storages are counted together, (n,) bool."""
        if not self._recording.merges_small:
            return np.zeros(len(kept.nbytes), bool)
        known = [*named, *self._recording.model.kinds, *self._list_touched()]
        small = find_small(kept.nbytes, np.isin(kept.allocations, known))
        small[np.abs(kept.events[self._find_in_spans()]) - 1] = False
        return small

    def _merge_small(
        self, kept: _Kept, small: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Events with few large storages for many small ones, and their sizes."""
        cuts = [hook.end_event for hook in self._recording.hooks]
        cuts += [max(0, self._recording.graph_end)]
        merged = count_together(
            kept.events, kept.nbytes, small, np.searchsorted(self._kept, cuts)
        )
        self._moved = merged.moved
        return np.array(merged.events, np.int64), merged.sizes


def _order_storages(raw: np.ndarray) -> _Kept:
    allocations, first, which = np.unique(
        np.abs(raw[:, 0]), return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    ids = np.empty_like(order)
    ids[order] = np.arange(len(order))
    storage = ids[which.reshape(-1)]
    nbytes = np.zeros(len(order), np.int64)
    nbytes[storage] = raw[:, 1]
    events = np.where(raw[:, 0] > 0, storage + 1, -(storage + 1))
    return _Kept(events, allocations[order], nbytes)


def _find_inside(
    length: int, firsts: np.ndarray | list[int], ends: np.ndarray | list[int]
) -> np.ndarray:
    """Which positions lie inside of any range, (length,) bool."""
    changes = np.zeros(length + 1, np.int64)
    np.add.at(changes, firsts, 1)
    np.add.at(changes, ends, -1)
    return np.cumsum(changes)[:-1] > 0
