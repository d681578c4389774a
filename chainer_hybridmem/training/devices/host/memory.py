"""Counted and limited memory of NumPy's arrays.

All array data allocated in the context where the memory is installed counts
against the limit: that of Chainer, NumPy's temporaries, the user's own code. Memory
that libraries take for themselves (BLAS buffers, Python objects) is not seen.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy

from chainer_hybridmem.errors import OutOfMemoryError, SessionError
from chainer_hybridmem.interrupts import held_back
from chainer_hybridmem.training.devices.adopted import AdoptedArrays
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.array_data import address_of, root_of
from chainer_hybridmem.training.devices.host.counter import Counter
from chainer_hybridmem.training.devices.ports import Memory
from chainer_hybridmem.training.devices.ram import available_ram, total_ram
from chainer_hybridmem.training.devices.values import Array, PoolFigures, Root

SPARE_SHARE = 16  # of the RAM, which is left to others where the limit is raised


class HostMemory(Memory):
    """NumPy's allocations; see :class:`.Memory`.

    Args:
        limit_bytes: Most bytes in use.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reclaim: Callable[[int], None] | None = None
        self._installed = False
        self._adopted = AdoptedArrays(
            lambda nbytes: self.counter.count_foreign(nbytes),
            lambda ident, nbytes: self.counter.uncount_foreign(ident, nbytes),
        )

    @functools.cached_property
    def counter(self) -> Counter:  # type: ignore[override]
        """Made when it is needed: it takes memory that outlives the device."""
        return Counter(self.limit_bytes, self._call_reclaim)

    # -- life ---------------------------------------------------------------
    @held_back
    def install(self, reclaim: Callable[[int], None]) -> None:
        """See :meth:`.Memory.install`.

        Raises:
            SessionError: If a host device is installed in this context.
        """
        counted = numpy_memory.serves()
        if self._installed or (counted and not lend(self)):
            raise SessionError(
                'a host device already counts the NumPy allocations of this thread; '
                'leave the first session before entering another one, and enter '
                'profile_memory() inside the session.'
            )
        self._reclaim = reclaim
        self._thread = threading.current_thread()
        self.counter.install()
        self._installed = True

    @held_back
    def uninstall(self) -> None:
        """See :meth:`.Memory.uninstall`.

        In another context of the thread, as a task's, or in a forked child, the present
        handler stays.

        Raises:
            SessionError: If called in another thread while that one lives.
        """
        if not self._installed:
            return
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            raise SessionError(
                f'a host device is uninstalled in the thread that has installed it, '
                f'{self._thread.name!r}; leave the session or the profile there.'
            )
        self.counter.uninstall()
        self._reclaim = None
        self._installed = False
        take_back(self)

    def follow(self) -> None:
        if self._installed and not numpy_memory.serves():
            self.counter.follow()

    def close(self) -> None:
        self._adopted.clear()
        if 'counter' in vars(self):
            self.counter.close()

    def adopt(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            root = root_of(array)
            if root.flags.owndata and not self.ident_of(root):
                self._adopted.add(address_of(root), root, root.nbytes)

    def allocate(self, nbytes: int) -> Root:
        try:
            return numpy.empty(nbytes, numpy.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(
                f'{nbytes} bytes do not fit: {self.used_bytes} of {self.limit_bytes} '
                'bytes are in use. Raise the memory limit or use smaller batches.',
                nbytes,
                self.limit_bytes,
                self.used_bytes,
            ) from (self.reclaim_error or error)

    def ident_of(self, root: numpy.ndarray) -> int:
        """Id of an allocation; 0 if it is not counted."""
        address = address_of(root)
        if numpy_memory.counted(root):  # never for memory it does not own
            ident = self.counter.ident_at(address)
            if ident:
                return ident
        return self._adopted.ident_at(address)

    def _call_reclaim(self, missing_bytes: int) -> None:
        if self._reclaim is not None:
            self._reclaim(missing_bytes)

    @contextmanager
    def without_reclaim(self) -> Iterator[None]:
        self.counter.pause_reclaim(True)
        try:
            yield
        finally:
            self.counter.pause_reclaim(False)

    # -- counting -----------------------------------------------------------
    @property
    def wanted_bytes(self) -> int:  # type: ignore[override]
        return self.counter.wanted_bytes

    def raise_limit(self, nbytes: int) -> bool:
        available = available_ram()
        if available is not None and nbytes > available - total_ram() // SPARE_SHARE:
            return False
        self.counter.limit(self.counter.limit_bytes + nbytes)
        return True

    @property
    def last_failure(self) -> tuple[int, int] | None:  # type: ignore[override]
        return self.counter.last_failure

    def forget_failure(self) -> None:
        self.counter.forget_failure()

    @property
    def reclaim_error(self) -> BaseException | None:  # type: ignore[override]
        return self.counter.error

    def watch_pool(self, watched: bool) -> None:
        """See :class:`.Memory`; the native handler always counts."""

    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        return PoolFigures(*self.counter.pool_figures(new_peak))


class Lender(Protocol):
    """Counts until another memory is installed, and after that one is uninstalled.

    A test that measures its peak may train in a session, whose device counts and limits
    meanwhile.
    """

    guest: Memory | None

    def lend(self, guest: Memory) -> None:
        """The guest counts from now on."""

    def take_back(self) -> None:
        """The guest counts no more."""


_lender: contextvars.ContextVar[Lender | None] = contextvars.ContextVar(
    'hybridmem_lender', default=None
)


def offer(lender: Lender | None) -> None:
    """From now on memories that are installed in this context are its guests.

    Args:
        lender: It counts already. None ends this.
    """
    _lender.set(lender)


def lend(guest: Memory) -> bool:
    """Whether what counts in this context lets a guest count."""
    lender = _lender.get()
    if lender is None or lender.guest is not None:
        return False
    lender.lend(guest)
    return True


def take_back(guest: Memory) -> None:
    """The guest has been uninstalled, if it has been one."""
    lender = _lender.get()
    if lender is not None and lender.guest is guest:
        lender.take_back()
