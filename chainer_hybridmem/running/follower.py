"""A session around whatever a program trains, without the program knowing.

Note: [when a session begins]
    Models are those that optimizers have got by ``setup``. A session begins with the
    first function that is applied for a backward after that: by then the program has
    moved its model to the device it trains on. When another model gets an optimizer,
    the session ends, and the next one has all models whose optimizers live: it learns
    anew. A program that begins a session itself keeps it: ours ends, and none follows.

Note: [which thread trains]
    A session belongs to the thread in which it begins. A backward in another one is
    refused, as long as the first one lives: it would have no limit. Once that has
    ended, the next function of any thread begins a session there.

Note: [static graphs]
    The schedule of a static graph keeps every array to itself, and none can leave. So
    Chainer's own switch for them is off from the first optimizer that gets a model,
    unless the program has set it: the same functions run define-by-run.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import chainer

from chainer_hybridmem.errors import (
    FormatError,
    OutOfMemoryError,
    SessionError,
    in_flags,
    use_flags,
)
from chainer_hybridmem.forecasting.recording_session import SteppingSession
from chainer_hybridmem.planning.records.rules import check_rules
from chainer_hybridmem.running.limit_finder import LimitFinder
from chainer_hybridmem.training.chainer_access.beginnings import Beginnings
from chainer_hybridmem.training.chainer_access.models import name_device, one_model
from chainer_hybridmem.training.execution.verifier import Verdict
from chainer_hybridmem.training.session.guides.guide import Stage
from chainer_hybridmem.training.session.iterations.iteration_history import (
    StepTimes,
    mean_times,
)
from chainer_hybridmem.training.session.iterations.overrun import Needs
from chainer_hybridmem.training.session.session import Session, active_session, optimize
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.runtime import FreeMemory, SessionRules
from chainer_hybridmem.units import (
    AUTO,
    FREE,
    format_apart,
    format_bytes,
    format_count,
    format_enough,
    format_seconds,
    is_percentage,
)

ENOUGH_ITERATIONS = 2  # inside a percentage, that have shown that it does
GROWN = 1.05  # times what has been measured, which measurements may differ by
IN_VAIN = 1.01  # times what was found before, that another look finds no more than
MOST_SPREAD = 0.01  # of most plain steps, with which two decimals are told


class _Off:
    """A switch that is off, and knows whether anything has asked."""

    asked = False

    def __bool__(self) -> bool:
        self.asked = True
        return False

    def __repr__(self) -> str:
        return 'False'


class _Refusal(NamedTuple):
    """What an error says that is not to be kept: its frames hold arrays.

    Attributes:
        needed_bytes (int): That would have been enough there.
        of_host (bool): Whether host copies had no room.
    """

    needed_bytes: int
    of_host: bool

    @classmethod
    def of(cls, error: BaseException | None, session: Session) -> _Refusal | None:
        """None if nothing was refused."""
        if not isinstance(error, OutOfMemoryError):
            return None
        of_host = error.limit_bytes != session.limit_bytes
        return cls(error.used_bytes + error.requested_bytes, of_host)


class Follower:
    """Begins and ends sessions inside of ``with``; see [when a session begins].

    Args:
        memory_limit: As for :func:`.optimize`, a percentage, or ``'auto'``; see [limits
            that are found]. None: nothing is limited.
        options: Others of :func:`.optimize`, by name.
        report: File for the page of the last session; None for no file.
        profile: File for the iteration that is recorded first; None for no file.
        count_sharers: Tells how many processes share a limit that is a size.

    Attributes:
        refused (bool): Whether a session could not begin.
    """

    def __init__(
        self,
        memory_limit: int | str | None,
        options: dict[str, Any],
        report: str | None = None,
        profile: str | None = None,
        count_sharers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._asked = memory_limit
        self._options = options
        self._report = report
        self._profile = profile
        self._count_sharers = count_sharers
        self._optimizers: list[weakref.ref[Any]] = []
        self._finder = LimitFinder(memory_limit, options, profile, self._optimizers)
        self._finding: SteppingSession | None = None  # in which it looks
        self._session: Session | None = None
        self._thread = threading.current_thread()  # the session's
        self._due = False  # another session is to begin
        self._outgrown_bytes = 0  # plain Chainer's need, when a share of it last failed
        self._figures: list[dict[str, Any]] = []  # of sessions that have ended
        self._verdicts: list[Verdict] = []  # likewise
        self._sharers = 1
        self._free: FreeMemory | None = None  # when the first session has begun
        self._own = False  # the program has a session itself
        self.refused = False
        self._failed = False  # the program has ended with an error
        self._backwards = 0  # of no session
        self._needs: Needs | None = None  # what the last session lacked
        self._caught = ''  # the error of a limit that was exceeded, if it ends nothing
        self._exceeded = False  # whether one was, by a session
        self._raised = False  # whether another one took its place then
        self._unmet: Needs | None = None  # of what exceeded one, until another holds
        self._has_ended = False  # the program
        self._refusal: _Refusal | None = None  # the last one
        self._lacked = False  # memory was short before there was a limit
        self._unwritten = ''  # why there is no page
        self._static = _Off()  # see [static graphs]
        self._beginnings = Beginnings(self._meet, self._begin, self._start_backward)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        """The program has ended, perhaps with an error.

        Raises:
            OutOfMemoryError: In place of a MemoryError, with a limit that would do.
        """
        self._beginnings.stop()
        if chainer.global_config.use_static_graph is self._static:
            chainer.global_config.use_static_graph = True
        self._has_ended = True
        self._failed = error is not None and getattr(error, 'code', 1) not in (None, 0)
        if isinstance(error, SystemExit):
            kind = error = trace = None
        finding = self._finding if self._unmet is None else None
        if error is None and finding is not None and self.trains_here:
            self._finder.look(finding, has_ended=True)
        self._leave(kind, error, trace)

    def begin(self) -> None:
        """The session begins before the first function, so that it counts the batch."""
        self._beginnings.begin()

    @property
    def trains_here(self) -> bool:
        """Whether there is a session, and it is this thread's."""
        return self._session is not None and self._thread is threading.current_thread()

    def explain(self, error: BaseException) -> BaseException:
        """Ends the session of this thread with an error; returns what to show of it."""
        if not self.trains_here or isinstance(error, SystemExit):
            return error
        try:
            self._leave(type(error), error, error.__traceback__)
        except Exception as explained:
            return explained
        return error

    # -- beginnings -----------------------------------------------------------
    def _meet(self, optimizer: chainer.Optimizer) -> None:
        if not self._optimizers and chainer.global_config.use_static_graph is True:
            chainer.global_config.use_static_graph = self._static
        known = self._find_models()
        if not any(found() is optimizer for found in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        inside = any(optimizer.target is model for model in known)
        goes_on = self._session is not None and self._thread.is_alive()
        if not (self._own or (inside and goes_on)):
            self._due, self._outgrown_bytes = True, 0
            self._beginnings.wait()

    def _find_models(self) -> list[chainer.Link]:
        """Models of optimizers that live; what is part of another one is left out."""
        found: list[chainer.Link] = []
        for reference in self._optimizers:
            optimizer = reference()
            target = None if optimizer is None else optimizer.target
            if target is not None and not any(target is model for model in found):
                found.append(target)
        parts = {id(link) for model in found for link in model.links(skipself=True)}
        return [model for model in found if id(model) not in parts]

    def _begin(self) -> None:
        """A function for a backward is about to run."""
        if self._session is not None:
            self._check_thread()
        finding = None if self._due else self._finding
        if finding is not None and not self._finder.look(finding):
            self._beginnings.wait()
            return
        outdated = self._due and self._finder.is_over and self._finder.is_found
        self._due = False
        if self._session is not None:
            self._leave()
            gc.collect()  # ended sessions and optimizers are in cycles
        if outdated:
            self._renew_finder()  # it was the limit of other models
        self._step_back(active_session() is not None)
        models = self._find_models()
        if models and not self._own:
            self.refused = True
            self._enter(models)
            self.refused = False

    def _enter(self, models: list[chainer.Link]) -> None:
        session = self._make_session(models)
        if session is not None:
            session.gives_way = self._give_way
            session.know_plain_peak(self._finder.in_core_bytes)
            if self._finder.is_found and self._finder.is_over:
                session.raise_limit_by(functools.partial(self._raise_limit, session))
            session.__enter__()
            self._session, self._thread = session, threading.current_thread()
            if session is not self._finding:
                self._unmet = None

    def _make_session(self, models: list[chainer.Link]) -> Session | None:
        """The next session around these models; None if there is no limit."""
        if self._options.get('rules'):  # what finds a limit may not know them
            SessionRules(check_rules(self._options['rules']), one_model(models))
        if self._asked == FREE and self._free is None:
            self._take_free(models)
        finder = self._finder
        if finder.is_over:
            if finder.limit_bytes is None:
                return None
            limit_bytes = finder.limit_bytes
            on_gpu = any(name_device(model) != 'cpu' for model in models)
            if not (finder.is_found or on_gpu):
                self._sharers = self._count_sharers()
                limit_bytes //= self._sharers
            options = self._options
            if self._free is not None and self._free.host_limit_bytes is not None:
                host_limit = self._free.host_limit_bytes // self._sharers
                options = {**options, 'host_limit': host_limit}
            return optimize(models, limit_bytes, **options)
        self._finding = finder.make_session(models)
        if self._finding is not None:
            self._beginnings.wait()
        return self._finding

    def _take_free(self, models: list[chainer.Link]) -> None:
        """The limit is what is free now, as if that had been named."""
        options = {'planner': None, **self._options}
        told = Options.of(FREE, options.pop('planner'), options)
        self._free = FreeMemory.measure(one_model(models), told)
        self._finder = LimitFinder(
            self._free.limit_bytes, self._options, self._profile, self._optimizers
        )

    def _renew_finder(self) -> None:
        self._finder = LimitFinder(self._asked, self._options, None, self._optimizers)
        self._finding = None

    def _raise_limit(self, session: Session, needs: Needs) -> bool:
        """Iterations need more than what has been found.

        A percentage is looked for anew where plain Chainer needs more than it did, as
        with a batch that grows, and where iterations have run inside of it. Where the
        last look has found no more than the one before, another one is in vain: what
        needs more is no part of a step, or the percentage is too small.
        """
        before = session.iterations - needs.iterations
        known_bytes = self._finder.in_core_bytes or 0
        grows = known_bytes > IN_VAIN * self._outgrown_bytes
        if self._asked == AUTO:
            self._finder.raise_limit(needs.named_bytes)
        elif self._has_ended:
            return False
        elif grows and (
            needs.in_core_bytes > GROWN * known_bytes or before >= ENOUGH_ITERATIONS
        ):
            self._due, self._outgrown_bytes = True, known_bytes
        else:
            return False
        self._raised, self._unmet = True, needs
        self._beginnings.wait()
        return True

    def _give_way(self) -> None:
        """The program begins a session of its own."""
        self._step_back()
        self._leave()

    def _step_back(self, own: bool = True) -> None:
        self._own = own
        if own:
            use_flags({})  # messages are for who has written the program

    def _start_backward(self) -> None:
        """A backward is about to run, perhaps in a thread that has no session."""
        if self._session is None:
            self._backwards += 1
            if self._finder.start_backward():
                self._beginnings.wait()
        elif active_session() is None:
            self._check_thread()
            self._due = True  # its thread has ended
            self._beginnings.wait()

    def _check_thread(self) -> None:
        """See [which thread trains].

        Raises:
            SessionError: If it is another one.
        """
        here = threading.current_thread()
        if self._thread is not here and self._thread.is_alive():
            raise SessionError(
                f'Thread {here.name!r} trains while the memory limit is that of '
                f'{self._thread.name!r}, which has begun to: train in one thread, or '
                f'in one process each.'
            )

    # -- ends -----------------------------------------------------------------
    def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        session, self._session = self._session, None
        finding, self._finding = self._finding, None
        if session is None:
            return
        here = threading.current_thread()
        unlimited = session is finding and self._finder.is_found
        self._lacked = unlimited and isinstance(error, MemoryError)
        try:
            if self._thread is here or not self._thread.is_alive():
                session.__exit__(kind, error, trace)
            self._refusal = _Refusal.of(error, session) or self._refusal
            if session is not finding and not isinstance(error, MemoryError):
                self._caught = session.exceeded or self._caught
        except OutOfMemoryError as explained:
            self._refusal = _Refusal.of(explained, session)
            raise
        finally:
            if session is not finding:
                self._needs = session.needs or self._needs
                self._exceeded = self._exceeded or bool(session.exceeded)
                self._figures.append(self._collect_figures(session))
                if session.verdict is not None:
                    self._verdicts.append(session.verdict)
                self._write_report(session)

    def _collect_figures(self, session: Session) -> dict[str, Any]:
        iterations = self._finder.step_iterations
        return {
            **session.statistics(),
            'step': session.time_steps(iterations) if iterations else None,
            'step_iterations': iterations,
            'plain_seconds': self._finder.plain_seconds,
        }

    def _write_report(self, session: Session) -> None:
        """A page that cannot be written changes nothing of how the program ends."""
        if self._report is not None:
            try:
                session.report(html=self._report)
            except Exception as error:
                self._unwritten = f'{type(error).__name__}: {error}'
                if isinstance(error, FormatError):
                    self._unwritten = str(error)

    def begin_in_child(self, report: str | None) -> None:
        """A forked child has left the session; what it trains has one of its own.

        Args:
            report: As for the class.
        """
        self._figures, self._backwards = [], 0
        self._verdicts = []
        self._caught, self._exceeded, self._raised = '', False, False
        self._needs = self._unmet = self._refusal = None
        self._static.asked = False
        self._report = report
        self._renew_finder()
        if self._session is not None:
            self._session = None
            self._due = True
            self._beginnings.wait()

    # -- what is told ---------------------------------------------------------
    @property
    def has_trained(self) -> bool:
        """Whether there has been a session with the limit."""
        return bool(self._figures)

    def describe(self) -> list[str]:
        """Peak, limit and time, or why there is no limit."""
        lines = []
        if self._figures:
            lines = [
                self._describe_peak(),
                self._describe_limit(),
                self._describe_time(),
            ]
        held = self._figures and self._finder.limit_bytes and self._unmet is None
        if self._asked is not None and not held:
            what = ' to what has trained last' if self._figures else ''
            lines.append(f'the limit was not applied{what}: {self._find_reason()}')
        if self._caught:
            lines.append(f'the program has caught this error: {in_flags(self._caught)}')
        if self._static.asked:
            lines.append('@static_graph was off: what a schedule keeps cannot leave')
        if self._finder.lacks_profile:
            lines.append(f'no profile: {self._find_reason()}')
        if self._finder.unsaved:
            lines.append(f'no profile: {self._finder.unsaved}')
        if self._options.get('verify') and self._figures:
            lines.append(self._describe_verified())
        if self._unwritten:
            lines.append(f'no report: {self._unwritten}')
        return [*lines, *self._describe_remedy()]

    def _describe_verified(self) -> str:
        if not self._verdicts:
            return 'nothing was verified: train until an iteration follows a plan'
        iterations, maps, replays = (
            sum(getattr(one, name) for one in self._verdicts)
            for name in ('iterations', 'maps', 'replays')
        )
        return (
            f'verified {format_count(iterations, "iteration")}: all bits of '
            f'{format_count(maps, "feature map")} are those that forward has made; '
            f'{format_count(replays, "replay")}'
        )

    def _describe_remedy(self) -> list[str]:
        """What to run next, where a limit was too small."""
        if self._lacked:
            return ['without a limit it does not fit: --memory-limit free']
        needs = self._needs if self._exceeded else self._unmet
        refusal = self._refusal
        if needs is not None:
            nbytes = needs.named_bytes
            told = 'will do for steps like these'
            if not needs.complete:
                told = 'did for what has run; more may be needed'
        elif refusal is not None:
            nbytes, told = refusal.needed_bytes, 'or more is needed'
        else:
            return []
        size = format_enough(nbytes * self._sharers)
        wanted = size.replace(' ', '')
        if refusal is not None and refusal.of_host:
            return [f'{size} {told} on the host: --host-limit {wanted}']
        if self._asked == FREE:
            return [f'{size} {told}, and so much is not free: lower the batch size']
        plain_bytes = self._finder.in_core_bytes
        share = is_percentage(self._asked) and self._unmet is None
        if share and plain_bytes and nbytes <= plain_bytes:
            wanted = f'{math.ceil(100 * nbytes / plain_bytes)}%'
        return [f'{size} {told}: --memory-limit {wanted}']

    def _find_reason(self) -> str:
        if self._own:
            return 'the program has a session of its own'
        if self.refused:
            return 'a session was refused, as the error says'
        finder = self._finder
        if self._unmet is not None and (finder.limit_bytes or not finder.is_over):
            return (
                'one was exceeded, and the program has ended before there was another'
            )
        if self._optimizers:
            if finder.has_begun:
                return finder.reason
            return 'no function has run for a backward since an optimizer had a model'
        if self._backwards:
            return (
                'the program trains without an optimizer of Chainer, so that its model '
                'is unknown; call setup() of one, or put hybridmem.optimize() around '
                'the loop'
            )
        what = 'has failed' if self._failed else 'does not train'
        return (
            f'the program {what}: no optimizer has got a model, and no backward has run'
        )

    def _describe_peak(self) -> str:
        plain_bytes = self._finder.in_core_bytes
        for one in self._figures:
            if one['plain_peak_bytes'] is not None:
                plain_bytes = max(plain_bytes or 0, one['plain_peak_bytes'])
        sizes = [self._peak_bytes, self._figures[-1]['limit_bytes']]
        told = f'peak {format_apart(*sizes)[0]}'
        if plain_bytes is None:
            return told
        plain = f'{format_bytes(plain_bytes)} in-core'
        if plain_bytes < self._peak_bytes:
            if any(one['plain_peak_bytes'] is None for one in self._figures):
                return told  # what those sessions need is not known
            # It evaluates, or draws what it has learnt.
            return f'{told}; iterations need {plain}, beside other memory'
        return f'{told} of {plain}'

    @property
    def _peak_bytes(self) -> int:
        return int(max(one['peak_bytes'] for one in self._figures))

    def _describe_limit(self) -> str:
        limit_bytes = self._figures[-1]['limit_bytes']
        limit = format_apart(self._peak_bytes, limit_bytes)[1]
        found = f' ({self._asked})' if self._finder.is_found else ''
        if self._free is not None:
            found = f' (free: {self._free})'
        if self._sharers > 1:
            found += f' (of {format_bytes(limit_bytes * self._sharers)}, shared by '
            found += f'{self._sharers} processes)'
        iterations = sum(one['iterations'] for one in self._figures)
        guided = sum(one['guided_iterations'] for one in self._figures)
        sessions = len(self._figures)
        where = f' in {format_count(sessions, "session")}' if sessions > 1 else ''
        if self._exceeded:
            found += ', exceeded once to find out what will do'
        elif self._unmet is not None:
            found += ', exceeded'
        elif self._raised:
            how = 'raised' if self._asked == AUTO else 'looked for anew'
            found += f', {how} where it was exceeded'
        return (
            f'limit {limit}{found}; {format_count(iterations, "iteration")}{where}, '
            f'{guided} of them with a plan{self._explain_others(guided)}'
        )

    def _explain_others(self, guided: int) -> str:
        """Why iterations have had no plan."""
        if not guided:
            return self._explain_no_plan()
        kinds = [kind for one in self._figures for kind in one['kinds']]
        in_core = sum(k['iterations'] for k in kinds if k['state'] == 'in-core')
        return f', {in_core} needed none' if in_core else ''

    def _explain_no_plan(self) -> str:
        if self._exceeded or self._failed or self._unmet is not None:
            return ''
        if all(one['fits'] for one in self._figures):
            return ', which none has needed'
        if any(one['unplanned'] for one in self._figures):
            return ', as none fits'
        states = {kind['state'] for one in self._figures for kind in one['kinds']}
        if Stage.PROFILING.value in states:
            return ': too few to make one'
        return ': none has come again'

    def _describe_time(self) -> str:
        one = max(self._figures, key=lambda figures: figures['guided_iterations'])
        if all(figures['fits'] for figures in self._figures):
            return 'time as without it: everything fits, and nothing had to leave'
        if one['iteration_seconds'] is None:
            return 'time unknown: no iteration has ended'
        if self._exceeded and not one['guided_iterations']:
            return 'time unknown: no iteration has followed a plan'
        times, plain = self._compare_times(one)
        told = f'time {format_seconds(times.seconds)} / iteration'
        if one['step'] is None and 0 < 2 * one['guided_iterations'] < one['iterations']:
            told += ' with a plan'  # what the others take is not in it
        if not plain:
            stalled = one['stall_seconds']
            if stalled:
                told += f', of which {format_seconds(stalled)} wait for copies'
            if one['plain_seconds']:
                return f'{told}; too few steps have run so to compare it'
            return f'{told}; plain Chainer was not timed'
        timed = one['plain_seconds']
        decimals = 2 if _agree(timed) else 1
        told += (
            f', {times.own_seconds / plain:.{decimals}f} times that of plain Chainer'
        )
        if times.predicted_seconds:
            told += f' ({times.predicted_seconds / plain:.{decimals}f} predicted)'
        return told if timed else f'{told}, which was estimated: it was not run alone'

    def _compare_times(self, one: dict[str, Any]) -> tuple[StepTimes, float | None]:
        """Times of an iteration of a session, and of plain Chainer if they are known.

        Where a step has iterations of several kinds, they are means: over a step if
        that of plain Chainer has been timed, else over all that have followed plans.
        """
        predicted = one['guided_iterations'] and one['predicted_seconds']
        alone = StepTimes(one['iteration_seconds'], one['own_seconds'], predicted)
        timed, count = one['plain_seconds'], one['step_iterations']
        if timed:
            if one['step'] is None:  # too few have run since the last recording
                return alone, statistics.median(timed) if count == 1 else None
            return one['step'].divide(count), statistics.median(timed) / count
        return mean_times(one['kinds']) or (alone, one['in_core_seconds'])


def _agree(seconds: list[float]) -> bool:
    """Whether most of them are much the same, so that their median has two digits."""
    middle = statistics.median(seconds) if seconds else 0.0
    near = sum(abs(one - middle) <= MOST_SPREAD * middle for one in seconds)
    return near > max(len(seconds) / 2, 1)
