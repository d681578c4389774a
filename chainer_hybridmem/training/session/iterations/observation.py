"""What is to be found out about an iteration that begins."""

from __future__ import annotations

from chainer_hybridmem.planning.layouts.arena import Arena
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.guides.operation_key import OperationKey
from chainer_hybridmem.training.session.iterations.iteration import Following
from chainer_hybridmem.training.session.iterations.iteration_history import (
    IterationHistory,
)
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.runtime import Runtime


class InstrumentSelector:
    """Chooses the instruments of each iteration.

    Args:
        runtime (Runtime): Has the instruments.
        arrays (ModelArrays): Leave while an iteration is recorded, as far as they may.
        guidebook (GuideBook): Knows what is still to be learnt.
        history (IterationHistory): Counts what has its offset.
        detail (Detail): Of recordings.
    """

    def __init__(
        self,
        runtime: Runtime,
        arrays: ModelArrays,
        guidebook: GuideBook,
        history: IterationHistory,
        detail: Detail,
    ) -> None:
        self._runtime = runtime
        self._instruments = runtime.instruments
        self._options = runtime.options
        self._arrays = arrays
        self._guidebook = guidebook
        self._history = history
        self._detail = detail
        self._placed: list[Arena] = []  # of the last iterations in a row
        self._placed_last = -1  # number of the last one

    @property
    def waits_for_shortage(self) -> bool:
        """Whether iterations are recorded only once memory has been short."""
        return not (self._options.plans_anyway or self._instruments.trace_requested)

    def wants_recording(self, key: OperationKey) -> bool:
        """Whether an iteration is to be recorded.

        Args:
            key: Of its first operation.
        """
        return self._is_profiled(None) or self._guidebook.wants_draft(key)

    def _is_profiled(self, guide: Guide | None) -> bool:
        if guide is None:
            return not self.waits_for_shortage and self._guidebook.hopes
        return guide.stage is Stage.PROFILING

    def begin(self, following: Following, key: OperationKey) -> None:
        """Begins to observe an iteration.

        Args:
            following: What it follows.
            key: Of its first operation.
        """
        guide = following.guide
        profiled = self._is_profiled(guide)
        if profiled or self._guidebook.wants_draft(key):
            self._record(following, key, profiled)
        self._instruments.stop_verifying()
        if guide is not None and not profiled:
            self._watch_guided(guide)

    def _record(self, following: Following, key: OperationKey, profiled: bool) -> None:
        executor, tried = self._runtime.executor, following.tried
        guide, detail = following.guide, self._detail
        if guide is not None and guide.tries_parts:
            detail = detail._replace(parts=True)
        executor.evictor.clear()
        recorder = self._instruments.record(
            trial=tried and self._guidebook.wants_trial(key),
            draft=not tried,
            detail=detail,
        )
        self._runtime.splitter.try_whole()
        parts = detail.parts and recorder.trial
        if recorder.trial:
            in_parts = ', as a whole and in parts' if parts else ''
            number = self._history.iterations + 1
            self._runtime.tell(
                f'iteration {number} takes several times as long: each function runs '
                f'again{in_parts}, which shows what that costs and whether every bit '
                f'is the same'
            )
        if parts:
            self._runtime.splitter.try_parts(recorder)
        if profiled and self._options.cross_iteration:
            executor.crossing.park(self._arrays.find_states())

    def _watch_guided(self, guide: Guide) -> None:
        """Times, traces or logs an iteration that follows a plan, or verifies it."""
        instruments = self._instruments
        verified = instruments.verify()
        first = not self._history.iterations  # allocates what stays
        may_log = instruments.recorder is None and not first
        free = may_log and not verified  # else it takes longer
        if instruments.trace_requested and free:
            instruments.trace()
        elif free and guide.wants_times:
            instruments.time()
        if self._options.arena:
            self._use_arena(guide, may_log and instruments.tracer is None)

    def _use_arena(self, guide: Guide, may_log: bool) -> None:
        """Allocations of this iteration get their offsets, or are logged."""
        arena, log = guide.arena.offsets, guide.wants_log and may_log
        if arena is not None:
            # What lacks memory for a draft that does not fit lies elsewhere for good.
            moves_in = self._moves_in(arena) or not guide.arena.wanted
            placed = self._instruments.place(arena, moves_in)
            self._history.begin_placing(is_draft=guide.arena.laid_out is None)
            if not placed:
                self._find_no_place(guide)
            log = log and self._instruments.settled
        if log:
            self._instruments.log_allocations()

    def _moves_in(self, arena: Arena) -> bool:
        """Whether what the arena has places for may still lie elsewhere."""
        number = self._history.iterations
        if self._placed_last != number - 1:
            self._placed.clear()
        self._placed_last = number
        if any(one is arena for one in self._placed):
            return False
        self._placed.append(arena)
        return True

    def _find_no_place(self, guide: Guide) -> None:
        """What the pool keeps is more than the layout has reckoned with."""
        missing_bytes = self._runtime.device.offsets.missing_bytes
        if missing_bytes:
            guide.arena.find_no_place(missing_bytes)
            return
        guide.arena.refuse('no memory for it beside what the pool keeps')
        self._runtime.tell('no memory for the arena beside what the pool keeps')
