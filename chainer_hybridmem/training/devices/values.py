"""What devices take and give: arrays, allocations, views, copies and figures.

Note: [identity]
    An allocation is known by an id that is never used twice, not by its
    address. All arrays that view one allocation share its id: they are one map, and
    come back with their offsets and strides, so that BLAS sums in the same order.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, NamedTuple

from chainer_hybridmem.planning.records.plan import Tier

Array = Any  # numpy.ndarray or cupy.ndarray
Root = Any  # holding it keeps the allocation alive
Mark = Any  # a moment on the compute device
Digest = Any  # of an array's bytes, known once the compute device has got so far


class View(NamedTuple):
    """How an array looks at its allocation.

    Attributes:
        offset_bytes (int): From the first byte of the allocation.
        shape (tuple of int): Shape of the array.
        strides (tuple of int): In bytes; may be zero or negative.
        dtype (str): NumPy type string.
        writeable (bool): Whether one may write through it.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    writeable: bool = True


# Arrays look at memory in few ways: maps share what says so.
find_view = functools.lru_cache(maxsize=4096)(View)


class PoolFigures(NamedTuple):
    """What a memory pool tells at one moment, in bytes.

    Attributes:
        occupied_bytes (int): In use.
        free_bytes (int): Held from the system or driver, but not in use.
        pool_allocated_bytes (int): Served so far from memory the pool held already.
        device_allocated_bytes (int): Asked so far of the system or driver.
        peak_bytes (int): Highest ``occupied_bytes`` since it was last begun anew.
    """

    occupied_bytes: int
    free_bytes: int
    pool_allocated_bytes: int
    device_allocated_bytes: int
    peak_bytes: int


class PlaceFigures(NamedTuple):
    """What became of large allocations since the device was opened, in counts.

    Attributes:
        placed (int): Got their planned offset.
        unexpected (int): Were not expected where they came.
        taken (int): Were expected, but something else lay there.
    """

    placed: int
    unexpected: int
    taken: int


class Completion(abc.ABC):
    """When a copy ran, and whether it has finished; holds no array alive."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the copy has finished or failed; never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns once it has."""

    @abc.abstractmethod
    def after(self, origin: Mark) -> tuple[float, float]:
        """Its start and end in seconds after a mark; only once it has finished."""


class Transfer(abc.ABC):
    """One copy under way or finished.

    Attributes:
        nbytes (int): Its size.
        completion (Completion): When it ran, or will have run.
    """

    nbytes: int
    completion: Completion

    def done(self) -> bool:
        """Whether the copy has finished; never blocks."""
        return self.completion.done()

    @abc.abstractmethod
    def seconds(self) -> float:
        """Time the copy itself took; only once it has finished."""

    def carried(self, origin: Mark) -> tuple[float, float]:
        """When its link carried it; who waits for a throttled one may wake later.

        Args:
            origin: Both are in seconds after this mark; only once it has finished.
        """
        return self.completion.after(origin)


class HostCopy(abc.ABC):
    """Host memory or a part of a file that holds one swapped feature map.

    Attributes:
        nbytes (int): Its size.
        tier (Tier): Whether it is memory or file.
    """

    nbytes: int
    tier: Tier

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the space back; the contents are gone."""
