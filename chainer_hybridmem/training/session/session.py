"""``optimize()`` and the session that it makes: ``with`` statement and results."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.compiling import told
from chainer_hybridmem.errors import (
    HybridMemoryError,
    SessionError,
    clear_frames,
    in_flags,
)
from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.measured_timeline import Measured
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.training.chainer_access.models import Model, one_model
from chainer_hybridmem.training.chainer_access.owners import (
    bring_home,
    model_arrays,
    move_in,
)
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution.verifier import Followed, Verdict
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.iterations.all_reduce import AllReduce
from chainer_hybridmem.training.session.iterations.iteration_history import (
    IterationHistory,
    StepTimes,
)
from chainer_hybridmem.training.session.iterations.learning import (
    Learning,
    end_late_checks,
    find_difference,
    refuse_differences,
)
from chainer_hybridmem.training.session.iterations.loop import Loop
from chainer_hybridmem.training.session.iterations.observation import InstrumentSelector
from chainer_hybridmem.training.session.iterations.out_of_memory import (
    OutOfMemoryExplainer,
)
from chainer_hybridmem.training.session.iterations.overrun import Needs, Overrun
from chainer_hybridmem.training.session.plan_cache import PlanCache, open_cache
from chainer_hybridmem.training.session.planning.planning import HostShare, Planning
from chainer_hybridmem.training.session.report import (
    session_page,
    session_report,
    title_of,
)
from chainer_hybridmem.training.session.results import Results
from chainer_hybridmem.training.session.setting.link_measurement import LinkMeasurement
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.options import (
    Options,
    documents_options,
)
from chainer_hybridmem.training.session.setting.planning_time import outside_limit
from chainer_hybridmem.training.session.setting.runtime import open_runtime
from chainer_hybridmem.training.session.setting.session_thread import (
    SessionThread,
    ThreadGuard,
    warn_user,
)
from chainer_hybridmem.units import format_bytes, format_count


class ProgressLines:
    """Tells what a session does.

    Args:
        progress: The option of that name: True for standard error, a file, or neither.
    """

    def __init__(self, progress: Any) -> None:
        self._file = (sys.stderr if progress is True else progress) or None
        self._compiling = contextlib.ExitStack()

    def open(self) -> None:
        """Tells when functions compile, too."""
        if self._file is not None:
            self._compiling.enter_context(told(self.tell))

    def close(self) -> None:
        """Tells no more of functions that compile."""
        self._compiling.close()

    def tell(self, message: str) -> None:
        """Writes a line, if the option asks for lines."""
        if self._file is not None:
            line = printable(f'hybridmem: {in_flags(message)}')
            print(line, file=self._file, flush=True)


class _Active(threading.local):
    """The session of each thread."""

    session: Session | None = None


_active = _Active()


def active_session() -> Session | None:
    """The session that this thread is in."""
    return _active.session


def _leave_in_child() -> None:
    """A forked child has no copy threads: it goes on as plain Chainer."""
    session = active_session()
    if session is not None:
        session._forget()


os.register_at_fork(after_in_child=_leave_in_child)


class Session:
    """One training run under a memory limit; made by :func:`.optimize`.

    Args:
        model (Link or list of Link): What is trained.
        options (Options): How.

    Attributes:
        gives_way (callable or None): Ends it where another session begins in its
            thread; None: that is an error.
    """

    detail = Detail()  # of recordings
    gives_way: Callable[[], None] | None = None

    def __init__(self, model: Model, options: Options) -> None:
        model = self.model = one_model(model)
        self.options = options
        self._thread = SessionThread()
        self._progress = ProgressLines(options.progress)
        tell, followed = self._progress.tell, lambda: Followed(self.profile, self.plan)
        runtime = self._runtime = open_runtime(model, options, tell, followed)
        arrays = self._arrays = ModelArrays(model, runtime.device)
        history = self._history = IterationHistory(runtime.device)
        guidebook = self._guidebook = GuideBook(not options.plans_anyway)
        self._cache = open_cache(runtime)
        planning = Planning(runtime, self.observe_problem, self._keep)
        self._planning = planning
        observation = InstrumentSelector(
            runtime, arrays, guidebook, history, self.detail
        )
        self._explainer = OutOfMemoryExplainer(model, runtime, arrays, observation)
        self._overrun = Overrun(runtime, arrays, self._explainer)
        planning.exceeds_limit = lambda: self._overrun.is_under_way
        self._loop = self._make_loop(observation)
        self._all_reduce = AllReduce(runtime, lambda: self._loop.iteration)
        self._results = Results(runtime, self._loop, guidebook, history, observation)

    def _make_loop(self, observation: InstrumentSelector) -> Loop:
        runtime, arrays = self._runtime, self._arrays
        planning, guidebook, history = self._planning, self._guidebook, self._history
        links = LinkMeasurement(runtime)
        learning = Learning(
            runtime, arrays, planning, guidebook, history, links, self.detail
        )
        return Loop(
            self.model,
            runtime,
            arrays,
            guidebook,
            HostShare(runtime, guidebook, links, planning),
            observation,
            learning,
            self._overrun,
            ThreadGuard(self._thread),
        )

    def __repr__(self) -> str:
        return (
            f'<Session: planner {self.planner}, memory limit '
            f'{format_bytes(self.limit_bytes)}; {self.state} after '
            f'{format_count(self.iterations, "iteration")}>'
        )

    # -- with -----------------------------------------------------------------
    def __enter__(self) -> Session:
        self._thread.check_not_ended()
        other = active_session()
        if other is not None and other.gives_way is not None:
            other.gives_way()
        if active_session() is not None:
            raise SessionError(
                'A hybridmem session is already active in this thread; leave it '
                'before starting another one.'
            )
        self._thread.check_not_open()
        return begin_whole(self, self._begin)

    def _begin(self) -> Session:
        device = self.device
        self._thread.enter()
        self._arrays.begin_counting_updates()
        bring_home(self.model)  # another session may have ended with an error
        device.memory.adopt(model_arrays(self.model, device))
        device.memory.install(self._loop.reclaim)
        try:
            if device.memory.other_bytes:
                move_in(self.model, device)
            self._loop.enter(None if self._cache is None else self._cache.meet)
        except BaseException:
            device.memory.uninstall()
            raise
        self._all_reduce.enter()
        _active.session = self
        self._thread.open()
        # Before the compiled code goes away, whoever else may leave it even later.
        atexit.register(self._leave_at_exit)
        self._progress.open()
        if self._cache is not None:
            outside_limit(self._load, self._cache)
        return self

    def _load(self, cache: PlanCache) -> None:
        """Guides of earlier runs are followed from the first iteration."""
        for link in self.model.links():
            cache.meet(type(link))
        guides = cache.load()
        self._planning.node.begin_with(guides)
        self._guidebook.take_in(guides)
        self._loop.iteration.following.guide = next(iter(guides), None)

    def _keep(self, guide: Guide) -> None:
        """A guide has another plan, or other times."""
        if self._cache is not None:
            self._cache.save(guide)

    @held_back
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        if not self._thread.is_open:
            return
        self._thread.check_is_mine()
        with contextlib.ExitStack() as ends:  # each of them, whatever is raised before
            ends.callback(self.device.close)
            ends.callback(self._runtime.executor.abandon)
            message = self._end(error)
        if error is None and message is None:
            refuse_differences(self.device, wait=True)
        else:
            self._warn_of_differences()
        if message is not None:
            raise message from error

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Lets Chainer go; living graphs get back what they may still ask for.

        Returns:
            The error to raise in place of one that ends the session, or of none.
        """
        executor, device = self._runtime.executor, self.device
        try:
            try:
                if error is None and self._overrun.is_under_way:
                    with contextlib.suppress(HybridMemoryError):  # a recording tells
                        self.finish_iteration()
            finally:
                self._forget()
                self._thread.end()
            if self._runtime.ranks is not None:
                self._runtime.ranks.close()
            message = self._explain(error)
            self._runtime.instruments.discard()
            if isinstance(error, MemoryError):  # or who keeps it, keeps the graph
                clear_frames(error)
                executor.evictor.drop_graphs()
            if error is None:
                self._loop.count_last()
                if not self.options.keep_graph:
                    executor.close()
        finally:
            device.memory.uninstall()
        last = self.iterations + self._loop.iteration.started
        if error is None:
            if not last:
                updates = self._arrays.count_updates()
                self._thread.warn_if_unseen(updates, self._runtime.tell)
            if self.options.keep_graph:
                executor.close(whole=True)
            end_late_checks(device, last)
        else:
            with contextlib.suppress(Exception):  # a broken GPU compares nothing
                end_late_checks(device, last)
        return message

    def _warn_of_differences(self) -> None:
        """Another error ends the session, and must not hide that numbers are wrong."""
        found = ''
        with contextlib.suppress(Exception):  # the GPU may be broken
            found = find_difference(self.device, wait=True)
        if found:
            self._runtime.tell(found)
            warn_user(found)

    def _leave_at_exit(self) -> None:
        """The process ends inside of the session."""
        if active_session() is self:
            self.__exit__()

    def _explain(self, error: BaseException | None) -> BaseException | None:
        """The error to raise in place of one that ends the session, or of none."""
        if error is None:
            return self._overrun.take_error()
        if not isinstance(error, MemoryError):
            return None
        loop, needs = self._loop, self._overrun.needs
        return self._explainer.explain(error, loop.iteration, loop.find_moment, needs)

    def _forget(self) -> None:
        """Chainer does not know of the session any more."""
        self._thread.forget()
        if active_session() is self:
            _active.session = None
        self._progress.close()
        self._all_reduce.leave()
        self._loop.leave(hooked=not self._thread.is_gone)
        atexit.unregister(self._leave_at_exit)

    # -- what a program may ask for -------------------------------------------
    def replan(self, planner: str, **options: Any) -> Plan:
        """Makes a new plan from the profile; it is followed from the next iteration.

        To be called between iterations.

        Args:
            planner: Name of the planner.
            options: Options of that planner.

        Returns:
            Plan: The new plan.

        Raises:
            SessionError: If there is no profile yet, or an iteration is under way.
            InfeasibleError: If the planner does not fit; the old plan stays.
        """
        guide = self._results.find_planned()
        if guide is None or guide.problem is None:
            raise self._results.make_error('profile')
        if self._loop.iteration.is_under_way:
            raise SessionError('An iteration is under way; replan between iterations.')
        self.finish_iteration()
        return outside_limit(self._planning.replan, guide, planner, options)

    def retime(self) -> None:
        """Times the next guided iterations again and predicts anew from them.

        For a machine whose speed has changed. The plan changes with the prediction
        if another one is clearly better for the new times.

        Raises:
            SessionError: If there is no plan yet.
        """
        guide = self._results.find_planned()
        if guide is None:
            raise self._results.make_error('plan')
        guide.pace.time_again()

    def trace_iteration(self) -> None:
        """Traces the next guided iteration; :attr:`timeline` has it afterwards.

        An iteration that leaves its plan does not count. What is traced is not timed.
        """
        self._runtime.instruments.trace_requested = True

    def finish_iteration(self) -> None:
        """Ends the iteration now instead of at the start of the next one.

        To be called after the update, when something else than the next
        iteration follows: its time is then not counted as the iteration's.
        """
        self._loop.finish_iteration()

    def observe_problem(self, problem: Problem) -> None:
        """Called with every finished profile, before it is planned."""

    # -- results --------------------------------------------------------------
    @property
    def device(self) -> Device:
        """Where the model is trained."""
        return self._runtime.device

    @property
    def state(self) -> str:
        """``'warm-up'``, ``'profiling'``, ``'guided'``, ``'passive'`` or ``'in-core'``.

        In-core is an iteration in which nothing has had to leave and of which nothing
        is found out.
        """
        return self._loop.name_state()

    @property
    def settled(self) -> bool:
        """Whether what is to be found out has been.

        The plan's prediction rests on iterations that have followed it; or there is no
        plan, and the last three iterations have fitted without one.
        """
        return self._results.settled

    @property
    def limit_bytes(self) -> int:
        """The memory limit."""
        return self.options.limit_bytes

    @property
    def planner(self) -> str:
        """Name of the planner."""
        return self.options.planner

    @property
    def iterations(self) -> int:
        """Number of finished iterations."""
        return self._history.iterations

    @property
    def deviations(self) -> int:
        """Number of iterations that have left what they had begun like."""
        return self._history.deviations

    @property
    def plan(self) -> Plan | None:
        """The plan followed now; None before there is one."""
        return self._results.plan

    @property
    def profile(self) -> Profile | None:
        """The profile the plan was made from; None before there is one."""
        return self._results.profile

    @property
    def timeline(self) -> Measured | None:
        """What :meth:`trace_iteration` has measured last."""
        return self._runtime.instruments.timeline

    @property
    def verdict(self) -> Verdict | None:
        """Of the iterations verified so far; None before the first."""
        return self._runtime.instruments.verdict

    def statistics(self) -> dict[str, Any]:
        """Figures of the run so far.

        Returns:
            dict: Bytes as int, seconds as float, None where nothing is known
            yet. Medians are over the newest 1000 guided iterations, of the present
            plan if there are some; peaks and numbers of iterations are over all.
            ``overhead`` is measured, ``gap`` is predicted: the plan's time over the
            proven bound, minus 1.
        """
        cached = 0 if self._cache is None else self._cache.loaded
        return self._results.collect_statistics(cached)

    def report(self, html: str | None = None) -> str:
        """The statistics as a table for people, and on request as a page.

        Args:
            html: File to write a page for a browser to; see ``docs/guide/seeing.md``.

        Raises:
            FormatError: If the page cannot be written.
        """
        statistics = self.statistics()
        costs = self._planning.rule_prices.find(self._results.find_planned())
        facts = self.plan, self.profile, self.verdict
        text = session_report(statistics, *facts, costs, self._thread.has_entered)
        if html is not None:
            page = self._make_page(text, statistics, cell=False)
            outside_limit(library.write_text, os.fspath(html), page)
        return text

    def _make_page(self, text: str, statistics: dict[str, Any], cell: bool) -> str:
        told = title_of(self.model), text, statistics, *self._results.planned
        return outside_limit(session_page, *told, self.timeline, cell)

    def _repr_html_(self) -> str:
        """The page of :meth:`report`, for notebooks."""
        return self._make_page(self.report(), self.statistics(), cell=True)

    def iteration_times(self) -> list[float]:
        """Seconds of the guided iterations since the present plan was predicted.

        Of all guided iterations, as long as there is none; of the newest 1000 at most.
        """
        return self._results.list_seconds()

    def time_steps(self, iterations: int) -> StepTimes | None:
        """Times of whole steps in which nothing was recorded; None: there are too few.

        A step ends where the next one begins: what the program does in between, such as
        acting with what it has learnt, is in all times.

        Args:
            iterations: Of a step, which may be of several kinds.
        """
        return self._results.time_steps(iterations)

    def know_plain_peak(self, seen_bytes: int | None) -> None:
        """Takes what plain Chainer has been seen to need; None: that is not known."""
        self._history.plain.seen_bytes = seen_bytes

    def raise_limit_by(self, begin_again: Callable[[Needs], bool]) -> None:
        """Has a limit that does not do raised instead of an error.

        Args:
            begin_again: Gets what iterations need, and tells whether it raises the
                limit: before the next function it leaves this session and enters
                another one.
        """
        self._overrun.raise_limit = begin_again

    @property
    def exceeded(self) -> str:
        """The error that was raised for going beyond the limit once; else empty."""
        return self._overrun.told

    @property
    def needs(self) -> Needs | None:
        """What it has found out about limits that do, if its own did not."""
        return self._overrun.needs

    def last_iteration(self) -> dict[str, Any]:
        """Figures of the last finished iteration; empty before the first."""
        entries = self._history.entries
        return dict(entries[-1]) if entries else {}


@documents_options
def optimize(
    model: Model,
    memory_limit: int | str,
    planner: str | None = None,
    **options: Any,
) -> Session:
    """Trains a model inside a memory limit.

    Args:
        model: The model that is trained; its parameters are counted. A list if
            several are trained together, as with a GAN.
        {options}

    Returns:
        Session: To be used in a ``with`` statement around the training loop.

    Raises:
        UnknownNameError: If there is no such planner or device.
        OptionError: If a value cannot be used, or an option is unknown.
    """
    return Session(model, Options.of(memory_limit, planner, options))
