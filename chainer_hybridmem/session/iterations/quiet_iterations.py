"""Iterations of which nothing is found out, because nothing has had to leave.

Note: [quiet iterations]
    An iteration of an unknown signature begins quietly: the hooks note which functions
    have run, by weak references, and nothing else. Most end so, wherever everything
    fits. If maps of older graphs are away, they also bring back what functions read.
    When an allocation does not fit, the executor gets to know what those functions
    have left in the graph, as few of them as will do: first those of older graphs, and
    those whose backward has ended, then from the first one on, for what that has left
    is needed last. The iteration goes on quietly; a backward function finds what it
    reads, known or not. Only then its signature is worth recording. If nothing else can
    go, or a backward makes a graph of its own, all functions become known and the rest
    is passive. Functions of quiet iterations stay noted as long as they live: a graph
    that the program keeps can be evicted, too.
"""

from __future__ import annotations

import weakref
from typing import Any

from chainer_hybridmem.chainer_access import graph
from chainer_hybridmem.session.iterations.iteration import Iteration
from chainer_hybridmem.session.iterations.link_path import LinkPath
from chainer_hybridmem.session.iterations.noted_functions import NotedFunctions
from chainer_hybridmem.session.iterations.older_graphs import OlderGraphs
from chainer_hybridmem.session.iterations.replay_trials import ReplayTrials
from chainer_hybridmem.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.session.setting.runtime import Runtime
from chainer_hybridmem.session.setting.session_thread import ThreadGuard

KNOWN_AT_ONCE = 16  # functions of a quiet iteration in which memory is short
GUARDED = 16  # one function in so many refuses a backward in another thread


class QuietIterations:
    """Notes the functions of quiet iterations, and finds what can leave.

    Args:
        runtime (Runtime): Evicts what it knows, and runs functions in parts.
        arrays (ModelArrays): Never leave.
        replays (ReplayTrials): Prepares functions for being run again.
        path (LinkPath): Names operations.
        guard (ThreadGuard): Is added to functions.
        older (OlderGraphs): Is told what is asked of older graphs.

    Attributes:
        replays (ReplayTrials): As given.
    """

    def __init__(
        self,
        runtime: Runtime,
        arrays: ModelArrays,
        replays: ReplayTrials,
        path: LinkPath,
        guard: ThreadGuard,
        older: OlderGraphs,
    ) -> None:
        self._device = runtime.device
        self._executor = runtime.executor
        self._splitter = runtime.splitter
        self._arrays = arrays
        self.replays = replays
        self._path = path
        self._guard = guard
        self._older = older
        self._rules = self._executor.evictor.rules
        self._noted = NotedFunctions()
        self._settings: tuple[dict[str, Any], ...] = ({}, {})  # of this thread, of all

    def enter(self) -> None:
        """The session begins in this thread."""
        self._settings = graph.settings()

    def begin_iteration(self, iteration: Iteration) -> None:
        """Another iteration begins, quiet or not."""
        self._noted.begin(iteration)

    # -- what the hooks tell --------------------------------------------------
    def take_forward(
        self, iteration: Iteration, function: Any, in_data: tuple[Any, ...]
    ) -> bool:
        """Takes note of a forward function; False if it ends the quiet iteration."""
        own, shared = self._settings
        if (
            graph.is_static(function)
            or own.get('schedule_func', shared['schedule_func']) is not None
        ):
            return False  # it will be refused
        if not own.get('enable_backprop', shared['enable_backprop']):
            self._splitter.prepare(function)
            return True
        if iteration.depth:
            return self._take_nested(iteration, function)
        if iteration.backward_seen or not iteration.started:
            return False
        self.start_forward(iteration, function, in_data)
        return True

    def _take_nested(self, iteration: Iteration, function: Any) -> bool:
        if not graph.backward_runs():
            return False
        if iteration.wary:
            self.know_all(iteration)
            return False
        self._noted.note_nested(function)
        self._splitter.prepare(function)
        return True

    def start_forward(
        self, iteration: Iteration, function: Any, in_data: tuple[Any, ...]
    ) -> None:
        """A forward function is about to run."""
        if iteration.fingerprint is not None:
            iteration.add_to_fingerprint(function, in_data)
        if iteration.wary:
            self._executor.pass_by(function)
        k = iteration.start_forward()
        self._noted.functions.append((k, weakref.ref(function)))
        if self._rules.active:
            label = self._path.label(graph.function_name(function))
            self._rules.note(function, label, k)
        self._splitter.start_operation(k, '')
        if self.replays.active:
            self.replays.prepare(function, in_data, self._splitter)
        else:
            self._splitter.prepare(function)
        if not k % GUARDED:
            graph.add_local_hook(function, self._guard)
            self._noted.forget_dead()

    def start_backward(self, iteration: Iteration, function: Any) -> None:
        """A backward function is about to run; what it reads may be away."""
        k = iteration.start_backward()
        if self.replays.watching:
            self.replays.start_backward()
        self._noted.running.append(weakref.ref(function))
        self._splitter.start_operation(k, '')
        if iteration.wary:
            executor = self._executor
            if not executor.functions.is_known(function):
                if not executor.maps.misses(function):
                    executor.before_unknown()
                    return
                if iteration.first_serial < 0:
                    self._begin_to_know(iteration)
                self._know(k, function, iteration.first_serial + k)
            self._older.find_forward(iteration, function)
            executor.before_backward(k, function)

    def end_backward(self, iteration: Iteration, function: Any) -> None:
        """A backward function has run."""
        depth = iteration.end_backward()
        ended = self._noted.running.pop()
        if iteration.wary and self._executor.functions.is_known(function):
            self._executor.after_backward(iteration.position - 1, function)
        else:
            self._noted.ended.append(ended)
        if not depth:
            self._splitter.start_operation(-1, '')

    def label_operation(self) -> str:
        """The label of the operation under way."""
        function = self._noted.find_current()
        name = 'a function' if function is None else graph.function_name(function)
        if self._noted.running:
            return f'backward of {name}'
        return self._path.label(name)

    # -- memory is short ------------------------------------------------------
    def reclaim(self, iteration: Iteration, missing_bytes: int) -> None:
        """An allocation of a quiet iteration does not fit; see [quiet iterations]."""
        executor, device = self._executor, self._device
        goal_bytes = device.memory.used_bytes - missing_bytes
        if iteration.first_serial < 0:
            self._begin_to_know(iteration)
        self._know_running(iteration)
        count = KNOWN_AT_ONCE
        while device.memory.used_bytes > goal_bytes and not self._noted.nested:
            executor.evictor.reclaim(device.memory.used_bytes - goal_bytes)
            if device.memory.used_bytes <= goal_bytes or self._noted.all_out:
                break
            self._know_more(iteration, count)
            count *= 2
        if device.memory.used_bytes > goal_bytes:
            self.know_all(iteration)
            executor.evictor.reclaim(device.memory.used_bytes - goal_bytes)

    def know_all(self, iteration: Iteration) -> None:
        """All that has run so far is known from now on, and what follows, too."""
        iteration.stop_quiet()
        if iteration.first_serial < 0:
            self._begin_to_know(iteration)
        self._know_older(self._noted.older, iteration.first_serial - self._noted.older)
        label = self.label_operation()
        iteration.name_operation(label)
        functions, ended, running = self._noted.take()
        for k, function in functions:
            self._know(k, function, iteration.first_serial + max(k, 0), iteration)
        if functions and graph.is_unfinished(functions[-1][1]):
            iteration.wait_for(*functions[-1])
        self._executor.catch_up(ended, running)
        self._splitter.start_operation(iteration.position - 1, label)

    def know_older(self) -> None:
        """Makes graphs of older quiet iterations known."""
        self._know_older(self._noted.older, self._executor.maps.serial + 1)

    def _know_older(self, count: int, serial: int) -> None:
        """So many functions of older quiet iterations become known.

        Args:
            count: Of functions.
            serial: Of the first of them.
        """
        executor = self._executor
        functions, ended = self._noted.take_older(count)
        for i, (origin, k, function) in enumerate(functions):
            self._know(k, function, serial + i, origin)
        executor.catch_up(ended, ())
        for _, _, function in functions:
            for live in executor.maps.find(function):
                live.begin_iteration()

    def _begin_to_know(self, iteration: Iteration) -> None:
        """Memory is short for the first time in a quiet iteration."""
        executor = self._executor
        categories = self._arrays.protect_from(executor)
        first_serial = executor.maps.serial + 1 + self._noted.older
        iteration.note_memory(categories, first_serial)
        executor.open_window()

    def _know_more(self, iteration: Iteration, count: int) -> None:
        """So many more functions of a quiet iteration, or all, become known."""
        serial, older = iteration.first_serial, self._noted.older
        if older:
            self._know_older(count, serial - older)
            return
        ended = self._noted.next_ended(count)
        for function in ended:
            self._know(iteration.position, function, serial)
        self._executor.catch_up(ended, ())
        if not ended:
            for k, function in self._noted.next_functions(count):
                self._know(k, function, serial + k, iteration)

    def _know_running(self, iteration: Iteration) -> None:
        """What backward functions under way read must not go."""
        k, running = iteration.position, self._noted.living_running()
        for function in running:
            self._know(k, function, iteration.first_serial + k)
        self._executor.catch_up((), running)

    def _know(
        self, k: int, function: Any, serial: int, origin: Iteration | None = None
    ) -> None:
        """What a function has left in the graph is known from now on.

        Args:
            k: Its number; -1 for a nested one.
            function: The function.
            serial: Its place in the order of functions.
            origin: The iteration that has run it, if the number is that of its forward.
        """
        executor = self._executor
        if not (graph.is_unfinished(function) or executor.functions.is_known(function)):
            if origin is not None and k >= 0:
                executor.functions.know(function).belong_to(origin, k)
            executor.complete(k, function, serial)
            if executor.maps.find(function):
                graph.add_local_hook(function, self._guard)
