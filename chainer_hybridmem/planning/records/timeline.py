"""Types only: when everything runs in one iteration, as simulated."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.units import format_bytes, format_count, format_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Something that occupies a lane.

    Attributes:
        lane (str): ``'compute'``, ``'d2h'`` or ``'h2d'``.
        kind (str): ``'forward'``, ``'backward'``, ``'all-reduce'``,
            ``'update'``, ``'recompute'``, ``'swap-out'``, ``'swap-in'`` or
            ``'stall'``.
        label (str): What; for a stall its cause.
        start_seconds (float): From the start of the iteration.
        end_seconds (float): End, exclusive.
        storage (int): Feature map copied or waited for; -1 otherwise.
    """

    lane: str
    kind: str
    label: str
    start_seconds: float
    end_seconds: float
    storage: int = -1


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One simulated iteration.

    Attributes:
        total_seconds (float): Time of the iteration.
        peak_bytes (int): Highest load.
        stall_seconds (float): Time compute waits for copies.
        host_stall_seconds (float): Time compute waits for the host to issue work.
        recompute_seconds (float): Time spent on replays.
        load_bytes (tuple of int): Highest load while each operation runs,
            what runs before it included.
        intervals (tuple of Interval): All lanes, by start.
    """

    total_seconds: float
    peak_bytes: int
    stall_seconds: float
    host_stall_seconds: float
    recompute_seconds: float
    load_bytes: tuple[int, ...]
    intervals: tuple[Interval, ...]

    def __repr__(self) -> str:
        return (
            f'<Timeline: {format_count(len(self.load_bytes), "operation")}, '
            f'{format_seconds(self.total_seconds)}, peak '
            f'{format_bytes(self.peak_bytes)}>'
        )
