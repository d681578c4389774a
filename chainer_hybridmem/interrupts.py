"""Holds Ctrl-C back while something runs that must not stop halfway, or lets it out.

Note: [signals and native code]
    Python runs a handler between two of its own instructions only. Ctrl-C waits for
    native code; so whatever takes long runs in parts (:mod:`.annealing`), or
    beside the main thread (:func:`run_aside`). Where native code runs instructions of
    Python itself, what a handler raises meets code that does not expect it, and the
    process may crash; so compiled functions return nothing that is made by such
    instructions (:func:`.jit.compiled`).

Note: [callbacks]
    Python calls back when an object dies: callbacks of weak references, ``__del__``.
    What a handler raises inside of one is printed and dropped, also before the first
    line of the callback has run: nothing that is written in it can hold a signal. So
    what has been dropped so in a callback of ours, or in one that runs while we collect
    garbage, is raised once more in its thread, after the callback and at the end of
    what Ctrl-C waits for. So is Ctrl-C in any callback: that of a weak table is a
    function of Python's :mod:`weakref`, whoever has the table. What runs most often, in
    :mod:`.by_owner`, is no code of Python's.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from chainer_hybridmem import timing

_LOOK_SECONDS = 0.1
_HOOK_SECONDS = 1e-4
_JOIN_SECONDS = 1.0  # longer than a thread needs that has nothing to do
Function = TypeVar('Function', bound=Callable[..., Any])
Result = TypeVar('Result')


class HeldBack:
    """A context in which Ctrl-C waits for the end; a second one does not wait.

    Handlers of signals run in the main thread: in others there is nothing to do.
    """

    def __init__(self) -> None:
        self._former: Any = None
        self._pending = False
        self._entered = 0, ''  # identity and name of the frame that has entered
        self.late: list[BaseException] = []  # to be raised at the end

    def __enter__(self) -> HeldBack:
        former = signal.getsignal(signal.SIGINT)
        if callable(former) and threading.current_thread() is threading.main_thread():
            self._former = former
            self._entered = _identify(sys._getframe(1))
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            outer = _find_held(self._former)
            if outer is not None:
                outer.late += self.late
            elif self.late:
                raise self.late.pop()
            if self._pending:
                # The frame that it came in may be over: it has no callers then.
                self._former(signal.SIGINT, sys._getframe(1))

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if not self._is_inside(frame):
            # The handler of another signal has raised while this was entered or left.
            signal.signal(signal.SIGINT, self._former)
            self._former(number, frame)
            return
        if self._pending:
            self._former(number, frame)
        self._pending = True

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None and _identify(frame) != self._entered:
            frame = frame.f_back
        return frame is not None


def _find_held(handler: Any) -> HeldBack | None:
    """What holds Ctrl-C back, if that is whose handler it is."""
    held = getattr(handler, '__self__', None)
    return held if isinstance(held, HeldBack) else None


def _identify(frame: FrameType) -> tuple[int, str]:
    """Tells a frame from others without keeping it: it would keep its arrays."""
    return id(frame), frame.f_code.co_name


class Worker(threading.Thread):
    """A thread that knows by itself whether it runs.

    ``Thread.is_alive()`` takes a thread for ended, and for good, if the handler of a
    signal raises while it looks (CPython up to 3.12).
    """

    def __init__(self, run: Callable[[], object], name: str | None = None) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self._process = os.getpid()
        self._is_over = False

    def run(self) -> None:
        """Runs what it was given."""
        try:
            super().run()
        finally:
            self._is_over = True

    @property
    def runs(self) -> bool:
        """Whether it has started and not ended; none runs in a forked child."""
        started = self.ident is not None and self._process == os.getpid()
        return started and not self._is_over


def start_whole(thread: threading.Thread, give_up: Callable[[], object]) -> None:
    """Starts a thread as a whole: Ctrl-C would leave a thread that nothing ends.

    Args:
        thread: The thread.
        give_up: Makes it end by itself; called if it may not have started.

    Raises:
        RuntimeError: If the system gives no thread.
    """
    with HeldBack():
        try:
            thread.start()
        except BaseException:  # the second Ctrl-C comes out: it may run all the same
            give_up()
            with contextlib.suppress(RuntimeError):
                thread.join(_JOIN_SECONDS)
            raise


def run_aside(function: Callable[[], Result]) -> Result:
    """Calls native code that takes long and lets other threads run meanwhile.

    In the main thread this waits for another thread, and a handler of a signal may
    raise while it waits. Nothing stops the native code then: it has a second to end,
    and is left alone if it takes longer. See Note: [signals and native code].

    Args:
        function: Changes nothing that others use.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    running = threading.Lock()  # an event, and starting a Thread, break if a handler
    running.acquire()  # raises while they wait
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            running.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the system gives no thread
        return function()
    try:
        # A signal may have been taken by another thread, and does not wake this one.
        while not running.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:  # a process that exits now would find a thread in C++
        if not (results or errors):
            running.acquire(timeout=_JOIN_SECONDS)
        raise
    if errors:
        raise errors[0]
    return results[0]


def held_back(function: Function) -> Function:
    """Decorates a function that Ctrl-C does not stop halfway."""

    @functools.wraps(function)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with HeldBack():
            return function(*args, **kwargs)

    return cast(Function, whole)


# -- callbacks of dying objects -----------------------------------------------
OURS = os.path.join(os.path.dirname(__file__), '')


class LostSignals:
    """Raises what a signal has raised in a callback of ours; see [callbacks]."""

    def __init__(self) -> None:
        self._former: Callable[[Any], object] = sys.__unraisablehook__
        self._watches = False

    def watch(self) -> None:
        """What Python drops from here on is looked at."""
        self._watches = True
        if sys.unraisablehook != self._look:
            self._former, sys.unraisablehook = sys.unraisablehook, self._look

    def leave(self) -> None:
        """It is not looked at any more, also where others look through this one."""
        self._watches = False
        if sys.unraisablehook == self._look:
            sys.unraisablehook = self._former

    def _look(self, dropped: Any) -> None:
        error, trace = dropped.exc_value, dropped.exc_traceback
        again = isinstance(error, KeyboardInterrupt) or (
            isinstance(error, BaseException)
            and not isinstance(error, Exception)
            and _is_ours(trace, sys._getframe(1))
        )
        if not (self._watches and again):
            self._former(dropped)
            return
        # Here it would be dropped once more.
        _thread.start_new_thread(_raise_in, (threading.get_ident(), error))


def _is_ours(trace: TracebackType | None, caller: FrameType) -> bool:
    """Whether a callback, or what it interrupts, is code of the package."""
    files = [caller.f_code.co_filename]
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any(file.startswith(OURS) for file in files)


def _looks(thread: int) -> bool:
    """Whether a thread is inside of what Python calls with what it drops."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not LostSignals._look.__code__:
        frame = frame.f_back
    return frame is not None


def _hold_late(error: BaseException) -> bool:
    """Has what holds Ctrl-C back raise an error at its end; False: nothing does."""
    held = _find_held(signal.getsignal(signal.SIGINT))
    if held is None:
        return False
    held.late.append(error)
    if _find_held(signal.getsignal(signal.SIGINT)) is held:
        return True
    with contextlib.suppress(IndexError):  # it has ended meanwhile
        held.late.pop()
        return False
    return True


def _raise_in(thread: int, error: BaseException) -> None:
    """Has another thread raise an error in the code that it runs next."""
    import ctypes  # which every start of Python would pay for

    while _looks(thread):  # what is raised in there is dropped for good
        timing.sleep(_HOOK_SECONDS)
    if thread == threading.main_thread().ident and _hold_late(error):
        return
    kind = type(error)
    # Python makes the error of a class by itself; this makes this very one.
    again = type(kind.__name__, (kind,), {'__new__': lambda *_: error})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(again)
    )


# -- contexts that begin and end as a whole -----------------------------------
def begin_whole(context: Any, begin: Callable[[], Result]) -> Result:
    """Begins a context as a whole; to be called by its ``__enter__``.

    Args:
        context: Its ``__exit__``, which :func:`held_back` decorates, ends what has
            begun, and does nothing the second time. Ctrl-C that is held back until the
            context has begun ends it.
        begin: Has undone what it has begun if it raises.
    """
    try:
        with HeldBack():
            return begin()
    except BaseException:
        context.__exit__(None, None, None)
        raise
