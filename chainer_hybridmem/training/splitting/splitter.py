"""When functions run in parts, and in how many.

A function whose memory does not fit, whatever has been evicted, is tried again in
more and more parts. What worked is remembered for its place in the iteration, so that
iterations of one kind need the same memory each time, and a profile knows of it.

Note: [in earnest]
    As long as a function may be given up for one in more parts, nothing is done for it
    that has its price. What fits in no way is run once more in earnest: then garbage is
    collected, and the limit may give way.

Note: [vain attempts]
    To find out that a function does not fit as a whole, everything else is evicted, and
    has to come back. In iterations of which nothing is known that would be so in each
    of them. So functions alike, with inputs of these shapes, run in parts at once for a
    while: twice as long after every vain attempt.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import chainer

from chainer_hybridmem.planning.records.profile import Split
from chainer_hybridmem.planning.records.splits import (
    EXACT,
    IN_PLACE,
    Splitting,
    check_splitting,
)
from chainer_hybridmem.training.chainer_access import graph, own_code, replaced
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.splitting import rules
from chainer_hybridmem.training.splitting.rules import Way

__all__ = ['EXACT', 'Splitter', 'Splitting', 'check_splitting']
SUM_IN_PLACE = Way(IN_PLACE, 1, True)
SUM = 'sum of gradients'
Place = tuple[int, int, str]  # operation, which of its functions, class
Alike = tuple[Any, ...]  # functions that need the same memory
MOST_ALIKE = 256  # kinds of functions that are remembered
LONGEST_REST = 64  # attempts that are left out in a row
Forward = Callable[[Any, tuple[Array, ...]], tuple[Array, ...]]

_local = threading.local()  # the splitter of a thread
_open: set[Splitter] = set()
_lock = threading.Lock()  # sessions of several threads begin and end


def _leave_threads() -> None:
    """A forked child has none of the other threads, one of which may have the lock."""
    global _lock
    _lock = threading.Lock()
    _open.intersection_update({getattr(_local, 'splitter', None)})


os.register_at_fork(after_in_child=_leave_threads)


def _sum(gradients: list[Any]) -> Any:
    if len(gradients) < 2:  # most
        return gradients[0] if gradients else None
    splitter: Splitter | None = getattr(_local, 'splitter', None)
    if splitter is None:
        return replaced.chainers_sum(gradients)
    return splitter.add_up(gradients)


def _make_forward(plain: Forward) -> Forward:
    """The forward of a class that has a rule; as plain, but for awaited functions."""

    # Functions may be small, and most fit: these pay for one ``try``.
    def forward(function: Any, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        splitter: Splitter | None = getattr(_local, 'splitter', None)
        if splitter is None or splitter.awaited != id(function):
            return plain(function, inputs)
        splitter.awaited = 0
        kind = type(function)
        k, index = splitter.place
        splitter.place = k, index + 1
        if own_code.find_foreign(kind):  # which parts would call more often
            return plain(function, inputs)
        expects = splitter.known or splitter.resting or splitter.trials is not None
        if expects:
            place = k, index, kind.__name__
            in_parts = splitter.run_expected(function, inputs, place)
            if in_parts is not None:
                return in_parts
        restore = rules.state(function, whole=True) if kind in rules.STATEFUL else None
        memory = splitter.memory
        former, memory.trying = memory.trying, True
        try:
            outputs = plain(function, inputs)
        except MemoryError as error:
            if memory.reclaim_error is not None:
                raise
            failure = error.with_traceback(None)  # its frames hold arrays
        else:
            if expects:
                splitter.end_rest(function, inputs, place)
            return outputs
        finally:
            memory.trying = former
        if restore is not None:
            restore()
        place = k, index, kind.__name__
        return splitter.run_after_failure(function, inputs, place, failure)

    return forward


class Splitter:
    """Runs functions in parts where they do not fit otherwise.

    Args:
        device: Where they run.
        splitting: True for any way, ``'exact'`` for those that keep every bit,
            False for none.
        tell: Called with a line for each new way.

    Attributes:
        kinds (collection of type): Classes of the functions that have a rule.
        awaited (int): Identity of the function of one of these kinds whose forward
            comes next, set by who calls it; no reference, for its graph may die.
        place (tuple of int): Operation under way, and how many of its functions with a
            rule have begun.
        memory (Memory): Of the device.
        known (dict): Ways of iterations like this one, by place.
        trials (Trials or None): Measures parts, in an iteration that does.
        resting (dict): Functions alike that run in parts at once; [vain attempts].
        changed (bool): Whether this iteration has found ways it did not begin with.
        used (dict): Ways of this iteration, by place.
    """

    def __init__(
        self, device: Device, splitting: Splitting, tell: Callable[[str], None]
    ) -> None:
        self._device = device
        self.kinds: Collection[type] = ()
        if splitting:
            self.kinds = rules.GPU_KINDS if device.kind == 'cuda' else rules.KINDS
        self._splitting = splitting
        self._tell = tell
        self.memory = device.memory
        self.known: dict[Place, Way] = {}
        self.place = -1, 0
        self._find_label: Callable[[], str] = lambda: 'A function'
        self.awaited = 0
        self.used: dict[Place, Way] = {}
        self.changed = False
        self.trials: Trials | None = None
        self._refused = ''
        self._unknown = False  # whether nothing is known of this iteration
        self._last_way: Way | None = None
        self.resting: dict[Alike, _Rest] = {}

    @property
    def inexact(self) -> int:
        """Functions of this iteration whose results are equal up to rounding only."""
        return sum(not way.exact for way in self.used.values())

    @property
    def hint(self) -> str:
        """For an error message: the split that was refused, and how to allow it."""
        if not self._refused:
            return ''
        return (
            f', or let {self._refused} run in parts, which gives results equal up to '
            f'rounding, with splitting=True'
        )

    def begin(self, known: dict[Place, Way] | None) -> None:
        """Starts an iteration.

        Args:
            known: Ways of iterations like it; new ones are added. None if nothing is
                known of it.
        """
        self._unknown = known is None
        self.known = {} if known is None else known
        self.used = {}
        self.changed = False
        self.trials = None

    def try_parts(self, recording: TrialRecording) -> None:
        """Measures how much memory functions of this iteration need in parts.

        Args:
            recording: Of the iteration; gets the results.
        """
        self.trials = Trials(self._device, recording)

    def try_whole(self) -> None:
        """Every function of this iteration is tried as a whole, as it is recorded."""
        self._unknown = False

    def switch(self, known: dict[Place, Way] | None) -> None:
        """The iteration is of another kind, which begins in the same way.

        Args:
            known: Ways of such iterations; None if nothing is known of it.
        """
        self._unknown = known is None
        self.known = {} if known is None else known
        self.known.update(self.used)
        self.trials = None

    def ask_for_labels(self, find_label: Callable[[], str]) -> None:
        """Says what tells the label of the operation under way."""
        self._find_label = find_label

    def run_expected(
        self, function: Any, inputs: tuple[Array, ...], place: Place
    ) -> tuple[Array, ...] | None:
        """Runs a function in parts of which it is known that it does not fit otherwise.

        Args:
            function: Its forward is about to run.
            inputs: Its arrays.
            place: Where in the iteration.

        Returns:
            tuple of array: Its outputs; None if it is to be tried as a whole.
        """
        if place in self.known or (self.trials is not None and place[0] >= 0):
            return self._run(function, inputs, place, None)
        rest = self._find_rest(function, inputs, place)
        if rest is not None and rest.goes_on():
            return self._run(function, inputs, place, None, rest.way)
        return None

    def run_after_failure(
        self,
        function: Any,
        inputs: tuple[Array, ...],
        place: Place,
        failure: MemoryError,
    ) -> tuple[Array, ...]:
        """Runs a function in parts that has just not fitted as a whole."""
        outputs = self._run(function, inputs, place, failure)
        if self._unknown or place[0] < 0:
            self._rest(
                self._find_rest(function, inputs, place), function, inputs, place
            )
        return outputs

    def _find_rest(
        self, function: Any, inputs: tuple[Array, ...], place: Place
    ) -> _Rest | None:
        if self.resting and (self._unknown or place[0] < 0):
            return self.resting.get(_alike(function, inputs, place))
        return None

    def end_rest(self, function: Any, inputs: tuple[Array, ...], place: Place) -> None:
        """A function has fitted as a whole: those alike are tried so, too."""
        if self._find_rest(function, inputs, place) is not None:
            del self.resting[_alike(function, inputs, place)]

    def _rest(
        self, rest: _Rest | None, function: Any, inputs: tuple[Array, ...], place: Place
    ) -> None:
        """A function has not fitted as a whole; see [vain attempts]."""
        way = self._last_way
        if way is None:
            return
        if rest is not None:
            rest.begin_again(way)
            return
        if len(self.resting) >= MOST_ALIKE:
            del self.resting[next(iter(self.resting))]
        self.resting[_alike(function, inputs, place)] = _Rest(way)

    def __enter__(self) -> Splitter:
        """Takes over this thread's functions and sums until :meth:`__exit__`."""
        if self._splitting:
            _local.splitter = self
            with _lock:
                if not _open:
                    replaced.use_sum(_sum)
                    replaced.replace_forwards(rules.KINDS, _make_forward)
                _open.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if (
            getattr(_local, 'splitter', None) is self
        ):  # else it is left in another thread
            _local.splitter = None
        with _lock:
            was_open = self in _open
            _open.discard(self)
            if was_open and not _open:
                replaced.use_sum(replaced.chainers_sum)
                replaced.put_back_forwards()

    def add_up(self, gradients: list[Any]) -> Any:
        """Chainer's sum of a variable's gradients; in place if it does not fit.

        Args:
            gradients: At least two variables.
        """
        if chainer.config.enable_backprop:  # the graph keeps them
            return replaced.chainers_sum(gradients)
        k, index = self.place
        self.place = k, index + 1
        place = k, index, SUM
        if place in self.known and add_in_place(gradients):
            self._remember(place, SUM_IN_PLACE, new=False)
            return gradients[0]
        memory, trials = self.memory, self.trials
        if trials is not None:
            trials.begin_sum(gradients)
        former, memory.trying = memory.trying, True
        try:
            total = replaced.chainers_sum(gradients)
        except MemoryError:  # its frames hold the gradients until here
            if memory.reclaim_error is not None:
                raise
        else:
            if trials is not None and k >= 0:
                trials.end_sum(place)
            return total
        finally:
            memory.trying = former
        if not add_in_place(gradients):
            return replaced.chainers_sum(gradients)  # in earnest
        self._remember(place, SUM_IN_PLACE, new=True)
        return gradients[0]

    def _run(
        self,
        function: Any,
        inputs: tuple[Array, ...],
        place: Place,
        failure: MemoryError | None,  # of the function as a whole, just now
        guess: Way | None = None,
    ) -> tuple[Array, ...]:
        way = known = guess or self.known.get(place)
        trials = self.trials if place[0] >= 0 else None
        restore = rules.state(function)
        ways = rules.ways(function, inputs)
        if known is not None:
            possible = list(ways)
            if known in possible:
                ways = iter(possible[possible.index(known) + 1 :])
            else:  # another iteration than the one it was found in
                ways, way = iter(possible), None
        if trials is not None:
            possible = list(ways)
            ways = iter(possible)
            trials.begin(function, inputs, possible, restore)
        run = self._try
        if failure is not None:
            following = next(ways, None)
            if self._gives_up(following, place):
                run = self._run_in  # see [in earnest]
            else:
                way = following
        while True:
            try:
                outputs = run(function, inputs, way)
            except MemoryError:
                if run == self._run_in or self.memory.reclaim_error is not None:
                    raise
                following = next(ways, None)
                if self._gives_up(following, place):
                    run, following = self._run_in, way
            else:
                break
            # Out here the failed forward's arrays are gone with its exception.
            restore()
            way = following
        if trials is not None:
            trials.end(place)
        self._last_way = way
        if way is not None:
            graph.set_forward(function, functools.partial(rules.run, way=way))
            self._remember(place, way, way != known)
        return outputs

    def _try(
        self, function: Any, inputs: tuple[Array, ...], way: Way | None
    ) -> tuple[Array, ...]:
        """Runs a function in a way that is given up where it does not fit."""
        with self.memory.attempt():
            return self._run_in(function, inputs, way)

    @staticmethod
    def _run_in(
        function: Any, inputs: tuple[Array, ...], way: Way | None
    ) -> tuple[Array, ...]:
        if way is not None:
            return rules.run(function, inputs, way)
        outputs: tuple[Array, ...] = function.forward(inputs)
        return outputs

    def _gives_up(self, way: Way | None, place: Place) -> bool:
        """Whether a forward that does not fit has no other way."""
        if way is None:
            return True
        if way.exact or self._splitting is True:
            return False
        self._refused = place[2]
        return True

    def _remember(self, place: Place, way: Way, new: bool) -> None:
        if place[0] < 0:  # operations without backward are not counted
            return
        self.used[place] = way
        if not new:
            return
        self.known[place] = way
        self.changed = True
        how = f'{way.parts} parts along {way.cut}' if way.parts > 1 else way.cut
        bits = '' if way.exact else ', equal up to rounding only'
        label = self._find_label()
        self._tell(f'{label} ({place[2]}) does not fit as a whole: {how}{bits}')


class _Rest:
    """How long functions alike run in parts at once; see [vain attempts]."""

    __slots__ = ('_left', '_length', 'way')

    def __init__(self, way: Way) -> None:
        self._length = self._left = 1
        self.way = way

    def goes_on(self) -> bool:
        """Whether the next one is not tried as a whole."""
        self._left -= 1
        return self._left >= 0

    def begin_again(self, way: Way) -> None:
        """Another attempt was in vain."""
        self._length = self._left = min(2 * self._length, LONGEST_REST)
        self.way = way


def _alike(function: Any, inputs: tuple[Array, ...], place: Place) -> Alike:
    shapes = tuple((x.shape, x.dtype.char) for x in inputs)
    return type(function), place[0] < 0, shapes


def _references(holder: list[Any], index: int) -> int:
    item = holder[index]
    return sys.getrefcount(item)


_ALONE = _references([object()], 0)  # what its list alone holds


# -- sums of gradients --------------------------------------------------------
def add_in_place(gradients: list[Any]) -> bool:
    """Replaces two gradients by their sum, bit for bit, if it may take one's place.

    Where branches of a network join, backward adds two arrays into a third. If nothing
    else refers to one of the two any more, the sum can take its place.

    Args:
        gradients: Variables; with success only the sum is left.

    Returns:
        bool: Whether they were added.
    """
    found = _find_place(gradients)
    if found is None:
        return False
    index, total, axis = found
    # In Chainer's order: two NaN have the sign of one of them, that of the first as a
    # rule (NumPy's loops over the end of an array take the second's).
    first, second = (variable.array for variable in gradients)
    if total is gradients[index].array:
        # CuPy copies what is not the output itself, and may share memory with it.
        chainer.backend.get_array_module(total).add(first, second, out=total)
    else:
        for i in range(total.shape[axis]):  # ahead of what is still to be read
            part = (slice(None),) * axis + (i,)
            total[part] = first[part] + second[part]
    needed = any(variable.requires_grad for variable in gradients)
    gradients[:] = [chainer.Variable(total, requires_grad=needed)]
    return True


def _find_place(gradients: list[Any]) -> tuple[int, Array, int] | None:
    """Which gradient the sum may replace, the sum's array, and its outermost axis."""
    if len(gradients) != 2:
        return None
    first, second = (variable.array for variable in gradients)
    if first.shape != second.shape or first.dtype != second.dtype or not first.ndim:
        return None
    order = _order_of_sum(first, second)
    del first, second
    for index in (0, 1):
        total = _place(gradients, index, order)
        if total is not None:
            return index, total, order[0]
    return None


def _order_of_sum(first: Array, second: Array) -> list[int]:
    """Axes of the sum, outermost first; found out with a corner of the arrays."""
    corner = (slice(2),) * first.ndim
    total = first[corner] + second[corner]
    # Those of length one say nothing.
    return sorted(
        range(first.ndim), key=lambda a: (first.shape[a] == 1, -total.strides[a])
    )


def _place(gradients: list[Any], index: int, order: list[int]) -> Any:
    """The sum's array in the memory of a gradient, None if it may not be there.

    A gradient may be cut out of something padded; the sum is not, and begins where that
    does. Where the layout is the sum's, it is the gradient's own array.
    """
    if not _alone(gradients, index):
        return None
    array = gradients[index].array
    interface = getattr(array, '__array_interface__', None)
    if interface is not None and interface['data'][1]:  # NumPy refuses or warns
        return None
    turned = array.transpose(order)
    owner = turned if array.base is None else array.base
    if not owner.flags.c_contiguous or owner.dtype != array.dtype:
        return None
    # In the same order as the sum, with nothing in the same place twice.
    least = array.itemsize
    for axis in reversed(range(array.ndim)):
        if turned.shape[axis] > 1:
            if turned.strides[axis] < least:
                return None
            least = turned.strides[axis] * turned.shape[axis]
    flat = owner.reshape(-1)[: array.size]
    inverse = [order.index(a) for a in range(array.ndim)]
    total = flat.reshape(turned.shape).transpose(inverse)
    places = zip(array.shape, total.strides, array.strides, strict=True)
    same = all(size < 2 or stride == other for size, stride, other in places)
    return array if same else total


def _alone(gradients: list[Any], index: int) -> bool:
    """Whether only the list refers to a variable and to the memory behind it."""
    if _references(gradients, index) > _ALONE:
        return False
    held = replaced.holder(gradients[index])
    if _references(held, 0) > _ALONE:
        return False
    base = held[0].base
    if base is None:
        return True
    # A view keeps the array that owns the memory; others may view it, too.
    return base.base is None and _references([base], 0) <= _ALONE + 2


LEAST_SAVING = 0.02  # of the load, for which even more parts are tried


class TrialRecording(Protocol):
    """Takes the results; the time and memory of trials must not count there."""

    def enter(self) -> None:
        """What follows is not the program's."""

    def leave(self) -> None:
        """The program goes on."""

    def note_split_trial(
        self, first_event: int, end_event: int, splits: Sequence[Split]
    ) -> None:
        """Takes the result for one function.

        Args:
            first_event: Events before the function.
            end_event: Events after it.
            splits: What its parts need; storages are missing.
        """


# -- trials -------------------------------------------------------------------
class Trials:
    """Measures how much memory functions need in parts, during a recording.

    Every function that has a rule is run in parts first, in more and more of them, and
    everything that this leaves is undone; then it runs as it does anyway.

    Args:
        device: Where they run.
        recording: Of the iteration.
    """

    def __init__(self, device: Device, recording: TrialRecording) -> None:
        self._device = device
        self._recording = recording
        self._loads: list[tuple[Way, int, int, tuple[int, ...]]] = []
        self._first_event = 0
        self._load_bytes = 0
        self._replaces = False  # whether a sum may

    def begin_sum(self, gradients: list[Any]) -> None:
        """Gradients are about to be added up.

        Only what needs no memory at all in the place of one of them is told.
        """
        self._recording.enter()
        found = _find_place(gradients)
        self._replaces = False
        if found is not None:
            target = gradients[found[0]].array
            owner = target if target.base is None else target.base
            alike = owner.nbytes == target.nbytes
            self._replaces = alike and found[1] is target
        self._recording.leave()
        self._first_event = self._device.memory.event_count

    def end_sum(self, place: Place) -> None:
        """They have been added up into another array."""
        if not self._replaces:
            return
        way = SUM_IN_PLACE
        split = Split(*place, way.cut, way.parts, way.exact, 0, (), 0)
        self._recording.note_split_trial(
            self._first_event, self._device.memory.event_count, [split]
        )

    def begin(
        self,
        function: Any,
        inputs: tuple[Array, ...],
        ways: Sequence[Way],
        restore: Callable[[], None],
    ) -> None:
        """A function is about to run.

        Args:
            function: Its forward has not been called.
            inputs: Its arrays.
            ways: To try.
            restore: Undoes what a forward has done to it.
        """
        self._recording.enter()
        # What has to leave for the function as a whole leaves now, and not later.
        with contextlib.suppress(MemoryError), self._device.memory.attempt():
            function.forward(inputs)
        restore()
        self._loads = []
        useless = ''  # to cut it more
        for way in ways:
            if way.cut == useless:
                continue
            load = self._load(function, inputs, way, restore)
            if load is None:
                continue
            last = self._loads[-1] if self._loads else None
            self._loads.append((way, *load))
            more = last is not None and last[0].cut == way.cut
            if last is not None and more and load[0] > last[1] * (1 - LEAST_SAVING):
                useless = way.cut
        self._recording.leave()
        self._first_event = self._device.memory.event_count
        self._load_bytes = self._device.memory.used_bytes

    def _load(
        self,
        function: object,
        inputs: tuple[Array, ...],
        way: Way,
        restore: Callable[[], None],
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Bytes above the beginning: the most, at the end, and the most of stages."""
        device = self._device
        before = device.memory.used_bytes
        stages: list[int] = []

        def mark() -> None:
            stages.append(device.memory.window_peak_bytes - before)
            device.memory.reset_window()

        device.memory.reset_window()
        result = None
        try:
            with device.memory.attempt():
                outputs = rules.run(function, inputs, way, mark)
            mark()
            result = (max(stages), device.memory.used_bytes - before, tuple(stages))
            del outputs
        except MemoryError:
            pass
        restore()
        # Something else may have been evicted: then this is not the function's load.
        return result if device.memory.used_bytes == before else None

    def end(self, place: tuple[int, int, str]) -> None:
        """It has run as it does anyway.

        Args:
            place: Operation, which of its functions, class.
        """
        left_bytes = self._device.memory.used_bytes - self._load_bytes
        splits = [
            Split(*place, way.cut, way.parts, way.exact, 0, (), peak_bytes, stages)
            for way, peak_bytes, stays_bytes, stages in self._loads
            if stays_bytes == left_bytes  # else later operations would differ, too
        ]
        self._recording.note_split_trial(
            self._first_event, self._device.memory.event_count, splits
        )
