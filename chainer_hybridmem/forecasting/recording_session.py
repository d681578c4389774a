"""A session that records iterations for others to plan."""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

from chainer_hybridmem import timing
from chainer_hybridmem.errors import InfeasibleError, OptionError, SessionError
from chainer_hybridmem.forecasting.estimation import (
    Kind,
    SamplePair,
    match_kinds,
    same_sizes,
)
from chainer_hybridmem.planning.planners import DEFAULT, make_plan
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.training.chainer_access.models import Model, one_model
from chainer_hybridmem.training.chainer_access.snapshots import kept
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.session import Session, active_session
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.units import format_count

# Profiling swaps everything under every planner; this one plans without a search.
PLANNER = 'swap-all'
ITERATIONS = 10
PLAIN_STEPS = 2  # the first one makes what stays
AMPLE_BYTES = 2**50  # nothing is to be in the way of two small iterations


class SteppingSession(Session):
    """A session that tells of the step which its iterations repeat."""

    def find_step(self) -> list[Problem | None]:
        """Problems of the step that repeats, in order; empty as long as none has.

        A step has an iteration for each backward pass. None stands for one that is not
        recorded.
        """
        step = self._guidebook.find_step()
        return [
            None if guide is None or self._times(guide) else guide.problem
            for guide in step
        ]

    def _times(self, guide: Guide) -> bool:
        """Whether iterations of a guide are still to be timed."""
        return False

    def find_least_rest(self, iterations: int) -> float:
        """Seconds between the iterations of a step, in which a program may evaluate.

        Args:
            iterations: Of a step.
        """
        return self._history.find_least_rest(iterations)

    @property
    def iterations_peak_bytes(self) -> int:
        """Highest load of iterations, whatever was there before and beside them."""
        kinds = self._history.kinds.collect()
        return max((kind['peak_bytes'] for kind in kinds), default=0)

    @property
    def clock(self) -> Callable[[], float]:
        """Tells seconds of the program; on a CPU, without other programs' ones."""
        issued = self._runtime.device.clock.asynchronous
        return timing.now if issued else timing.undelayed

    @classmethod
    def plain(cls, model: Model) -> SteppingSession:
        """A session of which nothing is to be found out but its peak."""
        return cls(model, Options(AMPLE_BYTES, splitting=False))


class RecordingSession(SteppingSession):
    """A session that keeps the problem it plans, whether a plan is found or not.

    Args:
        model (Link or list of Link): What is trained.
        options (Options): Of :func:`recording_options`.
        parts (bool): Whether the profile tells what functions need in parts. Finding
            that out takes most of the time.
        timed (bool): Whether it tells times; it is made in half the time without.

    Attributes:
        problem (Problem or None): The last one.
    """

    problem: Problem | None = None

    def __init__(
        self,
        model: Model,
        options: Options,
        parts: bool = True,
        timed: bool = True,
    ) -> None:
        self.detail = Detail(parts, keep_small_arrays=True, timed=timed)
        super().__init__(model, options)

    def _times(self, guide: Guide) -> bool:
        guided = guide.stage is Stage.GUIDED
        return self.detail.timed and guided and not guide.timed

    def observe_problem(self, problem: Problem) -> None:
        """See :class:`Session`; rules or the host may not let everything be swapped."""
        self.problem = problem
        options = self._runtime.options
        try:
            make_plan(problem, options.limit_bytes, PLANNER)
        except (InfeasibleError, OptionError):
            options.plan_with(DEFAULT, {'steps': 0})
        else:
            options.plan_with(PLANNER, {})

    def find_untimed(self) -> list[Problem | None]:
        """The last problem alone, if its times do not count."""
        return [] if self.detail.timed or not self.problem else [self.problem]

    def find_problems(self) -> list[Problem]:
        """Problems of all iterations that are recorded."""
        found = (guide.problem for guide in self._guidebook)
        return [problem for problem in found if problem is not None]


def recording_options(limit_bytes: int, **others: Any) -> Options:
    """What such a session is told: it plans at once, and nothing is done for speed."""
    return Options(limit_bytes, PLANNER, arena=False, **others)


def count_kinds(problems: Sequence[Problem], peak_bytes: int) -> list[Kind]:
    """Each of these iterations once, with how often it comes.

    Args:
        problems: Of the iterations of a step.
        peak_bytes: Of the whole step, as plain Chainer has run it; 0 if that is not
            known.
    """
    counts = collections.Counter(map(id, problems))
    most = max((problem.in_core_peak_bytes for problem in problems), default=0)
    return [
        Kind(problem.profile, counts[id(problem)], max(0, peak_bytes - most))
        for problem in {id(problem): problem for problem in problems}.values()
    ]


def record_step(
    step: Callable[[int], Any],
    model: Model,
    batchsize: int,
    parts: bool,
    timed: bool = True,
) -> list[Kind]:
    """Records each kind of iteration in a step of a batch size; the model is put back.

    Args:
        step: Trains with as many examples as it is told: one iteration, or those of
            several networks.
        model: What is trained.
        batchsize: Examples.
        parts: As for :class:`RecordingSession`.
        timed: Likewise.

    Raises:
        SessionError: If nothing could be recorded.
    """
    gc.collect()  # or what goes meanwhile counts at the beginning
    session = RecordingSession(model, recording_options(AMPLE_BYTES), parts, timed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept(one_model(model)))
        plain = SteppingSession.plain(model)
        with plain:
            for _ in range(PLAIN_STEPS):
                step(batchsize)
        peak_bytes = plain.iterations_peak_bytes
        stack.enter_context(session)
        for _ in range(ITERATIONS):
            before = session.iterations
            step(batchsize)
            session.finish_iteration()
            if session.iterations == before + 1 and session.problem is not None:
                return count_kinds([session.problem], peak_bytes)
            problems = session.find_step()
            recorded = [one for one in problems if one is not None]
            if len(problems) == len(recorded) > 0:
                return count_kinds(recorded, peak_bytes)
    raise SessionError(
        f'No iteration with {format_count(batchsize, "example")} could be recorded in '
        f'{ITERATIONS} steps: each of them must run forward, backward and update of '
        f'one batch, and the same computation each time.'
    )


def check_step(step: Any, model: Any) -> None:
    """Refuses what is no step of a model, before anything is recorded.

    Raises:
        OptionError: With the value.
    """
    if model is None:
        raise OptionError('model is None; a chainer.Link or a list of them is needed.')
    if not callable(step):
        raise OptionError(f'step is {step!r}; a function of the number is needed.')


def record_pairs(
    step: Callable[[int], Any],
    model: Model,
    batchsizes: tuple[int, int],
    parts: bool,
    timed: bool = True,
) -> list[tuple[SamplePair, int]]:
    """Records a step of each of two batch sizes; the model is put back.

    Args:
        step: As for :func:`record_step`.
        model: What is trained.
        batchsizes: Ascending.
        parts: As for :class:`RecordingSession`.
        timed: Likewise.

    Returns:
        Samples of each kind of iteration, with how often it comes in a step.

    Raises:
        OptionError: If the iterations do not depend on the batch size.
        ProfileMismatchError: If they differ in more than sizes.
        SessionError: If a session is active, or nothing could be recorded.
    """
    if active_session() is not None:
        raise SessionError(
            'An estimate records in sessions of its own; ask for it before optimize() '
            'or after its with statement.'
        )
    small, large = (record_step(step, model, size, parts, timed) for size in batchsizes)
    if same_sizes(small, large):
        first, second = batchsizes
        raise OptionError(
            f'step({first}) and step({second}) need the same memory; it has to train '
            f'with as many examples as it is told.'
        )
    return match_kinds(small, large, batchsizes)
