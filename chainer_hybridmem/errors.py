"""Every error the package raises, under one root.

Messages carry the values involved and what to do next. Out of memory is also
a :class:`MemoryError`, so that code written against NumPy or CuPy keeps
working.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TypeVar

_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class HybridMemoryError(Exception):
    """Root of all errors raised by this package."""


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
            (str(self), self.requested_bytes, self.limit_bytes, self.used_bytes),
        )


class InfeasibleError(OutOfMemoryError):
    """No plan of the chosen planner stays inside the memory limit."""


Error = TypeVar('Error', bound=BaseException)


def without_frames(error: Error) -> Error:
    """An error to be kept: its frames, and those of its causes, hold arrays."""
    for part in _chain(error):
        part.__traceback__ = None
    return error


def clear_frames(error: BaseException) -> None:
    """Frees what the frames of an error hold, and those of its causes.

    Frames that still run keep what they have, and so do generators, which may go on.
    """
    for part in _chain(error):
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


def _chain(error: BaseException) -> list[BaseException]:
    """An error with everything that has led to it."""
    found: list[BaseException] = [error]
    for part in found:  # grows meanwhile
        for cause in (part.__cause__, part.__context__):
            if cause is not None and not any(cause is other for other in found):
                found.append(cause)
    return found
