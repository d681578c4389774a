"""PyTorch's snapshots of memory (``torch.cuda.memory._dump_snapshot``): layouts only.

A snapshot has the mallocs and frees that the allocator has kept, and no operations. Its
profile has one operation with these events, on the device that has the most of them: it
is for ``hybridmem layout``, and a planner finds nothing to decide. A block is free
where ``free_completed`` says so. Sizes are those that were asked for. What is freed
without a malloc, or stays to the end without one, was there before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.lab.importing.pickles import read_pickle
from chainer_hybridmem.planning.records.profile import (
    Category,
    Link,
    Operation,
    Phase,
    Profile,
    Storage,
)
from chainer_hybridmem.planning.records.profile_file import check_profile

_ALLOCATED = ('active_allocated', 'active_pending_free')


def read_snapshot(data: bytes, link: Link) -> Profile:
    """The mallocs and frees of a snapshot.

    Args:
        data: The pickle, in which nothing is named.
        link: The path to host memory, which does not matter here.

    Raises:
        FormatError: If it is no such snapshot.
    """
    snapshot = read_pickle(data, {})
    with files.reading('snapshot'):
        traces = snapshot['device_traces']
        device = max(range(len(traces)), key=lambda i: len(traces[i]))
        log = _BufferLog()
        for entry in traces[device]:
            log.take(entry)
        if not log.events:
            raise FormatError(
                'The snapshot has no mallocs; record its history before: '
                'torch.cuda.memory._record_memory_history().'
            )
        for segment in snapshot['segments']:
            if int(segment.get('device', 0)) == device:
                log.see(segment)
        return log.profile(link)


class _BufferLog:
    """Buffers and events so far."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._sizes: list[int] = []
        self._live: dict[int, int] = {}  # buffer by address
        self._before: set[int] = set()

    def take(self, entry: Mapping[str, Any]) -> None:
        """One entry of the trace."""
        action = entry['action']
        if action not in ('alloc', 'free_completed'):
            return
        address, nbytes = int(entry['addr']), int(entry['size'])
        if action == 'alloc':
            self._live[address] = self._new(nbytes)
            self.events.append(len(self._sizes))
            return
        buffer = self._live.pop(address, -1)
        if buffer < 0:
            buffer = self._new(nbytes)
            self._before.add(buffer)
        self.events.append(-(buffer + 1))

    def see(self, segment: Mapping[str, Any]) -> None:
        """What a segment has at the end, and no malloc tells of."""
        address = int(segment.get('address', 0))
        for block in segment['blocks']:
            place = int(block.get('address', address))
            address = place + int(block['size'])
            if block['state'] in _ALLOCATED and place not in self._live:
                nbytes = int(block.get('requested_size', block['size']))
                self._before.add(self._new(nbytes))

    def _new(self, nbytes: int) -> int:
        self._sizes.append(nbytes)
        return len(self._sizes) - 1

    def profile(self, link: Link) -> Profile:
        """One operation with all events."""
        allocated = {e - 1: i for i, e in enumerate(self.events) if e > 0}
        freed = {-e - 1: i for i, e in enumerate(self.events) if e < 0}
        storages = tuple(
            Storage(
                id=b,
                nbytes=nbytes,
                category=Category.WORKSPACE,
                label='/snapshot',
                producer=0 if b in allocated else -1,
                allocated_at=allocated.get(b, -1),
                freed_at=freed.get(b, -1),
            )
            for b, nbytes in enumerate(self._sizes)
        )
        first = (0, '/snapshot', Phase.FORWARD, 0.0, 0.0, (), (), 0, (), -1, 0)
        end = len(self.events)
        update = (1, 'update', Phase.UPDATE, 0.0, 0.0, (), (), 0, (), -1, end)
        profile = Profile(
            operations=(Operation(*first), Operation(*update)),
            storages=storages,
            events=tuple(self.events),
            recipes=(),
            initial_bytes=sum(self._sizes[b] for b in self._before),
            graph_end_event=end,
            link=link,
            device={'kind': 'import', 'name': "as in PyTorch's snapshot"},
        )
        check_profile(profile)
        return profile
