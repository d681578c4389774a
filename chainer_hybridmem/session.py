"""``optimize()``: warm-up, profile, plan, guided iterations, and deviations."""

from __future__ import annotations

import contextvars
import dataclasses
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import chainer

from chainer_hybridmem import graph
from chainer_hybridmem.devices import open_device, parse_device
from chainer_hybridmem.devices.link import measure_link
from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.errors import (
    HybridMemoryError,
    InfeasibleError,
    OptionError,
    OutOfMemoryError,
    SessionError,
)
from chainer_hybridmem.estimation.specs import spec_of
from chainer_hybridmem.execution import Executor
from chainer_hybridmem.guide import Guide, Key, Stage
from chainer_hybridmem.measured import Measured
from chainer_hybridmem.owners import Owner, StateOwner, owners_of
from chainer_hybridmem.placing import MOST_SLOWDOWN, plan_with_arena
from chainer_hybridmem.plan import Action, Plan
from chainer_hybridmem.planners import DEFAULT, check_name, check_options, make_plan
from chainer_hybridmem.planners.bound import lower_bound
from chainer_hybridmem.planners.feedback import (
    moved_earlier,
    noticeable,
    with_measured_link,
)
from chainer_hybridmem.planners.improvement import Improvement
from chainer_hybridmem.pools import planned_trace
from chainer_hybridmem.pools.arena import Arena, IterationLog, lay_out, logs_of
from chainer_hybridmem.profile import Category, Link, Profile
from chainer_hybridmem.recording import Recorder
from chainer_hybridmem.recording.allocation_log import AllocationLog
from chainer_hybridmem.recording.lateness import Lateness
from chainer_hybridmem.recording.stopwatch import Stopwatch
from chainer_hybridmem.recording.tracer import Tracer
from chainer_hybridmem.reporting.session_report import session_report
from chainer_hybridmem.simulation import Problem, simulate
from chainer_hybridmem.simulation.problem import CrossIteration, crossing_of
from chainer_hybridmem.units import (
    format_bound,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
)

_active = threading.local()
LARGEST_GUIDE_COUNT = 16
IMPROVABLE = 'hybrid'
FED_BACK = 'capuchin'  # its swap-ins move by default
FEEDBACK_SHARES = (1.0, 0.5, 0.25, 0.125)  # of the time that a swap-in was late
SPARE_SHARE = 400  # of the limit, kept free once an arena has not fitted
LEAST_GAIN = 0.005  # of the time, for which a plan is changed under way


def optimize(
    model: chainer.Link,
    memory_limit: int | str,
    planner: str = DEFAULT,
    device: str | None = None,
    swap_dir: str | None = None,
    link_bandwidth: float | str | None = None,
    progress: bool | TextIO = False,
    improve: bool = False,
    arena: bool = True,
    feedback: bool | None = None,
    cross_iteration: CrossIteration = False,
    **options: Any,
) -> Session:
    """Trains a model inside a memory limit.

    Args:
        model: The model that is trained; its parameters are counted.
        memory_limit: Most bytes on the compute device, such as ``'16GiB'``.
        planner: Name of the planner.
        device: ``'cpu'`` or ``'cuda'``; by default the model's device.
        swap_dir: Host device only: folder for swapped feature maps instead of
            RAM.
        link_bandwidth: Host device only: most bytes per second and direction
            for swapping, such as ``'100MB/s'``.
        progress: Whether to tell what the session does, or the file to tell.
        improve: Whether planner ``hybrid`` goes on searching in a thread of low
            priority; what it finds is followed from the next iteration. Worth it
            where a core is idle, as with a GPU; where training uses all of
            them, it takes time from it.
        arena: Whether guided iterations allocate at places laid out beforehand, so
            that nothing is lost to fragmentation; see docs/memory.md.
        feedback: Whether swap-ins that were late begin earlier in later iterations,
            as far as the plan's memory allows; None: with planner ``capuchin``.
        cross_iteration: Whether optimizer states (``'states'``) or these and
            parameters (``'all'`` or True) may leave between their uses, too; see
            docs/memory.md, What crosses iterations.
        options: Options of the planner.

    Returns:
        Session: To be used in a ``with`` statement around the training loop.

    Raises:
        UnknownNameError: If there is no such planner or device.
        OptionError: If the limit or bandwidth cannot be read.
    """
    return Session(
        model,
        memory_limit,
        planner,
        device,
        swap_dir,
        link_bandwidth,
        progress,
        improve,
        arena,
        feedback,
        cross_iteration,
        options,
    )


def active_session() -> Session | None:
    """The session that this thread is in."""
    session: Session | None = getattr(_active, 'session', None)
    return session


class Session(chainer.FunctionHook):
    """One training run under a memory limit; made by :func:`optimize`.

    Attributes:
        plan (Plan or None): The plan followed now.
        profile (Profile or None): The profile it was made from.
    """

    name = 'hybridmem'

    def __init__(
        self,
        model: chainer.Link,
        memory_limit: int | str,
        planner: str,
        device: str | None,
        swap_dir: str | None,
        link_bandwidth: float | str | None,
        progress: bool | TextIO,
        improve: bool,
        arena: bool,
        feedback: bool | None,
        cross_iteration: CrossIteration,
        options: dict[str, Any],
    ) -> None:
        if not isinstance(model, chainer.Link):
            raise OptionError(
                f'model is a {type(model).__name__}; a chainer.Link is needed.'
            )
        self.model = model
        self.planner = check_name(planner)
        self.planner_options = check_options(planner, options)
        check_switches(improve=improve, arena=arena)
        check_feedback(feedback)
        if improve and planner != IMPROVABLE:
            raise OptionError(
                f'improve needs planner {IMPROVABLE!r}; the planner is {planner!r}.'
            )
        self._improve = improve
        self._use_arena = arena
        self._feedback = feedback
        crossing_of(cross_iteration)  # or it cannot be
        self._cross_iteration = cross_iteration
        self._improvements: list[Improvement] = []
        self.limit_bytes = parse_bytes(memory_limit, 'memory_limit')
        bandwidth = (
            None
            if link_bandwidth is None
            else parse_bandwidth(link_bandwidth, 'link_bandwidth')
        )
        self.device: Device = open_device(
            _device_name(model, device), self.limit_bytes, bandwidth, swap_dir
        )
        if progress not in (True, False, None) and not hasattr(progress, 'write'):
            raise OptionError(
                f'progress is {progress!r}; True, False or a file to write to is '
                'needed.'
            )
        self._progress = sys.stderr if progress is True else progress or None
        self._link_hook = _LinkPath(model)
        self._executor = Executor(self.device)
        self._guides: list[Guide] = []
        self._guide: Guide | None = None
        self._lost = False  # whether the last iteration left its guide
        self._recorder: Recorder | None = None
        self._stopwatch: Stopwatch | None = None
        self._tracer: Tracer | None = None
        self._lateness: Lateness | None = None
        self._log: AllocationLog | None = None
        self._places_before = self.device.place_figures()
        self._placing = False  # whether allocations have planned places now
        self._trace_next = False
        self._measured: Measured | None = None
        self._link: Link | None = None
        self._open = False
        self._last: tuple[int, Any] | None = None  # forward, not complete yet
        self._kinds: dict[int, Category] = {}
        self._reset_iteration()
        self._history: list[dict[str, Any]] = []
        self.iterations = 0
        self.deviations = 0

    # -- with -----------------------------------------------------------------
    def __enter__(self) -> Session:
        if active_session() is not None:
            raise SessionError(
                'A hybridmem session is already active in this thread; leave it '
                'before starting another one.'
            )
        self.device.adopt(array for _, array in permanent_arrays(self.model))
        self.device.install(self._executor.reclaim)
        try:
            super().__enter__()
            self._link_hook.__enter__()
        except BaseException:
            self.device.uninstall()
            raise
        _active.session = self
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if not self._open:
            return
        self._open = False
        _active.session = None
        self._stop_improving()
        message = self._explain(error)
        self._link_hook.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)
        if self._recorder is not None:
            self.device.take_events()
            self._recorder = None
        self._stopwatch = None
        self._stop_tracing()
        self._stop_placing()
        self.device.uninstall()
        try:
            if error is None:
                self._finish_statistics()
                self._executor.close()
        finally:
            self._executor.abandon()
            self.device.close()
        if message is not None:
            raise message from error

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
        return self.out_of_memory(*failure)

    def out_of_memory(self, requested: int, used: int) -> OutOfMemoryError:
        """The error for an allocation that did not fit, with numbers."""
        where = f'after operation {self._position - 1}' if self._position else 'first'
        return OutOfMemoryError(
            f'{format_bytes(requested)} ({requested} bytes) asked for {where} '
            f'({self._label}) do not fit: {used} of {self.limit_bytes} bytes are in '
            f'use and nothing more can be swapped. The smallest limit that gets past '
            f'this allocation is {used + requested} bytes; raise memory_limit or lower '
            f'the batch size.',
            requested,
            self.limit_bytes,
            used,
        )

    # -- hooks ----------------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function: complete the last one, act on the plan."""
        if not chainer.config.enable_backprop:
            self._executor.bring_back(function)
            return
        if self._in_backward:  # for a second backward: its maps are only known
            self._complete_last()
            self._last = (-1, weakref.ref(function))
            return
        self._enter()
        self._complete_last()
        if self._backward_seen or not self._started:
            self._end_iteration()
            self._begin_iteration(_forward_key(function, in_data))
        k = self._position
        self._position += 1
        name = graph.function_name(function)
        self._label = f'{self._link_hook.path}/{name}'
        self._start_operation(k, _forward_key(function, in_data))
        self._executor.before_forward(k, function)
        self._index[function] = k
        self._last = (k, weakref.ref(function))
        if self._recorder is not None:
            specs = tuple(spec_of(x) for x in in_data)
            self._recorder.forward_starts(self._label, function, specs, in_data)
        self._leave(starts_operation=True)

    def forward_postprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """After a forward function has computed."""
        recorder = self._recorder
        if recorder is None or self._in_backward:
            return
        if self._last is not None and self._last[1]() is function:
            recorder.enter()
            recorder.forward_ran(in_data)
            recorder.leave()

    def backward_preprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Before a backward function: everything it reads must be there."""
        del in_data, out_grad
        self._enter()
        self._complete_last()
        self._in_backward = self._backward_seen = True
        k = self._position
        self._position += 1
        forward = self._index.get(function, -1)
        self._label = f'backward of {graph.function_name(function)}'
        self._start_operation(k, ('backward', forward))
        self._executor.before_backward(k, function)
        if self._recorder is not None:
            self._recorder.backward_starts(
                self._recorder.label_of(forward, self._label), function, forward
            )
        self._leave(starts_operation=True)

    def backward_postprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """After a backward function: drop what is not needed any more."""
        del function, in_data, out_grad
        self._enter()
        self._complete_last()
        self._executor.after_backward(self._position - 1)
        self._in_backward = False
        self._leave(starts_operation=False)

    def _enter(self) -> None:
        """What follows is the session's work, not the program's."""
        if self._recorder is not None:
            self._recorder.enter()
        elif self._stopwatch is not None:
            self._stopwatch.enter()
        if self._tracer is not None:
            self._tracer.enter()

    def _leave(self, starts_operation: bool) -> None:
        if self._tracer is not None:
            self._tracer.leave(starts_operation)
        if self._recorder is not None:
            self._recorder.leave()
        elif self._stopwatch is not None:
            self._stopwatch.leave(starts_operation)

    def _complete_last(self) -> None:
        if self._last is None:
            return
        k, reference = self._last
        self._last = None
        function = reference()
        if function is None:
            return
        self._executor.complete(k, function)
        if self._recorder is not None and k >= 0:
            self._recorder.forward_complete(k, function)

    # -- iterations -----------------------------------------------------------
    def _reset_iteration(self) -> None:
        self._started = False
        self._position = 0
        self._label = 'no operation yet'
        self._last = None
        self._index: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._in_backward = False
        self._backward_seen = False
        self._matching = False
        self._keys: list[Key] = []
        self._start_seconds = 0.0

    def _start_operation(self, k: int, key: Key) -> None:
        """What is allocated from here on belongs to operation k."""
        self._check(k, key)
        if self._placing:
            self.device.seek(k)
        elif self._log is not None:
            self._log.start_operation()

    def _check(self, k: int, key: Key) -> None:
        """Compares an operation with the guide's; deviations go passive."""
        if self._recorder is not None:
            self._keys.append(key)
        if not self._matching:
            return
        guide = self._guide
        if guide is None or k >= len(guide.keys) or guide.keys[k] != key:
            self._deviate()

    def _deviate(self) -> None:
        """The iteration is not the one the guide knows: passive from here."""
        self._matching = False
        self._executor.leave_plan()
        self._stop_placing()
        self.deviations += 1
        # What begins like this one and goes another way is recorded next time.
        self._lost = True
        self._tell(f'iteration {self.iterations + 1} differs: passive, then profiled')

    def _begin_iteration(self, key: Key) -> None:
        self._reset_iteration()
        guide = next((g for g in self._guides if g.keys[:1] == [key]), None)
        if guide is None or self._lost:
            guide = Guide()
        self._lost = False
        self._guide = guide
        self._matching = guide.table is not None
        self._kinds = self._permanent_kinds()
        self._executor.permanent = set(self._kinds)
        moves = guide.table is not None and bool(guide.table.crossing)
        holders = self._owners().values() if moves else ()
        self._executor.begin(guide.table, guide.copies, holders)
        self.device.whole_blocks = self._use_arena and guide.wants_arena
        if guide.stage is not Stage.GUIDED:
            self._recorder = Recorder(
                self.device,
                self._executor,
                trial=guide.trial,
                draft=guide.stage is Stage.WARM_UP,
            )
            self._recorder.enter()
            if self._cross_iteration:
                kept = self._owners().values()
                self._executor.park(o for o in kept if isinstance(o, StateOwner))
        elif guide.wants_times:
            self._stop_improving()  # its thread would disturb the times
            self._stopwatch = Stopwatch(self.device)
            self._stopwatch.enter()
        guided = self._matching and guide.stage is Stage.GUIDED
        if self._trace_next and guided:
            self._tracer = self._executor.observer = Tracer(self.device)
            self._tracer.enter()
        elif guided and guide.timed and self._feeds_back:
            self._lateness = self._executor.observer = Lateness(self.device)
        if self._use_arena and guided:
            self._begin_placing(guide)
        self.device.reset_peak()
        self._started = True
        self._start_seconds = time.perf_counter()

    def _end_iteration(self) -> None:
        if not self._started:
            return
        seconds = time.perf_counter() - self._start_seconds
        self._record_statistics(seconds)
        recorder, guide, watch = self._recorder, self._guide, self._stopwatch
        self._recorder = self._stopwatch = None
        lateness, self._lateness = self._lateness, None
        assert guide is not None
        followed = guide.plan
        if self._matching and self._position != len(guide.keys):
            self._deviate()
        self._finish_trace(guide)
        self._executor.observer = None
        log, self._log = self._log, None
        self._stop_placing()
        if log is not None:
            guide.logs.append(log.finish())
        else:
            guide.logs.clear()
        if watch is not None and self._matching:
            self.device.synchronize()
            guide.timings.append(watch.times())
            if guide.timed:
                _uncounted(self._retime, guide)
        if len(guide.logs) == 2:
            _uncounted(self._lay_out, guide)
        if self._improve and self._matching and guide.timed:
            _uncounted(self._adopt, guide)
        if lateness is not None and self._matching and guide.plan is followed:
            self.device.synchronize()
            _uncounted(self._move_late, guide, lateness)
        if recorder is None:
            return
        self._executor.settle()
        self.device.synchronize()
        link = self._measured_link()
        kinds = {**self._kinds, **self._permanent_kinds()}
        profile = _uncounted(
            recorder.build, link, self.device.describe(), kinds, self._owners()
        )
        known = next((g for g in self._guides if g.keys == self._keys), guide)
        if known is guide:
            _uncounted(guide.learn, profile, self._keys)
        # The signature seen last is tried first the next time.
        others = [g for g in self._guides if g is not known and g is not guide]
        self._guides = [known, *others][:LARGEST_GUIDE_COUNT]
        if guide.profiled and guide.stage is not Stage.GUIDED:
            _uncounted(self._plan, guide)

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
            raise SessionError(
                f'There is no profile after {self.iterations} iterations; train '
                f'until session.profile is not None.'
            )
        if self._in_backward or (self._started and not self._backward_seen):
            raise SessionError('An iteration is under way; replan between iterations.')
        guide.begin_placing()
        plan = _uncounted(self._make_plan, guide, guide.problem, planner, options)
        self.finish_iteration()
        self._stop_improving()
        self.planner, self.planner_options = planner, options
        _uncounted(self._follow, guide, guide.problem, plan)
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
        if self._tracer is None:
            return
        if self._matching and guide.problem is not None and guide.plan is not None:
            self.device.synchronize()
            self._measured = _uncounted(
                self._tracer.build, guide.problem.profile, guide.plan
            )
            self._trace_next = False
        self._stop_tracing()

    def _stop_tracing(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        self._tracer = self._executor.observer = None

    @property
    def settled(self) -> bool:
        """Whether the plan's prediction rests on iterations that followed it."""
        guide = self._planned_guide()
        return guide is not None and guide.timed

    def retime(self) -> None:
        """Times the next guided iterations again and predicts anew from them.

        For a machine whose speed has changed. The plan changes with the prediction
        if another one is clearly better for the new times.

        Raises:
            SessionError: If there is no plan yet.
        """
        guide = self._planned_guide()
        if guide is None:
            raise SessionError(
                f'There is no plan after {self.iterations} iterations; train until '
                f'session.plan is not None.'
            )
        guide.timings.clear()
        guide.timed_again = False

    def finish_iteration(self) -> None:
        """Ends the iteration now instead of at the start of the next one.

        To be called after the update, when something else than the next
        iteration follows: its time is then not counted as the iteration's.
        """
        if self._started and self._backward_seen and not self._in_backward:
            self._enter()
            self._complete_last()
            self._end_iteration()
            self._started = False
            self._executor.forget_dead()

    def _plan(self, guide: Guide) -> None:
        problem = guide.make_problem(self._cross_iteration)
        self.observe_problem(problem)
        guide.begin_placing()
        plan = self._make_plan(guide, problem, self.planner, self.planner_options)
        self._follow(guide, problem, plan)

    def _retime(self, guide: Guide) -> None:
        """A plan from the times of guided iterations, if it is better for them."""
        old = guide.plan
        assert old is not None
        problem = guide.make_timed_problem()
        seconds = simulate(problem, old).total_seconds
        plan = None if guide.timed_again else self._faster(guide, problem, seconds)
        if plan is None:
            plan = dataclasses.replace(
                old,
                predicted_seconds=seconds,
                in_core_seconds=problem.in_core_seconds,
                lower_bound_seconds=lower_bound(problem, self.limit_bytes).seconds,
            )
        else:  # its own times tell more
            guide.timed_again = True
            guide.timings.clear()
        self._follow(guide, problem, plan, old)

    def _faster(self, guide: Guide, problem: Problem, seconds: float) -> Plan | None:
        """The planner's plan for new times if it is clearly better than the old one."""
        try:
            plan = self._make_plan(guide, problem, self.planner, self.planner_options)
        except InfeasibleError:  # it was replanned with another planner
            return None
        gained = seconds > plan.predicted_seconds * (1 + LEAST_GAIN)
        return plan if gained else None

    def _adopt(self, guide: Guide) -> None:
        """Takes over a plan found meanwhile, or begins to look for one."""
        problem, plan = guide.problem, guide.plan
        assert problem is not None and plan is not None
        current = guide.improvement
        if current is not None and current.problem is problem:
            better = current.better(plan)
            if better is not None:
                self._follow(guide, problem, better)
        elif self.planner == IMPROVABLE and not any(
            other.running for other in self._improvements
        ):
            guide.improvement = Improvement(problem, plan.memory_limit_bytes, plan)
            self._improvements.append(guide.improvement)
            guide.improvement.start()

    def _stop_improving(self) -> None:
        for improvement in self._improvements:
            improvement.close()
        self._improvements.clear()
        for guide in self._guides:
            guide.improvement = None

    # -- feedback -------------------------------------------------------------
    @property
    def _feeds_back(self) -> bool:
        if self._feedback is None:
            return self.planner == FED_BACK
        return self._feedback

    def _move_late(self, guide: Guide, lateness: Lateness) -> None:
        """Swap-ins that are late again and again begin earlier from now on."""
        problem, plan = guide.problem, guide.plan
        assert problem is not None and plan is not None
        late = guide.feedback.take(noticeable(problem, lateness.late_seconds()))
        if not late:
            return
        problem = with_measured_link(
            problem,
            plan,
            lateness.copy_seconds('swap-out'),
            lateness.copy_seconds('swap-in'),
        )
        moved = self._moved_earlier(guide, problem, plan, late)
        if moved is plan:
            guide.feedback.settle(late)
            return
        self._tell(f'{len(late)} swap-ins were late: they begin earlier')
        bound = lower_bound(problem, self.limit_bytes).seconds
        self._follow(
            guide, problem, dataclasses.replace(moved, lower_bound_seconds=bound)
        )

    def _moved_earlier(
        self, guide: Guide, problem: Problem, plan: Plan, late: dict[int, float]
    ) -> Plan:
        """The plan with triggers as much earlier as the arena lets them be."""
        for share in FEEDBACK_SHARES:
            part = {storage: share * seconds for storage, seconds in late.items()}
            moved = moved_earlier(problem, plan, part)
            if moved is plan or self._arena_fits(guide, problem, moved):
                return moved
        return plan

    # -- arena ----------------------------------------------------------------
    def _arena_fits(self, guide: Guide, problem: Problem, plan: Plan) -> bool:
        """Whether a plan needs no arena, or one that fits as far as its trace tells."""
        if not (self._use_arena and guide.wants_arena):
            return True
        arena = self._arena_of(logs_of(planned_trace(problem.profile, plan)))
        return arena.footprint_bytes + guide.spare_bytes <= self.limit_bytes

    def _begin_placing(self, guide: Guide) -> None:
        """Allocations of this iteration get their places, or are logged."""
        if guide.arena is not None:
            self._placing = self.device.set_places(guide.arena)
            self._places_before = self.device.place_figures()
            if not self._placing:
                guide.arena, guide.wants_arena = None, False
                self._tell('no memory for the arena beside what the pool keeps')
        elif guide.wants_log and self._tracer is None:
            self._log = AllocationLog(self.device)

    def _stop_placing(self) -> None:
        if self._placing:
            self.device.seek(-1)
            self._placing = False
        if self._log is not None:
            self._log.finish()
            self._log = None

    def _lay_out(self, guide: Guide) -> None:
        """Places for a plan's iterations; another plan if they exceed the limit."""
        arena = self._arena_of((guide.logs[0], guide.logs[1]))
        guide.logs.clear()
        excess = arena.footprint_bytes - self.limit_bytes
        if excess <= 0:
            guide.arena = arena
            self._tell(
                f'arena: {arena.placed} allocations placed in '
                f'{format_bytes(arena.slab_bytes)}, '
                f'{arena.layout.competitive_ratio:.3f} of their peak load; '
                f'{format_bytes(arena.side_bytes)} beside it'
            )
            return
        problem = guide.problem
        assert problem is not None
        self._tell(f'arena: {format_bytes(excess)} more than the limit')
        guide.wants_arena = not guide.spare_bytes  # once more, not twice
        guide.spare_bytes += excess + self.limit_bytes // SPARE_SHARE
        guide.timings.clear()
        plan = self._make_plan(guide, problem, self.planner, self.planner_options)
        self._follow(guide, problem, plan)

    def _arena_of(self, logs: tuple[IterationLog, IterationLog]) -> Arena:
        device = self.device
        return lay_out(
            logs, device.block_bytes, device.alignment_bytes, device.moves_in
        )

    def _make_plan(
        self, guide: Guide, problem: Problem, planner: str, options: dict[str, Any]
    ) -> Plan:
        """A plan for the limit, with an arena if there is one that fits.

        Raises:
            InfeasibleError: If there is no plan, with or without an arena.
        """

        def make_plan_for(limit_bytes: int) -> Plan:
            return make_plan(problem, limit_bytes, planner, **options)

        if not (self._use_arena and guide.wants_arena):
            return make_plan_for(self.limit_bytes)
        plan, fits = plan_with_arena(
            problem,
            make_plan_for,
            self._arena_of,
            self.limit_bytes,
            guide.spare_bytes,
            optional=self.device.moves_in,
        )
        if not fits:
            guide.wants_arena = False
            self._tell(
                f'no arena: none fits the limit for {MOST_SLOWDOWN:.0%} more time'
            )
        elif plan.memory_limit_bytes < self.limit_bytes:
            self._tell(
                f'planned for {format_bytes(plan.memory_limit_bytes)}, so that the '
                f'arena fits'
            )
        if plan.memory_limit_bytes < self.limit_bytes:
            bound = lower_bound(problem, self.limit_bytes).seconds
            plan = dataclasses.replace(plan, lower_bound_seconds=bound)
        return plan

    def observe_problem(self, problem: Problem) -> None:
        """Called with every finished profile, before it is planned."""

    def _follow(
        self, guide: Guide, problem: Problem, plan: Plan, old: Plan | None = None
    ) -> None:
        self._executor.settle()
        guide.follow(problem, plan)
        self.device.reserve(plan.action_bytes(problem.profile, Action.SWAP))
        if old is not None and plan.maps == old.maps:
            self._tell(
                f'timed: the same plan; predicted '
                f'{format_seconds(plan.predicted_seconds)} per iteration, bound '
                f'{format_bound(plan.lower_bound_seconds, plan.gap)}'
            )
            return
        self._tell(
            f'planned in {format_seconds(plan.planning_seconds)} '
            f'({plan.simulations} simulations): {plan.count(Action.KEEP)} keep, '
            f'{plan.count(Action.SWAP)} swap, {plan.count(Action.RECOMPUTE)} '
            f'recompute; predicted {format_seconds(plan.predicted_seconds)} per '
            f'iteration, bound {format_bound(plan.lower_bound_seconds, plan.gap)}, '
            f'peak {format_bytes(plan.predicted_peak_bytes)}'
        )

    def _measured_link(self) -> Link:
        if self._link is None:
            self._link = measure_link(self.device)
        return self._link

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
        """``'warm-up'``, ``'profiling'``, ``'guided'`` or ``'passive'``."""
        if self._guide is None or self._guide.stage is Stage.WARM_UP:
            return Stage.WARM_UP.value
        if self._started and not self._matching and self._guide.stage is Stage.GUIDED:
            return 'passive'
        return self._guide.stage.value

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

    def _record_statistics(self, seconds: float) -> None:
        self.iterations += 1
        guided = (
            self._matching
            and self._guide is not None
            and self._guide.stage is Stage.GUIDED
        )
        counters = self._executor.counters
        placed = self.device.place_figures()
        before, self._places_before = self._places_before, placed
        pool = self.device.pool_figures()
        self._history.append(
            {
                'guided': float(guided),
                'host_bytes': self.device.host_bytes,
                'plan': self._guide.plan if self._guide is not None else None,
                'seconds': seconds,
                'stall_seconds': self.device.take_stall_seconds(),
                'peak_bytes': self.device.peak_bytes,
                'swapped_bytes': counters.swapped_out_bytes + counters.swapped_in_bytes,
                'recomputed_bytes': counters.recomputed_bytes,
                'evictions': counters.evictions,
                'restores': counters.restores,
                'footprint_bytes': max(
                    self.device.peak_bytes, pool.occupied_bytes + pool.free_bytes
                ),
                'placed': placed.placed - before.placed,
                'unplaced': sum(placed[1:]) - sum(before[1:]),
            }
        )
        self._tell(
            f'iteration {self.iterations} ({self.state}): {format_seconds(seconds)}, '
            f'peak {format_bytes(self.device.peak_bytes)}'
        )

    def _finish_statistics(self) -> None:
        """Counts the last iteration, which no other one has ended."""
        if self._started and self._backward_seen:
            self._record_statistics(time.perf_counter() - self._start_seconds)
            self._started = False

    def _guided_entries(self) -> list[dict[str, Any]]:
        """Iterations after the present prediction; all guided ones before any is."""
        guided = [e for e in self._history if e['guided']]
        plan = self.plan
        return [e for e in guided if e['plan'] is plan] or guided

    def iteration_times(self) -> list[float]:
        """Seconds of the guided iterations since the present plan was predicted.

        Of all guided iterations, as long as there is none.
        """
        return [entry['seconds'] for entry in self._guided_entries()]

    def statistics(self) -> dict[str, Any]:
        """Figures of the run so far.

        Returns:
            dict: Bytes as int, seconds as float, None where nothing is known
            yet. Medians are over guided iterations. ``overhead`` is measured,
            ``gap`` is predicted: the plan's time over the proven bound, minus 1.
        """
        guided = self._guided_entries()
        recent = guided or self._history

        def median(name: str) -> float | None:
            if not recent:
                return None
            return statistics.median(entry[name] for entry in recent)

        plan, guide = self.plan, self._planned_guide()
        problem = guide.problem if guide is not None else None
        arena = guide.arena if guide is not None else None
        seconds = median('seconds')
        in_core = plan.in_core_seconds if plan is not None else None
        return {
            'state': self.state,
            'planner': self.planner,
            'iterations': self.iterations,
            'guided_iterations': sum(bool(e['guided']) for e in self._history),
            'deviations': self.deviations,
            'limit_bytes': self.limit_bytes,
            'peak_bytes': int(max((e['peak_bytes'] for e in self._history), default=0)),
            'predicted_peak_bytes': plan.predicted_peak_bytes if plan else None,
            'in_core_peak_bytes': problem.in_core_peak_bytes if problem else None,
            'footprint_bytes': int(
                max((e['footprint_bytes'] for e in self._history), default=0)
            ),
            'arena_bytes': arena.slab_bytes if arena else None,
            'side_bytes': arena.side_bytes if arena else None,
            'placed': _as_int(median('placed')),
            'unplaced': _as_int(median('unplaced')),
            'host_bytes': int(
                max((e['host_bytes'] for e in guided or self._history), default=0)
            ),
            'iteration_seconds': seconds,
            'predicted_seconds': plan.predicted_seconds if plan else None,
            'in_core_seconds': in_core,
            'lower_bound_seconds': plan.lower_bound_seconds if plan else None,
            'gap': plan.gap if plan else None,
            'overhead': seconds / in_core - 1 if seconds and in_core else None,
            'stall_seconds': median('stall_seconds'),
            'swapped_bytes': _as_int(median('swapped_bytes')),
            'recomputed_bytes': _as_int(median('recomputed_bytes')),
            'evictions': _as_int(median('evictions')),
            'restores': _as_int(median('restores')),
            'keep': plan.count(Action.KEEP) if plan else None,
            'swap': plan.count(Action.SWAP) if plan else None,
            'recompute': plan.count(Action.RECOMPUTE) if plan else None,
            'planning_seconds': plan.planning_seconds if plan else None,
            'simulations': plan.simulations if plan else None,
            'guided_peak_bytes': (
                int(max(e['peak_bytes'] for e in guided)) if guided else None
            ),
        }

    def report(self) -> str:
        """The statistics as a table for people."""
        return session_report(self.statistics(), self.plan, self.profile)

    def last_iteration(self) -> dict[str, Any]:
        """Figures of the last finished iteration; empty before the first."""
        return dict(self._history[-1]) if self._history else {}

    def _tell(self, message: str) -> None:
        if self._progress is not None:
            print(f'hybridmem: {message}', file=self._progress, flush=True)


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


def _uncounted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose NumPy arrays are ours and do not count.

    The host device counts the allocations of a context; a fresh one has
    NumPy's own handler.
    """
    return contextvars.Context().run(lambda: function(*args, **kwargs))


def check_feedback(feedback: bool | None) -> None:
    """Refuses what is neither a bool nor None.

    Raises:
        OptionError: With the value.
    """
    if feedback is not None and not isinstance(feedback, bool):
        raise OptionError(f'feedback is {feedback!r}; True, False or None is needed.')


def check_switches(**values: Any) -> None:
    """Refuses what is not a bool.

    Raises:
        OptionError: With name and value.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise OptionError(f'{name} is {value!r}; True or False is needed.')


def model_arrays(model: chainer.Link) -> list[Any]:
    """What stays from iteration to iteration, as arrays."""
    return [array for _, array in permanent_arrays(model)]


def permanent_arrays(model: chainer.Link) -> list[tuple[Category, Any]]:
    """Parameters, gradients, optimizer state and persistent arrays."""
    arrays: list[tuple[Category, Any]] = []
    for parameter in model.params():
        arrays.append((Category.PARAMETER, parameter.array))
        # The public property raises where there is none.
        arrays.append((Category.GRADIENT, parameter._grad))
        rule = parameter.update_rule
        if rule is not None and rule.state:
            states = rule.state.values()
            arrays.extend((Category.OPTIMIZER_STATE, state) for state in states)
    for link in model.links():
        persistent = (link.__dict__.get(name) for name in link._persistent)
        arrays.extend((Category.PARAMETER, value) for value in persistent)
    kinds = chainer.get_array_types()
    return [(kind, array) for kind, array in arrays if isinstance(array, kinds)]


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
    return (
        type(graph.target(function)).__name__,
        *[(x.shape, x.dtype.char) for x in in_data],
    )


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)
