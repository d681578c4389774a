"""Memory of a forward pass without backward: blobs, and how long they live.

A *blob* is an array that a function of the network has made, or the batch: what Caffe
allocates for a network and keeps. Two names for one allocation (a reshape, the parts of
a split, an output that is its input) are one blob. Parameters are no blobs; they stay
where they are and are left out here, as they are from the traces.

Memory multiloading (Xiong's Caffe, 2016) lets blobs that are never needed together
share memory. A dry run says when each is written first and read last; a layout then
gives it a place. Functions that write over their input make one blob of two, and
chains of them one of many: the classes of a union-find (Tarjan 1975).
"""

from __future__ import annotations

import bisect
import enum

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.layouts.trace import Trace
from chainer_hybridmem.planning.records.profile import (
    Category,
    Operation,
    Phase,
    Profile,
    Slot,
    SlotKind,
    Storage,
)

IN_PLACE = frozenset(
    {'ReLU', 'LeakyReLU', 'ClippedReLU', 'ELU', 'Sigmoid', 'HardSigmoid', 'Tanh'}
    | {'Softplus', 'FixedBatchNormalization', 'Dropout'}
)
"""Functions that Caffe's usual networks run in place: one array in, one like it out."""


class Lifetimes(enum.Enum):
    """How long a blob is taken to live.

    ``RUN``: as the program has held it: until its last reference is gone.
    ``LAST_USE``: until the last function has read it.
    ``IN_PLACE``: likewise, and functions of :data:`IN_PLACE` write over an input that
    no function reads later.

    What the program has still held at the end lives until then in any case.
    """

    RUN = 'run'
    LAST_USE = 'last-use'
    IN_PLACE = 'in-place'


class DisjointSets:
    """Union-find over the numbers from 0 to n - 1."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, item: int) -> int:
        """Finds the item that stands for the set of this one."""
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def union(self, left: int, right: int) -> None:
        """Makes one set of two; that of ``left`` stands for it."""
        self._parent[self.find(right)] = self.find(left)


# When a buffer goes: index of a recorded event, and whether before or at that event.
_Moment = tuple[float, int]
_BEFORE, _AT = 0, 1
_STAYS = (float('inf'), _AT)


def forward_trace(
    profile: Profile, lifetimes: Lifetimes, blobs_only: bool = False
) -> Trace:
    """One forward pass without backward, parameters left out.

    What is no blob (workspaces, arrays made between two functions) keeps its recorded
    events.

    Args:
        profile: Of forward operations only, see
            :func:`chainer_hybridmem.record_inference`.
        lifetimes: Of blobs.
        blobs_only: Whether workspaces are left out, too.

    Raises:
        OptionError: If the profile is one of training, or these are no lifetimes.
    """
    return _Forward(profile, lifetimes).trace(blobs_only)


def blob_bytes(profile: Profile, in_place: bool = False) -> int:
    """The sum of all blobs.

    Args:
        profile: As in :func:`forward_trace`.
        in_place: Whether blobs that would be written over count once.

    Raises:
        OptionError: If the profile is one of training.
    """
    lifetimes = Lifetimes.IN_PLACE if in_place else Lifetimes.LAST_USE
    return sum(_Forward(profile, lifetimes).trace(blobs_only=True).sizes)


def parameter_bytes(profile: Profile) -> int:
    """What stays beside a forward pass: parameters, statistics, other arrays it has."""
    return sum(s.nbytes for s in profile.storages if s.category is Category.PARAMETER)


def is_blob(storage: Storage) -> bool:
    """Whether a function has made it, or it is part of the batch."""
    if storage.category is Category.INPUT:
        return True
    made = any(slot.kind is SlotKind.OUTPUT for slot in storage.slots)
    return made and storage.category is not Category.PARAMETER


class _Forward:
    """Lifetimes of the buffers of one forward pass."""

    def __init__(self, profile: Profile, lifetimes: Lifetimes) -> None:
        if not isinstance(lifetimes, Lifetimes):
            raise OptionError(
                f'lifetimes is {lifetimes!r}; a member of layouts.Lifetimes is needed.'
            )
        if any(op.phase is not Phase.FORWARD for op in profile.operations):
            raise OptionError(
                'The profile is one of training; a forward pass without backward is '
                'recorded with record_inference(), or on the command line with '
                'hybridmem inference.'
            )
        self.profile = profile
        self.lifetimes = lifetimes
        self.last_use = [max((s.producer, *s.forward_uses)) for s in profile.storages]
        self.sets = DisjointSets(len(profile.storages))
        self.end = list(self.last_use)  # of the whole class, where it is looked up
        if lifetimes is Lifetimes.IN_PLACE:
            for op in profile.operations:
                self._write_over(op)

    def _write_over(self, op: Operation) -> None:
        """Joins output and input of a function that may run in place."""
        if op.function not in IN_PLACE or not op.reads:
            return
        storages = self.profile.storages
        slot = Slot(op.index, SlotKind.OUTPUT, 0)
        source = storages[op.reads[0]]
        made = [s for s in storages if s.producer == op.index and slot in s.slots]
        blob = self.sets.find(source.id)
        if not made or not is_blob(source) or source.producer < 0:
            return
        if source.freed_at < 0 or self.end[blob] != op.index:
            return  # a function reads the input later
        if made[0].nbytes == source.nbytes:
            self.sets.union(blob, made[0].id)
            self.end[blob] = self.last_use[made[0].id]

    def trace(self, blobs_only: bool) -> Trace:
        """The events of all buffers, one for each class."""
        members: dict[int, list[Storage]] = {}
        for storage in self.profile.storages:
            if storage.category is Category.PARAMETER:
                continue
            if is_blob(storage) or not blobs_only:
                members.setdefault(self.sets.find(storage.id), []).append(storage)
        steps: list[tuple[_Moment, int]] = []
        for buffer, storages in enumerate(members.values(), 1):
            malloc = min(storage.allocated_at for storage in storages)
            if malloc >= 0:
                steps.append(((malloc, _AT), buffer))
            free = max(map(self._free, storages))
            if free < _STAYS:
                steps.append((free, -buffer))
        steps.sort()
        moments = [moment for moment, _ in steps]
        firsts = [op.first_event for op in self.profile.operations]
        return Trace(
            sizes=tuple(storages[0].nbytes for storages in members.values()),
            events=tuple(event for _, event in steps),
            names=tuple(f's{storages[0].id}' for storages in members.values()),
            operation_starts=tuple(
                bisect.bisect_left(moments, (first, _AT)) for first in firsts
            ),
        )

    def _free(self, storage: Storage) -> _Moment:
        """When it goes, if it goes."""
        recorded = _STAYS if storage.freed_at < 0 else (storage.freed_at, _AT)
        if self.lifetimes is Lifetimes.RUN or not is_blob(storage):
            return recorded
        if recorded == _STAYS and storage.producer >= 0:
            return _STAYS
        after, operations = self.last_use[storage.id] + 1, self.profile.operations
        end = len(self.profile.events)
        if after < len(operations):
            end = operations[after].first_event
        return min(recorded, (end, _BEFORE))
