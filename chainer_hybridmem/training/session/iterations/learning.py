"""What happens when an iteration ends: figures, recordings, plans and other plans."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem import timing
from chainer_hybridmem.errors import FormatError, SessionError
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.recording import Detail, Recorder
from chainer_hybridmem.training.recording.allocation_log import AllocationLog
from chainer_hybridmem.training.session.guides.forecast import forecast
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.iterations.iteration import Following, Iteration
from chainer_hybridmem.training.session.iterations.iteration_history import (
    IterationHistory,
)
from chainer_hybridmem.training.session.planning.planning import Planning
from chainer_hybridmem.training.session.setting.link_measurement import (
    LinkMeasurement,
    Links,
)
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.planning_time import (
    PlanningTime,
    outside_limit,
)
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.units import format_bytes, format_seconds

PROFILING_RUNS = 2


class Learning:
    """Learns from iterations that have ended.

    Args:
        runtime (Runtime): Has run them.
        arrays (ModelArrays): Are named in profiles.
        planning (Planning): Makes and changes plans.
        guidebook (GuideBook): Takes new guides in.
        history (IterationHistory): Takes figures.
        links (LinkMeasurement): Are part of profiles.
        detail (Detail): Of recordings.
    """

    def __init__(
        self,
        runtime: Runtime,
        arrays: ModelArrays,
        planning: Planning,
        guidebook: GuideBook,
        history: IterationHistory,
        links: LinkMeasurement,
        detail: Detail,
    ) -> None:
        self._device: Device = runtime.device
        self._executor = runtime.executor
        self._splitter = runtime.splitter
        self._instruments = runtime.instruments
        self._tell = runtime.tell
        self._options = runtime.options
        self._arrays = arrays
        self._planning = planning
        self._guidebook = guidebook
        self._history = history
        self._links = links
        self._recordings = PROFILING_RUNS if detail.timed else 1

    def end(self, iteration: Iteration, seconds: float) -> None:
        """An iteration has ended, and its guide is settled.

        Args:
            iteration: The iteration.
            seconds: It took.

        Raises:
            InfeasibleError: If the planner asked for finds no plan.
        """
        following, instruments = iteration.following, self._instruments
        guide = following.guide
        fingerprint = iteration.find_fingerprint()
        self._planning.maker.begin_pause()
        self.count(iteration, seconds)
        end_late_checks(self._device, self._history.iterations)
        self._note_plan(following)
        missed = False
        if guide is None:
            # It may have begun with none because another one was expected.
            known = self._guidebook.find(following.operations, fingerprint)
            if known is None:
                missed = self._miss(iteration, fingerprint, seconds)
            else:
                self._guidebook.meet(known, following.tried)
                following.guide = known
        else:
            self._guidebook.meet(guide, following.tried)
            if guide.stage is Stage.GUIDED:
                self._finish_guided(iteration, guide)
        self._profile_outdated()
        instruments.stop_placing()
        recorder = instruments.take_recorder()
        if recorder is not None:
            start = timing.now()
            following.guide = self._learn(iteration, recorder, following.guide)
            self._guidebook.end_learning(
                following.operations[0],
                fingerprint,
                seconds + timing.now() - start,
            )
        self._guidebook.end(following.guide, fingerprint, iteration.position, missed)

    def _profile_outdated(self) -> None:
        """What may not be recomputed any more is planned anew."""
        for guide in self._guidebook.take_outdated():
            self._executor.settle()  # graphs that live on keep their host copies
            guide.profile_again()

    @property
    def next_number(self) -> int:
        """Of the iteration under way or, if none is, of the next one; from 1."""
        return self._history.iterations + 1

    # -- figures --------------------------------------------------------------
    def count(self, iteration: Iteration, seconds: float) -> None:
        """An iteration becomes part of the history.

        Args:
            iteration: The iteration.
            seconds: It took.
        """
        guide = iteration.following.guide
        guided = guide is not None and guide.stage is Stage.GUIDED
        issued = self._device.clock.asynchronous
        self._history.note_shortage(iteration.short)
        problem = None if guide is None else guide.problem
        if problem is not None or self._instruments.recorder is None:
            self._note_plain_peak(iteration, problem)
        entry = self._history.add(
            iteration.began,
            seconds,
            seconds if issued else min(seconds, iteration.own_seconds),
            self._executor.counters,
            None if guide is None else guide.plan,
            guided,
            0 if guide is None else guide.count_foreign(iteration.held_bytes),
            self._splitter,
            self._instruments.finish_verifying(guided),
            iteration.evaluates,
        )
        state = self.name_state(iteration)
        self._history.kinds.count(state, guide, entry)
        self._tell(
            f'iteration {self._history.iterations} ({state}): '
            f'{format_seconds(seconds)}, peak {format_bytes(entry["peak_bytes"])}'
        )

    def _note_plain_peak(self, iteration: Iteration, problem: Problem | None) -> None:
        """What plain Chainer would have needed beside graphs of older iterations."""
        begun = iteration.plain_bytes, iteration.older_bytes
        dead_bytes = iteration.dead_bytes
        plain = kept = None
        if problem is not None:
            in_core, initial = problem.in_core, problem.profile.initial_bytes
            forward = in_core.forward_bytes - initial
            kept = max(forward, in_core.peak_bytes - initial - dead_bytes)
            if in_core.plain_peak_bytes is not None:
                plain = max(forward, in_core.plain_peak_bytes - initial - dead_bytes)
        self._history.plain.note(*begun, plain)
        self._history.kept.note(*begun, kept)

    def count_deviation(self, iteration: Iteration) -> None:
        """Counts an iteration that has left what it followed for nothing."""
        if iteration.following.deviated:
            self._history.deviations += 1
            recorded = '' if self._instruments.recorder is None else ', and is recorded'
            self._tell(
                f'iteration {self._history.iterations} left what it had begun like: it '
                f'went on in passive mode{recorded}'
            )

    def name_state(self, iteration: Iteration) -> str:
        """How an iteration runs or has run; see :attr:`.Session.state`."""
        guide = iteration.following.guide
        if guide is not None:
            return guide.stage.value
        if iteration.quiet and not iteration.short:
            return 'in-core'
        recorded = self._instruments.recorder is not None
        waits = self._options.plans_anyway or not self._history.iterations
        if recorded or (waits and not len(self._guidebook)):
            return Stage.WARM_UP.value
        passive = iteration.following.deviated or self._has_moved(iteration)
        return 'passive' if passive else 'in-core'

    # -- iterations without a recording ---------------------------------------
    def _miss(self, iteration: Iteration, fingerprint: int, seconds: float) -> bool:
        """The signature is unknown: the next iterations like it may be recorded.

        Returns:
            bool: Whether it was worth recording and has not been.
        """
        self.count_deviation(iteration)
        if self._instruments.recorder is not None or not self._is_pressed(iteration):
            return False
        following = iteration.following
        self._guidebook.miss(
            following.operations[0],
            fingerprint,
            0.0 if following.deviated else seconds,
            self._executor.counters.lost_seconds,
        )
        return True

    def _note_plan(self, following: Following) -> None:
        """Tells whether a plan that was followed from the start was the right one."""
        guide = following.guide
        guided = guide is not None and guide.stage is Stage.GUIDED
        if (guided or following.deviated) and not following.tried:
            self._guidebook.end_plan(following.operations[0], fits=guided)

    def _is_pressed(self, iteration: Iteration) -> bool:
        """Whether the iteration that ends is worth recording when it comes again."""
        return self._options.plans_anyway or self._has_moved(iteration)

    def _has_moved(self, iteration: Iteration) -> bool:
        """Whether a map has had to leave or to come back."""
        counters = self._executor.counters
        moved = counters.swapped_out_bytes or counters.replays or counters.restores
        return iteration.short or bool(moved)

    def _finish_guided(self, iteration: Iteration, guide: Guide) -> None:
        """What an iteration that has followed a plan tells about it."""
        instruments, whole = self._instruments, iteration.following.whole
        followed, watch = guide.plan, instruments.stopwatch
        placing = instruments.placing
        settled = placing and instruments.settled
        at_offsets = placing and guide.arena.laid_out is not None
        log = instruments.take_log()
        if whole and guide.problem is not None and followed is not None:
            instruments.finish_trace(guide.problem.profile, followed)
        instruments.stop_following()
        self._note_log(guide, log)
        if not whole:
            return
        wants_arena = self._options.arena and guide.arena.wanted
        guide.pace.note_iteration(at_offsets=at_offsets or not wants_arena)
        planning = self._planning
        profile = None if guide.problem is None else guide.problem.profile
        if watch is not None and profile is not None and watch.has_seen(profile):
            self._device.clock.synchronize()
            guide.pace.note_times(watch.times())
            if guide.timed:
                outside_limit(planning.retime, guide)
        outside_limit(planning.follow_node, guide)
        if guide.arena.is_logged:
            outside_limit(planning.lay_out, guide)
        elif guide.arena.missing_bytes:
            outside_limit(planning.find_place, guide)
        # What no plan has a place for does not count: maps of older graphs, and those
        # for later iterations.
        evicted = self._executor.counters.planned_evictions > 0
        waits = wants_arena and self._device.offsets.needed and not settled
        if not waits and guide.foreign.end_iteration(evicted):
            foreign_bytes = guide.count_foreign(iteration.held_bytes)
            older_waits = iteration.older_waits
            outside_limit(planning.make_room, guide, foreign_bytes, older_waits)
        planning.node.close_iteration(guide)

    def _note_log(self, guide: Guide, log: AllocationLog | None) -> None:
        if log is None:
            guide.arena.note_log(None)
            return
        with guide.spent.counted():
            guide.arena.note_log(outside_limit(log.finish))

    # -- recordings -----------------------------------------------------------
    def _learn(
        self, iteration: Iteration, recorder: Recorder, guide: Guide | None
    ) -> Guide | None:
        """Takes in what has been recorded, if that is new.

        Returns:
            Guide of the iteration; None if it is still unknown.
        """
        if not _is_new(recorder, guide):
            recorder.discard()
            return guide
        self._executor.settle()
        self._device.clock.synchronize()
        links = self._links.measure_once()
        if links is None:
            recorder.discard()
            return guide
        spent = PlanningTime() if guide is None else guide.spent
        with spent.counted():
            profile = self._build_profile(iteration, recorder, links)
            if iteration.older_bytes:
                problem = outside_limit(_find_problem, profile)
                self._note_plain_peak(iteration, problem)
            if guide is None:
                guide = self._make_guide(iteration, profile, spent)
            else:
                outside_limit(guide.learn, profile, self._splitter.changed)
            self._plan_recorded(guide)
        return guide

    def _build_profile(
        self, iteration: Iteration, recorder: Recorder, links: Links
    ) -> Profile:
        arrays = self._arrays
        categories = {**iteration.categories, **arrays.find_categories()}
        profile = outside_limit(
            recorder.build,
            links.link,
            self._device.describe(),
            categories,
            arrays.find_owners(),
            iteration.labels,
        )
        for function in sorted(recorder.untrusted - self._history.untrusted):
            self._tell(f'{function} is never recomputed')
        self._history.untrusted |= recorder.untrusted
        places = sorted((k, function) for k, function, _ in self._splitter.used)
        return dataclasses.replace(
            profile, disk_link=links.disk, functions_in_parts=tuple(places)
        )

    def _make_guide(
        self, iteration: Iteration, draft: Profile, spent: PlanningTime
    ) -> Guide:
        """The guide of a signature that was unknown."""
        ways = dict(self._splitter.used)
        guide = Guide(iteration.following.operations, spent, ways)
        outside_limit(guide.learn, draft)
        limit_bytes = self._options.limit_bytes
        guide.forecast = outside_limit(forecast, draft, limit_bytes)
        self._guidebook.add(guide)
        iteration.following.guide = guide
        return guide

    def _plan_recorded(self, guide: Guide) -> None:
        """Makes a guide's first plan once enough is recorded."""
        if len(guide.recordings) >= self._recordings:
            outside_limit(self._planning.plan, guide)


def _find_problem(draft: Profile) -> Problem | None:
    """What was recorded as a problem; None if parameters that it has made forbid it."""
    try:
        return make_problem(draft)
    except FormatError:
        return None


def _is_new(recorder: Recorder, guide: Guide | None) -> bool:
    """Whether a recording tells what its guide does not know."""
    if guide is None:
        return True
    return (
        guide.stage is Stage.PROFILING
        and not recorder.draft
        and (recorder.trial or not guide.trial)
    )


def end_late_checks(device: Device, iteration: int) -> None:
    """What a GPU has been asked to compare so far belongs to this iteration."""
    if device.late_checks is not None:
        device.late_checks.end_iteration(iteration)


def find_difference(device: Device, wait: bool) -> str:
    """What a GPU has found out about replays of earlier iterations; or nothing.

    Args:
        device: Compares what replays make.
        wait: Whether comparisons under way are waited for.
    """
    checks = device.late_checks
    for iteration, what in () if checks is None else checks.differences(wait):
        return f'Numbers since iteration {iteration} are wrong. {what}'
    return ''


def refuse_differences(device: Device, wait: bool) -> None:
    """Raises what :func:`find_difference` finds; arguments as there.

    Raises:
        SessionError: If a replay has not made what it should.
    """
    found = find_difference(device, wait)
    if found:
        raise SessionError(found)
