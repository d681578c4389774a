"""Finds a program's memory limit from its first iterations, which run without one.

Note: [limits that are found]
    A percentage is a share of the in-core peak of the step that the program repeats.
    ``auto`` is the least limit whose plans are predicted to take at most ``MOST_COST``
    more than plain Chainer, over the step, the session's own work included. Where there
    is none, nothing is limited: plain Chainer is faster than any session. It needs
    iterations that come again, to record them; a limit below what iterations without a
    plan need is never taken, for the next ones have none. It has what
    [limits that are named] have to spare, and is raised where that is not enough.
"""

from __future__ import annotations

import os
import statistics
import weakref
from typing import Any, NamedTuple

import chainer

from chainer_hybridmem.errors import FormatError, InfeasibleError, SessionError
from chainer_hybridmem.forecasting.recording_session import SteppingSession
from chainer_hybridmem.planning.planners import (
    DEFAULT,
    check_options,
    make_plan,
    options_of,
)
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.running.step_recorder import RecordedProgram, StepRecorder
from chainer_hybridmem.training.devices import host_limit_bytes
from chainer_hybridmem.training.session.guides.forecast import need_in_parts, with_spare
from chainer_hybridmem.training.session.setting.options import RECORDED_WITH
from chainer_hybridmem.training.session.setting.planning_time import outside_limit
from chainer_hybridmem.units import AUTO, FREE, format_bytes, is_percentage, parse_bytes

MOST_COST = 0.1  # of the time of plain Chainer
OF_PROBLEMS = 'cross_iteration', 'rules', 'splitting'  # options that shape plans
ITERATIONS = 30  # are recorded at most, until a step has repeated
HALVINGS = 6  # of the range in which the least limit lies
TOLERANCE = 0.01  # of the bound; a search for a limit needs no better plans


class LimitFinder:
    """Has the first iterations show it; see [limits that are found].

    Args:
        memory_limit: Of the command line; None if there is none.
        options: Others of :func:`.optimize`, by name.
        profile: File for the iteration that is recorded; None for no file.
        optimizers: As for :class:`.StepRecorder`.

    Attributes:
        limit_bytes (int or None): What has been found; None if there is no limit.
        in_core_bytes (int or None): What plain Chainer needs, if it is known.
        plain_seconds (list of float): Of steps of plain Chainer that have been timed.
        step_iterations (int): Of a step; 0 if none has repeated.
        is_over (bool): Whether there is nothing to find any more.
        reason (str): Why there is no limit although one was asked for.
        has_begun (bool): Whether an iteration that is to show it has.
        unsaved (str): Why the profile could not be written; empty if it could.
    """

    def __init__(
        self,
        memory_limit: int | str | None,
        options: dict[str, Any],
        profile: Any,
        optimizers: list[weakref.ref[chainer.Optimizer]],
    ) -> None:
        self._asked = memory_limit
        self._options = options
        self._profile = None if profile is None else os.path.abspath(profile)
        self._share = is_percentage(memory_limit)
        self.limit_bytes: int | None = None
        if not (self._share or memory_limit in (None, AUTO, FREE)):
            self.limit_bytes = parse_bytes(memory_limit, 'memory_limit')
        self.in_core_bytes: int | None = None
        self.has_begun = False
        self.unsaved = ''
        records = memory_limit == AUTO or profile is not None
        self.is_over = not (self._share or records)
        self.reason = (
            f'the program has ended before iterations have shown what {memory_limit} is'
        )
        told = {name: options[name] for name in RECORDED_WITH if name in options}
        if self.limit_bytes is not None:
            told['memory_limit'] = self.limit_bytes
        self._recorder = StepRecorder(
            optimizers, told, ITERATIONS, records, times_plain=True
        )

    @property
    def is_found(self) -> bool:
        """Whether iterations show the limit, and it is not a size that was named."""
        return self._share or self._asked == AUTO

    @property
    def lacks_profile(self) -> bool:
        """Whether a profile was asked for and could not be made."""
        return self._profile is not None and self._recorder.recorded is None

    @property
    def plain_seconds(self) -> list[float]:
        return self._recorder.plain_step_seconds

    @property
    def step_iterations(self) -> int:
        return self._recorder.plain_iterations

    def start_backward(self) -> bool:
        """A backward is about to run without a session; whether one is due then."""
        if not self._recorder.start_backward():
            return False
        self.is_over = self._recorder.is_over
        return True

    def make_session(self, models: list[chainer.Link]) -> SteppingSession | None:
        """The next session of the iterations that show the limit.

        None: the next ones are to run without a session.
        """
        self.has_begun = True
        return self._recorder.make_session(models)

    def look(self, session: SteppingSession, has_ended: bool = False) -> bool:
        """Whether a session has shown what it is for: another one has to begin.

        Args:
            session: From :meth:`make_session`; a function of it is about to run.
            has_ended: Whether the program has ended.
        """
        recorder = self._recorder
        try:
            if not recorder.look(session, has_ended):
                return False
        except SessionError as error:
            self.is_over = True
            self.reason = f'{error}{self._suggest_size(session)}'
            return True
        if recorder.recorded is not None:
            outside_limit(self._take_recorded, recorder.recorded)
        else:
            self._take_plain()
        self.is_over = recorder.is_over
        return True

    def _suggest_size(self, session: SteppingSession) -> str:
        """What to name if iterations cannot show it."""
        seen = self._recorder.plain_peak_bytes or session.iterations_peak_bytes
        if not (self.is_found and seen):
            return ''
        told = f', or name a size: it needs {format_bytes(seen)}'
        if self._share:
            told += f', {self._asked} of which are {format_bytes(self._share_of(seen))}'
        return told

    def _share_of(self, whole_bytes: int) -> int:
        return parse_bytes(str(self._asked), 'memory_limit', whole_bytes=whole_bytes)

    def _take_plain(self) -> None:
        self.in_core_bytes = self._recorder.plain_peak_bytes
        if self._share:
            self.limit_bytes = self._share_of(self.in_core_bytes)

    def _take_recorded(self, recorded: RecordedProgram) -> None:
        if self._profile is not None:
            try:
                library.save(recorded.find_largest().profile, self._profile)
            except FormatError as error:  # training goes on
                self.unsaved = str(error)
        if self._asked == AUTO:
            peak = recorded.find_peak()
            seconds = self._recorder.plain_step_seconds
            plain_seconds = statistics.median(seconds) if seconds else None
            least = find_least_limit(recorded, self._options, MOST_COST, plain_seconds)
            if least.limit_bytes is not None:
                self.limit_bytes = min(peak, with_spare(least.limit_bytes, peak))
                return
            self.reason = (
                f'no limit below the in-core peak of {format_bytes(peak)} costs at '
                f'most {MOST_COST:.0%} of the time of plain Chainer, which needs no '
                f'limit: {least.ratio - 1:.1%} is predicted for the best one'
            )

    def raise_limit(self, limit_bytes: int) -> None:
        """What was found has not been enough; this limit is."""
        self.limit_bytes = limit_bytes


class LeastLimit(NamedTuple):
    """What :func:`find_least_limit` has found.

    Attributes:
        limit_bytes (int or None): None if each limit below the peak costs more.
        ratio (float): Its time over that of plain Chainer; else the least of those that
            were tried.
    """

    limit_bytes: int | None
    ratio: float


def find_least_limit(
    recorded: RecordedProgram,
    options: dict[str, Any],
    most_cost: float,
    plain_seconds: float | None = None,
) -> LeastLimit:
    """The least limit whose plans cost at most a share of the in-core time of a step.

    Args:
        recorded: The step.
        options: Of the session that will follow plans.
        most_cost: That share, such as 0.1.
        plain_seconds: Of a step of plain Chainer; None: what is recorded tells it.

    Returns:
        LeastLimit: Between a limit that costs more and this one there is at most a
        64th of what can leave.
    """
    planner = options.get('planner') or DEFAULT
    own = {
        name: value for name, value in options.items() if name in options_of(planner)
    }
    if 'tolerance' in options_of(planner):
        own.setdefault('tolerance', TOLERANCE)
    check_options(planner, own)
    told = {name: options[name] for name in OF_PROBLEMS if name in options}
    told['host_limit_bytes'] = host_limit_bytes(
        options.get('host_limit'), options.get('swap_dir')
    )
    pairs = [(make_problem(kind.profile, **told), kind) for kind in recorded.kinds]
    if plain_seconds is None:
        plain_seconds = recorded.rest_seconds + sum(
            kind.repeats * problem.in_core_seconds for problem, kind in pairs
        )
    ratios = {}

    def is_cheap(limit_bytes: int) -> bool:
        seconds = recorded.rest_seconds
        for problem, kind in pairs:
            room_bytes = limit_bytes - kind.older_bytes
            try:
                plan = make_plan(problem, room_bytes, planner, **own)
            except InfeasibleError:
                return False
            seconds += kind.repeats * plan.predicted_seconds
        ratios[limit_bytes] = seconds / plain_seconds
        return seconds <= (1 + most_cost) * plain_seconds

    still = recorded.rest_seconds
    still += sum(kind.repeats * problem.still_seconds for problem, kind in pairs)
    if still > (1 + most_cost) * plain_seconds:  # whatever is planned
        return LeastLimit(None, still / plain_seconds)
    most = recorded.find_peak()
    needs = (
        need_in_parts(problem) + _roomless_bytes(problem) + kind.older_bytes
        for problem, kind in pairs
    )
    least = min(most, max(needs))
    if is_cheap(least):
        return LeastLimit(least, ratios[least])
    for _ in range(HALVINGS):
        middle = (least + most) // 2
        if is_cheap(middle):
            most = middle
        else:
            least = middle
    if most in ratios:
        return LeastLimit(most, ratios[most])
    return LeastLimit(None, min(ratios.values(), default=still / plain_seconds))


def _roomless_bytes(problem: Problem) -> int:
    """What stays although everything may be swapped: the host has no room for it."""
    if problem.profile.disk_link is not None:
        return 0
    swapped_bytes = sum(storage.nbytes for storage in problem.maps)
    return max(0, swapped_bytes - problem.arrays.host_limit)
