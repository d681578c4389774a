"""Ctrl-C at any line of the package, in every stage of a session."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support import faulty
from support.matrices import several
from support.native_faults import NativeFaults

import chainer_hybridmem
from chainer_hybridmem import interrupts
from chainer_hybridmem.interrupts import HeldBack, Worker
from chainer_hybridmem.training.session.session import Session

AT_MOST = several(1, all_of_them=3)  # interruptions per stage
AT_EITHER_END = several(5, all_of_them=12)  # of a session
FOLDER = os.path.dirname(chainer_hybridmem.__file__)
Place = tuple[str, int]
PLANS = {
    'swap and recompute': faulty.PLAN,
    'crossing': {**faulty.SWAP_ALL, 'cross_iteration': 'all'},
}
pytestmark = [
    pytest.mark.usefixtures('ctrl_c'),
    pytest.mark.skipif(sys.gettrace() is not None, reason='lines are traced already'),
]


class Interruption:
    """Raises SIGINT before a line of the package.

    Args:
        place: File and line number; None counts the lines instead.
        time: How often the line has run before.

    Attributes:
        counts (Counter): How often each line was about to run.
        happened (bool): Whether the signal was raised.
    """

    def __init__(self, place: Place | None = None, time: int = 0) -> None:
        self.place, self.time = place, time
        self.counts: collections.Counter[Place] = collections.Counter()
        self.happened = False

    @contextlib.contextmanager
    def __call__(self, session: Session | None = None) -> Iterator[None]:
        traced = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(traced)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == 'line':
            place = frame.f_code.co_filename[len(FOLDER) + 1 :], frame.f_lineno
            self.counts[place] += 1
            if place == self.place and self.counts[place] > self.time:
                self.happened = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line


def interruptions(count: Callable[[Interruption], Any]) -> Iterator[Interruption]:
    """One for each of the chosen lines, at its first, last or middle time."""
    counting = Interruption()
    count(counting)
    places = sorted(counting.counts)
    assert len(places) > 20
    for index in faulty.chosen(len(places), AT_MOST, offset=len(places) // 3):
        times = counting.counts[places[index]]
        yield Interruption(places[index], (0, times - 1, times // 2)[index % 3])


def interrupt_iteration(
    way: Callable[..., faulty.Case], stage: str, plan: str, injection: Interruption
) -> None:
    """Ctrl-C in an iteration comes out, in whatever way the program goes on."""
    at, options = faulty.STAGES[stage]
    case = way(at, injection, **options, **PLANS[plan])
    came_out = type(case.error or case.inside) is KeyboardInterrupt
    assert came_out or not injection.happened, injection.place


@pytest.mark.matrix
@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('stage', faulty.STAGES)
@pytest.mark.parametrize(
    'way', [faulty.leave_session, faulty.stay_in_session], ids=['ends', 'caught']
)
def test_ctrl_c_in_an_iteration(
    way: Callable[..., faulty.Case], stage: str, plan: str
) -> None:
    """It ends the session, or the program catches it."""
    interrupt = functools.partial(interrupt_iteration, way, stage, plan)
    for injection in interruptions(interrupt):
        interrupt(injection)


def begin_and_end(beginning: Interruption, ending: Interruption, ended: bool) -> Any:
    """A session that is interrupted while it begins, or while it ends."""
    run, snapshots = faulty.Run(), faulty.in_core()
    session = chainer_hybridmem.optimize(run.model, faulty.LIMIT, **PLANS['crossing'])
    error = None
    try:
        with beginning():
            session.__enter__()
        for i in range(5):
            run.iterate(i)
        if not ended:  # in the middle of an iteration, parameters may be away
            loss = run.model(run.pictures[5], run.labels[5])
        with ending():
            session.__exit__(None, None, None)
    except KeyboardInterrupt as caught:
        error = faulty.without_frames(caught)
    loss = None  # noqa: F841
    done = 0 if beginning.happened else 5
    case = faulty.Case(error, None, run, session)
    faulty.assert_nothing_left(case)
    faulty.check_learnt(run, done)
    run.restore(snapshots[done])
    run.iterate(done)
    run.snapshot().assert_same(snapshots[done + 1])
    return case


def places_of(count: Callable[[Interruption], Any]) -> dict[Place, int]:
    """How often each line runs, but those that run until Ctrl-C is held back."""
    counting = Interruption()
    gc.collect()  # memory that is idle again is taken, as in each case
    count(counting)
    found = {
        place: times
        for place, times in sorted(counting.counts.items())
        if not place[0].startswith('interrupts')
    }
    assert len(found) > 30
    return found


def chosen_places(count: Callable[[Interruption], Any]) -> Iterator[Interruption]:
    counts = places_of(count)
    places = list(counts)
    for index in faulty.chosen(len(places), AT_EITHER_END, offset=5):
        times = counts[places[index]]
        yield Interruption(places[index], (0, times - 1)[index % 2])


def test_ctrl_c_while_a_session_begins() -> None:
    begin_and_end(Interruption(), Interruption(), True)  # makes what others use again

    def begin(injection: Interruption) -> faulty.Case:
        return begin_and_end(injection, Interruption(), True)

    for injection in chosen_places(begin):
        case = begin(injection)
        assert injection.happened and case.error, injection.place


@pytest.mark.parametrize('ended', [True, False])
def test_ctrl_c_while_a_session_ends(ended: bool) -> None:
    def end(injection: Interruption) -> faulty.Case:
        return begin_and_end(Interruption(), injection, ended)

    for injection in chosen_places(end):
        case = end(injection)
        assert injection.happened and case.error, injection.place


class WhileStarting:
    """Ctrl-C when a thread of ours runs, and who has started it does not know yet."""

    def __init__(self, signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened = False
        self._signals = signals
        self._monkeypatch = monkeypatch

    @contextlib.contextmanager
    def __call__(self, session: Session) -> Iterator[None]:
        begin = threading._start_new_thread  # type: ignore[attr-defined]

        def interrupted(function: Any, *args: Any) -> Any:
            number = begin(function, *args)
            thread = function.__self__
            if thread.name.startswith('hybridmem') and not self.happened:
                self.happened = True
                assert thread._started.wait(10)
                for _ in range(self._signals):
                    signal.raise_signal(signal.SIGINT)
            return number

        with self._monkeypatch.context() as patch:
            patch.setattr(threading, '_start_new_thread', interrupted)
            yield


@pytest.mark.parametrize('signals', [1, 2])
@pytest.mark.parametrize(
    'at, options',
    [(0, faulty.PLAN), (0, faulty.CROSSING)],
    ids=['copies', 'crossing'],
)
def test_ctrl_c_while_a_thread_starts(
    signals: int, at: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left that nobody knows of."""
    injection = WhileStarting(signals, monkeypatch)

    @contextlib.contextmanager
    def inject(session: Session) -> Iterator[None]:
        with injection(session):
            yield

    case = faulty.leave_session(at, inject, **options)
    assert injection.happened
    assert interrupted_by(case.error)


def interrupted_by(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the error or what led to it."""
    while error is not None and type(error) is not KeyboardInterrupt:
        error = error.__cause__ or error.__context__
    return error is not None


def test_a_second_ctrl_c_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with HeldBack():
            signal.raise_signal(signal.SIGINT)
            done.append('first')
            signal.raise_signal(signal.SIGINT)
            done.append('second')
    assert done == ['first']
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_outermost_end() -> None:
    """Also where the frame is over that it has come in, as that of a generator."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        with HeldBack():
            with HeldBack():
                all(signal.raise_signal(signal.SIGINT) is None for _ in range(1))
                done.append('inner')
            done.append('outer')
        done.append('after')
    assert done == ['inner', 'outer']


@pytest.mark.parametrize('line', range(12))
def test_nothing_is_held_back_for_good(line: int) -> None:
    """Though the handler of another signal raises while it is entered, or left."""
    codes = [method.__code__ for method in (HeldBack.__enter__, HeldBack.__exit__)]
    lines = iter(range(100))

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == 'line' and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    def enter() -> None:
        with HeldBack():
            pass

    former = sys.gettrace()
    sys.settrace(trace)
    with contextlib.suppress(KeyboardInterrupt):
        enter()
    sys.settrace(former)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_signal_raises_ends_no_thread() -> None:
    """As with ``Thread.is_alive()``, which forgets a thread then."""
    go_on = threading.Event()
    worker = Worker(go_on.wait)
    assert not worker.runs
    worker.start()
    former = sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == 'line':
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        assert worker.runs
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
    assert worker.runs
    go_on.set()
    worker.join()
    assert not worker.runs


@pytest.mark.parametrize('often', [1, 2])
def test_ctrl_c_while_memory_is_made(often: int) -> None:
    """It comes out although the program catches NumPy's error."""

    class Refusing:
        def __init__(self) -> None:
            self.left = often

        @contextlib.contextmanager
        def __call__(self, session: Session) -> Iterator[None]:
            memory: Any = session.device.memory
            reclaim = memory._reclaim

            def interrupted(missing_bytes: int) -> None:
                if self.left:
                    self.left -= 1
                    signal.raise_signal(signal.SIGINT)
                reclaim(missing_bytes)

            memory._reclaim = interrupted
            faults = NativeFaults(memory)
            faults.refuse(40)
            try:
                yield
            except MemoryError as error:
                raise AssertionError from error
            finally:
                faults.remove()
                memory._reclaim = reclaim

    for at in (0, 2, 7):
        refusing = Refusing()
        case = faulty.leave_session(at, refusing, **faulty.PLAN)
        assert not refusing.left
        error: BaseException | None = case.error
        while error is not None and type(error) is not KeyboardInterrupt:
            error = error.__cause__ or error.__context__
        assert error is not None
        assert often == 2 or type(case.error) is KeyboardInterrupt


class Weak:
    """What a weak table can have as a key."""


@pytest.mark.parametrize('depth', [1, 2])
def test_what_is_raised_once_more_waits_for_what_holds_ctrl_c_back(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stop halfway what must not, such as the end of a session."""
    late: list[Callable[[], Any]] = []

    def keep(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        late.append(functools.partial(function, *arguments))

    monkeypatch.setattr(interrupts._thread, 'start_new_thread', keep)
    signals, done, watched = interrupts.LostSignals(), [], Weak()
    reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
    signals.watch()
    try:
        del watched
        monkeypatch.undo()
        with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(HeldBack())
            thread = threading.Thread(target=late[0])
            thread.start()
            thread.join()
            done.append(True)
    finally:
        signals.leave()
    assert done and reference() is None


@pytest.mark.parametrize(
    ('callback', 'number'),
    [
        ('ours', signal.SIGINT),
        ('ours', signal.SIGTERM),
        ('of a table', signal.SIGINT),  # another signal is lost, as without a session
        ('of a table, collected by us', signal.SIGTERM),
    ],
)
def test_a_signal_in_a_callback_of_a_dying_object_comes_out(
    callback: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what its handler raises there, before the first line, too.

    And, for good, what is raised where Python tells of that: on a busy machine the
    thread that raises it once more may run at once.
    """
    run = faulty.Run()
    session = chainer_hybridmem.optimize(run.model, faulty.LIMIT)
    array = np.zeros(1000, np.float32)
    key: Any = Weak()
    key.itself = key  # the collector alone takes it
    table = weakref.WeakKeyDictionary({key: 1})
    sent: list[str] = []
    start = interrupts._thread.start_new_thread

    def let_run(*args: Any) -> None:
        start(*args)
        time.sleep(0.05)

    monkeypatch.setattr(interrupts._thread, 'start_new_thread', let_run)

    def end(*_: Any) -> None:
        raise SystemExit(7)

    def send(frame: FrameType, event: str, argument: Any) -> None:
        name = '<lambda>' if callback == 'ours' else 'remove'
        if event == 'call' and frame.f_code.co_name == name and not sent:
            sent.append(frame.f_code.co_filename)
            signal.raise_signal(number)

    former = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, end)
    try:
        with session:
            kept = session.device.arrays.last_look(array, lambda address: None)
            with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
                sys.setprofile(send)
                if callback == 'ours':
                    array = None
                elif callback == 'of a table':
                    key.itself = key = None
                else:
                    key = None
                    session.device.memory.collect_garbage()
                sys.setprofile(None)
                for _ in range(100):
                    time.sleep(0.01)
            del kept, table
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGTERM, former)
    assert sent and sent[0].startswith(FOLDER) == (callback == 'ours')
    if number == signal.SIGTERM:
        assert raised.type is SystemExit and raised.value.code == 7
