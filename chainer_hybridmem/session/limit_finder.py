"""Finds a program's memory limit from its first iterations, which run without one.

Note: [limits that are found]
    A percentage is a share of the highest load of two iterations: the second one begins
    with the optimizer states that the first one has made. ``auto`` is the least limit
    whose plan is predicted to take at most ``MOST_COST`` more than plain Chainer. It
    needs an iteration that comes again, to record it; a limit below what iterations
    without a plan need is never taken, for the next ones have none.
"""

from __future__ import annotations

import os
from typing import Any

from chainer_hybridmem.chainer_access.models import Model
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planners import DEFAULT, check_options, make_plan, options_of
from chainer_hybridmem.records import library
from chainer_hybridmem.session.guides.forecast import forecast
from chainer_hybridmem.session.optimizing import optimize
from chainer_hybridmem.session.recording_session import (
    AMPLE_BYTES,
    ITERATIONS,
    RecordingSession,
    recording_options,
)
from chainer_hybridmem.session.session import Session
from chainer_hybridmem.session.setting.planning_time import outside_limit
from chainer_hybridmem.simulation import Problem
from chainer_hybridmem.units import is_percentage, parse_bytes

AUTO = 'auto'
MOST_COST = 0.1  # of the time of plain Chainer
SHOWING = 2  # iterations that show the in-core peak
HALVINGS = 6  # of the range in which the least limit lies
TOLERANCE = 0.01  # of the bound; a search for a limit needs no better plans
# What a session that records is told; the others are for what follows a plan.
_RECORDED_WITH = (
    'device',
    'swap_dir',
    'link_bandwidth',
    'shared_link',
    'host_limit',
    'disk_bandwidth',
    'cross_iteration',
    'splitting',
    'rules',
    'progress',
)


class LimitFinder:
    """Runs the first iterations; see [limits that are found].

    Args:
        memory_limit: Of the command line; None if there is none.
        options: Others of :func:`.optimize`, by name.
        profile: File for the iteration that is recorded; None for no file.

    Attributes:
        limit_bytes (int or None): What has been found; None if there is no limit.
        in_core_bytes (int or None): What plain Chainer needs, if it is known.
        in_core_seconds (float or None): What an iteration of it takes.
        is_over (bool): Whether there is nothing to find any more.
        reason (str): Why there is no limit although one was asked for.
        has_begun (bool): Whether an iteration that is to show it has.
    """

    def __init__(
        self, memory_limit: int | str | None, options: dict[str, Any], profile: Any
    ) -> None:
        self._asked = memory_limit
        self._options = options
        self._profile = None if profile is None else os.path.abspath(profile)
        self._share = is_percentage(memory_limit)
        self._records = memory_limit == AUTO or profile is not None
        self.limit_bytes: int | None = None
        if not (self._share or memory_limit in (None, AUTO)):
            self.limit_bytes = parse_bytes(memory_limit, 'memory_limit')
        self.in_core_bytes: int | None = None
        self.in_core_seconds: float | None = None
        self.has_begun = False
        self.is_over = not (self._share or self._records)
        self.reason = (
            f'it has ended before iterations have shown what {memory_limit} is'
            if self.limit_bytes is None
            else ''
        )

    @property
    def is_found(self) -> bool:
        """Whether iterations show the limit, and it is not a size that was named."""
        return self._share or self._asked == AUTO

    def make_session(self, models: Model) -> Session:
        """The session of the iterations that show the limit."""
        self.has_begun = True
        if not self._records:
            return optimize(models, AMPLE_BYTES, **self._choose_options())
        limit_bytes = self.limit_bytes or AMPLE_BYTES
        options = recording_options(limit_bytes, **self._choose_options())
        return RecordingSession(models, options)

    def _choose_options(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._options.items()
            if name in _RECORDED_WITH
            and (self._records or name in ('device', 'progress'))
        }

    def look(self, session: Session) -> bool:
        """Ends the iteration if it has come to its end; whether enough is known.

        Args:
            session: From :meth:`make_session`; a function of it is about to run.
        """
        session.finish_iteration()
        self.is_over = self._is_known(session)
        return self.is_over

    def _is_known(self, session: Session) -> bool:
        if isinstance(session, RecordingSession):
            if session.problem is not None:
                plain_bytes = session.statistics()['in_core_peak_bytes']
                outside_limit(self._take_problem, session.problem, plain_bytes)
                return True
            if session.iterations < ITERATIONS:
                return False
            self.reason = (
                f'no iteration came twice within {ITERATIONS}, so that none could be '
                f'recorded; name a size, such as 8GiB, or a percentage'
            )
            if not self._share:
                return True
        elif session.iterations < SHOWING:
            return False
        self._take_peak(session)
        return True

    def _take_peak(self, session: Session) -> None:
        self.in_core_bytes = session.statistics()['peak_bytes']
        self.in_core_seconds = session.last_iteration()['seconds']
        self._take_share()

    def _take_share(self) -> None:
        self.limit_bytes = parse_bytes(
            str(self._asked), 'memory_limit', whole_bytes=self.in_core_bytes
        )

    def _take_problem(self, problem: Problem, plain_bytes: int | None) -> None:
        self.in_core_bytes = plain_bytes or problem.in_core_peak_bytes
        self.in_core_seconds = problem.in_core.seconds
        if self._share:
            self._take_share()
        elif self._asked == AUTO:
            self.limit_bytes = find_least_limit(problem, self._options)
        if self._profile is not None:
            library.save(problem.profile, self._profile)


def find_least_limit(
    problem: Problem, options: dict[str, Any], most_cost: float = MOST_COST
) -> int:
    """The least limit whose plan costs at most a share of the in-core time.

    Args:
        problem: A recorded iteration.
        options: Of the session that will follow a plan.
        most_cost: That share, such as 0.1.

    Returns:
        int: Bytes; between a limit that costs more and this one there is at most
        a 64th of what can leave.
    """
    planner = options.get('planner') or DEFAULT
    own = {
        name: value for name, value in options.items() if name in options_of(planner)
    }
    if 'tolerance' in options_of(planner):
        own.setdefault('tolerance', TOLERANCE)
    check_options(planner, own)

    def is_cheap(limit_bytes: int) -> bool:
        try:
            plan = make_plan(problem, limit_bytes, planner, **own)
        except InfeasibleError:
            return False
        return plan.predicted_seconds <= (1 + most_cost) * plan.in_core_seconds

    most = problem.in_core_peak_bytes
    needs = forecast(problem.profile, 0, bool(options.get('cross_iteration')), True)
    least = most if needs is None else min(most, needs.enough_bytes)
    if is_cheap(least):
        return least
    for _ in range(HALVINGS):
        middle = (least + most) // 2
        if is_cheap(middle):
            most = middle
        else:
            least = middle
    return most
