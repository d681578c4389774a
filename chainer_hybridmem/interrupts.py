"""Holds Ctrl-C back while something runs that must not stop halfway."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

_JOIN_SECONDS = 1.0  # longer than a thread needs that has nothing to do
Function = TypeVar('Function', bound=Callable[..., Any])


class HeldBack:
    """A context in which Ctrl-C waits for the end; a second one does not wait.

    Handlers of signals run in the main thread: in others there is nothing to do.
    """

    def __init__(self) -> None:
        self._former: Any = None
        self._pending: FrameType | None = None

    def __enter__(self) -> HeldBack:
        former = signal.getsignal(signal.SIGINT)
        if callable(former) and threading.current_thread() is threading.main_thread():
            self._former = former
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            if self._pending is not None:
                self._former(signal.SIGINT, self._pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self._former(number, frame)
        self._pending = frame


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


def held_back(function: Function) -> Function:
    """Decorates a function that Ctrl-C does not stop halfway."""

    @functools.wraps(function)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with HeldBack():
            return function(*args, **kwargs)

    return cast(Function, whole)
