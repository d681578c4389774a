"""Temporary: the names that a device had before it had ports.

Clients take ports (``device.memory.used_bytes``). Nothing new belongs here; the file
goes when no client uses these names any more.
"""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.devices.copies import Copies
from chainer_hybridmem.devices.ports import Arrays, Clock, Memory, Offsets


class FlatNames:
    """Delegates each former name to its port."""

    memory: Memory
    arrays: Arrays
    copies: Copies
    clock: Clock
    offsets: Offsets

    @property
    def install(self) -> Any:
        return self.memory.install

    @property
    def uninstall(self) -> Any:
        return self.memory.uninstall

    @property
    def without_reclaim(self) -> Any:
        return self.memory.without_reclaim

    @property
    def adopt(self) -> Any:
        return self.memory.adopt

    @property
    def allocate(self) -> Any:
        return self.memory.allocate

    @property
    def forget_failure(self) -> Any:
        return self.memory.forget_failure

    @property
    def reset_peak(self) -> Any:
        return self.memory.reset_peak

    @property
    def reset_window(self) -> Any:
        return self.memory.reset_window

    @property
    def start_events(self) -> Any:
        return self.memory.start_events

    @property
    def take_events(self) -> Any:
        return self.memory.take_events

    @property
    def watch_pool(self) -> Any:
        return self.memory.watch_pool

    @property
    def pool_figures(self) -> Any:
        return self.memory.pool_figures

    @property
    def owns(self) -> Any:
        return self.arrays.owns

    @property
    def allocation_id(self) -> Any:
        return self.arrays.allocation_id

    @property
    def root(self) -> Any:
        return self.arrays.root

    @property
    def root_bytes(self) -> Any:
        return self.arrays.root_bytes

    @property
    def capture(self) -> Any:
        return self.arrays.capture

    @property
    def restore(self) -> Any:
        return self.arrays.restore

    @property
    def memory_at(self) -> Any:
        return self.arrays.memory_at

    @property
    def same_bits(self) -> Any:
        return self.arrays.same_bits

    @property
    def last_look(self) -> Any:
        return self.arrays.last_look

    @property
    def distinct_bytes(self) -> Any:
        return self.arrays.distinct_bytes

    @property
    def host_room(self) -> Any:
        return self.copies.host_room

    @property
    def reserve(self) -> Any:
        return self.copies.reserve

    @property
    def host_copy(self) -> Any:
        return self.copies.host_copy

    @property
    def same_contents(self) -> Any:
        return self.copies.same_contents

    @property
    def fill(self) -> Any:
        return self.copies.fill

    @property
    def swap_out(self) -> Any:
        return self.copies.swap_out

    @property
    def swap_in(self) -> Any:
        return self.copies.swap_in

    @property
    def wait(self) -> Any:
        return self.copies.wait

    @property
    def take_stall_seconds(self) -> Any:
        return self.copies.take_stall_seconds

    @property
    def mark(self) -> Any:
        return self.clock.mark

    @property
    def elapsed(self) -> Any:
        return self.clock.elapsed

    @property
    def synchronize(self) -> Any:
        return self.clock.synchronize

    @property
    def block_bytes(self) -> Any:
        return self.offsets.block_bytes

    @property
    def seek(self) -> Any:
        return self.offsets.seek

    @property
    def set_places(self) -> Any:
        return self.offsets.follow

    @property
    def release_places(self) -> Any:
        return self.offsets.release

    @property
    def place_figures(self) -> Any:
        return self.offsets.figures

    @property
    def limit_bytes(self) -> Any:
        return self.memory.limit_bytes

    @property
    def used_bytes(self) -> Any:
        return self.memory.used_bytes

    @property
    def peak_bytes(self) -> Any:
        return self.memory.peak_bytes

    @property
    def window_peak_bytes(self) -> Any:
        return self.memory.window_peak_bytes

    @property
    def other_bytes(self) -> Any:
        return self.memory.other_bytes

    @property
    def last_failure(self) -> Any:
        return self.memory.last_failure

    @property
    def reclaim_error(self) -> Any:
        return self.memory.reclaim_error

    @property
    def event_count(self) -> Any:
        return self.memory.event_count

    @property
    def host_bytes(self) -> Any:
        return self.copies.host_bytes

    @property
    def disk_bytes(self) -> Any:
        return self.copies.disk_bytes

    @property
    def host_refusal(self) -> Any:
        return self.copies.host_refusal

    @property
    def asynchronous(self) -> Any:
        return self.clock.asynchronous

    @property
    def alignment_bytes(self) -> Any:
        return self.offsets.alignment_bytes

    @property
    def moves_in(self) -> Any:
        return self.offsets.moves_in
