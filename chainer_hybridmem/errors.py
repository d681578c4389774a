"""Every error the package raises, under one root.

Messages carry the values involved and what to do next. Out of memory is also
a :class:`MemoryError`, so that code written against NumPy or CuPy keeps
working.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_PACKAGE = os.path.join(os.path.dirname(__file__), '')
_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_flags: dict[str, str] = {}  # that the user of this process can type
_options = re.compile('(?!)')  # finds their Python names


def use_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """From now on messages name options as a command line does.

    Args:
        flags: Such as ``'--memory-limit'`` for ``'memory_limit'``; empty for a user
            who writes Python.

    Returns:
        dict: Those used before.
    """
    global _flags, _options
    before, _flags = _flags, dict(flags)
    any_name, long_name, word = (
        '|'.join(names) or '(?!)'
        for names in (
            _flags,
            [name for name in _flags if '_' in name],
            [name for name in _flags if '_' not in name],
        )
    )
    _options = re.compile(
        rf"""(?<![\w./(\\'"-])(?:{any_name})=(?:'[\w.%+-]+'|[\w%+-]+)
        |(?<![\w./(\\'"-])(?:{long_name})(?![\w=(/'"]|\.\w)
        |(?:^|(?<=[.]\s))(?:{word})(?=\s(?:is|has|must|needs|can|'))
        |(?<=option\s)'(?:{any_name})'""",
        re.VERBOSE,
    )
    return before


def in_flags(text: str) -> str:
    """A message as the user of this process can follow it.

    An option is found where its name has an underscore, a value (``planner='hybrid'``),
    or begins a sentence: so messages name options.
    """
    return _options.sub(_name_flag, text)


def _name_flag(found: re.Match[str]) -> str:
    name, _, value = found.group().strip("'").partition('=')
    value = {'True': 'true', 'False': 'false'}.get(value, value.strip("'"))
    return f'{_flags[name]} {value}'.rstrip()


def nearest(name: object, known: Iterable[str], least: float = 0.6) -> str:
    """What a message adds about the known name that is most like one; may be empty."""
    close = difflib.get_close_matches(str(name), list(known), 1, least)
    return f' Did you mean {close[0]!r}?' if close else ''


class HybridMemoryError(Exception):
    """Root of all errors raised by this package."""

    def __str__(self) -> str:
        return in_flags(super().__str__())


class UnknownNameError(HybridMemoryError, ValueError):
    """A planner, architecture, pool or device name that is not registered."""


class FormatError(HybridMemoryError, ValueError):
    """A file is not what it claims to be, or has an unknown version."""


class OptionError(HybridMemoryError, ValueError):
    """An option has a value that cannot be used."""


class ProfileMismatchError(HybridMemoryError, ValueError):
    """Two recorded iterations are not of the same computation."""


class SessionError(HybridMemoryError, RuntimeError):
    """A session is used in an impossible way or at an impossible moment."""


class PlanError(HybridMemoryError, RuntimeError):
    """A plan breaks a rule; the message names the rule and the position."""


class PlannerError(PlanError):
    """A planner of another package fails, or returns what is no plan."""


class VerificationError(HybridMemoryError, RuntimeError):
    """An iteration that is verified is not what it would be in-core."""


class SwapStoreError(HybridMemoryError, OSError):
    """The storage for swapped feature maps cannot be used."""


class HostFullError(SwapStoreError):
    """Host copies have used up ``host_limit``, and there is no disk to go to."""


class OutOfMemoryError(HybridMemoryError, MemoryError):
    """An allocation does not fit, or no plan fits the memory limit.

    Attributes:
        requested_bytes (int): Bytes asked for by the failing allocation, or
            bytes needed at the worst moment of the best plan.
        limit_bytes (int): The memory limit in force.
        used_bytes (int): Bytes in use when the allocation failed.
    """

    def __init__(
        self,
        message: str,
        requested_bytes: int = 0,
        limit_bytes: int = 0,
        used_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.limit_bytes = limit_bytes
        self.used_bytes = used_bytes

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int]]:
        return (
            type(self),
            (self.args[0], self.requested_bytes, self.limit_bytes, self.used_bytes),
        )


class InfeasibleError(OutOfMemoryError):
    """No plan of the chosen planner stays inside the memory limit."""


Error = TypeVar('Error', bound=BaseException)


def without_frames(error: Error) -> Error:
    """An error to be kept: its frames, and those of its causes, hold arrays."""
    for part in chain_of(error):
        part.__traceback__ = None
    return error


def fold(error: Error) -> Error:
    """Leaves the frames of this package out of what is printed of an error.

    An error of this package that stands for a MemoryError gets its traceback, too, so
    that there is one. What is neither of memory, nor of this package, nor Ctrl-C, may
    be a fault of this package, and keeps its frames.
    """
    if isinstance(error, HybridMemoryError | MemoryError | KeyboardInterrupt):
        cause = error.__cause__
        leave_out_frames(error, _is_own)
        if isinstance(error, HybridMemoryError) and isinstance(cause, MemoryError):
            leave_out_frames(cause, _is_own)
            error.__traceback__ = _join(error.__traceback__, cause.__traceback__)
            error.__cause__ = error.__context__ = None
    return error


def leave_out_frames(error: BaseException, is_left_out: Callable[[str], bool]) -> None:
    """Shortens the traceback of an error.

    Args:
        error: Its traceback changes in place.
        is_left_out: Whether the frames of a file are left out.
    """
    kept, trace = [], error.__traceback__
    while trace is not None:
        if not is_left_out(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    for outer, inner in itertools.zip_longest(kept, kept[1:]):
        outer.tb_next = inner
    error.__traceback__ = kept[0] if kept else None


def _is_own(path: str) -> bool:
    return path.startswith(_PACKAGE)


def _join(
    outer: types.TracebackType | None, inner: types.TracebackType | None
) -> types.TracebackType | None:
    """The way of an error, and below it that of the error that it stands for.

    Both may have the frame in which one has become the other.
    """
    if outer is None or inner is None:
        return inner or outer
    last, trace = None, outer
    while trace.tb_next is not None:
        last, trace = trace, trace.tb_next
    if trace.tb_frame is not inner.tb_frame:
        trace.tb_next = inner
    elif last is None:
        return inner
    else:
        last.tb_next = inner
    return outer


def clear_frames(error: BaseException) -> None:
    """Frees what the frames of an error hold, and those of its causes.

    Frames that still run keep what they have, and so do generators, which may go on.
    """
    for part in chain_of(error):
        trace = part.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_flags & _MAY_GO_ON:
                with contextlib.suppress(RuntimeError):  # it still runs
                    trace.tb_frame.clear()
            trace = trace.tb_next


def clear_handled() -> None:
    """The same for an out-of-memory error that the program is handling now."""
    error = sys.exc_info()[1]
    if isinstance(error, MemoryError):
        clear_frames(error)


def chain_of(error: BaseException) -> list[BaseException]:
    """An error with everything that has led to it."""
    found: list[BaseException] = [error]
    for part in found:  # grows meanwhile
        for cause in (part.__cause__, part.__context__):
            if cause is not None and not any(cause is other for other in found):
                found.append(cause)
    return found
