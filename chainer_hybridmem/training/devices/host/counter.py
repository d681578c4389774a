"""Counts and limits NumPy's data allocations of one context."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from chainer_hybridmem.training.devices import counting, slab
from chainer_hybridmem.training.devices.counting import WordsCounter, count, uncount
from chainer_hybridmem.training.devices.host import counter_words as words
from chainer_hybridmem.training.devices.host import numpy_memory
from chainer_hybridmem.training.devices.host.native_pages import (
    drop_slab,
    make_slab,
    release_holes,
    write_figures,
)
from chainer_hybridmem.training.devices.host.reclaimer import Reclaimer
from chainer_hybridmem.training.devices.ram import total_ram


class Counter(WordsCounter):
    """A handler of its own, with a limit and counters.

    Args:
        limit_bytes: Most bytes in use; more is refused while installed.
        reclaim: Called with the bytes missing when a block does not fit. What
            it raises is kept in ``error`` and the block is refused.
    """

    def __init__(self, limit_bytes: int, reclaim: Callable[[int], None]) -> None:
        memory = numpy_memory.take_memory()
        super().__init__(memory.words)
        self.limit(limit_bytes)
        self._number = memory.number
        self._figures = (ctypes.c_int64 * 5)()
        self._figures_address = ctypes.addressof(self._figures)
        self._own = self._previous = None  # handlers, while installed
        self._capsule: Any = memory.capsule
        self._reclaimer = Reclaimer(reclaim)
        self._reclaimer.serve(memory.address)
        memory.hand_to(self)

    def close(self) -> None:
        """The last array that this counter has counted frees its memory for others.

        Until then, and afterwards, the figures can be read.
        """
        self._capsule = None

    def keep_figures(self) -> None:
        """Another counter gets the memory: keeps the last figures elsewhere."""
        self._words = type(self._words).from_buffer_copy(self._words)
        self.address = ctypes.addressof(self._words)

    @property
    def limit_bytes(self) -> int:
        """Most bytes in use, as it is now."""
        return self._get(counting.LIMIT)

    @property
    def wanted_bytes(self) -> int:
        """Asked for, while space is made for a block that does not fit by count."""
        return self._get(words.WANTED)

    @property
    def error(self) -> BaseException | None:
        """What ``reclaim`` has raised last."""
        return self._reclaimer.error

    @property
    def last_failure(self) -> tuple[int, int] | None:
        """Bytes asked for and in use when a block was last refused."""
        nbytes = self._get(words.FAILED_BYTES)
        return (nbytes, self._get(words.FAILED_USED)) if nbytes else None

    def forget_failure(self) -> None:
        """No block has been refused since."""
        self._set(words.FAILED_BYTES, 0)

    def count_foreign(self, nbytes: int) -> int:
        """Counts memory the handler has not given out; returns its id.

        In one native step: between two Python statements a garbage collection
        may free arrays.
        """
        return int(count(self.address, nbytes))

    def uncount_foreign(self, ident: int, nbytes: int) -> None:
        """Takes back what :meth:`count_foreign` has counted."""
        uncount(self.address, ident, nbytes)

    def pool_figures(self, new_peak: bool) -> tuple[int, ...]:
        """Bytes in use, held but free, served from held pages, asked of the system
        so far, and the highest load since this was last asked with ``new_peak``.

        Small blocks come from the C library's heap, which tells nothing: they are
        in use but neither served from here nor asked of the system. Pages that a
        hole shares with blocks count as the hole's.
        """
        write_figures(self.address, self._figures_address, int(new_peak))
        return tuple(self._figures)

    # -- offsets --------------------------------------------------------------
    @property
    def table_address(self) -> int:
        """Address of the words that say where the next blocks shall lie."""
        return self.address + words.TABLE

    def release_side(self) -> None:
        """Gives free pages outside of the arena back to the system."""
        arena_bytes = self._get(words.ARENA + slab.HELD)
        release_holes(self.address, self._get(counting.USED) + arena_bytes)

    @property
    def arena_bytes(self) -> int:
        """Addresses for blocks with planned offsets."""
        return self._get(words.ARENA + slab.SIZE)

    # -- installing -----------------------------------------------------------
    def install(self) -> None:
        """Sends NumPy's allocations of the current context to this counter."""
        for place in (words.SIDE, words.ARENA):
            make_slab(self.address, place, _slab_bytes(self._get(counting.LIMIT)))
        self._set(words.THREAD, threading.get_ident())
        self._set(words.LIMITED, 1)
        self._own = self._capsule
        self._previous = numpy_memory.set_handler(self._own)

    def follow(self) -> None:
        """Counts the current context, too."""
        numpy_memory.set_handler(self._own)

    def uninstall(self) -> None:
        """Counts and limits nothing more.

        The handler that :meth:`install` replaced is back, if this is the same context;
        in others the present one stays, and passes everything on. It may be closed by
        now, where Ctrl-C has come before.
        """
        former = numpy_memory.set_handler(self._previous)
        if former is not self._own:
            numpy_memory.set_handler(former)
        self._own = self._previous = None
        self._set(words.LIMITED, 0)
        release_holes(self.address, 0)
        self._set(words.TABLE + slab.STOP, 0)
        for place in (words.SIDE, words.ARENA):
            drop_slab(self.address, place)

    def pause_reclaim(self, paused: bool) -> None:
        """Refuses blocks that do not fit without asking for space first."""
        self._set(words.RECLAIMING, int(paused))

    def ident_at(self, address: int) -> int:
        """Id of a block one of our handlers has given out; 0 if another did."""
        ident = ctypes.c_int64.from_address(address - words.HEADER).value
        return ident if ident >> counting.ID_BITS == self._number else 0


def _slab_bytes(limit_bytes: int) -> int:
    """Whole pages for the limit, and no more than the process may have."""
    return (min(limit_bytes, total_ram()) + 4095) & -4096
