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
import sys
import types
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.errors import HybridMemoryError, SessionError
from chainer_hybridmem.extras.inference_recorder import record_inference
from chainer_hybridmem.extras.inference_session import describe
from chainer_hybridmem.forecasting.recording_session import AMPLE_BYTES, SteppingSession
from chainer_hybridmem.planning.layouts import blob_bytes
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.running.follower import Follower
from chainer_hybridmem.running.step_recorder import RecordedProgram, StepRecorder
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.chainer_access.models import one_model
from chainer_hybridmem.training.chainer_access.snapshots import Snapshot, snapshot
from chainer_hybridmem.training.execution.verifier import Verdict
from chainer_hybridmem.training.session.session import Session, active_session


class Stopped(BaseException):
    """Ends a program of which enough is known."""


def _is_good_end(error: BaseException | None) -> bool:
    """Whether a program that ends so has come to its end."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


class Watcher(Follower, abc.ABC):
    """Looks at every iteration of a program, and ends it when it has seen enough.

    Args:
        finish (callable): Gets what has been found out, or an error of this package;
            called at most once.
        options (dict): Of the sessions, by name.

    Attributes:
        infers (bool): Whether it looks at a program that does not train.
    """

    infers = False

    def __init__(self, finish: Callable[[Any], None], options: dict[str, Any]) -> None:
        limit = options.get('memory_limit', AMPLE_BYTES)
        others = {name: options[name] for name in options if name != 'memory_limit'}
        super().__init__(limit, others)
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
        if _is_good_end(error):
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
        self._may_be_backward = False  # to look takes time, which would be measured

    def leave(self) -> None:
        """Chainer does not call it any more."""
        if chainer.get_function_hooks().get(self.name) is self:
            self.__exit__()

    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function; those inside of a backward do not count."""
        del function, in_data
        self._may_be_backward = self._may_be_backward and graph.backward_runs()
        if not self._may_be_backward:
            self._watcher.watch(chainer.config.enable_backprop)

    def backward_preprocess(self, function: Any, *data: Any) -> None:
        """Before a backward function."""
        self._may_be_backward = True
        self._watcher.watch_backward(function)


class ProgramRecorder(Watcher):
    """Records every kind of iteration in the step that a program repeats.

    Args:
        finish (callable): Gets a :class:`.RecordedProgram`.
        options (dict): As for :class:`.StepRecorder`.
        iterations (int): Likewise.
        parts (bool): Likewise.
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
        self._recorder = StepRecorder(
            self._optimizers, options, iterations, parts=parts, timed=timed
        )

    def begin(self) -> None:
        """See :class:`.Follower`; what says when it begins trains one network."""
        self._recorder.single = True
        super().begin()

    def _make_session(self, models: list[chainer.Link]) -> Session:
        session = self._recorder.make_session(models)
        assert session is not None  # it times no steps without one
        return session

    def find_answer(self, has_ended: bool) -> RecordedProgram | None:
        """See :class:`Watcher`.

        Raises:
            SessionError: If nothing could be recorded.
        """
        session, recorder = self._session, self._recorder
        try:
            if not isinstance(session, SteppingSession):
                if has_ended:
                    raise SessionError(self.explain_nothing())
            elif recorder.look(session, has_ended) and not recorder.is_over:
                self._beginnings.wait()  # for the session that records
        except SessionError as error:
            raise SessionError(f'Nothing could be recorded: {error}.') from error
        return recorder.recorded


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


@dataclasses.dataclass(frozen=True)
class RecordedPass:
    """What :class:`PassRecorder` has recorded.

    Attributes:
        profile (Profile): Of the pass that has most blobs.
        link (str): The class that was called.
    """

    profile: Profile
    link: str


class PassRecorder(chainer.LinkHook):
    """Records the forward passes of a program that infers, and ends it.

    A pass is the call of a link, not inside of another one's, where no backward can
    follow: under ``no_backprop_mode`` or with ``train`` off. Each kind is recorded when
    it comes first, by one more call, until one comes again.

    Args:
        finish (callable): Gets a :class:`RecordedPass`, or an error of this package;
            called at most once.
        kinds (int): Look at so many at most.
    """

    name = 'hybridmem-passes-of-a-program'
    infers = True

    def __init__(self, finish: Callable[[Any], None], kinds: int) -> None:
        self._finish = finish
        self._most = kinds
        self._finished = False
        self._kinds: set[Any] = set()
        self._largest: RecordedPass | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        """The program has ended, perhaps with an error."""
        super().__exit__(kind, error, trace)
        if not self._finished and _is_good_end(error):
            self._end()

    def forward_preprocess(self, args: Any) -> None:
        """A link is called.

        Raises:
            Stopped: If enough is known.
        """
        if graph.frame_of(chainer.Link.__call__, sys._getframe(2)) is not None:
            return
        if not self._finished and not (
            chainer.config.enable_backprop and chainer.config.train
        ):
            self._look(args.link, args.args, args.kwargs)
        if self._finished:
            raise Stopped

    def _look(self, link: chainer.Link, args: Any, kwargs: Any) -> None:
        kind = id(link), describe((args, kwargs))
        if kind in self._kinds or len(self._kinds) == self._most:
            self._end()
            return
        self._kinds.add(kind)
        profile = record_inference(link, *args, **kwargs)
        if self._largest is None or blob_bytes(profile) > blob_bytes(
            self._largest.profile
        ):
            self._largest = RecordedPass(profile, type(link).__name__)

    def _end(self) -> None:
        self._finished = True
        if self._largest is None:
            self._finish(
                SessionError(
                    'Nothing of the program could be recorded: it has called no link '
                    'under no_backprop_mode or with train off.'
                )
            )
        else:
            self._finish(self._largest)
