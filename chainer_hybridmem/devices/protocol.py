"""What a device must offer: counted memory, asynchronous copies, time.

Everything above this floor is written against :class:`Device` alone and runs
unchanged on the host device and on CUDA.

Note: [stream order]
    Compute work and the release of memory are ordered by the host program:
    memory released by the program may be given out again at once, because on
    CUDA all allocations belong to the compute stream. Copies run beside it.
    Two rules keep them apart. (1) ``wait(transfer)`` orders all later compute
    work after the copy, without blocking the host on CUDA; a block whose
    swap-out has been waited for may be released, one that has not may not.
    (2) A swap-in starts only after all compute work issued before the call,
    so that it never writes into memory an earlier kernel still uses.

Note: [identity]
    An allocation is known by an id that is never used twice, not by its
    address. All arrays that view one allocation share its id.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from chainer_hybridmem.records.plan import Tier

if TYPE_CHECKING:
    from chainer_hybridmem.pools.arena import Arena

Array = Any  # numpy.ndarray or cupy.ndarray
Root = Any  # holding it keeps the allocation alive
Mark = Any  # a moment on the compute device
Digest = Any  # of an array's bytes, known once the compute device has got so far


class Checks(Protocol):
    """Compares memory without waiting for the compute device."""

    def digest(self, array: Array) -> Digest | None:
        """Issues the digest of an array; None where there is none."""

    def expect_same(self, before: Digest, after: Digest, what: str) -> None:
        """Two digests of this iteration must be equal; else ``what`` is told."""

    def end_iteration(self, iteration: int) -> None:
        """What has been issued is that of one iteration, with this number."""

    def differences(self, wait: bool = False) -> list[tuple[int, str]]:
        """Iterations with what was not the same in them, as far as they are known."""


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
        placed (int): Got their planned place.
        unexpected (int): Were not expected where they came.
        taken (int): Were expected, but something else lay in their place.
    """

    placed: int
    unexpected: int
    taken: int


class Span(abc.ABC):
    """When a copy ran; keeps no memory alive."""

    @abc.abstractmethod
    def after(self, origin: Mark) -> tuple[float, float]:
        """Its start and end in seconds after a mark; only once it has finished."""


class Transfer(abc.ABC):
    """One copy under way or finished."""

    nbytes: int

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the copy has finished; never blocks."""

    @abc.abstractmethod
    def seconds(self) -> float:
        """Time the copy itself took; only once it has finished."""

    @abc.abstractmethod
    def span(self) -> Span:
        """When it runs."""


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


class Device(abc.ABC):
    """Memory, copies and time of one compute device.

    Attributes:
        kind (str): ``'host'`` or ``'cuda'``.
        asynchronous (bool): Whether the host only issues work and runs ahead of it.
        limit_bytes (int): Most bytes that may be in use.
        used_bytes (int): In use now, adopted arrays included.
        peak_bytes (int): Highest ``used_bytes`` since :meth:`reset_peak`.
        window_peak_bytes (int): Highest since :meth:`reset_window`.
        alignment_bytes (int): Every block of an arena begins at a multiple of it.
        moves_in (bool): Whether an arena may take over what lies elsewhere when its
            first iteration begins; else there is no memory for both.
        last_failure (tuple or None): Bytes asked for and bytes in use when an
            allocation was last refused.
        reclaim_error (BaseException or None): What ``reclaim`` raised last; the
            allocation it was called for has been refused.
        host_refusal (str or None): Why a copy to the host was last refused for want
            of host memory, and what to do.
        late_checks (Checks or None): Compares memory without waiting for the
            device, where the host cannot look at it.
    """

    kind: str
    asynchronous: bool
    alignment_bytes: int
    moves_in: bool
    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    window_peak_bytes: int
    last_failure: tuple[int, int] | None
    reclaim_error: BaseException | None
    host_refusal: str | None
    late_checks: Checks | None = None

    # -- life ---------------------------------------------------------------
    @abc.abstractmethod
    def install(self, reclaim: Callable[[int], None]) -> None:
        """Starts counting and limiting allocations of the calling thread.

        Args:
            reclaim: Called with the bytes missing when an allocation does not
                fit; may release memory. Afterwards the allocation is tried
                once more and refused if it still does not fit.
        """

    @abc.abstractmethod
    def without_reclaim(self) -> AbstractContextManager[None]:
        """For work of the device's own: what does not fit is refused at once."""

    @abc.abstractmethod
    def uninstall(self) -> None:
        """Restores what was installed before. Live arrays stay valid."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends copy threads or streams and gives all host copies back."""

    @property
    def other_bytes(self) -> int:
        """In use in a pool of others, beside the arrays that are known."""
        return 0

    @abc.abstractmethod
    def adopt(self, arrays: Iterable[Array]) -> None:
        """Counts arrays that were made before :meth:`install`, once each."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, kind, versions and link of the device, as plain values."""

    @abc.abstractmethod
    def forget_failure(self) -> None:
        """:attr:`last_failure` has been dealt with."""

    # -- events -------------------------------------------------------------
    @abc.abstractmethod
    def start_events(self) -> None:
        """Starts a log of every malloc and free."""

    @property
    @abc.abstractmethod
    def event_count(self) -> int:
        """Events logged since :meth:`start_events`."""

    @abc.abstractmethod
    def take_events(self) -> list[tuple[int, int]]:
        """Ends the log: ``(+id, bytes)`` per malloc, ``(-id, bytes)`` per free."""

    # -- memory -------------------------------------------------------------
    @abc.abstractmethod
    def owns(self, array: Any) -> bool:
        """Whether the object is an array of this device's array type."""

    @abc.abstractmethod
    def allocation_id(self, array: Array) -> int:
        """Id of the allocation behind an array; 0 if it is not counted."""

    @abc.abstractmethod
    def root(self, array: Array) -> Root:
        """The owner of the allocation behind an array."""

    @abc.abstractmethod
    def root_bytes(self, root: Root) -> int:
        """Size of an allocation in bytes."""

    @abc.abstractmethod
    def capture(self, array: Array) -> View:
        """How the array looks at its allocation."""

    @abc.abstractmethod
    def restore(self, root: Root, view: View) -> Array:
        """The array that looks at ``root`` through ``view``."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Root:
        """A counted allocation with undefined contents.

        Raises:
            MemoryError: If it does not fit, even after reclaiming.
        """

    @abc.abstractmethod
    def same_bits(self, left: Array, right: Array) -> bool:
        """Whether shapes, types and every bit are equal (NaN included)."""

    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        """Has a function called with the address just before memory is freed.

        Returns:
            What keeps it so; None for memory that the device has not given.
        """
        del root, look
        return None

    def memory_at(self, address: int, nbytes: int) -> Root:
        """The memory at an address, for as long as it is there."""
        raise NotImplementedError

    def same_contents(self, copy: HostCopy, root: Root) -> bool:
        """Whether a host copy has what is in memory, where the host can read both.

        Raises:
            SwapStoreError: If the copy cannot be read.
        """
        raise NotImplementedError

    def fill(self, copy: HostCopy, root: Root) -> None:
        """Writes memory into a host copy at once.

        Raises:
            SwapStoreError: If it cannot be written.
        """
        raise NotImplementedError

    def distinct_bytes(self, arrays: Iterable[Array]) -> int:
        """Bytes of the allocations behind arrays, each counted once."""
        roots = {
            self.allocation_id(array): self.root_bytes(self.root(array))
            for array in arrays
            if self.owns(array)
        }
        return sum(roots.values())

    def reset_peak(self) -> None:
        """Starts a new peak at the present load."""
        self.peak_bytes = self.used_bytes

    def reset_window(self) -> None:
        """Starts a new window peak at the present load."""
        self.window_peak_bytes = self.used_bytes

    # -- pool ---------------------------------------------------------------
    @abc.abstractmethod
    def watch_pool(self, watched: bool) -> None:
        """Begins or ends counting what :meth:`pool_figures` tells; they nest."""

    @abc.abstractmethod
    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        """What the pool holds now and has served.

        Args:
            new_peak: Whether the peak begins anew at the present load.
        """

    # -- places -------------------------------------------------------------
    @abc.abstractmethod
    def block_bytes(self, nbytes: int) -> int:
        """What an allocation takes up in an arena; 0 if it never lies in one."""

    @abc.abstractmethod
    def set_places(self, arena: Arena) -> bool:
        """From now on allocations lie where an arena says.

        What is somewhere else stays there. Takes effect with :meth:`seek`.

        Returns:
            bool: Whether there is memory for the arena now.
        """

    def release_places(self) -> None:  # noqa: B027  most devices lose nothing by it
        """The iterations to come have other places or none: frees the arena's memory.

        What lies in it stays, and its memory with it.
        """

    @abc.abstractmethod
    def seek(self, k: int) -> None:
        """The allocations to come are those of operation k; -1 for none of them."""

    @abc.abstractmethod
    def place_figures(self) -> PlaceFigures:
        """What became of large allocations while places were set."""

    # -- copies -------------------------------------------------------------
    @property
    @abc.abstractmethod
    def host_bytes(self) -> int:
        """Bytes of RAM held for host copies; never more than the host limit."""

    @property
    @abc.abstractmethod
    def disk_bytes(self) -> int:
        """Bytes of files held for host copies."""

    @abc.abstractmethod
    def host_room(self, tier: Tier) -> int:
        """Bytes that may still be taken there; a huge number without a limit."""

    @abc.abstractmethod
    def reserve(self, ram_bytes: int, disk_bytes: int = 0) -> None:
        """Takes one slab of exactly this size in each tier for the copies to come.

        The one in RAM is smaller where the host limit leaves less.

        Raises:
            SwapStoreError: If the machine cannot give it.
        """

    @abc.abstractmethod
    def host_copy(self, nbytes: int, tier: Tier | None = None) -> HostCopy:
        """Space for one host copy.

        Args:
            nbytes: Its size.
            tier: Where it should lie; RAM that is used up makes it the disk if there
                is one. None is RAM.

        Raises:
            HostFullError: If the host limit leaves no room, and there is no disk.
            SwapStoreError: If the machine cannot give it.
        """

    @abc.abstractmethod
    def swap_out(self, root: Root, copy: HostCopy | None) -> tuple[HostCopy, Transfer]:
        """Starts a copy to the host after all compute work issued so far.

        Args:
            root: The allocation; the transfer keeps it alive until the caller
                drops the transfer, and it must not be released before
                :meth:`wait`.
            copy: Where it goes: new space, or where it went last time, to be written
                again; None takes new space.
        """

    @abc.abstractmethod
    def swap_in(self, copy: HostCopy, root: Root) -> Transfer:
        """Starts a copy to ``root`` after all compute work issued so far."""

    @abc.abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Orders all later compute work after the copy; see [stream order].

        Raises:
            SwapStoreError: If the copy failed.
        """

    # -- time ---------------------------------------------------------------
    @abc.abstractmethod
    def mark(self) -> Mark:
        """The present moment in the order of compute work."""

    @abc.abstractmethod
    def elapsed(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks; after :meth:`synchronize` on CUDA."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until all compute work and copies issued have finished."""

    @abc.abstractmethod
    def take_stall_seconds(self) -> float:
        """Time compute spent in :meth:`wait` since the last call.

        On CUDA without the waits that are still to come; the next call has them.
        """
