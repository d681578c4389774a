"""The iteration without a plan, and the load that no plan decides about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from chainer_hybridmem.planning.records.peak import UNKNOWN, Load, Peak
from chainer_hybridmem.planning.records.profile import Category, Profile, Storage


def in_core_seconds(profile: Profile) -> float:
    """Of plain Chainer: neither a session nor a plan."""
    device = [op.device_seconds for op in profile.operations]
    return still_seconds(device, [op.host_seconds for op in profile.operations])


def still_seconds(
    device_seconds: Iterable[float], host_seconds: Iterable[float]
) -> float:
    """Seconds of an iteration in which nothing moves; see :func:`.lanes.time_lanes`.

    Args:
        device_seconds: Of each operation.
        host_seconds: To issue each of them.
    """
    now = issued = 0.0
    for device, host in zip(device_seconds, host_seconds, strict=True):
        now = max(now, issued) + device
        issued += host
    return max(now, issued)


def in_core_peak_bytes(profile: Profile) -> int:
    """Highest load of plain Chainer: feature maps stay until the graph dies."""
    return max(in_core_peaks(profile))


def in_core_peaks(profile: Profile) -> tuple[int, int]:
    """The same before the first backward function, and from it on."""
    load = profile.initial_bytes
    peaks = [load, 0]
    forward = profile.span_of(profile.first_backward - 1)[1]
    for position, storage, sign in _walk(profile):
        load += sign * storage.nbytes
        behind = position >= forward
        peaks[behind] = max(peaks[behind], load)
    return peaks[0], peaks[1]


def in_core_peak(profile: Profile) -> Peak:
    """What :func:`in_core_peak_bytes` is made of, by label and category."""
    load = Load()

    def count(storage: Storage, sign: int) -> None:
        part = storage.label, storage.category.value
        load.add([(sign * (storage.id + 1), storage.nbytes)], part)

    before = [storage for storage in profile.storages if storage.allocated_at < 0]
    for storage in before:
        count(storage, 1)
    unknown = profile.initial_bytes - sum(storage.nbytes for storage in before)
    load.add([(len(profile.storages) + 1, unknown)], UNKNOWN)
    for _, storage, sign in _walk(profile):
        count(storage, sign)
    return load.peak


def _walk(profile: Profile) -> Iterator[tuple[int, Storage, int]]:
    """Positions of mallocs (1) and frees (-1) of plain Chainer, in their order.

    What the recording has swapped is freed where the graph dies.
    """
    held = held_by_graph(profile)
    storages, end = profile.storages, profile.graph_end_event
    waiting: list[Storage] = []
    for position, event in enumerate(profile.events):
        if position == end:
            for storage in waiting:
                yield position, storage, -1
        if event > 0:
            yield position, storages[event - 1], 1
            continue
        storage = storages[-event - 1]
        if position < end and storage.id in held:
            waiting.append(storage)
        else:
            yield position, storage, -1


def fixed_load(
    profile: Profile, planned: set[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load of what a plan does not decide about, per operation.

    A planned map counts as fixed from its malloc to the end of the operation
    that produces it; from then on the plan decides. What the recording has
    swapped but the plan may not stays until the graph dies. What crosses
    iterations is never part of it.

    Returns:
        tuple of ndarray: Before each operation, highest while it runs, and the event
        that makes it so high; -1 if none does.
    """
    operations, events = profile.operations, profile.events
    held = held_by_graph(profile) - planned
    waiting = 0
    starts = np.zeros(len(operations), np.int64)
    peaks = np.zeros(len(operations), np.int64)
    highest = np.full(len(operations), -1, np.int64)
    storages = profile.storages
    load = profile.initial_bytes - sum(
        storages[s].nbytes for s in planned if storages[s].persistent
    )
    for op in operations:
        starts[op.index] = peak = load
        born = 0
        for position in range(*profile.span_of(op.index)):
            if position == profile.graph_end_event:
                load -= waiting
                waiting = 0
            event = events[position]
            storage = storages[abs(event) - 1]
            if storage.id in planned:
                born += storage.nbytes if event > 0 else 0
                load += storage.nbytes if event > 0 else 0
            elif (
                event < 0 and storage.id in held and position < profile.graph_end_event
            ):
                waiting += storage.nbytes
            else:
                load += storage.nbytes if event > 0 else -storage.nbytes
            if load > peak:
                peak, highest[op.index] = load, position
        peaks[op.index] = peak
        load -= born
    return starts, peaks, highest


def last_forward(storage: Storage) -> int:
    """The last operation of forward that makes or reads a storage."""
    return max((storage.producer, *storage.forward_uses))


def between_phases(storage: Storage, b0: int) -> bool:
    """Whether forward has finished with a map before backward begins."""
    return last_forward(storage) < b0 <= min(storage.backward_uses)


def held_by_graph(profile: Profile) -> set[int]:
    """Maps that the recording has swapped: else the graph holds them to its end."""
    b0 = profile.first_backward
    return {
        s.id
        for s in profile.storages
        if s.category is Category.FEATURE_MAP
        and s.producer >= 0
        and s.backward_uses
        and between_phases(s, b0)
    }
