"""What finds something out about the iteration under way."""

from __future__ import annotations

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.execution import Executor
from chainer_hybridmem.pools.arena import Arena
from chainer_hybridmem.recording import Recorder
from chainer_hybridmem.recording.allocation_log import AllocationLog
from chainer_hybridmem.recording.lateness import Lateness
from chainer_hybridmem.recording.stopwatch import Stopwatch
from chainer_hybridmem.recording.tracer import Tracer


class Instruments:
    """The instruments of one session; for each iteration, those that are wanted.

    What follows a plan (all but the recorder) is worth nothing once an iteration has
    turned out to be another one: :meth:`stop_following`.

    Args:
        device (Device): Where iterations run.
        executor (Executor): What executes their plans.

    Attributes:
        recorder (Recorder or None): Makes a profile of the iteration.
        stopwatch (Stopwatch or None): Times its operations.
        tracer (Tracer or None): Traces operations and copies.
        lateness (Lateness or None): Finds swap-ins that come late.
        log (AllocationLog or None): Logs allocations for an arena.
        placing (bool): Whether allocations have planned places.
    """

    def __init__(self, device: Device, executor: Executor) -> None:
        self._device = device
        self._executor = executor
        self.recorder: Recorder | None = None
        self.stopwatch: Stopwatch | None = None
        self.tracer: Tracer | None = None
        self.lateness: Lateness | None = None
        self.log: AllocationLog | None = None
        self.placing = False

    # -- while an iteration runs ------------------------------------------------
    def enter(self) -> None:
        """What follows is the session's work, not the program's."""
        if self.recorder is not None:
            self.recorder.enter()
        elif self.stopwatch is not None:
            self.stopwatch.enter()
        if self.tracer is not None:
            self.tracer.enter()

    def leave(self, starts_operation: bool) -> None:
        """What follows is the program's work."""
        if self.tracer is not None:
            self.tracer.leave(starts_operation)
        if self.recorder is not None:
            self.recorder.leave()
        elif self.stopwatch is not None:
            self.stopwatch.leave(starts_operation)

    def start_operation(self, k: int) -> None:
        """What is allocated from here on belongs to operation k."""
        if self.placing:
            self._device.seek(k)
        elif self.log is not None:
            self.log.start_operation()

    # -- which ones -----------------------------------------------------------
    def record(self, trial: bool, draft: bool) -> Recorder:
        """Records the iteration; arguments as of :class:`.recording.Recorder`."""
        self.recorder = Recorder(self._device, self._executor, trial, draft)
        self.recorder.enter()
        return self.recorder

    def time(self) -> None:
        """Times the iteration's operations."""
        self.stopwatch = Stopwatch(self._device)
        self.stopwatch.enter()

    def trace(self) -> None:
        """Traces the iteration."""
        self.tracer = Tracer(self._device)
        self._executor.observe(self.tracer)
        self.tracer.enter()

    def find_late(self) -> None:
        """Finds out which swap-ins are late."""
        self.lateness = Lateness(self._device)
        self._executor.observe(self.lateness)

    def log_allocations(self) -> None:
        """Logs what the iteration allocates."""
        self.log = AllocationLog(self._device)

    def place(self, arena: Arena) -> bool:
        """Gives allocations their places; False if there is no memory for the arena."""
        self.placing = self._device.set_places(arena)
        return self.placing

    # -- at the end -----------------------------------------------------------
    def stop_placing(self) -> None:
        """Ends places and log."""
        if self.placing:
            self._device.seek(-1)
            self.placing = False
        if self.log is not None:
            self.log.finish()
            self.log = None

    def _stop_tracing(self) -> None:
        """Ends whatever observes the executor."""
        if self.tracer is not None:
            self.tracer.close()
        self.tracer = None
        self._executor.observe(None)

    def stop_following(self) -> None:
        """It is no iteration of the plan it has followed; a recording goes on."""
        self.stopwatch = self.lateness = None
        self._stop_tracing()
        self.stop_placing()

    def discard(self) -> None:
        """Nothing is found out about this iteration."""
        if self.recorder is not None:
            self.recorder.discard()
            self.recorder = None
        self.stop_following()
