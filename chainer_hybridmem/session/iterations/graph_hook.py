"""Chainer's hooks, turned into events of iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.errors import clear_handled
from chainer_hybridmem.estimation.specs import spec_of
from chainer_hybridmem.session.guides.operation_key import (
    OperationKey,
    make_backward_key,
    make_forward_key,
)
from chainer_hybridmem.session.iterations.failure_moment import Progress
from chainer_hybridmem.session.iterations.guide_switching import GuideSwitching
from chainer_hybridmem.session.iterations.iteration import Iteration
from chainer_hybridmem.session.iterations.iteration_start import IterationStart
from chainer_hybridmem.session.iterations.learning import Learning
from chainer_hybridmem.session.iterations.link_path import LinkPath
from chainer_hybridmem.session.iterations.older_graphs import OlderGraphs
from chainer_hybridmem.session.iterations.overrun import Overrun
from chainer_hybridmem.session.iterations.quiet_iterations import QuietIterations
from chainer_hybridmem.session.setting.runtime import Runtime
from chainer_hybridmem.session.setting.session_thread import ThreadGuard


class GraphHook(chainer.FunctionHook):
    """Knows the iteration under way, and tells every part what happens in it.

    Args:
        runtime (Runtime): Acts before and after each operation.
        quiet (QuietIterations): Takes over while nothing is to be found out.
        start (IterationStart): Begins iterations.
        switching (GuideSwitching): Finds the guide of iterations that differ.
        learning (Learning): Takes iterations that have ended.
        overrun (Overrun): Lets what fits in no way exceed the limit, once.
        path (LinkPath): Names operations.
        guard (ThreadGuard): Is added to functions.
        older (OlderGraphs): Knows the operations of forward functions.

    Attributes:
        iteration (Iteration): The one under way; between two, the last one.
    """

    name = 'hybridmem'

    def __init__(
        self,
        runtime: Runtime,
        quiet: QuietIterations,
        start: IterationStart,
        switching: GuideSwitching,
        learning: Learning,
        overrun: Overrun,
        path: LinkPath,
        guard: ThreadGuard,
        older: OlderGraphs,
    ) -> None:
        self.iteration = Iteration()
        self._memory = runtime.device.memory
        self._executor = runtime.executor
        self._rules = runtime.executor.evictor.rules
        self._splitter = runtime.splitter
        self._instruments = runtime.instruments
        self._quiet = quiet
        self._replays = quiet.replays
        self._start = start
        self._switching = switching
        self._learning = learning
        self._overrun = overrun
        self._path = path
        self._guard = guard
        self._older = older
        self._meet: Callable[[type], None] | None = None
        self._settings: tuple[dict[str, Any], ...] = ({}, {})  # of this thread, of all
        self._executor.idle.tell_found(self._guard_maps)

    def enter(self, meet: Callable[[type], None] | None) -> None:
        """Hooks into functions, links and sums of gradients, in this thread.

        Args:
            meet: Called with the class of each forward function that is not quiet.
        """
        self._quiet.enter()
        self._settings = graph.settings()
        self._meet = meet
        self.__enter__()
        self._path.__enter__()
        self._splitter.__enter__()

    def leave(self) -> None:
        """Chainer does not call these hooks any more."""
        self._splitter.__exit__()
        self._path.__exit__(None, None, None)
        self.__exit__(None, None, None)

    # -- Chainer's hooks ------------------------------------------------------
    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function: complete the last one, act on the plan."""
        iteration = self.iteration
        if iteration.quiet and self._quiet.take_forward(iteration, function, in_data):
            return
        own, shared = self._settings
        if not own.get('enable_backprop', shared['enable_backprop']):
            self._start_without_graph(iteration, function)
            return
        graph.refuse_static(function)
        if iteration.depth and graph.backward_runs():
            self._start_nested(iteration, function)
            return
        if self._is_broken_off(iteration):
            self._break_off(iteration)
        self._instruments.enter()
        self._complete_last(iteration)
        key = make_forward_key(function, in_data)
        if iteration.backward_seen or not iteration.started:
            self._end(iteration)
            iteration = self.iteration = Iteration()
            self._start.begin(iteration, key)
            if iteration.quiet:
                iteration.following.fits(0, key)
                self._quiet.start_forward(iteration, function, in_data)
                return
        self._start_forward(iteration, function, in_data, key)

    def _start_without_graph(self, iteration: Iteration, function: Any) -> None:
        """A function leaves nothing in the graph, as most in a backward function."""
        if not iteration.depth:
            graph.refuse_static(function)
        self._splitter.prepare(function)
        if not graph.is_unfinished(function):  # it is applied once more
            self._executor.restore_maps(function)

    def _start_forward(
        self,
        iteration: Iteration,
        function: Any,
        in_data: tuple[Any, ...],
        key: OperationKey,
    ) -> None:
        if iteration.fingerprint is not None:
            iteration.add_to_fingerprint(function, in_data)
        k = iteration.start_forward()
        label = self._path.label(graph.function_name(function))
        self._start_operation(iteration, k, key, label)
        self._rules.note(function, label, k)
        self._executor.before_forward(k, function)
        known = self._executor.functions.know(function)
        known.belong_to(iteration, k)
        iteration.wait_for(k, function)
        if self._meet is not None:
            self._meet(type(graph.target(function)))
        recorder = self._instruments.recorder
        if recorder is not None:
            specs = tuple(spec_of(x) for x in in_data)
            recorder.forward_starts(label, function, specs, in_data)
        if self._replays.active:
            self._replays.prepare(function, in_data, self._splitter)
        else:
            self._splitter.prepare(function)
        self._instruments.leave(starts_operation=True)

    def _start_nested(self, iteration: Iteration, function: Any) -> None:
        """A backward function makes a graph of its own, for another backward.

        No plan knows its maps; they can be evicted.
        """
        self._complete_last(iteration)
        iteration.wait_for(-1, function)
        self._splitter.prepare(function)

    def forward_postprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """After a forward function has computed."""
        iteration = self.iteration
        if iteration.quiet:
            if self._replays.active:
                self._executor.after_forward(function)
            return
        if (
            iteration.depth
            or iteration.last is None
            or iteration.last[1]() is not function
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
        iteration = self.iteration
        if iteration.quiet:
            self._quiet.start_backward(iteration, function)
            return
        self._instruments.enter()
        self._complete_last(iteration)
        k = iteration.start_backward()
        if self._replays.watching:
            self._replays.start_backward()
        forward = self._older.find_forward(iteration, function)
        name = graph.function_name(function)
        label = f'backward of {name}'
        self._start_operation(iteration, k, make_backward_key(forward, name), label)
        self._executor.before_backward(k, function)
        recorder = self._instruments.recorder
        if recorder is not None:
            label = recorder.label_of(forward, label)
            recorder.backward_starts(label, function, forward)
        self._instruments.leave(starts_operation=True)

    def backward_postprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """After a backward function: drop what is not needed any more."""
        del in_data, out_grad
        iteration = self.iteration
        if iteration.quiet:
            self._quiet.end_backward(iteration, function)
            return
        self._instruments.enter()
        self._complete_last(iteration)
        self._executor.after_backward(iteration.position - 1, function)
        if not iteration.end_backward():
            self._splitter.start_operation(-1, iteration.label)
        self._instruments.leave(starts_operation=False)

    # -- operations -----------------------------------------------------------
    def _start_operation(
        self, iteration: Iteration, k: int, key: OperationKey, label: str
    ) -> None:
        """What is allocated from here on belongs to operation k."""
        iteration.name_operation(label)
        if not iteration.following.fits(k, key):
            self._switching.redirect(iteration, k)
        self._splitter.start_operation(k, label)
        self._instruments.start_operation(k)

    def _complete_last(self, iteration: Iteration) -> None:
        """Chainer sets retained arrays after a function's hooks have run."""
        if iteration.last is None:
            return
        k, reference = iteration.last
        iteration.forget_last()
        function = reference()
        if graph.is_unfinished(function):
            return
        recorder = self._instruments.recorder
        if recorder is None and k >= 0 and self._executor.pass_idle(k, function):
            return
        self._executor.complete(k, function)
        self._guard_maps(function)
        if recorder is not None and k >= 0:
            recorder.forward_complete(k, function)

    def _guard_maps(self, function: Any) -> None:
        """A backward in another thread would miss what is away."""
        if self._executor.maps.find(function):
            graph.add_local_hook(function, self._guard)

    # -- iterations -----------------------------------------------------------
    def _is_broken_off(self, iteration: Iteration) -> bool:
        """Whether the iteration has come to nothing.

        The program has caught an error, or its graph has died before a backward: then a
        backward function or a hook before a forward function has not come to an end,
        or no function is left.
        """
        if not iteration.started or iteration.depth:
            return iteration.depth > 0
        if iteration.backward_seen or iteration.last is None:
            return not iteration.backward_seen
        k, reference = iteration.last
        if k < 0 or not graph.is_unfinished(reference()):
            return False
        clear_handled()
        return self._executor.graph_is_dead

    def _break_off(self, iteration: Iteration) -> None:
        """What was begun is not recorded; its signature is known as well as before."""
        self._instruments.discard()
        self._instruments.stop_verifying()
        iteration.break_off()
        clear_handled()

    def _end(self, iteration: Iteration) -> None:
        if iteration.started:
            seconds = iteration.seconds
            self._replays.end(self._executor.counters)
            self._switching.settle(iteration)
            self._learning.end(iteration, seconds)
            self._overrun.end(iteration)

    def finish_iteration(self) -> None:
        """Ends an iteration that has come through backward."""
        iteration = self.iteration
        if iteration.is_complete:
            self._instruments.enter()
            self._complete_last(iteration)
            self._end(iteration)
            iteration.end()
            self._executor.forget_dead()

    def count_last(self) -> None:
        """Counts the last iteration of a session, which no other one has ended."""
        iteration = self.iteration
        if iteration.started and iteration.backward_seen:
            self._learning.count_deviation(iteration)
            self._learning.count(iteration, iteration.seconds)
            iteration.end()

    # -- memory ---------------------------------------------------------------
    def reclaim(self, missing_bytes: int) -> None:
        """An allocation does not fit: feature maps leave, as far as they can."""
        self._executor.counters.lose(lambda: self._make_room(missing_bytes))

    def _make_room(self, missing_bytes: int) -> None:
        iteration, evictor = self.iteration, self._executor.evictor
        goal_bytes = self._memory.used_bytes - missing_bytes
        iteration.fall_short()
        self._replays.fall_short()
        if iteration.quiet:
            self._quiet.reclaim(iteration, missing_bytes)
        else:
            self._executor.idle.know_all()
            evictor.reclaim(missing_bytes)
        if self._memory.used_bytes > goal_bytes:
            short_bytes = self._memory.used_bytes - goal_bytes
            optional = self._memory.trying or self._overrun.is_under_way
            evictor.collect_garbage(short_bytes, optional)
        short_bytes = self._memory.used_bytes - goal_bytes
        if short_bytes > 0:
            self._overrun.exceed(
                short_bytes,
                iteration,
                lambda: self.describe_progress(self._learning.next_number),
            )

    # -- what is told ---------------------------------------------------------
    def name_state(self) -> str:
        """How the iteration runs or has run; see :attr:`.Session.state`."""
        return self._learning.name_state(self.iteration)

    def describe_progress(self, number: int) -> Progress:
        """How far the iteration has come, which has this number."""
        iteration = self.iteration
        if iteration.quiet:
            iteration.name_operation(self._quiet.label_operation())
        return Progress(
            number,
            iteration.started,
            iteration.position,
            iteration.label,
            iteration.depth,
            iteration.backward_seen,
        )
