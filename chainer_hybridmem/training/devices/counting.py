"""Counts blocks and logs them, in native code, for every device.

A counter is a structure of 8-byte words in C memory; a device may have more behind
them. The interpreter lock is held in all of these functions; it orders what they do.
"""

from __future__ import annotations

import ctypes
import functools

from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.training.devices import slab
from chainer_hybridmem.training.devices.slab import load, store

LIMIT, USED, PEAK, WINDOW, SAMPLE_PEAK = range(0, 40, 8)
NEXT_ID, LOGGING, LOG, LOG_LENGTH, LOG_CAPACITY = range(40, 80, 8)
COUNTING_BYTES = 80
FIRST_LOG_ENTRIES = 1 << 14
ID_BITS = 40  # of an id; the counter's number is above them

_native = functools.partial(compiled, uses=(slab,))
_i64 = types.int64
_c_realloc = types.ExternalFunction('realloc', _i64(_i64, _i64))


@_native()
def log_event(counter: int, ident: int, size: int) -> None:
    """Appends a malloc, or a free with a negative id, to the log."""
    length, capacity = load(counter + LOG_LENGTH), load(counter + LOG_CAPACITY)
    if length == capacity:
        grown = _c_realloc(load(counter + LOG), capacity * 32)
        if grown == 0:
            store(counter + LOGGING, 0)
            return
        store(counter + LOG, grown)
        store(counter + LOG_CAPACITY, capacity * 2)
    entry = load(counter + LOG) + length * 16
    store(entry, ident)
    store(entry + 8, size)
    store(counter + LOG_LENGTH, length + 1)


@_native()
def count(counter: int, size: int) -> int:
    """Counts bytes in use; returns a new id."""
    ident = load(counter + NEXT_ID)
    store(counter + NEXT_ID, ident + 1)
    used = load(counter + USED) + size
    store(counter + USED, used)
    if used > load(counter + PEAK):
        store(counter + PEAK, used)
    if used > load(counter + WINDOW):
        store(counter + WINDOW, used)
    if used > load(counter + SAMPLE_PEAK):
        store(counter + SAMPLE_PEAK, used)
    return ident


@_native(_i64(_i64, _i64))
def count_malloc(counter: int, size: int) -> int:
    """Counts bytes in use and logs them; returns a new id."""
    ident = count(counter, size)
    if load(counter + LOGGING) != 0:
        log_event(counter, ident, size)
    return ident


@_native(types.void(_i64, _i64, _i64))
def uncount(counter: int, ident: int, size: int) -> None:
    """Takes counted bytes back."""
    store(counter + USED, load(counter + USED) - size)
    if load(counter + LOGGING) != 0:
        log_event(counter, -ident, size)


class WordsCounter:
    """What a counter's words say.

    Args:
        words: Of the counter, and what a device has behind them.

    Attributes:
        address (int): Of the words.
    """

    def __init__(self, words: ctypes.Array[ctypes.c_int64]) -> None:
        self._words = words
        self.address = ctypes.addressof(words)

    def _get(self, field: int) -> int:
        return self._words[field // 8]

    def _set(self, field: int, value: int) -> None:
        self._words[field // 8] = value

    @property
    def used_bytes(self) -> int:
        """Bytes in use; every operation asks for them where memory is short."""
        return self._words[USED // 8]

    @property
    def peak_bytes(self) -> int:
        """Highest load since :meth:`reset_peak`."""
        return self._get(PEAK)

    @property
    def window_peak_bytes(self) -> int:
        """Highest load since :meth:`reset_window`."""
        return self._get(WINDOW)

    def reset_peak(self, least_bytes: int = 0) -> None:
        """Starts a new peak at the present load, or at more."""
        self._set(PEAK, max(self.used_bytes, least_bytes))

    def reset_window(self) -> None:
        """Starts a new window peak at the present load."""
        self._set(WINDOW, self.used_bytes)

    def limit(self, limit_bytes: int) -> None:
        """Refuses what goes beyond so many bytes from now on."""
        self._set(LIMIT, limit_bytes)

    def start_events(self) -> None:
        """Starts a new event log."""
        self._set(LOG_LENGTH, 0)
        self._set(LOGGING, 1)

    @property
    def event_count(self) -> int:
        """Events logged so far."""
        return self._get(LOG_LENGTH)

    def take_events(self) -> list[tuple[int, int]]:
        """Ends the log: ``(+id or -id, bytes)`` for each malloc and free."""
        self._set(LOGGING, 0)
        length = self._get(LOG_LENGTH)
        self._set(LOG_LENGTH, 0)
        log = (ctypes.c_int64 * (2 * length)).from_address(self._get(LOG))
        return list(zip(log[::2], log[1::2], strict=True))
