"""The emulator from Python: figures, when queued work runs, failures, races."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from typing import Any

COUNTERS = (
    *('launch', 'malloc', 'free', 'host_malloc', 'host_free', 'query', 'not_ready'),
    *('event_create', 'event_destroy', 'synchronize', 'copy', 'compile', 'elapsed'),
    *('elapsed_not_ready', 'generator_create', 'race'),
)  # in the order of core.h

_library = ctypes.CDLL(os.environ['EMU_LIBRARY'])
for _name in ('emu_device_bytes', 'emu_device_peak', 'emu_host_bytes'):
    getattr(_library, _name).restype = ctypes.c_size_t
_library.emu_synchronous_bytes.restype = ctypes.c_longlong
_library.emu_fail.argtypes = (ctypes.c_int, ctypes.c_long)


def counters() -> dict[str, int]:
    """Calls so far, by kind."""
    values = (ctypes.c_long * len(COUNTERS))()
    _library.emu_counts(values)
    return dict(zip(COUNTERS, values, strict=True))


def device_bytes() -> int:
    """Bytes of ``cudaMalloc`` on the current device that have not been freed."""
    return int(_library.emu_device_bytes())


def take_device_peak() -> int:
    """Most of these since this was last called."""
    return int(_library.emu_device_peak())


def host_bytes() -> int:
    """Bytes of pinned memory."""
    return int(_library.emu_host_bytes())


def synchronous_bytes() -> int:
    """Bytes copied to pageable memory, for which the program has waited."""
    return int(_library.emu_synchronous_bytes())


def schedule(mode: str, seed: int = 0) -> None:
    """From now on queued work runs ``eager``, ``lazy`` or ``random``."""
    _library.emu_schedule(mode.encode(), seed)


def fail(kind: str, call: int) -> None:
    """Lets a call fail once: the ``call``-th from now, from 1; 0 calls it off.

    Args:
        kind: ``'malloc'``, ``'host_malloc'``, ``'copy'`` or ``'launch'``.
        call: Its number.
    """
    _library.emu_fail(COUNTERS.index(kind), call)


# -- races -------------------------------------------------------------------------
_places: list[str] = ['unknown']
_numbers: dict[tuple[Any, ...], int] = {}


def place(number: int) -> str:
    """Where the program was when it issued something: what the emulator numbers."""
    return _places[number]


def _find_place() -> int:
    frames = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 8:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    key = tuple(frames)
    if key not in _numbers:
        _numbers[key] = len(_places)
        stack = traceback.extract_stack(sys._getframe(1), limit=8)
        _places.append(''.join(traceback.format_list(stack)))
    return _numbers[key]


def watch_places() -> None:
    """Finds out where races come from; with ``EMU_RACES=1``."""
    global _callback
    _callback = ctypes.CFUNCTYPE(ctypes.c_int)(_find_place)
    _library.emu_find_places(_callback)


_callback: Any = None
