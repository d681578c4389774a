"""In which thread a session is open, and what is refused in others."""

from __future__ import annotations

import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import chainer

from chainer_hybridmem.errors import SessionError, in_flags
from chainer_hybridmem.interrupts import LostSignals
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.units import format_count

# What calls the package on the user's behalf: a Trainer, an updater, a link.
_BENEATH = {'chainer_hybridmem', 'chainer', 'chainermn'}
_BETWEEN = {'contextlib', 'cupy', 'numpy', 'threading'}


def warn_user(message: str) -> None:
    """Warns at the user's line that has called the package, through Chainer or not.

    Inside of a model's ``forward`` it is the line that has called the model, under a
    Trainer that of ``run()``. Where there is none, as in a thread of the package, it
    is the caller's line.

    Args:
        message: One sentence or more; ``hybridmem: `` is put before it.
    """
    caller = sys._getframe(1)
    frame = _user_frame(caller) or caller
    names = frame.f_globals
    warnings.warn_explicit(
        f'hybridmem: {in_flags(message)}',
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get('__name__'),
        registry=names.setdefault('__warningregistry__', {}),
    )


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    found, beneath = None, False
    while frame is not None:
        name = frame.f_globals.get('__name__') or ''
        package = name.partition('.')[0]
        if package in _BENEATH:
            beneath = True
        elif beneath and package not in _BETWEEN:
            found, beneath = frame, False
        frame = frame.f_back
    return found


class SessionThread:
    """The thread that has entered a session, and whether the session is open.

    Attributes:
        is_open (bool): Between the beginning and the end of the ``with`` statement.
    """

    def __init__(self) -> None:
        self.is_open = self._has_ended = False
        self._lost = LostSignals()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Of the thread, for messages."""
        return _name(self._thread)

    def check_not_ended(self) -> None:
        """Refuses a session that has ended.

        Raises:
            SessionError: With what to do instead.
        """
        if self._has_ended:
            raise SessionError(
                'This session has ended and cannot be entered again; make another one '
                'with optimize().'
            )

    def check_not_open(self) -> None:
        """Refuses a session that is open in another thread.

        Raises:
            SessionError: With what to do instead.
        """
        if self.is_open:
            raise SessionError(
                f'This session is active in {self.name}; make one with '
                f'optimize() for each thread.'
            )

    def enter(self) -> None:
        """The session belongs to this thread."""
        self._thread = threading.current_thread()

    def open(self) -> None:
        """The session has begun."""
        self._lost.watch()
        self.is_open = True

    @property
    def has_entered(self) -> bool:
        """Whether there is one."""
        return self._thread is not None

    @property
    def is_mine(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    @property
    def is_gone(self) -> bool:
        """Whether the thread has ended, so that its hooks are gone with it."""
        return self._thread is not None and not self._thread.is_alive()

    def check_is_mine(self) -> None:
        """Refuses to end the session in another thread, as long as this one lives.

        Raises:
            SessionError: With both threads.
        """
        if not (self.is_mine or self.is_gone):
            raise SessionError(
                f'This session was entered in {self.name} and is left in '
                f'{_name(threading.current_thread())}; leave it where it was entered.'
            )

    def warn_if_unseen(self, updates: int, tell: Callable[[str], None]) -> None:
        """Chainer calls hooks in the thread that has entered the session only.

        Args:
            updates: Of parameters, in a session that has seen no iteration.
            tell: Takes a line of progress.
        """
        if updates <= 0:
            return
        message = (
            f'parameters were updated {format_count(updates, "time")} in this session, '
            f'but no iteration was seen in {self.name}, which entered it: what other '
            f'threads train is not managed; enter the session in the thread that '
            f'trains.'
        )
        tell(message)
        warn_user(message)

    def forget(self) -> None:
        """Chainer does not know of the session any more."""
        self.is_open = False
        self._lost.leave()

    def end(self) -> None:
        """The session has ended for good."""
        self._has_ended = True

    def check_backward(self, function: Any) -> None:
        """Refuses a backward in another thread than the session's.

        Raises:
            SessionError: With both threads.
        """
        thread = threading.current_thread()
        if not self.is_open or thread is self._thread:
            return
        raise SessionError(
            f'The graph of {graph.function_name(function)} was made inside of a '
            f'session in {self.name}, and its backward runs in '
            f'{_name(thread)}: run both in the thread that has entered the session.'
        )


class ThreadGuard(chainer.FunctionHook):
    """Refuses a backward in another thread: the session's hooks do not run there.

    Args:
        thread (SessionThread): The session's.
    """

    name = 'hybridmem-thread'

    def __init__(self, thread: SessionThread) -> None:
        self._thread = weakref.ref(thread)  # a graph may outlive the session

    def backward_preprocess(
        self, function: Any, in_data: tuple[Any, ...], out_grad: tuple[Any, ...]
    ) -> None:
        """Before a backward function.

        Raises:
            SessionError: In another thread than the session's.
        """
        thread = self._thread()
        if thread is not None:
            thread.check_backward(function)


def _name(thread: threading.Thread | None) -> str:
    return 'no thread' if thread is None else f'thread {thread.name!r}'
