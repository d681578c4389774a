"""A device: memory, copies and time of NumPy or CuPy, behind ports.

Everything above this room is written against :class:`Device` and its ports alone and
runs unchanged on the host device and on CUDA.
"""

from __future__ import annotations

import abc
from typing import Any

from chainer_hybridmem.training.devices.copies import Copies
from chainer_hybridmem.training.devices.ports import (
    Arrays,
    Checks,
    Clock,
    Memory,
    Offsets,
)
from chainer_hybridmem.training.devices.values import (
    Array,
    Completion,
    Digest,
    HostCopy,
    Mark,
    PlaceFigures,
    PoolFigures,
    Root,
    Transfer,
    View,
)

__all__ = [
    'Array',
    'Arrays',
    'Checks',
    'Clock',
    'Completion',
    'Copies',
    'Device',
    'Digest',
    'HostCopy',
    'Mark',
    'Memory',
    'Offsets',
    'PlaceFigures',
    'PoolFigures',
    'Root',
    'Transfer',
    'View',
]


class Device(abc.ABC):
    """The ports of one compute device; a client takes those that it needs.

    Attributes:
        kind (str): ``'host'`` or ``'cuda'``.
        memory (Memory): Counts and limits allocations.
        arrays (Arrays): How arrays look at allocations.
        copies (Copies): Host copies, and the transfers to and from them.
        clock (Clock): Time in the order of compute work.
        offsets (Offsets): The arena.
        late_checks (Checks or None): Compares memory without waiting for the
            device, where the host cannot look at it.
    """

    kind: str
    memory: Memory
    arrays: Arrays
    copies: Copies
    clock: Clock
    offsets: Offsets
    late_checks: Checks | None

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, kind, versions and link of the device, as plain values."""

    def close(self) -> None:
        """Ends copy threads or streams and gives all host copies back."""
        self.copies.close()
        self.offsets.close()
        self.memory.close()
