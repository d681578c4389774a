"""Records the step that a program repeats, while the program runs.

Note: [two sessions]
    The first one leaves plain Chainer as it is and shows its peak, which grows no more
    in its last step. Its hooks cost time all the same, so that the next steps run
    without a session where its time is asked for. The second session records. Each
    lasts until the program has repeated a step in which every optimizer that lives
    updates, and as often as in the one before: a critic that is trained several times
    in a row is no step, nor is a backward that only adds to gradients. The second one
    also lasts until iterations under its plan are timed: while they are recorded, they
    take much longer. Networks that are trained one after the other never have such a
    step, so neither session waits for it for ever. Where a limit holds meanwhile, there
    is only the second one.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.errors import SessionError
from chainer_hybridmem.forecasting.estimation import Kind
from chainer_hybridmem.forecasting.recording_session import (
    AMPLE_BYTES,
    RecordingSession,
    SteppingSession,
    count_kinds,
    recording_options,
)
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.units import format_count

TIMED_STEPS = 5  # without a session
PLAIN_ITERATIONS = 12  # at most: two steps of a critic that updates five times in each


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """What :class:`StepRecorder` has recorded.

    Attributes:
        kinds (tuple of Kind): Of the step that repeats, at least one.
        iterations (int): That the program has run in the session that records.
        complete (bool): Whether a step has repeated, and each optimizer has updated.
        rest_seconds (float): Between the iterations of a step.
    """

    kinds: tuple[Kind, ...]
    iterations: int
    complete: bool
    rest_seconds: float = 0.0

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


class PlainTimer:
    """Times steps that run without a session, from one backward to another.

    Args:
        count_updates (callable): Of all optimizers, so far.
        updates (int): Of a step.
        clock (callable): Tells seconds.

    Attributes:
        seconds (list of float): Of each step.
    """

    def __init__(
        self,
        count_updates: Callable[[], int],
        updates: int,
        clock: Callable[[], float],
    ) -> None:
        self._count_updates = count_updates
        self._updates = updates
        self._clock = clock
        self._begun: tuple[int, float] | None = None
        self._is_whole = False  # the step under way; the first may lack its beginning
        self._seen = 0  # backward passes
        self.seconds: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether enough steps are timed, or none repeats any more."""
        most = (TIMED_STEPS + 2) * PLAIN_ITERATIONS
        return len(self.seconds) == TIMED_STEPS or self._seen >= most

    def start_backward(self) -> None:
        """A backward is about to run."""
        self._seen += 1
        updates, now = self._count_updates(), self._clock()
        if self._begun is not None:
            before, start = self._begun
            if updates < before + self._updates:
                return
            if self._is_whole:
                self.seconds.append(now - start)
            self._is_whole = True
        self._begun = updates, now


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
        times_plain (bool): Whether steps without a session are timed.

    Attributes:
        single (bool): Whether each iteration is known to be a step, so that none has to
            repeat; one whose times count goes on until they are taken.
        plain_peak_bytes (int): Of plain Chainer; 0 if it is not known.
        plain_iterations (int): Of a step; 0 if none has repeated.
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
        times_plain: bool = False,
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
        self.single = False
        self._seen = 0  # iterations of the session
        self._counts: list[int] = []  # of updates by each optimizer, so far
        self._updates: list[dict[int, int]] = []  # in each of them
        self._peaks: dict[int, int] = {}  # in bytes, after so many of them
        self.plain_peak_bytes = 0
        self.plain_iterations = 0
        self._times_plain = times_plain
        self._timer: PlainTimer | None = None
        self.recorded: RecordedProgram | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to find out."""
        if self._timer is not None and not self._timer.is_over:
            return False
        if self._records:
            return self.recorded is not None
        return not self._measures

    @property
    def plain_step_seconds(self) -> list[float]:
        """Of steps of plain Chainer."""
        return [] if self._timer is None else self._timer.seconds

    def start_backward(self) -> bool:
        """A backward is about to run without a session.

        Returns:
            bool: Whether the steps that have none are over with it.
        """
        if self._timer is None or self._timer.is_over:
            return False
        self._timer.start_backward()
        return self._timer.is_over

    def make_session(self, models: list[chainer.Link]) -> SteppingSession | None:
        """The next session; its models train from the beginning of a step.

        None as long as steps are to run without a session.
        """
        if self._timer is not None and not self._timer.is_over:
            return None
        self._seen = 0
        self._take_updates()
        self._updates, self._peaks = [], {}
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
            self._updates.append(self._take_updates())
        step = session.find_step()
        if self.single and isinstance(session, RecordingSession):
            step = step or session.find_untimed()
        repetitions = self._count_repetitions(len(step)) if step else 0
        step, repeats = step * max(repetitions, 1), repetitions > 0
        if isinstance(session, RecordingSession):
            recorded = [one for one in step if one is not None]
            complete = repeats and len(recorded) == len(step)
            if not (complete or has_ended or self._seen >= self._most):
                return False
            rest_seconds = session.find_least_rest(max(len(step), 1))
            self._take(recorded or session.find_problems(), complete, rest_seconds)
            return True
        if has_ended:
            raise SessionError(
                f'the program ends after {format_count(self._seen, "iteration")}; let '
                f'it train for longer'
            )
        self.plain_peak_bytes = session.iterations_peak_bytes
        self._peaks[len(self._updates)] = self.plain_peak_bytes
        settled = repeats and not self._has_grown(len(step))
        if not settled and self._seen < PLAIN_ITERATIONS:
            return False
        self._measures = False
        if repeats:
            self.plain_iterations = len(step)
            newest = self._updates[-len(step) :]
            updates = sum(sum(one.values()) for one in newest)
            if self._times_plain and updates:
                self._timer = PlainTimer(
                    lambda: sum(self._count_updates()), updates, session.clock
                )
        return True

    def _has_grown(self, iterations: int) -> bool:
        """Whether the newest iterations have needed more than all before.

        A session counts what the program makes once it has begun: neither the first
        batch nor, in the second step, the one before it.
        """
        now = len(self._updates)
        return self._peaks.get(now - iterations, 0) < self._peaks[now]

    def _count_updates(self) -> list[int]:
        optimizers = (reference() for reference in self._optimizers)
        return [0 if one is None else one.t for one in optimizers]

    def _take_updates(self) -> dict[int, int]:
        """How often optimizers, by number, have updated since this was asked last."""
        before, self._counts = self._counts, self._count_updates()
        since = [0] * (len(self._counts) - len(before))  # have got a model meanwhile
        pairs = enumerate(zip(self._counts, before + since, strict=True))
        return {number: now - old for number, (now, old) in pairs if now > old}

    def _count_repetitions(self, iterations: int) -> int:
        """How often what repeats comes in a step; 0 as long as no step has.

        Args:
            iterations: That have computed the same as those before.
        """
        updates, seen = self._updates, len(self._updates)
        alive = {k for k, one in enumerate(self._optimizers) if one() is not None}
        for count in range(iterations, seen + 1, iterations):
            newest, before = updates[-count:], updates[-2 * count : -count]
            if alive <= set().union(*newest) and (self.single or newest == before):
                return count // iterations
        return 0

    def _take(
        self, problems: list[Problem], complete: bool, rest_seconds: float
    ) -> None:
        kinds = count_kinds(problems, self.plain_peak_bytes)
        if not kinds:
            raise SessionError(
                f'too few of {format_count(self._seen, "iteration")} have computed the '
                f'same, with arrays of the same shapes; let it train for longer, '
                f'unless each computes something else'
            )
        self.recorded = RecordedProgram(
            tuple(kinds), self._seen, complete, rest_seconds
        )
