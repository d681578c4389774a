"""The loop of iterations: what happens at each of Chainer's hooks.

An iteration begins with the first forward function after a backward. It begins quietly,
in passive mode, or with a guide, and goes on with another guide, or with none, where
its operations are not what that expects. Each operation completes at the next hook, for
Chainer sets retained arrays after a function's hooks have run.

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

Note: [asked for later]
    Parameters may be others by the time an iteration asks for the graphs of those
    before it: what it asks for must not be recomputed, and must not be dropped. Which
    iterations are asked, only later ones tell, so this is learnt for all that begin
    alike (guide, [habits of a family]).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.errors import clear_handled
from chainer_hybridmem.planning.records.profile import Slot
from chainer_hybridmem.planning.records.specs import spec_of
from chainer_hybridmem.training.chainer_access import graph, own_code
from chainer_hybridmem.training.execution.ledger import LiveFunction
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.guidebook import GuideBook
from chainer_hybridmem.training.session.guides.operation_key import (
    BACKWARD,
    OperationKey,
    extend_fingerprint,
    make_forward_key,
)
from chainer_hybridmem.training.session.iterations.iteration import (
    NESTED,
    Following,
    Iteration,
)
from chainer_hybridmem.training.session.iterations.learning import (
    Learning,
    refuse_differences,
)
from chainer_hybridmem.training.session.iterations.observation import InstrumentSelector
from chainer_hybridmem.training.session.iterations.out_of_memory import (
    Codes,
    Moment,
    moment_of,
)
from chainer_hybridmem.training.session.iterations.overrun import Overrun
from chainer_hybridmem.training.session.planning.planning import HostShare
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.training.session.setting.session_thread import ThreadGuard

_ignore: Any = operator.is_  # takes two, does nothing, and is no function of Python's
_maker_of = operator.attrgetter('creator_node')
_of_none = itertools.repeat(-1)  # in place of the number of an operation
KNOWN_AT_ONCE = 16  # functions of a quiet iteration in which memory is short
GUARDED = 16  # one function in so many refuses a backward in another thread


class Loop(chainer.FunctionHook):
    """Knows the iteration under way, and tells every part what happens in it.

    Args:
        model (Link): Is trained.
        runtime (Runtime): Runs iterations.
        arrays (ModelArrays): Never leave, or as a plan says.
        guidebook (GuideBook): Has the guides.
        host_share (HostShare): Gives host memory to a guide.
        observation (InstrumentSelector): Finds out about iterations.
        learning (Learning): Takes iterations that have ended.
        overrun (Overrun): Lets what fits in no way exceed the limit, once.
        guard (ThreadGuard): Is added to functions.

    Attributes:
        iteration (Iteration): The one under way; between two, the last one.
    """

    name = 'hybridmem'
    forward_postprocess: Any = _ignore  # but while a forward is waited for

    def __init__(
        self,
        model: chainer.Link,
        runtime: Runtime,
        arrays: ModelArrays,
        guidebook: GuideBook,
        host_share: HostShare,
        observation: InstrumentSelector,
        learning: Learning,
        overrun: Overrun,
        guard: ThreadGuard,
    ) -> None:
        self.iteration = Iteration()
        self._device = runtime.device
        self._executor = runtime.executor
        self._rules = runtime.executor.evictor.rules
        self._splitter = runtime.splitter
        self._instruments = runtime.instruments
        self._arrays = arrays
        self._guidebook = guidebook
        self._host_share = host_share
        self._observation = observation
        self._learning = learning
        self._overrun = overrun
        self._guard = guard
        self._paths = {id(link): path for path, link in model.namedlinks()}
        self._ledger = runtime.executor.ledger
        self._meet: Callable[[type], None] | None = None
        self._settings: tuple[dict[str, Any], ...] = ({}, {})  # of this thread, of all
        self._executor.report_to(self._note_read, arrays.sum_known_updates)
        self._splitter.ask_for_labels(self._find_label)

    def enter(self, meet: Callable[[type], None] | None) -> None:
        """Hooks into functions and sums of gradients, in this thread.

        Args:
            meet: Called with the class of each forward function that is not quiet.
        """
        self._settings = graph.settings()
        self._meet = meet
        self.__enter__()
        self._splitter.__enter__()

    def leave(self, hooked: bool = True) -> None:
        """Chainer does not call these hooks any more.

        Args:
            hooked: Whether it would; not if the thread has ended.
        """
        self.forward_postprocess = _ignore  # no reference to itself is left
        self._splitter.__exit__()
        if hooked:
            self.__exit__(None, None, None)

    # -- Chainer's hooks: one way through an iteration --------------------------
    # Functions may be small and many, so these do by themselves what each of them needs
    # (`overhead` tells what a function costs), and call others for the rest.
    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Before a forward function: completes the last one, acts on the plan."""
        iteration = self.iteration
        own, shared = self._settings
        with_graph = own.get('enable_backprop', shared['enable_backprop'])
        if with_graph or not iteration.depth:
            schedule = own.get('schedule_func', shared['schedule_func'])
            if schedule is not None or type(function) is graph.StaticScheduleFunction:
                graph.refuse_static()
        splitter = self._splitter
        if not with_graph:  # it leaves nothing, as most in a backward function
            evaluates = not iteration.depth and not own.get('train', shared['train'])
            if evaluates and iteration.note_evaluation(self._device.clock.asynchronous):
                self._instruments.end_times()
            if type(function) in splitter.kinds:
                splitter.awaited = id(function)
            if function.inputs is not None and not iteration.quiet:
                self._executor.restore_maps(function)  # it is applied once more
            return
        if iteration.depth and graph.backward_runs():
            self._start_nested(iteration, function)
            return
        goes_on = iteration.started and not iteration.backward_seen
        newest = None if iteration.newest is None else iteration.newest()
        inputs = None if newest is None else newest.inputs
        is_unfinished = inputs is None
        makers = map(id, map(_maker_of, inputs or ()))
        wiring = hash((*map(self._ledger.forwards.get, makers, _of_none),))
        # With a reference to one of them, their graph would not be dead.
        newest = inputs = None
        if is_unfinished or iteration.depth:
            goes_on = self._goes_on(iteration, goes_on)
        if not goes_on or not iteration.quiet:
            if self._instruments.active:
                self._instruments.enter()
            if iteration.last is not None:
                self._complete_last(iteration, iteration.last)
        key: OperationKey = ()
        if not goes_on:
            iteration, key = self._begin_another(function, in_data)
            wiring = 0
        k = iteration.position
        iteration.position = k + 1
        before = iteration.fingerprint
        if before is not None:
            iteration.fingerprint = extend_fingerprint(
                before, function, in_data, wiring
            )
        self._ledger.forwards[id(function)] = k
        if iteration.quiet:
            if iteration.wary:
                self._executor.before_forward(k, function)
            iteration.newest = self._ledger.note(k, function)
            if self._rules.active:
                self._rules.note(function, self._find_label(), k)
            splitter.place = k, 0
            if not k % GUARDED:
                self._ledger.forget_dead()
        else:
            key = key or make_forward_key(function, in_data, wiring)
            self._start_known_forward(iteration, k, function, in_data, key)
        if not k % GUARDED:
            graph.add_local_hook(function, self._guard)
        if type(function) in splitter.kinds:
            splitter.awaited = id(function)

    def _start_known_forward(
        self,
        iteration: Iteration,
        k: int,
        function: Any,
        in_data: tuple[Any, ...],
        key: OperationKey,
    ) -> None:
        """Forward operation k is about to run, of an iteration that is not quiet."""
        iteration.newest = None
        iteration.named = key[0]
        self._start_operation(iteration, k, key)
        if self._rules.active:
            self._rules.note(function, self._find_label(), k)
        executor, recorder = self._executor, self._instruments.recorder
        is_idle = executor.before_forward(k, function)
        if is_idle and recorder is None:
            iteration.newest = self._ledger.note(k, function)
        else:
            executor.functions.know(function).belong_to(iteration, k)
            iteration.wait_for(k, function)
            if recorder is not None or executor.awaits_forward:
                self.forward_postprocess = self._end_forward
        if self._meet is not None:
            self._meet(type(graph.target(function)))
        if recorder is not None:
            specs = tuple(spec_of(x) for x in in_data)
            recorder.forward_starts(self._find_label(), function, specs, in_data)
        if self._instruments.active:
            self._instruments.leave(starts_operation=True)

    def _start_nested(self, iteration: Iteration, function: Any) -> None:
        """A backward function makes a graph of its own, for another backward.

        No plan knows its maps; they can be evicted.
        """
        if iteration.quiet and iteration.wary:
            self._know_all(iteration)
        self._ledger.forwards.pop(id(function), None)  # that of one that has died
        if iteration.quiet:
            self._ledger.note_nested(function)
        else:
            if iteration.last is not None:
                self._complete_last(iteration, iteration.last)
            iteration.wait_for(NESTED, function)
        if type(function) in self._splitter.kinds:
            self._splitter.awaited = id(function)

    def _end_forward(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """After a forward function has computed, if that is waited for."""
        iteration = self.iteration
        last = iteration.last
        if last is None or iteration.depth or last[1]() is not function:
            return
        self.forward_postprocess = _ignore
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
        instruments = self._instruments
        newest = iteration.newest
        if instruments.active:
            instruments.enter()
        if iteration.last is not None:
            self._complete_last(iteration, iteration.last)
        k = iteration.position
        iteration.position = k + 1
        iteration.depth += 1
        wiring = 0
        if not iteration.backward_seen:
            iteration.see_backward()
            last = None if newest is None else newest()
            makers = map(id, map(_maker_of, getattr(last, 'inputs', None) or ()))
            wiring = hash((*map(self._ledger.forwards.get, makers, _of_none),))
            if iteration.fingerprint is not None:
                iteration.fingerprint = hash((iteration.fingerprint, wiring))
        if iteration.quiet:
            self._ledger.start_backward(function)
            self._splitter.place = k, 0
            if iteration.wary:
                self._bring_back_quietly(iteration, k, function)
            return
        forward = self._ledger.forwards.get(id(function), -1)
        if forward < 0:
            self._note_other_backward(function)
        name = iteration.named = graph.function_name(function)
        key = BACKWARD, (forward if forward >= 0 else name), wiring
        self._start_operation(iteration, k, key)
        self._executor.before_backward(k, function)
        if instruments.recorder is not None:
            label = instruments.recorder.label_of(forward, self._find_label())
            instruments.recorder.backward_starts(label, function, forward)
        if instruments.active:
            instruments.leave(starts_operation=True)

    def backward_postprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """After a backward function: drops what is not needed any more."""
        del in_data, out_grad
        iteration, executor = self.iteration, self._executor
        instruments = self._instruments
        if instruments.active:
            instruments.enter()
        if iteration.last is not None:
            self._complete_last(iteration, iteration.last)
        if iteration.quiet:
            self._ledger.end_backward(function)
            if iteration.wary and executor.functions.is_known(function):
                executor.after_backward(iteration.position - 1, function)
        else:
            executor.after_backward(iteration.position - 1, function)
        if iteration.depth:
            iteration.depth -= 1
        if not iteration.depth:
            self._splitter.place = -1, 0
        if instruments.active:
            instruments.leave(starts_operation=False)

    # -- operations -----------------------------------------------------------
    def _start_operation(self, iteration: Iteration, k: int, key: OperationKey) -> None:
        """What is allocated from here on belongs to operation k."""
        following = iteration.following
        expected = following.expected
        if expected is None:
            following.operations.append(key)
        elif k < len(expected) and expected[k] == key:
            following.operations.append(expected[k])  # fewer objects that live long
        else:
            following.operations.append(key)
            self._redirect(iteration, k)
        self._splitter.place = k, 0
        instruments = self._instruments
        if instruments.placing:
            self._device.offsets.seek(k)
        if instruments.log is not None:
            instruments.log.start_operation()

    def _complete_last(
        self, iteration: Iteration, last: tuple[int, weakref.ref[Any]]
    ) -> None:
        """Chainer sets retained arrays after a function's hooks have run."""
        iteration.last = iteration.newest = None  # an error may come from here on
        k, reference = last
        function = reference()
        if graph.is_unfinished(function):
            return
        recorder = self._instruments.recorder
        self._executor.complete(k, function)
        if recorder is not None and k >= 0:
            recorder.forward_complete(k, function)

    # -- quiet iterations: functions are noted and nothing else ---------------
    def _bring_back_quietly(self, iteration: Iteration, k: int, function: Any) -> None:
        """A backward function is about to run; what it reads may be away."""
        executor = self._executor
        if not executor.functions.is_known(function):
            if not executor.maps.misses(function):
                executor.before_unknown()
                return
            self._begin_to_know(iteration)
            executor.know(k, function)
        if id(function) not in self._ledger.forwards:
            self._note_other_backward(function)
        executor.before_backward(k, function)

    def _name_quiet_operation(self) -> str:
        """Name of the function under way; those of others are noted as they begin."""
        function = self._ledger.find_current()
        return 'a function' if function is None else graph.function_name(function)

    def _find_label(self) -> str:
        """The label of the operation under way: where it is, and its function."""
        iteration = self.iteration
        if iteration.quiet:
            name, goes_back = self._name_quiet_operation(), bool(self._ledger.running)
        else:
            name, goes_back = iteration.named, iteration.backward_seen
        return f'backward of {name}' if goes_back else self._find_path() + name

    def _find_path(self) -> str:
        """Path of the link that runs, with a slash at its end."""
        link = graph.find_running_link()
        if link is None:
            return '/'
        path = self._paths.get(id(link), link.name or '')
        return path if path == '/' else f'{path}/'

    # -- a beginning ----------------------------------------------------------
    def _begin_another(
        self, function: Any, in_data: tuple[Any, ...]
    ) -> tuple[Iteration, OperationKey]:
        """Ends an iteration; a forward function begins another one, with its key."""
        own_code.look_anew()
        key = make_forward_key(function, in_data)
        self._end(self.iteration)
        iteration = self.iteration = Iteration()
        self._begin(iteration, key)
        if iteration.quiet:
            iteration.following.operations.append(key)
        return iteration, key

    def _begin(self, iteration: Iteration, key: OperationKey) -> None:
        """Begins an iteration.

        Args:
            iteration: A new one.
            key: Of its first operation.

        Raises:
            OutOfMemoryError: If the last ones went beyond the limit, with a limit that
                does.
            SessionError: If replays of earlier iterations have made something else.
        """
        self._ledger.begin(iteration)
        self._device.memory.follow()
        self._overrun.conclude()
        refuse_differences(self._device, wait=False)
        guide = self._guidebook.begin(key)
        iteration.follow(guide)
        if not self._begin_quietly(iteration, guide, key):
            self._begin_known(iteration, guide, key)

    def _begin_quietly(
        self, iteration: Iteration, guide: Guide | None, key: OperationKey
    ) -> bool:
        """Begins an iteration of which nothing is to be found out, if it is one."""
        if guide is not None or self._observation.wants_recording(key):
            return False
        executor = self._executor
        if executor.maps.knows_any:
            self._arrays.protect_from(executor)
        executor.begin(None, {})
        wary = not executor.maps.all_present
        if wary:
            older = executor.maps.find_living()
            iteration.note_older(self._device.memory.used_bytes, older)
        self._splitter.begin(None)
        self._device.memory.forget_failure()
        self._device.memory.reset_peak()
        iteration.start(quiet=True, wary=wary)
        return True

    def _begin_known(
        self, iteration: Iteration, guide: Guide | None, key: OperationKey
    ) -> None:
        """Begins an iteration whose feature maps are known one by one."""
        iteration.note_memory(self._arrays.protect_from(self._executor))
        self._executor.know_older(self._ledger.older)
        older = self._executor.maps.find_living()
        iteration.note_older(self._device.memory.used_bytes, older)
        self._host_share.give_to(guide)
        if guide is None:
            self._executor.begin(None, {})
            self._splitter.begin(None)
        else:
            self._follow(guide, self._guidebook.find_others(guide, key))
        maps = self._executor.maps
        iteration.held_bytes = self._device.memory.used_bytes - maps.resident_bytes
        iteration.older_waits = maps.have_pending_backward
        self._device.memory.forget_failure()
        self._observation.begin(iteration.following, key)
        if self._instruments.recorder is not None:
            iteration.labels = self._arrays.find_labels()
        self._device.memory.reset_peak()
        iteration.start()

    def _follow(self, guide: Guide, others: list[Guide]) -> None:
        table = guide.table
        crosses = table is not None and table.crossing
        holders = self._arrays.find_owners().values() if crosses else ()
        self._executor.begin(
            table,
            guide.copies,
            holders,
            [other.table for other in others if other.table is not None],
            guide.habits.outliving,
        )
        self._splitter.begin(guide.ways)

    # -- another guide ---------------------------------------------------------
    def _redirect(self, iteration: Iteration, k: int) -> None:
        """Operation k is not what the guide expects."""
        following = iteration.following
        guide = following.guide
        assert guide is not None
        other = self._guidebook.find_alternative(following.operations, guide.stage)
        self._go_on(following, guide, other, k)

    def _settle(self, iteration: Iteration) -> None:
        """An iteration ends: it follows the guide of its operations, or none."""
        following, n = iteration.following, iteration.position
        guide = following.guide
        if guide is not None and n != len(guide.signature):
            other = self._guidebook.find(following.operations)
            self._go_on(following, guide, other, n)

    def _go_on(
        self, following: Following, guide: Guide, other: Guide | None, k: int
    ) -> None:
        if other is None:
            self._deviate(following)
        else:
            self._switch(following, guide, other, k)

    def _switch(self, following: Following, guide: Guide, other: Guide, k: int) -> None:
        """The iteration is one of another guide that begins in the same way."""
        following.switch(other)
        self._instruments.stop_following()
        late = False
        if other.table is None:
            self._executor.leave_plan()
        else:
            late = self._executor.switch(
                other.table, other.copies, k, other.habits.outliving
            )
        recorder = self._instruments.recorder
        profiling = guide.stage is other.stage is Stage.PROFILING
        if recorder is not None and (late or not profiling):
            recorder.mark_as_draft()
        self._splitter.switch(other.ways)

    def _deviate(self, following: Following) -> None:
        """The signature is unknown: passive from here."""
        following.deviate()
        self._executor.leave_plan()
        self._splitter.switch(None)
        self._instruments.stop_following()
        if self._instruments.recorder is not None:
            self._instruments.recorder.mark_as_draft()

    # -- iterations -----------------------------------------------------------
    def _goes_on(self, iteration: Iteration, goes_on: bool) -> bool:
        """Whether an iteration goes on that would, unless it has come to nothing."""
        if (goes_on or iteration.depth) and self._is_broken_off(iteration):
            self._break_off(iteration)
            return False
        return goes_on

    def _is_broken_off(self, iteration: Iteration) -> bool:
        """Whether the iteration has come to nothing.

        The program has caught an error, or its graph has died before a backward: then a
        backward function or a hook before a forward function has not come to an end,
        or no function is left.
        """
        if not iteration.started or iteration.depth:
            return iteration.depth > 0
        if iteration.backward_seen:
            return False
        if iteration.last is not None and iteration.last[0] == NESTED:
            return False
        reference = iteration.newest
        if reference is None:
            return True
        if not graph.is_unfinished(reference()):
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
            self._settle(iteration)
            iteration.started = False  # counts once, also where no plan is found
            self._learning.end(iteration, seconds)
            self._overrun.end(iteration)

    def finish_iteration(self) -> None:
        """Ends an iteration that has come through backward."""
        iteration = self.iteration
        if iteration.is_complete:
            self._instruments.enter()
            if iteration.last is not None:
                self._complete_last(iteration, iteration.last)
            self._end(iteration)
            self._executor.end_iteration()

    def count_last(self) -> None:
        """Counts the last iteration of a session, which no other one has ended."""
        iteration = self.iteration
        if iteration.is_complete:
            self._learning.count(iteration, iteration.seconds)
            self._learning.count_deviation(iteration)
            iteration.started = False

    # -- older graphs: [asked for later] ---------------------------------------
    def _note_other_backward(self, function: Any) -> None:
        """A backward function runs whose forward is none of this iteration."""
        known = self._executor.functions.find(function)
        if known is not None and known.origin is not None:
            updated = self._executor.functions.is_updated(function)
            self._outlive(known, _name_maps(known), updated)

    def _note_read(self, function: Any, slots: list[Slot]) -> None:
        """The program reads what the graph keeps: later iterations must not drop it."""
        known = self._executor.functions.find(function)
        if known is not None and known.origin is not None:
            self._outlive(known, slots, updated=False)

    def _outlive(self, known: LiveFunction, slots: list[Slot], updated: bool) -> None:
        operations = known.origin.following.operations
        if operations:
            self._guidebook.outlive(operations[0], slots, updated)

    # -- memory ---------------------------------------------------------------
    def reclaim(self, missing_bytes: int) -> None:
        """An allocation does not fit: feature maps leave, as far as they can."""
        self._executor.counters.lose(lambda: self._make_room(missing_bytes))

    def _make_room(self, missing_bytes: int) -> None:
        iteration, evictor = self.iteration, self._executor.evictor
        goal_bytes = self._device.memory.used_bytes - missing_bytes
        iteration.fall_short()
        if iteration.quiet:
            self._reclaim_quietly(iteration, missing_bytes)
        else:
            self._know_all(iteration)
            evictor.reclaim(missing_bytes)
        if self._device.memory.used_bytes > goal_bytes:
            short_bytes = self._device.memory.used_bytes - goal_bytes
            optional = self._device.memory.trying or self._overrun.is_under_way
            evictor.collect_garbage(short_bytes, optional)
        short_bytes = self._device.memory.used_bytes - goal_bytes
        if short_bytes > 0:
            self._overrun.exceed(short_bytes, self.find_moment)

    def _reclaim_quietly(self, iteration: Iteration, missing_bytes: int) -> None:
        """An allocation of a quiet iteration does not fit; see [quiet iterations]."""
        executor, device = self._executor, self._device
        goal_bytes = device.memory.used_bytes - missing_bytes
        self._begin_to_know(iteration)
        executor.know_running(iteration.position)
        count = KNOWN_AT_ONCE
        while device.memory.used_bytes > goal_bytes and not self._ledger.nested:
            executor.evictor.reclaim(device.memory.used_bytes - goal_bytes)
            if device.memory.used_bytes <= goal_bytes or self._ledger.all_out:
                break
            executor.know_more(iteration.position, count)
            count *= 2
        if device.memory.used_bytes > goal_bytes:
            self._know_all(iteration)
            executor.evictor.reclaim(device.memory.used_bytes - goal_bytes)

    def _know_all(self, iteration: Iteration) -> None:
        """All that has run so far is known from now on, and what follows, too."""
        if iteration.quiet:
            self._begin_to_know(iteration)
            iteration.named = self._name_quiet_operation()
            iteration.quiet = False
            self._executor.know_older(self._ledger.older)
            self._splitter.place = iteration.position - 1, 0
        noted = self._executor.know_all()
        if noted is not None and iteration.last is None:
            k, function = noted
            if graph.is_unfinished(function):
                iteration.wait_for(k, function)
            else:
                iteration.newest = weakref.ref(function)

    def _begin_to_know(self, iteration: Iteration) -> None:
        """Functions become known: what never leaves is none of their maps."""
        if not iteration.knows:
            iteration.note_memory(self._arrays.protect_from(self._executor))
            self._executor.open_window()

    # -- what is told ---------------------------------------------------------
    def name_state(self) -> str:
        """How the iteration runs or has run; see :attr:`.Session.state`."""
        return self._learning.name_state(self.iteration)

    def find_moment(self, codes: Codes) -> Moment:
        """When something happened; see :func:`.moment_of`."""
        number, label = self._learning.next_number, self._find_label()
        return moment_of(codes, self.iteration, number, label)


def _name_maps(known: LiveFunction) -> list[Slot]:
    """Where a function of an iteration has its feature maps."""
    return [
        slot for live in known.maps for slot in live.slots.name_made_by(known.operation)
    ]
