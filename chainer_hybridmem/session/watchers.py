"""Followers that find something out about a program, and end it when they know it.

Note: [how a program ends]
    What is found out is handed over before the program ends. Then every function that
    it runs raises :class:`Stopped`, which ``except Exception`` does not catch: what it
    has opened is closed on the way out, and a Trainer finalizes its extensions and
    iterators.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import types
from collections.abc import Callable
from typing import Any, NoReturn

import chainer

from chainer_hybridmem.chainer_access.models import one_model
from chainer_hybridmem.chainer_access.snapshots import Snapshot, snapshot
from chainer_hybridmem.errors import HybridMemoryError, SessionError
from chainer_hybridmem.estimation import Kind
from chainer_hybridmem.execution.verifier import Verdict
from chainer_hybridmem.records.plan import Action
from chainer_hybridmem.session.follower import Follower
from chainer_hybridmem.session.recording_session import (
    AMPLE_BYTES,
    RecordingSession,
    SteppingSession,
    count_kinds,
    recording_options,
)
from chainer_hybridmem.session.session import Session, active_session
from chainer_hybridmem.units import format_count


class Stopped(BaseException):
    """Ends a program of which enough is known."""


class Watcher(Follower, abc.ABC):
    """Looks at every iteration of a program, and ends it when it has seen enough.

    Args:
        finish (callable): Gets what has been found out, or an error of this package;
            called at most once.
        options (dict): Of the sessions, by name.
    """

    def __init__(self, finish: Callable[[Any], None], options: dict[str, Any]) -> None:
        limit = options.get('memory_limit', AMPLE_BYTES)
        others = {name: options[name] for name in options if name != 'memory_limit'}
        super().__init__(limit, others)
        self._limit = limit
        self._finish = finish
        self._finished = False
        self._process = os.getpid()
        self._hook = WatcherHook(self)

    @abc.abstractmethod
    def find_answer(self, has_ended: bool) -> Any:
        """What has been found out; None if that is not enough.

        Args:
            has_ended: Whether the program has ended, so that no more will be seen.

        Raises:
            HybridMemoryError: If nothing will be found out.
        """

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        """The program has ended, perhaps with an error."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._look(has_ended=True)
        self._hook.leave()
        super().__exit__(kind, error, trace)

    def _begin(self) -> None:
        self._hook.leave()
        super()._begin()
        if not self._own:
            self._hook.__enter__()

    def _look(self, has_ended: bool) -> None:
        if self._finished or os.getpid() != self._process:
            return
        try:
            answer = self.find_answer(has_ended)
        except HybridMemoryError as error:
            answer = error
        if answer is not None:
            self._finished = True
            self._finish(answer)

    def watch(self, with_graph: bool) -> None:
        """A forward function begins; the session, if there is one, has met it.

        Args:
            with_graph: Whether it is for a backward.

        Raises:
            Stopped: If enough is known.
        """
        if with_graph:
            self._look(has_ended=False)
        if self._finished:
            raise Stopped

    def watch_backward(self, function: Any) -> None:
        """A backward function begins."""

    def explain_nothing(self) -> str:
        """Why nothing can be found out, in a few words."""
        if self._own:
            return 'it has a session of its own'
        if not self._optimizers:
            return 'no optimizer of Chainer has got a model'
        return 'no function has run for a backward since an optimizer had a model'


class WatcherHook(chainer.FunctionHook):
    """Has a watcher look at functions; it is entered inside of the session.

    Args:
        watcher (Watcher): Looks.
    """

    name = 'hybridmem-watcher'

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._depth = 0  # of functions whose backward runs

    def leave(self) -> None:
        """Chainer does not call it any more."""
        self._depth = 0
        if chainer.get_function_hooks().get(self.name) is self:
            self.__exit__()

    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function; those inside of a backward do not count."""
        del function, in_data
        if not self._depth:
            self._watcher.watch(chainer.config.enable_backprop)

    def backward_preprocess(self, function: Any, *data: Any) -> None:
        """Before a backward function."""
        self._depth += 1
        if self._depth == 1:
            self._watcher.watch_backward(function)

    def backward_postprocess(self, function: Any, *data: Any) -> None:
        """After a backward function."""
        del function
        self._depth -= 1


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """What :class:`ProgramRecorder` has recorded.

    Attributes:
        kinds (tuple of Kind): Of the step that repeats, at least one.
        iterations (int): That the program has run.
        complete (bool): Whether a step has repeated, and each optimizer has updated.
    """

    kinds: tuple[Kind, ...]
    iterations: int
    complete: bool


class ProgramRecorder(Watcher):
    """Records every kind of iteration in the step that a program repeats.

    Args:
        finish (callable): Gets a :class:`RecordedProgram`.
        options (dict): Of the session, by name, as for :func:`.recording_options`.
        iterations (int): Give up after so many.
        parts (bool): As for :class:`.RecordingSession`.
        timed (bool): Likewise.
    """

    def __init__(
        self,
        finish: Callable[[RecordedProgram], None],
        options: dict[str, Any],
        iterations: int,
        parts: bool = True,
        timed: bool = True,
    ) -> None:
        super().__init__(finish, options)
        self._most = iterations
        self._detail = parts, timed
        self._measures = 'memory_limit' not in options  # plain Chainer, first
        self._plain_peak_bytes = 0
        self._seen = 0  # iterations
        self._updates: list[list[int]] = []  # of each optimizer, after each of them

    def _make_session(self, models: list[chainer.Link]) -> Session:
        self._seen = 0
        self._updates = [self._count_updates()]
        if self._measures and not self._plain_peak_bytes:
            return SteppingSession.plain(models)
        options = recording_options(int(self._limit), **self._options)
        return RecordingSession(models, options, *self._detail)

    def find_answer(self, has_ended: bool) -> RecordedProgram | None:
        """See :class:`Watcher`.

        Raises:
            SessionError: If nothing could be recorded.
        """
        session = self._session
        if not isinstance(session, SteppingSession):
            if has_ended:
                self._refuse(self.explain_nothing())
            return None
        if has_ended:
            session.finish_iteration()
        seen = session.iterations
        if seen == self._seen and not has_ended:
            return None
        self._seen = seen
        self._updates.append(self._count_updates())
        step = session.find_step()
        repeats = bool(step) and self._all_update(len(step))
        if isinstance(session, RecordingSession):
            return self._find_recorded(session, repeats, has_ended)
        if has_ended:
            self._refuse(
                f'it ends after {format_count(seen, "iteration")}; let it train for '
                f'longer'
            )
        if repeats or seen >= self._most:
            self._plain_peak_bytes = session.statistics()['peak_bytes']
            self._beginnings.wait()  # for the session that records
        return None

    def _count_updates(self) -> list[int]:
        optimizers = (reference() for reference in self._optimizers)
        return [0 if one is None else one.t for one in optimizers]

    def _all_update(self, iterations: int) -> bool:
        """Whether each optimizer that lives has updated in the newest iterations.

        A critic that is trained several times in a row is no step.
        """
        if len(self._updates) <= iterations:
            return False
        now, before = self._updates[-1], self._updates[-1 - iterations]
        return all(
            t > old or reference() is None
            for t, old, reference in zip(now, before, self._optimizers, strict=True)
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise SessionError(f'Nothing of the program could be recorded: {reason}.')

    def _find_recorded(
        self, session: RecordingSession, repeats: bool, has_ended: bool
    ) -> RecordedProgram | None:
        seen = self._seen
        step = session.find_step()
        recorded = [one for one in step if one is not None]
        complete = repeats and len(recorded) == len(step)
        if not complete and not (has_ended or seen >= self._most):
            return None
        kinds = count_kinds(recorded or session.find_problems(), self._plain_peak_bytes)
        if not kinds:
            self._refuse(
                f'of {format_count(seen, "iteration")} a few have to compute the same, '
                f'with arrays of the same shapes, and let it train for longer if it '
                f'has ended'
            )
        return RecordedProgram(tuple(kinds), seen, complete)


@dataclasses.dataclass(frozen=True)
class VerifiedRun:
    """The bits of one run of a training.

    Attributes:
        snapshots (list of Snapshot): After every iteration.
        guided (list of bool): Whether it has followed a plan.
        peak_bytes (int or None): Of the sessions; None for plain Chainer.
        swapped_maps (int): In the last plan.
        recomputed_maps (int): Likewise.
        verdict (Verdict or None): Of the last session.
    """

    snapshots: list[Snapshot]
    guided: list[bool]
    peak_bytes: int | None = None
    swapped_maps: int = 0
    recomputed_maps: int = 0
    verdict: Verdict | None = None

    def with_session(self, session: Session, peak_bytes: int) -> VerifiedRun:
        """The same run, which a session was around."""
        plan = session.plan
        return dataclasses.replace(
            self,
            peak_bytes=peak_bytes,
            swapped_maps=plan.count(Action.SWAP) if plan else 0,
            recomputed_maps=plan.count(Action.RECOMPUTE) if plan else 0,
            verdict=session.verdict,
        )


class ProgramVerifier(Watcher):
    """Notes the bits of a program's models after every iteration.

    Args:
        finish (callable): Gets a :class:`VerifiedRun`.
        options (dict or None): Of sessions, by name; None for plain Chainer.
        iterations (int): So many.
    """

    def __init__(
        self,
        finish: Callable[[VerifiedRun], None],
        options: dict[str, Any] | None,
        iterations: int,
    ) -> None:
        super().__init__(finish, options or {})
        self._plain = options is None
        self._iterations = iterations
        self._models: list[chainer.Link] = []
        self._loss: Any = None  # of the iteration under way, once its backward runs
        self._snapshots: list[Snapshot] = []
        self._guided: list[bool] = []

    def _begin(self) -> None:
        self._models = self._find_models()
        if not self._plain:
            super()._begin()
            return
        self._hook.leave()
        self._own = active_session() is not None
        if not self._own:
            self._hook.__enter__()

    def watch_backward(self, function: Any) -> None:
        """The first one of an iteration has the loss."""
        if self._loss is None:
            self._loss = function.outputs[0]().get_variable().array

    def find_answer(self, has_ended: bool) -> VerifiedRun | None:
        """See :class:`Watcher`.

        Raises:
            SessionError: If the program has not trained.
        """
        session = self._session
        if self._loss is not None:
            if has_ended and session is not None:
                session.finish_iteration()
            last = {} if session is None else session.last_iteration()
            self._guided.append(bool(last.get('guided')))
            self._snapshots.append(snapshot(one_model(self._models), self._loss))
            self._loss = None
        if not self._snapshots and has_ended:
            raise SessionError(
                f'Nothing of the program can be compared: {self.explain_nothing()}.'
            )
        if not has_ended and len(self._snapshots) < self._iterations:
            return None
        run = VerifiedRun(self._snapshots, self._guided)
        if session is None:
            return run
        figures = [*self._figures, session.statistics()]
        return run.with_session(session, max(one['peak_bytes'] for one in figures))
