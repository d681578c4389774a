"""A time of the test's own, in which copies and computing take what they are to take.

Every thread has a clock. It moves on where the thread sleeps, and by a tick where it
looks; who waits for a copy goes on when that has ended, if that is later. So copies in
both directions and computing run at once, as on a machine that nobody else uses, and
how long the threads really take makes no difference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from chainer_hybridmem import timing
from chainer_hybridmem.training.devices.host import copies


class Clocks(threading.local):
    """A clock for each thread.

    Args:
        tick_seconds: What a look takes, so what lies between two looks takes in all.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick = tick_seconds
        self._now = 1000.0

    def now(self) -> float:
        """Seconds since some moment."""
        self._now += self._tick
        return self._now

    def sleep(self, seconds: float) -> None:
        """Lets time pass at once."""
        self._now += seconds

    def meet(self, moment: float) -> None:
        """Goes on at a moment, if it is still to come."""
        self._now = max(self._now, moment)

    def before(self, moment: float) -> bool:
        """Whether a moment is still to come."""
        return self._now < moment


@contextlib.contextmanager
def own_time(tick_seconds: float = 1e-4) -> Iterator[Clocks]:
    """Sessions, devices and copies know no other time.

    Args:
        tick_seconds: See :class:`Clocks`.
    """
    clocks = Clocks(tick_seconds)
    execute, wait = copies.CopyThread._execute, copies.HostCompletion.wait
    whole = copies.HostCompletion.done

    def executed(self: copies.CopyThread, job: Any) -> None:
        clocks.meet(job.transfer.submitted)
        execute(self, job)

    def done(self: copies.HostCompletion) -> bool:
        return whole(self) and not clocks.before(self.ended)

    def waited(self: copies.HostCompletion) -> None:
        wait(self)
        clocks.meet(self.ended)

    with contextlib.ExitStack() as stack:
        for name in ('now', 'sleep'):
            patch = mock.patch.object(timing, name, getattr(clocks, name))
            stack.enter_context(patch)
        for name, method in (('done', done), ('wait', waited)):
            patch = mock.patch.object(copies.HostCompletion, name, method)
            stack.enter_context(patch)
        patch = mock.patch.object(copies.CopyThread, '_execute', executed)
        stack.enter_context(patch)
        yield clocks
