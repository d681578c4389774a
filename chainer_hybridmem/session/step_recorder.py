"""Records the step that a program repeats, while the program runs.

Note: [two sessions]
    The first one leaves plain Chainer as it is and shows its peak and its time. The
    second one records. Each lasts until the program has repeated a step in which every
    optimizer that lives updates: a critic that is trained several times in a row is no
    step. Networks that are trained one after the other never have such a step, so
    neither session waits for it for ever. Where a limit holds meanwhile, there is only
    the second one.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import chainer

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.estimation import Kind
from chainer_hybridmem.session.recording_session import (
    AMPLE_BYTES,
    RecordingSession,
    SteppingSession,
    count_kinds,
    recording_options,
)
from chainer_hybridmem.simulation import Problem, make_problem
from chainer_hybridmem.units import format_count

PLAIN_ITERATIONS = 12  # at most: two steps of a critic that updates five times in each


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """What :class:`StepRecorder` has recorded.

    Attributes:
        kinds (tuple of Kind): Of the step that repeats, at least one.
        iterations (int): That the program has run in the session that records.
        complete (bool): Whether a step has repeated, and each optimizer has updated.
    """

    kinds: tuple[Kind, ...]
    iterations: int
    complete: bool

    @functools.cached_property
    def problems(self) -> tuple[Problem, ...]:
        """What there is to plan, for each kind."""
        return tuple(make_problem(kind.profile) for kind in self.kinds)

    def find_largest(self) -> Problem:
        """The kind of iteration that needs most in-core."""
        return max(self.problems, key=lambda one: one.in_core_peak_bytes)

    def find_peak(self) -> int:
        """Bytes that plain Chainer needs for a step."""
        pairs = zip(self.problems, self.kinds, strict=True)
        return max(one.in_core_peak_bytes + kind.older_bytes for one, kind in pairs)


class StepRecorder:
    """Makes the sessions and looks at them; see [two sessions].

    Args:
        optimizers (list of weakref): Those that have got a model, also later ones.
        options (dict): Of the session that records, by name, as for
            :func:`.recording_options`. With ``memory_limit``, nothing is known of plain
            Chainer.
        iterations (int): The session that records lasts for so many at most.
        records (bool): Whether more is to be found out than peak and time of plain
            Chainer.
        parts (bool): As for :class:`.RecordingSession`.
        timed (bool): Likewise.

    Attributes:
        plain_peak_bytes (int): Of plain Chainer; 0 if it is not known.
        plain_seconds (float or None): Of its last iteration.
        recorded (RecordedProgram or None): What has been found.
    """

    def __init__(
        self,
        optimizers: list[weakref.ref[chainer.Optimizer]],
        options: dict[str, Any],
        iterations: int,
        records: bool = True,
        parts: bool = True,
        timed: bool = True,
    ) -> None:
        self._optimizers = optimizers
        self._options = {'limit_bytes': AMPLE_BYTES, **options}
        limit = self._options.pop('memory_limit', None)
        if limit is not None:
            self._options['limit_bytes'] = int(limit)
        self._most = iterations
        self._records = records
        self._detail = parts, timed
        self._measures = limit is None
        self._seen = 0  # iterations of the session
        self._updates: list[list[int]] = []  # of each optimizer, after each of them
        self.plain_peak_bytes = 0
        self.plain_seconds: float | None = None
        self.recorded: RecordedProgram | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to find out."""
        if self._records:
            return self.recorded is not None
        return not self._measures

    def make_session(self, models: list[chainer.Link]) -> SteppingSession:
        """The next session; its models train from the beginning of a step."""
        self._seen = 0
        self._updates = [self._count_updates()]
        if self._measures:
            return SteppingSession.plain(models)
        return RecordingSession(
            models, recording_options(**self._options), *self._detail
        )

    def look(self, session: SteppingSession, has_ended: bool = False) -> bool:
        """Whether a session has shown what it is for: another one has to begin.

        Args:
            session: From :meth:`make_session`. Its iteration ends if it is complete.
            has_ended: Whether the program has ended, so that no more will be seen.

        Raises:
            SessionError: If nothing could be recorded.
        """
        session.finish_iteration()
        if session.iterations == self._seen and not has_ended:
            return False
        if session.iterations > self._seen:
            self._seen = session.iterations
            self._updates.append(self._count_updates())
        step = session.find_step()
        repeats = bool(step) and self._all_update(len(step))
        if isinstance(session, RecordingSession):
            recorded = [one for one in step if one is not None]
            complete = repeats and len(recorded) == len(step)
            if not (complete or has_ended or self._seen >= self._most):
                return False
            self._take(recorded or session.find_problems(), complete)
            return True
        if has_ended:
            raise SessionError(
                f'it ends after {format_count(self._seen, "iteration")}; let it train '
                f'for longer'
            )
        if not repeats and self._seen < PLAIN_ITERATIONS:
            return False
        self.plain_peak_bytes = session.statistics()['peak_bytes']
        self.plain_seconds = session.last_iteration()['seconds']
        self._measures = False
        return True

    def _count_updates(self) -> list[int]:
        optimizers = (reference() for reference in self._optimizers)
        return [0 if one is None else one.t for one in optimizers]

    def _all_update(self, iterations: int) -> bool:
        """Whether each optimizer that lives has updated in the newest iterations."""
        if len(self._updates) <= iterations:
            return False
        now, before = self._updates[-1], self._updates[-1 - iterations]
        since = [0] * (len(now) - len(before))  # those that have got a model meanwhile
        return all(
            t > old or reference() is None
            for t, old, reference in zip(
                now, before + since, self._optimizers, strict=False
            )
        )

    def _take(self, problems: list[Problem], complete: bool) -> None:
        kinds = count_kinds(problems, self.plain_peak_bytes)
        if not kinds:
            raise SessionError(
                f'too few of {format_count(self._seen, "iteration")} have computed the '
                f'same, with arrays of the same shapes; let it train for longer'
            )
        self.recorded = RecordedProgram(tuple(kinds), self._seen, complete)
