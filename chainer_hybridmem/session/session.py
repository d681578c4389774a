"""``optimize()``: warm-up, profile, plan, guided iterations, and deviations."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.chainer_access.models import Model, one_model
from chainer_hybridmem.chainer_access.owners import (
    Owner,
    StateOwner,
    model_arrays,
    move_in,
    owners_of,
    permanent_arrays,
)
from chainer_hybridmem.compiling import told
from chainer_hybridmem.devices import open_device, parse_device
from chainer_hybridmem.devices.link import measure_link
from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.errors import (
    HybridMemoryError,
    OptionError,
    OutOfMemoryError,
    SessionError,
    clear_frames,
    clear_handled,
)
from chainer_hybridmem.estimation.specs import spec_of
from chainer_hybridmem.execution import Executor
from chainer_hybridmem.execution.verifier import (
    Followed,
    Verdict,
    Verification,
)
from chainer_hybridmem.interrupts import HeldBack, held_back
from chainer_hybridmem.recording import Recorder
from chainer_hybridmem.records.measured_timeline import Measured
from chainer_hybridmem.records.plan import Plan, Tier
from chainer_hybridmem.records.profile import Category, Link, Profile, Slot
from chainer_hybridmem.session.first_update import coming
from chainer_hybridmem.session.forecast import Forecast, enough_for_update, forecast
from chainer_hybridmem.session.guide import Guide, Key, Stage
from chainer_hybridmem.session.guides import Guides
from chainer_hybridmem.session.history import History
from chainer_hybridmem.session.instruments import Instruments
from chainer_hybridmem.session.options import Options, documents_options
from chainer_hybridmem.session.out_of_memory import (
    Moment,
    Progress,
    crossing_hint,
    moment_of,
)
from chainer_hybridmem.session.plan_cache import PlanCache
from chainer_hybridmem.session.planning import Planning
from chainer_hybridmem.session.report import session_report
from chainer_hybridmem.session.spent import Spent
from chainer_hybridmem.session.watch import Watch
from chainer_hybridmem.simulation import Problem
from chainer_hybridmem.splitting import Splitter
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import (
    format_bytes,
    format_seconds,
)

_active = threading.local()
MEASURING_BYTES = 3 * 2**24  # wanted for measuring the link
NO_LINK = Link(0.0, 1.0, 1.0)  # where no copy is timed
EVICTING_ITERATIONS = 3  # in a row under a plan, after which there is another one
FITTING_ITERATIONS = 3  # in a row, after which nobody expects that anything must leave
KNOWN_AT_ONCE = 16  # functions of a quiet iteration in which memory is short
GUARDED = 16  # one function in so many refuses a backward in another thread


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
        OptionError: If a value cannot be used, or nobody knows an option.
    """
    return Session(model, Options.of(memory_limit, planner, options))


def active_session() -> Session | None:
    """The session that this thread is in."""
    session: Session | None = getattr(_active, 'session', None)
    return session


def _leave_in_child() -> None:
    """A forked child has no copy threads: it goes on as plain Chainer."""
    session = active_session()
    if session is not None:
        session._forget()


os.register_at_fork(after_in_child=_leave_in_child)


class Session(chainer.FunctionHook):
    """One training run under a memory limit; made by :func:`optimize`.

    Attributes:
        plan (Plan or None): The plan followed now.
        profile (Profile or None): The profile it was made from.
    """

    name = 'hybridmem'
    tries_parts = False  # whether the profile tells what functions need in parts, and
    # keeps all allocations apart

    def __init__(self, model: Model, options: Options) -> None:
        model = self.model = one_model(model)
        self.options = options
        self.device: Device = open_device(
            _device_name(model, options.device),
            options.limit_bytes,
            options.link_bandwidth,
            options.swap_dir,
            options.host_limit_bytes,
            options.disk_bandwidth,
        )
        told = sys.stderr if options.progress is True else options.progress
        self._progress = told or None
        self._link_hook = _LinkPath(model)
        self._executor = Executor(
            self.device, may_drop=self.options.host_limit_bytes is not None
        )
        self._executor.asked = self._note_asked
        self._splitter = Splitter(self.device, self.options.splitting, self._tell)
        self._planning = Planning(
            self.device,
            self._executor,
            self.options,
            self._tell,
            self.observe_problem,
            self._keep,
        )
        self._cache: PlanCache | None = None
        if options.cache_dir is not None:
            self._cache = PlanCache(options.cache_dir, self.device, options, self._tell)
        self._cached = 0  # guides that earlier runs have made
        self._history = History(self.device)
        self._verification = Verification(
            self.device,
            model,
            options.verified_iterations,
            lambda: Followed(self.profile, self.plan),
        )
        self._guides = Guides(cautious=not options.plans_anyway)
        self._watch = Watch()
        self._quiet = False  # see watch.py, [quiet iterations]
        self._short = False  # whether an allocation has not fitted since one has begun
        self._fitting = 0  # iterations in a row in which all have
        self._shortages = 0  # iterations in which one has not
        self._settings: tuple[dict[str, Any], ...] = ()  # of this thread, of all
        self._guide: Guide | None = None  # None: nobody knows this iteration
        self._instruments = Instruments(self.device, self._executor)
        self._trace_next = False
        self._measured: Measured | None = None
        self._links: tuple[Link, Link | None] | None = None  # RAM, disk
        self._host_user: Guide | None = None  # whose copies the host holds
        self._open = self._ended = False
        self._thread: threading.Thread | None = None  # that has entered it
        self._guard = _ThreadGuard(self)
        self._told = contextlib.ExitStack()
        self._updates = 0  # of parameters, when it was entered
        self._last: tuple[int, Any] | None = None  # forward, not complete yet
        self._kinds: dict[int, Category] = {}
        self._depth: int
        self._backward_seen: bool
        self._print: int | None
        self._origin: _Origin
        self._reset_iteration()
        self.deviations = 0

    # -- with -----------------------------------------------------------------
    def __enter__(self) -> Session:
        self._check_can_begin()
        try:
            with HeldBack():
                self._begin()
            return self
        except BaseException:
            self.__exit__()  # if it was held back until the session had begun
            raise

    def _check_can_begin(self) -> None:
        if self._ended:
            raise SessionError(
                'This session has ended and cannot be entered again; make another one '
                'with optimize().'
            )
        if active_session() is not None:
            raise SessionError(
                'A hybridmem session is already active in this thread; leave it '
                'before starting another one.'
            )
        if self._open:
            raise SessionError(
                f'This session is active in {_name(self._thread)}; make one with '
                f'optimize() for each thread.'
            )

    def _begin(self) -> None:
        self._thread = threading.current_thread()
        self._updates = _count_updates(self.model)
        self.device.adopt(array for _, array in permanent_arrays(self.model))
        self._settings = graph.settings()
        self.device.install(self._reclaim)
        try:
            if self.device.other_bytes:
                move_in(self.model, self.device)
            super().__enter__()
            self._link_hook.__enter__()
            self._splitter.__enter__()
        except BaseException:
            self.device.uninstall()
            raise
        _active.session = self
        self._open = True
        if self._progress is not None:
            self._told.enter_context(told(self._tell))
        if self._cache is not None:
            _uncounted(self._load, self._cache)

    def _load(self, cache: PlanCache) -> None:
        """Guides of earlier runs are followed from the first iteration."""
        for link in self.model.links():
            cache.meet(type(link))
        guides = cache.load()
        self._guides.take_in(guides)
        self._guide = next(iter(guides), None)
        self._cached = len(guides)

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
        if not self._open:
            return
        if threading.current_thread() is not self._thread:
            raise SessionError(
                f'This session was entered in {_name(self._thread)} and is left in '
                f'{_name(threading.current_thread())}; leave it where it was entered.'
            )
        self._forget()
        self._ended = True
        try:
            self._planning.stop_improving()
            message = self._explain(error)
            self._instruments.discard()
            if isinstance(error, MemoryError):  # or who keeps it, keeps the graph
                clear_frames(error)
                self._executor.drop_graphs()
        finally:
            self.device.uninstall()
        try:
            if error is None:
                self._finish_statistics()
                self._warn_if_unseen()
                self._executor.close()
                self._end_late_checks(self.iterations + self._started)
        finally:
            try:
                self._executor.abandon()
            finally:
                self.device.close()
        if message is not None:
            raise message from error
        if error is None:
            self._refuse_differences(wait=True)

    def _warn_if_unseen(self) -> None:
        """Chainer calls hooks in the thread that has entered the session only."""
        count = _count_updates(self.model) - self._updates
        if self.iterations or self._started or count <= 0:
            return
        message = (
            f'parameters were updated {count} times in this session, but no iteration '
            f'was seen in {_name(self._thread)}, which entered it: what other threads '
            f'train is not managed; enter the session in the thread that trains.'
        )
        self._tell(message)
        warnings.warn(f'hybridmem: {message}', stacklevel=4)

    def _forget(self) -> None:
        """Chainer does not know of the session any more."""
        self._open = False
        _active.session = None
        self._told.close()
        self._splitter.__exit__()
        self._link_hook.__exit__(None, None, None)
        super().__exit__(None, None, None)

    def _explain(self, error: BaseException | None) -> BaseException | None:
        """NumPy's and CuPy's own errors know neither limit nor operation."""
        if not isinstance(error, MemoryError) or isinstance(error, HybridMemoryError):
            return None
        reason = self.device.reclaim_error
        if reason is not None:
            return reason  # Ctrl-C, or a swap file that is full
        failure = self.device.last_failure
        if failure is None:
            return None
        moment = moment_of(error, self._now, self.model)
        told: OutOfMemoryError = _uncounted(self.out_of_memory, *failure, moment)
        return told

    def out_of_memory(
        self, requested: int, used: int, moment: Moment
    ) -> OutOfMemoryError:
        """The error for an allocation that did not fit, with numbers."""
        limit_bytes, refusal = self.options.limit_bytes, self.device.host_refusal
        why = '' if refusal is None else f' ({refusal.rstrip(".")})'
        crossing = ''
        if moment.in_operation and not self.options.cross_iteration:
            missing = used + requested - limit_bytes
            crossing = crossing_hint(self.model, self.device, missing)
        enough = self._enough(moment)
        later = ', and later ones may need more'
        if enough is not None and self.options.host_limit_bytes is None:
            later = f'; the smallest known to do for all is {enough} bytes'
        return OutOfMemoryError(
            f'{format_bytes(requested)} ({requested} bytes) asked for {moment.text} '
            f'do not fit: {used} of {limit_bytes} bytes are in use'
            f'{self._resident()}, and nothing more can be swapped{why}. The smallest '
            f'limit that gets past this allocation is {used + requested} bytes{later}; '
            f'raise memory_limit or lower the batch '
            f'size{self._splitter.hint}{crossing}{self._hint_to_record(enough)}.',
            requested,
            limit_bytes,
            used,
        )

    def _hint_to_record(self, enough: int | None) -> str:
        """For an error message: how to learn a limit that does for all iterations."""
        unrecorded = self._guide is None and self._instruments.recorder is None
        if enough is not None or not unrecorded or not self._waits_for_shortage:
            return ''
        return (
            f'; with planner={self.options.planner!r} the first iteration is recorded, '
            f'which tells a limit for all later ones'
        )

    def _enough(self, moment: Moment) -> int | None:
        """A limit at which iterations like this one run, if that is known."""
        if self._guide is not None:
            known = self._guide.forecast
            return None if known is None else known.enough_bytes
        recorder = self._instruments.recorder
        if recorder is None or not (moment.in_update and self._started):
            return None
        self._instruments.recorder = None
        recorder.enter()
        kinds = {**self._kinds, **self._permanent_kinds()}
        on_host = not self.device.asynchronous
        try:
            draft = recorder.build(NO_LINK, {}, kinds, self._owners())
            return enough_for_update(draft, coming(self.model, on_host))
        except HybridMemoryError:  # such a recording makes no profile
            return None

    @property
    def _now(self) -> Progress:
        """How far the iteration has come."""
        if self._quiet:
            self._label = self._label_now()
        return Progress(
            self.iterations + 1,
            self._started,
            self._position,
            self._label,
            self._depth,
            self._backward_seen,
        )

    def _resident(self) -> str:
        """What was in memory at the last shortage, and why it could not go."""
        shortage = self._executor.shortage
        if shortage is None:
            return ''
        permanent_bytes = self.device.distinct_bytes(model_arrays(self.model))
        known_bytes = (
            permanent_bytes
            + shortage.busy_bytes
            + shortage.held_bytes
            + shortage.stuck_bytes
        )
        parts = (
            (permanent_bytes, 'of parameters, gradients and optimizer states'),
            (shortage.busy_bytes, 'of feature maps that this operation reads'),
            (
                shortage.held_bytes,
                'of feature maps that the program holds in variables',
            ),
            (shortage.stuck_bytes, 'of feature maps that could not be copied out'),
            (
                shortage.used_bytes - known_bytes,
                'of inputs, gradients on their way, temporary arrays and what else '
                'the program holds',
            ),
        )
        told = [f'{format_bytes(n)} {what}' for n, what in parts if n > 0]
        return f' ({"; ".join(told)})' if told else ''

    # -- hooks ----------------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function: complete the last one, act on the plan."""
        if self._quiet and self._noted(function, in_data):
            return
        graph.refuse_static(function)
        if not chainer.config.enable_backprop:
            self._splitter.prepare(function)
            self._executor.restore_maps(function)
            return
        if self._depth and graph.backward_runs():
            self._nested_forward(function)
            self._splitter.prepare(function)
            return
        if self._broken_off():
            self._give_up_iteration()
        self._instruments.enter()
        self._complete_last()
        key = _forward_key(function, in_data)
        if self._backward_seen or not self._started:
            self._end_iteration()
            self._begin_iteration(key)
            if self._quiet:
                self._keys.append(key)
                self._note(function, in_data)
                return
        k = self._position
        self._position += 1
        name = graph.function_name(function)
        self._label = f'{self._link_hook.path}/{name}'
        self._start_operation(k, key)
        self._executor.before_forward(k, function)
        known = self._executor.functions.know(function)
        known.operation, known.origin = k, self._origin
        self._last = (k, weakref.ref(function))
        if self._cache is not None:
            self._cache.meet(type(graph.target(function)))
        recorder = self._instruments.recorder
        if recorder is not None:
            specs = tuple(spec_of(x) for x in in_data)
            recorder.forward_starts(self._label, function, specs, in_data)
        self._splitter.prepare(function)
        self._instruments.leave(starts_operation=True)

    def forward_postprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """After a forward function has computed."""
        if (
            self._quiet
            or self._depth
            or self._last is None
            or self._last[1]() is not function
        ):
            return
        self._executor.after_forward(function)
        recorder = self._instruments.recorder
        if recorder is not None:
            recorder.enter()
            recorder.forward_ran(in_data)
            recorder.leave()

    def backward_preprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Before a backward function: everything it reads must be there."""
        del in_data, out_grad
        if self._quiet:
            self._depth += 1
            self._backward_seen = True
            self._watch.running.append(weakref.ref(function))
            self._splitter.start_operation(self._position, '')
            self._position += 1
            if self._short:
                self._before_quiet_backward(function)
            return
        self._instruments.enter()
        self._complete_last()
        self._depth += 1
        self._backward_seen = True
        k = self._position
        self._position += 1
        known = self._executor.functions.get(function)
        forward = -1
        if known is not None and known.origin is self._origin:
            forward = known.operation
        elif known is not None and known.origin is not None:
            self._visit(known.origin, function)
        name = graph.function_name(function)
        self._label = f'backward of {name}'
        key = ('backward', forward) if forward >= 0 else ('backward', name)
        self._start_operation(k, key)
        self._executor.before_backward(k, function)
        recorder = self._instruments.recorder
        if recorder is not None:
            label = recorder.label_of(forward, self._label)
            recorder.backward_starts(label, function, forward)
        self._instruments.leave(starts_operation=True)

    def backward_postprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """After a backward function: drop what is not needed any more."""
        del in_data, out_grad
        if self._quiet:
            self._depth -= 1
            ended = self._watch.running.pop()
            if self._short and self._executor.is_known(function):
                self._executor.after_backward(self._position - 1, function)
            else:
                self._watch.ended.append(ended)
            if not self._depth:
                self._splitter.start_operation(-1, '')
            return
        self._instruments.enter()
        self._complete_last()
        self._executor.after_backward(self._position - 1, function)
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._splitter.start_operation(-1, self._label)
        self._instruments.leave(starts_operation=False)

    # -- quiet iterations -----------------------------------------------------
    def _noted(self, function: Any, in_data: tuple[Any, ...]) -> bool:
        """Takes note of a forward function; False if another iteration begins."""
        own, shared = self._settings
        if (
            graph.is_static(function)
            or own.get('schedule_func', shared['schedule_func']) is not None
        ):
            return False  # it will be refused
        if not own.get('enable_backprop', shared['enable_backprop']):
            self._splitter.prepare_whole(function)
            return True
        if self._depth:
            if not graph.backward_runs():
                return False
            if self._short:
                self._catch_up()
                return False
            self._watch.nested.add(len(self._watch.functions))
            self._watch.functions.append(weakref.ref(function))
            self._splitter.prepare_whole(function)
            return True
        if self._backward_seen or not self._started:
            return False
        self._note(function, in_data)
        return True

    def _note(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """A forward function is about to run in a quiet iteration."""
        if self._shortages:  # the iteration may be worth recording if it comes again
            shapes = [x.shape for x in in_data]
            self._print = hash((self._print, type(function), *shapes))
        if self._short:
            self._executor.pass_by(function)
        functions = self._watch.functions
        k = len(functions)
        functions.append(weakref.ref(function))
        self._position = k + 1
        self._splitter.start_operation(k, '')
        self._splitter.prepare_whole(function)
        if not k % GUARDED:
            graph.add_local_hook(function, self._guard)

    def _reclaim(self, missing_bytes: int) -> None:
        """An allocation does not fit; see watch.py, [quiet iterations]."""
        self._short = True
        if not self._quiet:
            self._executor.reclaim(missing_bytes)
            return
        executor, device = self._executor, self.device
        goal_bytes = device.used_bytes - missing_bytes
        if self._serials_from < 0:
            self._begin_to_know()
        self._know_running()
        count = KNOWN_AT_ONCE
        while device.used_bytes > goal_bytes and not self._watch.nested:
            executor.reclaim(device.used_bytes - goal_bytes)
            if device.used_bytes <= goal_bytes or self._watch.all_out:
                break
            self._know_more(count)
            count *= 2
        if device.used_bytes > goal_bytes:
            self._catch_up()
            executor.reclaim(device.used_bytes - goal_bytes)

    def _begin_to_know(self) -> None:
        """Memory is short for the first time in a quiet iteration."""
        executor = self._executor
        self._kinds = self._permanent_kinds()
        executor.permanent = set(self._kinds)
        if self._know_older():
            executor.begin(None, {})  # what is known belongs to older graphs
        self._serials_from = executor.serial + 1
        executor.open_window()

    def _know_more(self, count: int) -> None:
        """So many more functions of a quiet iteration, or all, become known."""
        ended = self._watch.next_ended(count)
        for function in ended:
            self._know(self._position, function, self._serials_from)
        self._executor.catch_up(ended, ())
        if not ended:
            for k, function in self._watch.next_functions(count):
                self._know(k, function, self._serials_from + k)

    def _know_running(self) -> None:
        """What backward functions under way read must not go."""
        references = self._watch.running
        running = [f for f in (r() for r in references) if f is not None]
        for function in running:
            self._know(self._position, function, self._serials_from + self._position)
        self._executor.catch_up((), running)

    def _before_quiet_backward(self, function: Any) -> None:
        """Memory has been short: what a backward function reads may be away."""
        executor, k = self._executor, self._position - 1
        if not executor.is_known(function):
            if not executor.misses(function):
                executor.before_unknown()
                return
            self._know(k, function, self._serials_from + k)
        executor.before_backward(k, function)

    def _catch_up(self) -> None:
        """All that has run so far is known from now on, and what follows, too."""
        self._quiet = False
        if self._serials_from < 0:
            self._begin_to_know()
        self._label = self._label_now()
        functions, ended, running = self._watch.take()
        for k, function in functions:
            self._know(k, function, self._serials_from + max(k, 0))
        if functions and graph.is_unfinished(functions[-1][1]):
            self._last = functions[-1][0], weakref.ref(functions[-1][1])
        self._executor.catch_up(ended, running)
        self._splitter.start_operation(self._position - 1, self._label)

    def _know_older(self) -> bool:
        """Makes graphs of older quiet iterations known; whether any lives."""
        functions, ended = self._watch.take_older()
        for k, function in enumerate(functions):
            self._know(k, function, self._executor.serial + 1)
        self._executor.catch_up(ended, ())
        return bool(functions)

    def _know(self, k: int, function: Any, serial: int) -> None:
        """What a function has left in the graph is known from now on."""
        executor = self._executor
        if not (graph.is_unfinished(function) or executor.is_known(function)):
            executor.complete_late(k, function, serial)
            if executor.maps_of(function):
                graph.add_local_hook(function, self._guard)

    def _label_now(self) -> str:
        """Of the operation under way in a quiet iteration."""
        watch = self._watch
        references = watch.running or watch.functions
        function = references[-1]() if references else None
        name = 'a function' if function is None else graph.function_name(function)
        if watch.running:
            return f'backward of {name}'
        return f'{self._link_hook.path}/{name}'

    def _nested_forward(self, function: Any) -> None:
        """A backward function makes a graph of its own, for another backward.

        No plan knows its maps; they can be evicted.
        """
        self._complete_last()
        self._last = -1, weakref.ref(function)

    def _visit(self, origin: _Origin, function: Any) -> None:
        """Backward has come to a function of an iteration that has ended.

        What is asked for then must not be recomputed: parameters may be others.
        """
        if origin.guide is not None:
            updated = self._executor.is_updated(function)
            origin.guide.outlives(self._slots(function), updated)

    def _note_asked(self, function: Any, slots: list[Slot]) -> None:
        """The program reads what the graph keeps: later iterations must not drop it."""
        known = self._executor.functions.get(function)
        origin = None if known is None else known.origin
        if origin is None:
            return
        guide = self._guide if origin is self._origin else origin.guide
        if guide is not None:
            guide.outlives(slots, updated=False)

    def _slots(self, function: Any) -> list[Slot]:
        """Where a function of an iteration has its feature maps."""
        known = self._executor.functions.know(function)
        maps = known.maps
        return [slot for live in maps for slot in live.slots_of(known.operation)]

    def _complete_last(self) -> None:
        if self._last is None:
            return
        k, reference = self._last
        self._last = None
        function = reference()
        if graph.is_unfinished(function):
            return
        self._executor.complete(k, function)
        if self._executor.maps_of(function):  # which another thread would miss
            graph.add_local_hook(function, self._guard)
        if self._instruments.recorder is not None and k >= 0:
            self._instruments.recorder.forward_complete(k, function)

    # -- iterations -----------------------------------------------------------
    def _reset_iteration(self) -> None:
        self._started = False
        self._position = 0
        self._label = 'no operation yet'
        self._last = None
        self._depth = 0  # backward functions under way
        self._backward_seen = False
        self._matching = False
        self._deviated = False  # whether it has left what it followed
        self._tried = False  # whether it has begun with a draft
        self._whole = False  # whether it has followed one guide alone
        self._keys: list[Key] = []
        self._origin = _Origin()
        self._start_seconds = 0.0
        self._foreign_bytes = 0
        self._short = False
        self._print = None  # of a quiet iteration's operations
        self._serials_from = -1  # of functions, once some are known

    def _broken_off(self) -> bool:
        """Whether the iteration has come to nothing.

        The program has caught an error, or its graph has died before a backward: then a
        backward function or a hook before a forward function has not come to an end,
        or no function is left.
        """
        if not self._started or self._depth:
            return self._depth > 0
        if self._backward_seen or self._last is None:
            return not self._backward_seen
        k, reference = self._last
        if k < 0 or not graph.is_unfinished(reference()):
            return False
        clear_handled()
        return self._executor.graph_is_dead

    def _give_up_iteration(self) -> None:
        """What was begun is not recorded; its kind is known as well as before."""
        self._instruments.discard()
        self._executor.verifier = None
        self._depth, self._started = 0, False
        clear_handled()

    def _start_operation(self, k: int, key: Key) -> None:
        """What is allocated from here on belongs to operation k."""
        self._keys.append(key)
        if self._matching:
            self._check(k, key)
        self._splitter.start_operation(k, self._label)
        self._instruments.start_operation(k)

    def _check(self, k: int, key: Key) -> None:
        """Compares an operation with the guide's; follows another one if need be."""
        guide = self._guide
        assert guide is not None
        if k < len(guide.keys) and guide.keys[k] == key:
            return
        other = self._guides.alternative(self._keys, guide.stage)
        if other is None:
            self._deviate()
        else:
            self._switch(guide, other, k)

    def _switch(self, guide: Guide, other: Guide, k: int) -> None:
        """The iteration is one of another guide that begins in the same way."""
        self._guide, self._whole = other, False
        self._instruments.stop_following()
        recorder = self._instruments.recorder
        if recorder is not None and not (guide.stage is other.stage is Stage.PROFILING):
            recorder.mark_as_draft()
        if other.table is None:
            self._executor.leave_plan()
        else:
            self._executor.switch(
                other.table, other.copies, k, other.outliving, other.watched
            )
        self._splitter.switch(other.ways)

    def _deviate(self) -> None:
        """Nobody knows this iteration: passive from here."""
        self._guide, self._matching, self._whole = None, False, False
        self._executor.leave_plan()
        self._splitter.switch({})
        self._instruments.stop_following()
        if self._instruments.recorder is not None:
            self._instruments.recorder.mark_as_draft()
        self._deviated = True

    def _begin_iteration(self, key: Key) -> None:
        self._reset_iteration()
        self._watch.begin()
        self._refuse_differences(wait=False)
        guide = self._guide = self._guides.begin(key)
        self._quiet = self._begin_quietly(guide, key)
        if self._quiet:
            return
        self._refuse(guide)
        self._matching = self._whole = guide is not None
        self._tried = guide is not None and guide.stage is Stage.PROFILING
        self._kinds = self._permanent_kinds()
        self._executor.permanent = set(self._kinds)
        self._know_older()
        self._share_host_memory(guide)
        table = None if guide is None else guide.table
        holders = self._owners().values() if table and table.crossing else ()
        copies = {} if guide is None else guide.copies
        alone = self._guides.alone(key)
        outliving = () if guide is None else guide.outliving
        watched = None if guide is None else guide.watched
        self._executor.begin(table, copies, holders, not alone, outliving, watched)
        self._splitter.begin({} if guide is None else guide.ways)
        self._foreign_bytes = self._foreign(guide)
        self.device.forget_failure()
        self._observe(guide, key)
        self.device.reset_peak()
        self._started = True
        self._start_seconds = time.perf_counter()

    def _begin_quietly(self, guide: Guide | None, key: Key) -> bool:
        """Begins an iteration of which nothing is to be found out, if it is one."""
        if guide is not None or self.options.plans_anyway or self._trace_next:
            return False
        if self._guides.wants_draft(key):
            return False
        executor = self._executor
        if executor.knows_maps:
            executor.permanent = set(self._permanent_kinds())
        executor.begin(None, {})
        if not executor.all_present:
            return False
        self._splitter.begin({})
        self.device.forget_failure()
        self.device.reset_peak()
        self._started = True
        self._start_seconds = time.perf_counter()
        return True

    def _end_late_checks(self, iteration: int) -> None:
        """What has been issued for a GPU to compare is of this iteration."""
        if self.device.late_checks is not None:
            self.device.late_checks.end_iteration(iteration)

    def _refuse_differences(self, wait: bool) -> None:
        """Tells what a GPU has found out about replays of earlier iterations.

        Raises:
            SessionError: If one of them has not made what it should.
        """
        checks = self.device.late_checks
        for iteration, what in () if checks is None else checks.differences(wait):
            raise SessionError(f'Numbers since iteration {iteration} are wrong. {what}')

    def _foreign(self, guide: Guide | None) -> int:
        """What the program holds beyond what it held in the guide's profile."""
        if guide is None or guide.problem is None:
            return 0
        held_bytes = self.device.used_bytes - self._executor.older_bytes
        return max(0, held_bytes - guide.problem.profile.initial_bytes)

    def _observe(self, guide: Guide | None, key: Key) -> None:
        """Whatever is to be found out about the iteration that begins."""
        options, instruments = self.options, self._instruments
        unknown = guide is None and (self.options.plans_anyway or self._trace_next)
        profiling = unknown or (guide is not None and guide.stage is Stage.PROFILING)
        if profiling or self._guides.wants_draft(key):
            self._executor.clear()
            recorder = instruments.record(
                trial=self._tried and self._guides.wants_trial(key),
                draft=not self._tried,
            )
            if self.tries_parts:
                recorder.keep_small_apart()
            if self.tries_parts and recorder.trial:
                self._splitter.try_parts(recorder)
            if profiling and options.cross_iteration:
                kept = self._owners().values()
                self._executor.park(o for o in kept if isinstance(o, StateOwner))
        self._executor.verifier = None
        if guide is None or profiling:
            return
        self._executor.verifier = self._verification.begin()
        first = not self.iterations  # allocates what stays
        may_log = instruments.recorder is None and not first
        free = may_log and self._executor.verifier is None  # else it takes longer
        if free and guide.wants_times:
            self._planning.stop_improving()  # its thread would disturb the times
            instruments.time()
        if self._trace_next and free:
            instruments.trace()
        elif free and guide.timed and options.feeds_back:
            instruments.find_late()
        if options.arena:
            self._begin_placing(guide, may_log and instruments.tracer is None)

    def _end_iteration(self) -> None:
        if not self._started:
            return
        seconds = time.perf_counter() - self._start_seconds
        guide = self._guide
        if guide is not None and self._position != len(guide.keys):
            other = self._guides.find(self._keys)
            if other is None:
                self._deviate()
            else:
                self._switch(guide, other, self._position)
            guide = self._guide
        self._add_to_history(seconds)
        self._end_late_checks(self.iterations)
        if guide is None:
            self._count_deviation()
            if self._tried:
                self._guides.tried()
            if self._instruments.recorder is None and self._is_pressed:
                self._guides.missed(self._keys[0], self._print)
        else:
            self._guides.met(guide, self._tried)
        if guide is not None and guide.stage is Stage.GUIDED:
            self._finish_guided(guide)
        self._instruments.stop_placing()
        recorder, self._instruments.recorder = self._instruments.recorder, None
        origin = self._origin
        origin.guide = self._learn(recorder, guide) if recorder is not None else guide

    @property
    def _is_pressed(self) -> bool:
        """Whether the iteration that ends is worth recording when it comes again."""
        counters = self._executor.counters
        moved = counters.swapped_out_bytes or counters.replays or counters.restores
        return self._short or self.options.plans_anyway or bool(moved)

    def _count_deviation(self) -> None:
        if self._deviated:
            self.deviations += 1
            recorded = '' if self._instruments.recorder is None else ', and is recorded'
            self._tell(
                f'iteration {self.iterations} left what it had begun like: it went on '
                f'in passive mode{recorded}'
            )

    def _finish_guided(self, guide: Guide) -> None:
        """What an iteration that has followed a plan tells about it."""
        followed = guide.plan
        instruments = self._instruments
        watch, lateness = instruments.stopwatch, instruments.lateness
        log, instruments.log = instruments.log, None
        self._finish_trace(guide)
        at_places = instruments.placing or not (
            self.options.arena and guide.wants_arena
        )
        instruments.stop_following()
        if log is not None:
            with guide.spent.counted():
                guide.logs.append(_uncounted(log.finish))
        else:
            guide.logs.clear()
        if not self._whole:
            return
        guide.rested += at_places
        planning = self._planning
        if watch is not None:
            self.device.synchronize()
            guide.timings.append(watch.times())
            if guide.timed:
                _uncounted(planning.retime, guide)
        if len(guide.logs) == 2:
            _uncounted(planning.lay_out, guide)
        if self.options.improve and guide.timed:
            _uncounted(planning.adopt, guide)
        if lateness is not None and guide.plan is followed:
            self.device.synchronize()
            _uncounted(planning.move_late, guide, lateness)
        guide.evicting = guide.evicting + 1 if self._executor.counters.evictions else 0
        if guide.evicting >= EVICTING_ITERATIONS:
            _uncounted(planning.make_room, guide, self._foreign_bytes)

    def _learn(self, recorder: Recorder, guide: Guide | None) -> Guide | None:
        """Takes in what has been recorded, if that is new.

        Returns:
            Guide of the iteration; None if it is still unknown.
        """
        links = None
        wanted = guide is None or (
            guide.stage is Stage.PROFILING
            and not recorder.draft
            and (recorder.trial or not guide.trial)
        )
        if wanted:
            written = recorder.written_slots() | self._executor.written_slots()
            self._executor.settle()
            self.device.synchronize()
            links = self._measured_links()
        if links is None:
            recorder.discard()
            return guide
        spent = Spent() if guide is None else guide.spent
        with spent.counted():
            return self._take_in(recorder, guide, links, written, spent)

    def _take_in(
        self,
        recorder: Recorder,
        guide: Guide | None,
        links: tuple[Link, Link | None],
        written: set[Slot],
        spent: Spent,
    ) -> Guide:
        """A guide learns from a recording, a new one if there is none."""
        kinds = {**self._kinds, **self._permanent_kinds()}
        profile: Profile = _uncounted(
            recorder.build, links[0], self.device.describe(), kinds, self._owners()
        )
        profile = dataclasses.replace(profile, disk_link=links[1])
        self._history.untrusted.update(recorder.untrusted)
        if guide is None:
            guide = Guide(self._keys, spent)
            guide.ways.update(self._splitter.used)
            _uncounted(guide.learn, profile)
            guide.forecast = _uncounted(self._foresee, profile)
            self._guides.add(guide)
            self._guide = guide
        else:
            _uncounted(guide.learn, profile, self._splitter.changed)
        guide.written |= written
        if guide.profiled:
            _uncounted(self._planning.plan, guide)
        return guide

    def _foresee(self, draft: Profile) -> Forecast | None:
        """What iterations like one without a plan need, if they may not fit."""
        options = self.options
        crossing = bool(options.cross_iteration)
        return forecast(draft, options.limit_bytes, crossing, bool(options.splitting))

    def _refuse(self, guide: Guide | None) -> None:
        """An iteration that surely cannot end does not begin.

        Raises:
            OutOfMemoryError: With a limit that does.
        """
        if guide is None or guide.forecast is None or not guide.trial:
            return
        used = self.device.used_bytes - self._executor.older_bytes
        options = self.options
        host_limited = options.host_limit_bytes is not None
        error = guide.forecast.refusal(options.limit_bytes, used, host_limited)
        if error is not None:
            raise error

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
        guide = self._planned_guide()
        if guide is None or guide.problem is None:
            raise self._nothing_planned('profile')
        if self._depth or (self._started and not self._backward_seen):
            raise SessionError('An iteration is under way; replan between iterations.')
        guide.begin_placing()
        planning = self._planning
        plan: Plan = _uncounted(
            planning.make_plan, guide, guide.problem, planner, options
        )
        self.finish_iteration()
        planning.stop_improving()
        self.options.plan_with(planner, options)
        _uncounted(planning.follow, guide, guide.problem, plan)
        return plan

    def trace_iteration(self) -> None:
        """Traces the next guided iteration; :attr:`timeline` has it afterwards.

        An iteration that leaves its plan does not count.
        """
        self._trace_next = True

    @property
    def timeline(self) -> Measured | None:
        """What :meth:`trace_iteration` has measured last."""
        return self._measured

    def _finish_trace(self, guide: Guide) -> None:
        tracer = self._instruments.tracer
        if tracer is None or not self._whole:
            return
        if guide.problem is not None and guide.plan is not None:
            self.device.synchronize()
            self._measured = _uncounted(tracer.build, guide.problem.profile, guide.plan)
            self._trace_next = False

    @property
    def settled(self) -> bool:
        """Whether what is to be found out has been.

        The plan's prediction rests on iterations that have followed it; or there is no
        plan, and the last three iterations have fitted without one.
        """
        guide = self._planned_guide()
        if guide is not None:
            return guide.timed
        return self._waits_for_shortage and self._fitting >= FITTING_ITERATIONS

    @property
    def _waits_for_shortage(self) -> bool:
        """Whether iterations are recorded only once memory has been short."""
        return not self.options.plans_anyway and not self._trace_next

    @property
    def _fits(self) -> bool:
        """Whether nothing has had to leave, and nothing is planned."""
        fitted = self.iterations > 0 and not self._shortages
        return fitted and self._planned_guide() is None

    def _nothing_planned(self, what: str) -> SessionError:
        """There is no profile or plan."""
        if self._waits_for_shortage and self._fits:
            return SessionError(
                f'There is no {what} after {self.iterations} iterations, because '
                f'nothing had to leave: iterations are recorded once memory has been '
                f"short; name a planner, such as planner='hybrid', to have them "
                f'recorded in any case.'
            )
        return SessionError(
            f'There is no {what} after {self.iterations} iterations; train until '
            f'session.{what} is not None.'
        )

    def retime(self) -> None:
        """Times the next guided iterations again and predicts anew from them.

        For a machine whose speed has changed. The plan changes with the prediction
        if another one is clearly better for the new times.

        Raises:
            SessionError: If there is no plan yet.
        """
        guide = self._planned_guide()
        if guide is None:
            raise self._nothing_planned('plan')
        guide.timings.clear()
        guide.timed_again = False

    def finish_iteration(self) -> None:
        """Ends the iteration now instead of at the start of the next one.

        To be called after the update, when something else than the next
        iteration follows: its time is then not counted as the iteration's.
        """
        if self._started and self._backward_seen and not self._depth:
            self._instruments.enter()
            self._complete_last()
            self._end_iteration()
            self._started = False
            self._executor.forget_dead()

    # -- arena ----------------------------------------------------------------
    def _begin_placing(self, guide: Guide, may_log: bool) -> None:
        """Allocations of this iteration get their places, or are logged."""
        if guide.arena is not None:
            placed = self._instruments.place(guide.arena)
            self._history.begin_placing()
            if not placed:
                guide.refuse_arena('no memory for it beside what the pool keeps')
                self._tell('no memory for the arena beside what the pool keeps')
        elif guide.wants_log and may_log:
            self._instruments.log_allocations()

    def _measured_links(self) -> tuple[Link, Link | None] | None:
        """Of RAM and of the disk; of the disk alone if there is no RAM to speak of.

        None if there is no memory to measure them yet.
        """
        if self._links is None:
            device = self.device
            free_bytes = device.limit_bytes - device.used_bytes
            if free_bytes < MEASURING_BYTES:
                self._executor.reclaim(MEASURING_BYTES - free_bytes)
            try:
                ram = measure_link(device)
                disk = measure_link(device, tier=Tier.DISK)
            except MemoryError:
                self._tell('no memory to measure the link: profiled later')
                return None
            link = ram or disk
            if link is None:
                self._tell('no host memory to measure the link: profiled later')
                return None
            self._links = link, disk
        return self._links

    def _share_host_memory(self, guide: Guide | None) -> None:
        """Under a host limit, one kind of iteration has it all while it runs."""
        if self.options.host_limit_bytes is None:
            return
        if self._links is None and self.options.host_limit_bytes > 0:
            self._measured_links()  # while there is room
        if guide is self._host_user:
            return
        self._executor.settle()
        for other in self._guides:
            if other is not guide:
                other.forget_copies()
        self._host_user = guide
        if guide is not None:
            self._planning.reserve(guide)

    def observe_problem(self, problem: Problem) -> None:
        """Called with every finished profile, before it is planned."""

    def _permanent_kinds(self) -> dict[int, Category]:
        """What the model's allocations hold now, by allocation id."""
        identify, owns = self.device.allocation_id, self.device.owns
        return {
            identify(array): category
            for category, array in permanent_arrays(self.model)
            if owns(array)
        }

    def _owners(self) -> dict[int, Owner]:
        """Who holds parameters and optimizer states, by allocation id.

        Arrays that share an allocation are left out: one of them cannot leave alone.
        """
        found: dict[int, list[Owner]] = {}
        for owner in owners_of(self.model):
            array = owner.get()
            allocation = self.device.allocation_id(array) if array is not None else 0
            found.setdefault(allocation, []).append(owner)
        return {a: owners[0] for a, owners in found.items() if a and len(owners) == 1}

    # -- results --------------------------------------------------------------
    @property
    def state(self) -> str:
        """``'warm-up'``, ``'profiling'``, ``'guided'``, ``'passive'`` or ``'in-core'``.

        In-core is an iteration in which nothing has had to leave and of which nothing
        is found out.
        """
        if self._guide is not None:
            return self._guide.stage.value
        if self._quiet and not self._short:
            return 'in-core'
        recorded = self._instruments.recorder is not None
        waits = self.options.plans_anyway or not self._history.iterations
        if recorded or (waits and not len(self._guides)):
            return Stage.WARM_UP.value
        return 'passive'

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
        """Finished ones."""
        return self._history.iterations

    @property
    def plan(self) -> Plan | None:
        """The plan followed now."""
        guide = self._planned_guide()
        return None if guide is None else guide.plan

    @property
    def profile(self) -> Profile | None:
        """The profile the plan was made from."""
        guide = self._planned_guide()
        if guide is None or guide.problem is None:
            return None
        return guide.problem.profile

    def _planned_guide(self) -> Guide | None:
        if self._guide is not None and self._guide.plan is not None:
            return self._guide
        return next((g for g in self._guides if g.plan is not None), None)

    def _add_to_history(self, seconds: float) -> None:
        guide = self._guide
        guided = guide is not None and guide.stage is Stage.GUIDED
        self._shortages += self._short
        self._fitting = 0 if self._short else self._fitting + 1
        verifier, self._executor.verifier = self._executor.verifier, None
        verified = guided and verifier is not None
        entry = self._history.add(
            seconds,
            self._executor.counters,
            None if guide is None else guide.plan,
            guided,
            self._foreign_bytes,
            self._splitter,
            verified,
        )
        if verifier is not None and verified:
            self._verification.count(verifier)
        self._tell(
            f'iteration {self.iterations} ({self.state}): {format_seconds(seconds)}, '
            f'peak {format_bytes(entry["peak_bytes"])}'
        )

    def _finish_statistics(self) -> None:
        """Counts the last iteration, which no other one has ended."""
        if self._started and self._backward_seen:
            self._count_deviation()
            self._add_to_history(time.perf_counter() - self._start_seconds)
            self._started = False

    def iteration_times(self) -> list[float]:
        """Seconds of the guided iterations since the present plan was predicted.

        Of all guided iterations, as long as there is none; of the newest 1000 at most.
        """
        return [entry['seconds'] for entry in self._history.guided(self.plan)]

    def statistics(self) -> dict[str, Any]:
        """Figures of the run so far.

        Returns:
            dict: Bytes as int, seconds as float, None where nothing is known
            yet. Medians are over the newest 1000 guided iterations, of the present
            plan if there are some; peaks and numbers of iterations are over all.
            ``overhead`` is measured, ``gap`` is predicted: the plan's time over the
            proven bound, minus 1.
        """
        figures = self._history.statistics(
            self.options, self.state, self._planned_guide(), self.deviations
        )
        unplanned = sum(guide.stage is Stage.PASSIVE for guide in self._guides)
        return {
            **figures,
            'cached': self._cached,
            'unplanned': unplanned,
            'fits': self._fits,
        }

    @property
    def verdict(self) -> Verdict | None:
        """Of the iterations verified so far; None before the first."""
        return self._verification.verdict

    def report(self) -> str:
        """The statistics as a table for people."""
        return session_report(self.statistics(), self.plan, self.profile, self.verdict)

    def last_iteration(self) -> dict[str, Any]:
        """Figures of the last finished iteration; empty before the first."""
        entries = self._history.entries
        return dict(entries[-1]) if entries else {}

    def _tell(self, message: str) -> None:
        if self._progress is not None:
            line = printable(f'hybridmem: {message}')
            print(line, file=self._progress, flush=True)


class _Origin:
    """An iteration, as its functions know it.

    Attributes:
        guide (Guide or None): Once it has ended and is known.
    """

    def __init__(self) -> None:
        self.guide: Guide | None = None


class _ThreadGuard(chainer.FunctionHook):
    """Refuses a backward in another thread: the session's hooks do not run there."""

    name = 'hybridmem-thread'

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)  # a graph may outlive it

    def backward_preprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Before a backward function.

        Raises:
            SessionError: In another thread than the session's.
        """
        session, thread = self._session(), threading.current_thread()
        if session is None or not session._open or thread is session._thread:
            return
        raise SessionError(
            f'The graph of {graph.function_name(function)} was made inside of a '
            f'session in {_name(session._thread)}, and its backward runs in '
            f'{_name(thread)}: run both in the thread that has entered the session.'
        )


class _LinkPath(chainer.LinkHook):
    """Knows the path of the link that runs now."""

    name = 'hybridmem-path'

    def __init__(self, model: chainer.Link) -> None:
        self._paths = {id(link): name for name, link in model.namedlinks()}
        self._stack: list[str] = []

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ''

    def forward_preprocess(self, args: Any) -> None:
        name = self._paths.get(id(args.link), args.link.name or '')
        self._stack.append('' if name == '/' else name)

    def forward_postprocess(self, args: Any) -> None:
        if self._stack:
            self._stack.pop()


def _name(thread: threading.Thread | None) -> str:
    return 'no thread' if thread is None else f'thread {thread.name!r}'


def _count_updates(model: chainer.Link) -> int:
    """How often parameters have been updated, all together."""
    rules = (parameter.update_rule for parameter in model.params())
    return sum(rule.t for rule in rules if rule is not None)


def _uncounted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose NumPy arrays are ours and do not count.

    The host device counts the allocations of a context; a fresh one has
    NumPy's own handler.
    """
    return contextvars.Context().run(lambda: function(*args, **kwargs))


def _device_name(model: chainer.Link, device: str | None) -> str:
    """The device to open; the model must be on it already.

    Raises:
        OptionError: If it is not.
        UnknownNameError: If there is no such device.
    """
    on_gpu = isinstance(model.device, chainer.backend.GpuDevice)
    if device is None or device == 'auto':
        return f'cuda:{model.device.device.id}' if on_gpu else 'cpu'
    kind, number = parse_device(device)
    same = kind == ('cuda' if on_gpu else 'host')
    if same and number is not None:
        same = number == model.device.device.id
    if not same:
        raise OptionError(
            f'device is {device!r} but the model is on {model.device}; move one of '
            f'them, for example with model.to_device.'
        )
    return f'cuda:{model.device.device.id}' if on_gpu else 'cpu'


def _forward_key(function: Any, in_data: tuple[Any, ...]) -> Key:
    """What a function is known by: its class, its inputs and the arrays it is given."""
    return (
        type(graph.target(function)).__name__,
        *[(x.shape, x.dtype.char) for x in in_data],
        *graph.given_arrays(function),
    )
