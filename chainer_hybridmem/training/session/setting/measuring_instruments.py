"""What finds something out about the iteration under way."""

from __future__ import annotations

from chainer_hybridmem.planning.layouts.arena import Arena
from chainer_hybridmem.planning.records.measured_timeline import Measured
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution import Executor
from chainer_hybridmem.training.execution.verifier import (
    Verdict,
    Verification,
    Verifier,
)
from chainer_hybridmem.training.recording import Detail, Recorder
from chainer_hybridmem.training.recording.allocation_log import AllocationLog
from chainer_hybridmem.training.recording.hooks import Hooks
from chainer_hybridmem.training.recording.stopwatch import Stopwatch, measure_hook
from chainer_hybridmem.training.recording.tracer import Tracer
from chainer_hybridmem.training.session.setting.planning_time import outside_limit


class Instruments:
    """The instruments of one session; for each iteration, those that are wanted.

    What follows a plan (all but the recorder) is worth nothing once an iteration has
    turned out to be another one: :meth:`stop_following`.

    Args:
        device (Device): Where iterations run.
        executor (Executor): What executes their plans.
        verification (Verification): Makes verifiers.

    Attributes:
        recorder (Recorder or None): Makes a profile of the iteration.
        stopwatch (Stopwatch or None): Times its operations.
        tracer (Tracer or None): Traces operations and copies.
        log (AllocationLog or None): Logs allocations for an arena.
        placing (bool): Whether allocations have planned offsets.
        settled (bool): Whether those of the iteration before had them, too.
        active (bool): Whether one of the first three is in use.
        trace_requested (bool): Whether the next guided iteration is to be traced.
        timeline (Measured or None): Of the iteration traced last.
    """

    def __init__(
        self, device: Device, executor: Executor, verification: Verification
    ) -> None:
        self._device = device
        self._executor = executor
        self._verification = verification
        self.recorder: Recorder | None = None
        self.stopwatch: Stopwatch | None = None
        self.tracer: Tracer | None = None
        self.log: AllocationLog | None = None
        self.placing = self.settled = self.active = False
        self.trace_requested = False
        self.timeline: Measured | None = None
        self._verifier: Verifier | None = None

    # -- while an iteration runs ------------------------------------------------
    @property
    def _hooks(self) -> Hooks | None:
        """The one that notes hooks; no iteration has two."""
        return self.recorder or self.stopwatch or self.tracer

    def enter(self) -> None:
        """What follows is the session's work, not the program's."""
        if (hooks := self._hooks) is not None:
            hooks.enter()

    def leave(self, starts_operation: bool) -> None:
        """What follows is the program's work."""
        if (hooks := self._hooks) is not None:
            hooks.leave(starts_operation)

    def start_after_backward(self, exchanged_bytes: int | None) -> None:
        """What follows comes after backward; see :class:`.Hooks`."""
        if (hooks := self._hooks) is not None:
            hooks.start_after_backward(exchanged_bytes)

    def end_times(self) -> None:
        """What follows is no operation's; see :class:`.Hooks`."""
        if (hooks := self._hooks) is not None:
            hooks.end_times()

    # -- which ones -----------------------------------------------------------
    def record(self, trial: bool, draft: bool, detail: Detail) -> Recorder:
        """Records the iteration; arguments as of :class:`.recording.Recorder`."""
        self.recorder = Recorder(self._device, self._executor, trial, draft, detail)
        self.active = True
        self.recorder.enter()
        return self.recorder

    def time(self) -> None:
        """Times the iteration's operations."""
        own_seconds = measure_hook(self._device)
        self.stopwatch = Stopwatch(self._device, own_seconds)
        self.active = True
        self._executor.observers.add(self.stopwatch)
        self.stopwatch.enter()

    def trace(self) -> None:
        """Traces the iteration."""
        self.tracer, self.active = Tracer(self._device), True
        self._executor.observers.add(self.tracer)
        self.tracer.enter()

    def log_allocations(self) -> None:
        """Logs what the iteration allocates."""
        self.log = AllocationLog(self._device)

    def place(self, arena: Arena, moves_in: bool) -> bool:
        """Gives allocations their offsets; False if the arena finds no memory.

        Args:
            arena: Says where.
            moves_in: Whether those of the iteration before lie elsewhere.
        """
        self.placing = self._device.offsets.follow(arena, moves_in)
        self.settled = self.placing and not moves_in
        return self.placing

    def verify(self) -> bool:
        """Verifies the iteration, unless enough have been; whether it is verified."""
        self._verifier = self._verification.begin()
        if self._verifier is not None:
            self._executor.observers.add(self._verifier)
        return self._verifier is not None

    @property
    def verdict(self) -> Verdict | None:
        """Of the iterations verified so far; None before the first."""
        return self._verification.verdict

    # -- at the end -----------------------------------------------------------
    def take_recorder(self) -> Recorder | None:
        """Hands out what records the iteration; it records no more."""
        recorder, self.recorder = self.recorder, None
        self._note_ended()
        return recorder

    def _note_ended(self) -> None:
        self.active = self._hooks is not None

    def take_log(self) -> AllocationLog | None:
        """Hands out the log, to be finished by the caller."""
        log, self.log = self.log, None
        return log

    def finish_trace(self, profile: Profile, plan: Plan) -> None:
        """Makes the timeline of a whole iteration, if that was traced."""
        if self.tracer is not None and self.tracer.has_seen(profile):
            self._device.clock.synchronize()
            self.timeline = outside_limit(self.tracer.build, profile, plan)
            self.trace_requested = False

    def finish_verifying(self, guided: bool) -> bool:
        """Ends the verification of an iteration; whether a guided one was verified."""
        verifier = self._verifier
        self.stop_verifying()
        if verifier is None or not guided:
            return False
        self._verification.count(verifier)
        return True

    def stop_verifying(self) -> None:
        """The iteration is not verified."""
        self._executor.observers.discard(self._verifier)
        self._verifier = None

    def stop_placing(self) -> None:
        """Ends offsets and log."""
        if self.placing:
            self._device.offsets.seek(-1)
            self.placing = False
        if self.log is not None:
            self.log.finish()
            self.log = None

    def stop_following(self) -> None:
        """It is no iteration of the plan it has followed; a recording goes on."""
        if self.tracer is not None:
            self.tracer.close()
        for observer in (self.stopwatch, self.tracer):
            self._executor.observers.discard(observer)
        self.stopwatch = self.tracer = None
        self._note_ended()
        self.stop_placing()

    def discard(self) -> None:
        """Nothing is found out about this iteration."""
        if self.recorder is not None:
            self.recorder.discard()
            self.recorder = None
        self.stop_following()
