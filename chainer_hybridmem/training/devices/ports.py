"""The ports of a device; :class:`.Copies` is one more, the same for every device.

A client takes the port it needs: what counts memory knows nothing of copies.

Note: [stream order]
    Compute work and the release of memory are ordered by the host program:
    memory released by the program may be given out again at once, because on
    CUDA all allocations belong to the compute stream. Copies run beside it.
    Two rules keep them apart. (1) ``copies.wait(transfer)`` orders all later compute
    work after the copy, without blocking the host on CUDA; a block whose
    swap-out has been waited for may be released, one that has not may not.
    (2) A swap-in starts only after all compute work issued before the call,
    so that it never writes into memory an earlier kernel still uses.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from chainer_hybridmem.interrupts import begin_whole, held_back
from chainer_hybridmem.training.devices.counting import WordsCounter
from chainer_hybridmem.training.devices.values import (
    Array,
    Digest,
    Mark,
    PlaceFigures,
    PoolFigures,
    Root,
    View,
)

if TYPE_CHECKING:
    from chainer_hybridmem.planning.layouts.arena import Arena


class _Attempt:
    """What :meth:`Memory.attempt` enters; cheap: even small sums are tried."""

    __slots__ = ('_former', '_memory')

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._former = memory.trying

    def __enter__(self) -> None:
        self._former, self._memory.trying = self._memory.trying, True

    def __exit__(self, *error: object) -> None:
        self._memory.trying = self._former


class _Counting:
    """What :meth:`Memory.counting` enters."""

    def __init__(self, memory: Memory, reclaim: Callable[[int], None]) -> None:
        self._memory = memory
        self._reclaim = reclaim

    def __enter__(self) -> None:
        begin_whole(self, lambda: self._memory.install(self._reclaim))

    @held_back
    def __exit__(self, *error: object) -> None:
        self._memory.uninstall()


class Memory(abc.ABC):
    """Counts and limits allocations.

    Attributes:
        limit_bytes (int): Most bytes that may be in use.
        trying (bool): Whether what does not fit is given up for something else: no
            reason to go beyond the limit.
        wanted_bytes (int): While ``reclaim`` runs: asked for by the allocation that
            exceeds the limit; 0 as long as one that fits by count may find a place.
        counter (WordsCounter): Counts.
        last_failure (tuple or None): Bytes asked for and bytes in use when an
            allocation was last refused.
        reclaim_error (BaseException or None): What ``reclaim`` raised when it was
            called last; the allocation that it was called for has been refused.
    """

    limit_bytes: int
    counter: WordsCounter
    trying = False
    _past_peak_bytes: int | None = None  # before the first iteration nothing counts
    wanted_bytes: int
    last_failure: tuple[int, int] | None
    reclaim_error: BaseException | None

    @abc.abstractmethod
    def install(self, reclaim: Callable[[int], None]) -> None:
        """Starts counting and limiting allocations of the calling thread.

        Args:
            reclaim: Called with the bytes missing when an allocation does not
                fit; may release memory. The allocation is refused once this
                frees nothing more and it still does not fit.

        Ctrl-C comes before it or after it.

        Raises:
            SessionError: If another device counts them already.
        """

    @abc.abstractmethod
    def follow(self) -> None:
        """An iteration begins: counts in the present context, too.

        With asyncio, each task has its own.
        """

    @abc.abstractmethod
    def uninstall(self) -> None:
        """Restores what was installed before, likewise as a whole; does nothing if
        nothing is installed. Live arrays stay valid.
        """

    def counting(
        self, reclaim: Callable[[int], None] = lambda missing_bytes: None
    ) -> AbstractContextManager[None]:
        """Is installed inside, with the same argument as :meth:`install`."""
        return _Counting(self, reclaim)

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what no array needs."""

    @abc.abstractmethod
    def without_reclaim(self) -> AbstractContextManager[None]:
        """Refuses at once what does not fit: for work of the device's own."""

    def attempt(self) -> AbstractContextManager[None]:
        """Says that what does not fit inside is given up for something else."""
        return _Attempt(self)

    @abc.abstractmethod
    def adopt(self, arrays: Iterable[Array]) -> None:
        """Counts arrays that were made before :meth:`install`, once each."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Root:
        """A counted allocation with undefined contents.

        Raises:
            MemoryError: If it does not fit, even after reclaiming.
        """

    @property
    def other_bytes(self) -> int:
        """Bytes in use in a pool of others, beside the arrays that are known."""
        return 0

    def collect_garbage(self) -> None:
        """Frees what is in nothing but reference cycles."""
        gc.collect()

    @abc.abstractmethod
    def raise_limit(self, nbytes: int) -> bool:
        """Lets so many bytes more be in use, until :meth:`restore_limit`.

        Returns:
            bool: Whether the machine has them; if not, nothing changes.
        """

    def restore_limit(self) -> None:
        """The limit is :attr:`limit_bytes` again."""
        self.counter.limit(self.limit_bytes)

    @abc.abstractmethod
    def forget_failure(self) -> None:
        """Resets :attr:`last_failure`: it has been dealt with."""

    @property
    def used_bytes(self) -> int:
        """In use now, adopted arrays included."""
        return self.counter.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest :attr:`used_bytes` since :meth:`reset_peak`."""
        return self.counter.peak_bytes

    @property
    def window_peak_bytes(self) -> int:
        """Highest since :meth:`reset_window`."""
        return self.counter.window_peak_bytes

    @property
    def highest_bytes(self) -> int:
        """Highest :attr:`used_bytes` since the first :meth:`reset_peak`.

        What is adopted may need more, and be gone when it matters.
        """
        return max(self._past_peak_bytes or 0, self.peak_bytes)

    def reset_peak(self) -> None:
        """Starts a new peak at the present load."""
        known = self._past_peak_bytes is not None
        self._past_peak_bytes = self.highest_bytes if known else 0
        self.counter.reset_peak()

    @contextlib.contextmanager
    def peak_kept(self) -> Iterator[None]:
        """What is in use inside is in no peak: it is not the program's."""
        before = self.peak_bytes
        try:
            yield
        finally:
            self.counter.reset_peak(before)

    def reset_window(self) -> None:
        """Starts a new window peak at the present load."""
        self.counter.reset_window()

    def start_events(self) -> None:
        """Starts a log of every malloc and free."""
        self.counter.start_events()

    @property
    def event_count(self) -> int:
        """Events logged since :meth:`start_events`."""
        return self.counter.event_count

    def take_events(self) -> list[tuple[int, int]]:
        """Ends the log: ``(+id, bytes)`` per malloc, ``(-id, bytes)`` per free."""
        return self.counter.take_events()

    @abc.abstractmethod
    def watch_pool(self, watched: bool) -> None:
        """Begins or ends counting what :meth:`pool_figures` tells; they nest."""

    @abc.abstractmethod
    def pool_figures(self, new_peak: bool = False) -> PoolFigures:
        """What the pool holds now and has served.

        Args:
            new_peak: Whether the peak begins anew at the present load.
        """


class Arrays(abc.ABC):
    """How arrays look at allocations."""

    @abc.abstractmethod
    def owns(self, array: Any) -> bool:
        """Whether the object is an array of this device's array type."""

    @abc.abstractmethod
    def allocation_id(self, array: Array) -> int:
        """Id of the allocation behind an array; 0 if it is not counted."""

    @abc.abstractmethod
    def root(self, array: Array) -> Root:
        """The owner of the allocation behind an array."""

    def track(self, array: Array) -> Callable[[], Root | None]:
        """Finds the allocation of an array for as long as anything keeps it alive.

        Where there are no weak references to roots, this looks for the array, or for
        the one that it is a view of, and misses other arrays there.
        """
        root = self.root(array)
        if type(root).__weakrefoffset__:
            return weakref.ref(root)
        reference = weakref.ref(array if array.base is None else array.base)

        def find_root() -> Root | None:
            alive = reference()
            return None if alive is None else self.root(alive)

        return find_root

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
    def memory_at(self, address: int, nbytes: int) -> Root:
        """The memory at an address, for as long as it is there."""

    @abc.abstractmethod
    def same_bits(self, left: Array, right: Array) -> bool:
        """Whether shapes, types and every bit are equal (NaN included)."""

    @abc.abstractmethod
    def last_look(self, root: Root, look: Callable[[int], None]) -> object:
        """Has a function called with the address just before memory is freed.

        Returns:
            What keeps it so; None for memory that the device has not given.
        """

    @abc.abstractmethod
    def held_by_none_but(
        self, arrays: dict[int, Array], holders: dict[int, set[object]]
    ) -> bool:
        """Whether only known holders refer to arrays and to their memory.

        Args:
            arrays: By ``id()``; the caller has no other reference to them. May be
                added to.
            holders: What refers to each array, one reference each. May be added to.

        Returns:
            bool: False where it is not certain.
        """

    def distinct_bytes(self, arrays: Iterable[Array]) -> int:
        """Bytes of the allocations behind arrays, each counted once."""
        roots = {
            self.allocation_id(array): self.root_bytes(self.root(array))
            for array in arrays
            if self.owns(array)
        }
        return sum(roots.values())


class Clock(abc.ABC):
    """Time in the order of compute work.

    Attributes:
        asynchronous (bool): Whether the host only issues work and runs ahead of it.
    """

    asynchronous: bool

    @abc.abstractmethod
    def mark(self) -> Mark:
        """The present moment in the order of compute work."""

    @abc.abstractmethod
    def elapsed(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks; after :meth:`synchronize` on CUDA."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until all compute work and copies issued have finished."""


class Offsets(abc.ABC):
    """The arena: allocations lie at planned offsets.

    Attributes:
        alignment_bytes (int): Every block of an arena begins at a multiple of it.
        moves_in (bool): Whether an arena may take over what lies elsewhere when its
            first iteration begins; else there is no memory for both.
        needed (bool): Whether the limit may not hold without an arena.
        spare_bytes (int): What a plan must leave of the limit, because memory comes in
            larger units than blocks.
    """

    alignment_bytes: int
    moves_in: bool
    needed: bool
    spare_bytes: int = 0

    @property
    def drafts(self) -> bool:
        """Whether an arena that a plan's trace tells, nearly exact, beats none."""
        return self.needed and self.moves_in

    @abc.abstractmethod
    def block_bytes(self, nbytes: int) -> int:
        """What an allocation takes up in an arena; 0 if it never lies in one."""

    @abc.abstractmethod
    def follow(self, arena: Arena, moves_in: bool = True) -> bool:
        """From now on allocations lie where an arena says.

        What is somewhere else stays there. Takes effect with :meth:`seek`.

        Args:
            arena: Says where.
            moves_in: Whether what the iteration before has left lies elsewhere.

        Returns:
            bool: Whether there is memory for the arena now.
        """

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the last arena has exceeded the limit; 0 if it did not."""
        return 0

    def release(self) -> None:  # noqa: B027  most devices lose nothing by it
        """Frees the arena's memory: the next iterations have another one or none.

        What lies in it stays, and its memory with it.
        """

    @abc.abstractmethod
    def seek(self, k: int) -> None:
        """The allocations to come are those of operation k; -1 for none of them."""

    @abc.abstractmethod
    def figures(self) -> PlaceFigures:
        """What became of large allocations while an arena was followed."""

    def close(self) -> None:  # noqa: B027  most devices hold nothing
        """Gives the arena's memory back, once nothing lies in it."""


class Checks(Protocol):
    """Compares memory without waiting for the compute device."""

    def digest(self, array: Array) -> Digest | None:
        """Issues the digest of an array; None where there is none."""

    def expect_same(self, before: Digest, after: Digest, what: str) -> None:
        """Two digests, of this iteration or of earlier ones, must be equal.

        Args:
            before: One of them.
            after: The other one.
            what: Told if they are not.
        """

    def end_iteration(self, iteration: int) -> None:
        """What has been issued is that of one iteration, with this number."""

    def differences(self, wait: bool = False) -> list[tuple[int, str]]:
        """Iterations with what was not the same in them, as far as they are known."""
