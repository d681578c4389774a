"""Mallocs and frees of one iteration as a snapshot for pytorch.org/memory_viz.

The format is that of ``torch.cuda.memory._snapshot()``, pickled; what is written here
is what the viewer (``torch/utils/viz/MemoryViz.js``) reads of it. Order, sizes,
operations and categories are those of the iteration.

Note: [addresses]
    Neither a profile nor a measured timeline knows addresses, and the viewer needs
    some. They are made up: SmartPool's layout in one segment, from address 0x100000000
    on. So the timeline of active memory is right, and the picture of the segment shows
    one possible layout, not the one that was.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable
from typing import Any

from chainer_hybridmem.planning.layouts import from_log, smartpool
from chainer_hybridmem.planning.records.measured_timeline import OPERATIONS, Measured
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Category, Profile
from chainer_hybridmem.planning.records.splits import in_parts
from chainer_hybridmem.planning.records.validation import Walk

PROTOCOL = 4  # the viewer reads 2 to 4
FIRST_ADDRESS = 0x100000000
UNKNOWN = 'unknown'  # the viewer asks for this category where there are any
_UNIT_BYTES = 512

Frames = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One malloc or free.

    Attributes:
        block (int): ``+id`` for a malloc, ``-id`` for a free.
        nbytes (int): Size.
        frames (list of dict): What the viewer shows as the stack: ``filename``,
            ``line``, ``name``.
        category (str): Colour.
    """

    block: int
    nbytes: int
    frames: Frames
    category: str = UNKNOWN


def dumps(snapshot: dict[str, Any]) -> bytes:
    """The snapshot as the file that the viewer reads."""
    return pickle.dumps(snapshot, protocol=PROTOCOL)


def planned_snapshot(profile: Profile, plan: Plan) -> dict[str, Any]:
    """What a plan is predicted to do with memory.

    Args:
        profile: The recorded iteration.
        plan: A plan for it.

    Returns:
        dict: The snapshot.

    Raises:
        PlanError: If the plan cannot be executed.
    """
    log = _WalkLog(in_parts(profile, plan.parts), plan)
    log.run()
    return make_snapshot(log.events, profile.initial_bytes)


def measured_snapshot(measured: Measured, profile: Profile) -> dict[str, Any]:
    """What a measured iteration did with memory.

    Args:
        measured: The timeline.
        profile: Says what storages are called.

    Returns:
        dict: The snapshot.
    """
    labels = [i.label for i in measured.intervals if i.kind in OPERATIONS]
    events = []
    for event in measured.events:
        frames = [_frame('operation', event.operation, labels[event.operation])]
        category = UNKNOWN
        if event.storage >= 0:
            category = 'swapped in'
            label = f'storage {event.storage}'
            if event.storage < len(profile.storages):
                label = profile.storages[event.storage].label
            frames.append(_frame(category, event.storage, label))
        events.append(Event(event.block, event.nbytes, frames, category))
    first = measured.samples[0].occupied_bytes if measured.samples else 0
    return make_snapshot(events, first)


def make_snapshot(events: Iterable[Event], initial_bytes: int) -> dict[str, Any]:
    """A snapshot at the end of the events.

    Args:
        events: In host issue order. Blocks that are freed without a malloc were there
            before.
        initial_bytes: Load before the first event, those blocks included.

    Returns:
        dict: The snapshot.
    """
    events = list(events)
    made = {event.block for event in events if event.block > 0}
    before = [e for e in events if e.block < 0 and -e.block not in made]
    rest = initial_bytes - sum(event.nbytes for event in before)
    blocks = {-event.block: event.nbytes for event in before}
    if rest > 0:
        blocks[0] = rest
    frames = [_frame('before', 0, 'there before the iteration')]
    live = {block: Event(block, nbytes, frames) for block, nbytes in blocks.items()}
    allocated = [*live.values(), *(event for event in events if event.block > 0)]
    log = [(event.block, max(1, event.nbytes)) for event in allocated[: len(live)]]
    log += [(abs(e.block), max(1, e.nbytes) if e.block > 0 else -1) for e in events]
    layout = smartpool(from_log(log), _UNIT_BYTES)
    addresses = {
        event.block: FIRST_ADDRESS + offset
        for event, offset in zip(allocated, layout.offsets, strict=True)
    }
    trace = []
    for event in events:
        address = addresses[abs(event.block)]
        if event.block > 0:
            live[event.block] = event
            trace.append(_entry('alloc', address, event, event.category))
            continue
        category = live.pop(-event.block).category
        for action in ('free_requested', 'free_completed'):
            trace.append(_entry(action, address, event, category))
    left = [(addresses[block], event) for block, event in live.items()]
    segment = _segment(layout.footprint_bytes, left)
    whole = Event(0, segment['total_size'], frames)
    head = _entry('segment_alloc', FIRST_ADDRESS, whole, UNKNOWN)
    end = Event(0, 0, [_frame('after', 0, 'the end of the iteration')])
    tail = _entry('snapshot', 0, end, UNKNOWN)
    return {'segments': [segment], 'device_traces': [[head, *trace, tail]]}


def _entry(action: str, address: int, event: Event, category: str) -> dict[str, Any]:
    return {
        'action': action,
        'addr': address,
        'size': event.nbytes,
        'stream': 0,
        'timestamp': None,  # without a time, the viewer is to show none
        'frames': event.frames,
        'category': category,
    }


def _segment(total_bytes: int, live: list[tuple[int, Event]]) -> dict[str, Any]:
    """The one segment; its blocks lie side by side, as the viewer adds up sizes."""
    blocks: list[dict[str, Any]] = []
    position = FIRST_ADDRESS

    def hole(end: int) -> None:
        if end > position:
            blocks.append(_block(position, end - position, 0, 'inactive', []))

    for address, event in sorted(live, key=lambda item: item[0]):
        hole(address)
        size = max(1, -(-event.nbytes // _UNIT_BYTES)) * _UNIT_BYTES
        blocks.append(
            _block(address, size, event.nbytes, 'active_allocated', event.frames)
        )
        position = address + size
    hole(FIRST_ADDRESS + total_bytes)
    active = sum(b['requested_size'] for b in blocks)
    return {
        'device': 0,
        'address': FIRST_ADDRESS,
        'total_size': total_bytes,
        'allocated_size': active,
        'active_size': active,
        'requested_size': active,
        'stream': 0,
        'segment_type': 'large',
        'segment_pool_id': (0, 0),  # torch's default pool
        'frames': [],
        'blocks': blocks,
    }


def _block(
    address: int, size: int, requested: int, state: str, frames: Frames
) -> dict[str, Any]:
    return {
        'address': address,
        'size': size,
        'requested_size': requested,
        'state': state,
        'frames': frames,
    }


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {'filename': filename, 'line': line, 'name': name}


class _WalkLog(Walk):
    """Writes down what the checker of plans walks through.

    A copy that a plan brings back is a block of its own.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        super().__init__(profile, plan)
        self.events: list[Event] = []
        self._blocks: dict[int, list[int]] = {}  # by storage; a replay has its own
        self._next = 1
        self._position = 0
        self._why = ''

    def _emit(self, storage: int, malloc: bool) -> None:
        item = self.profile.storages[storage]
        op = self.profile.operations[self._position]
        frames = [
            _frame('operation', op.index, op.label),
            _frame(item.category.value, storage, item.label),
        ]
        why = self._why if malloc or self._why != 'swapped in' else 'released'
        if why:
            frames.insert(1, _frame('plan', op.index, why))
        if malloc:
            block = self._next
            self._blocks.setdefault(storage, []).append(block)
            self._next += 1
        elif self._blocks.get(storage):
            block = -self._blocks[storage].pop()
        else:  # it was there before
            block = -self._next
            self._next += 1
        workspace = item.category is Category.WORKSPACE
        category = UNKNOWN if workspace else item.category.value
        if self._why and malloc:
            category = self._why
        self.events.append(Event(block, item.nbytes, frames, category))

    def _gain(self, storage: int) -> None:
        super()._gain(storage)
        self._emit(storage, True)

    def _lose(self, storage: int) -> None:
        super()._lose(storage)
        self._emit(storage, False)

    def _before(self, k: int) -> int:
        self._position, self._why = k, 'swapped in'
        return super()._before(k)

    def _replay(self, k: int) -> int:
        self._why = 'recomputed'
        highest = super()._replay(k)
        self._why = ''
        return highest
