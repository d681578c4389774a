"""Counts the blocks of a counter and logs them, in native code."""

from __future__ import annotations

import functools

from numba import types

from chainer_hybridmem.devices import slab
from chainer_hybridmem.devices.host import counter_words as words
from chainer_hybridmem.devices.host import native_pages
from chainer_hybridmem.devices.host.native_pages import count_held
from chainer_hybridmem.devices.slab import load, store
from chainer_hybridmem.jit import compiled

_native = functools.partial(compiled, uses=(slab, words, native_pages))
_i64 = types.int64
_c_realloc = types.ExternalFunction('realloc', _i64(_i64, _i64))


@_native(types.void(_i64, _i64, _i64))
def log_event(counter: int, ident: int, size: int) -> None:
    """Appends a malloc, or a free with a negative id, to the log."""
    length, capacity = (
        load(counter + words.LOG_LENGTH),
        load(counter + words.LOG_CAPACITY),
    )
    if length == capacity:
        grown = _c_realloc(load(counter + words.LOG), capacity * 32)
        if grown == 0:
            store(counter + words.LOGGING, 0)
            return
        store(counter + words.LOG, grown)
        store(counter + words.LOG_CAPACITY, capacity * 2)
    entry = load(counter + words.LOG) + length * 16
    store(entry, ident)
    store(entry + 8, size)
    store(counter + words.LOG_LENGTH, length + 1)


@_native(_i64(_i64, _i64))
def count(counter: int, size: int) -> int:
    """Counts bytes in use; returns a new id."""
    ident = load(counter + words.NEXT_ID)
    store(counter + words.NEXT_ID, ident + 1)
    used = load(counter + words.USED) + size
    store(counter + words.USED, used)
    if used > load(counter + words.PEAK):
        store(counter + words.PEAK, used)
    if used > load(counter + words.WINDOW):
        store(counter + words.WINDOW, used)
    if used > load(counter + words.SAMPLE_PEAK):
        store(counter + words.SAMPLE_PEAK, used)
    return ident


@_native(types.void(_i64, _i64, _i64))
def uncount(counter: int, ident: int, size: int) -> None:
    """Takes counted bytes back."""
    store(counter + words.USED, load(counter + words.USED) - size)
    if load(counter + words.LOGGING) != 0:
        log_event(counter, -ident, size)


@_native(types.void(_i64, _i64, _i64))
def write_figures(counter: int, out: int, new_peak: int) -> None:
    """Writes what :meth:`.Counter.pool_figures` returns."""
    free = count_held(counter)
    used = load(counter + words.USED)
    store(out, used)
    store(out + 8, free)
    store(out + 16, load(counter + words.FROM_POOL))
    store(out + 24, load(counter + words.FROM_SYSTEM))
    store(out + 32, max(used, load(counter + words.SAMPLE_PEAK)))
    if new_peak != 0:
        store(counter + words.SAMPLE_PEAK, used)
