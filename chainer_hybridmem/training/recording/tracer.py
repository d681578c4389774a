"""The measured timeline of one guided iteration.

Marks are taken where the session's hooks begin and end and around what the executor
does; the copies know their own times. Nothing here keeps an array alive.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from chainer_hybridmem.planning.records.measured_timeline import (
    Measured,
    MemoryEvent,
    Sample,
)
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Interval
from chainer_hybridmem.training.devices.protocol import (
    Completion,
    Device,
    Mark,
    PoolFigures,
)
from chainer_hybridmem.training.execution.mover import Observer
from chainer_hybridmem.training.recording.hooks import Hooks

_LANES = {'swap-out': 'd2h', 'swap-in': 'h2d'}
LEAST_STALL_SECONDS = 2e-6  # shorter ones are the calls themselves


class Tracer(Hooks, Observer):
    """Traces one iteration.

    Args:
        device (Device): Tells time and load.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._copies: list[tuple[str, int, Completion]] = []
        self._stalls: list[tuple[str, int, Mark, Mark]] = []
        self._replays: list[tuple[int, Mark, Mark]] = []
        self._uses: list[tuple[int, int]] = []
        self._figures: list[tuple[Mark, PoolFigures, int]] = []
        self._taken: list[tuple[int, int]] = []  # events so far, storage swapped in
        device.memory.watch_pool(True)
        device.memory.reset_window()
        device.memory.start_events()
        self._open = True

    def close(self) -> list[tuple[int, int]]:
        """Ends the logs; returns the events."""
        if not self._open:
            return []
        self._open = False
        self.device.memory.watch_pool(False)
        return self.device.memory.take_events()

    # -- hooks ----------------------------------------------------------------
    def enter(self) -> None:
        """The session's hook begins."""
        super().enter()
        self._look(self.calls[-1].entered)

    def leave(self, starts_operation: bool = False) -> None:
        """The session's hook ends, perhaps the one before an operation."""
        super().leave(starts_operation)
        self._look(self.calls[-1].left)

    def _look(self, mark: Mark) -> None:
        device = self.device
        self._figures.append(
            (mark, device.memory.pool_figures(), device.memory.window_peak_bytes)
        )
        device.memory.reset_window()

    # -- reports of the executor ----------------------------------------------
    def copy(self, kind: str, storage: int, completion: Completion) -> None:
        """A copy has started."""
        self._copies.append((kind, storage, completion))
        if kind == 'swap-in':
            self._taken.append((self.device.memory.event_count, storage))

    def released(self) -> None:
        """All releases before an operation are done: its own load begins here."""
        self.device.memory.reset_window()

    def wait(self, kind: str, storage: int, action: Callable[[], None]) -> None:
        """Does something that may wait for a copy."""
        start = self.device.clock.mark()
        action()
        self._stalls.append((kind, storage, start, self.device.clock.mark()))

    def use(self, storage: int) -> None:
        """The next operation uses a map that was swapped in."""
        self._uses.append((storage, len(self.starts)))

    def replay(self, operation: int, action: Callable[[], None]) -> None:
        """Runs one replay."""
        start = self.device.clock.mark()
        action()
        self._replays.append((operation, start, self.device.clock.mark()))

    # -- result ---------------------------------------------------------------
    def build(self, profile: Profile, plan: Plan) -> Measured:
        """The timeline; to be called in the hook that ends the iteration.

        The device must have finished its work.

        Args:
            profile: The profile whose operations have run.
            plan: The plan that has been followed.
        """
        events = self.close()
        origin = self.calls[0].entered

        def after(mark: Mark) -> float:
            return self.device.clock.elapsed(origin, mark)

        hooks = self.operations()
        operations = [
            Interval(
                'compute',
                op.phase.value,
                op.label,
                after(self.calls[start].left),
                after(self.calls[end].entered),
            )
            for op, (start, end) in zip(profile.operations, hooks, strict=True)
        ]
        samples = self._samples(after)
        others = [*self._waits(profile, after), *self._copied(profile, origin)]
        for operation, start, end in self._replays:
            label = profile.operations[operation].label
            others.append(
                Interval('compute', 'recompute', label, after(start), after(end))
            )
        loads = self._loads(hooks)
        intervals = sorted(
            [*operations, *others], key=lambda i: (i.start_seconds, -i.end_seconds)
        )
        return Measured(
            planner=plan.planner,
            profile_fingerprint=plan.profile_fingerprint,
            memory_limit_bytes=self.device.memory.limit_bytes,
            device=self.device.describe(),
            total_seconds=operations[-1].end_seconds,
            load_bytes=tuple(loads),
            intervals=tuple(intervals),
            uses=tuple(self._uses),
            samples=tuple(samples),
            events=tuple(self._events(events, hooks)),
        )

    def _samples(self, after: Callable[[Mark], float]) -> list[Sample]:
        first = self._figures[0][1]
        peaks = [peak for _, _, peak in self._figures[1:]]
        peaks.append(self._figures[-1][1].occupied_bytes)
        return [
            Sample(
                after(mark),
                figures.occupied_bytes,
                figures.free_bytes,
                figures.pool_allocated_bytes - first.pool_allocated_bytes,
                figures.device_allocated_bytes - first.device_allocated_bytes,
                max(peak, figures.occupied_bytes),
            )
            for (mark, figures, _), peak in zip(self._figures, peaks, strict=True)
        ]

    def _loads(self, hooks: list[tuple[int, int]]) -> list[int]:
        """Highest load from the hook before an operation to the one before the next.

        Looks are at ``enter`` of hook 0, ``leave`` of hook 0, ``enter`` of hook 1 ...;
        the peak of a look is that since the one before.
        """
        peaks = [peak for _, _, peak in self._figures]
        return [max(peaks[2 * start + 1 : 2 * end + 1]) for start, end in hooks]

    def _waits(
        self, profile: Profile, after: Callable[[Mark], float]
    ) -> list[Interval]:
        waits = []
        for kind, storage, start, end in self._stalls:
            first, last = after(start), after(end)
            if last - first >= LEAST_STALL_SECONDS:
                label = f'waits for {kind} of {_label(profile, storage)}'
                waits.append(Interval('compute', 'stall', label, first, last, storage))
        return waits

    def _copied(self, profile: Profile, origin: Mark) -> list[Interval]:
        copies = []
        for kind, storage, completion in self._copies:
            first, last = completion.after(origin)
            label = _label(profile, storage)
            copies.append(Interval(_LANES[kind], kind, label, first, last, storage))
        return copies

    def _events(
        self, events: list[tuple[int, int]], hooks: list[tuple[int, int]]
    ) -> list[MemoryEvent]:
        """Events with their operation; what a hook does belongs to the next one."""
        first = [self.calls[start].first_event for start, _ in hooks]
        first[0] = 0
        storages: dict[int, int] = {}
        for position, storage in self._taken:
            while position and events[position - 1][0] < 0:
                position -= 1
            if position:
                storages[events[position - 1][0]] = storage
        return [
            MemoryEvent(
                block,
                nbytes,
                bisect.bisect_right(first, position) - 1,
                storages.get(abs(block), -1),
            )
            for position, (block, nbytes) in enumerate(events)
        ]


def _label(profile: Profile, storage: int) -> str:
    return profile.storages[storage].label if storage >= 0 else 'an unplanned map'
