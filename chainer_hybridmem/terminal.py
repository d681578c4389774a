"""What reaches a terminal or a pipe: nothing that steers it, nothing that is not ours.

A name from a foreign file may hold escapes that move the cursor, and marks that turn
the order of letters around, so that a line tells something else than what is there.
Compiled libraries print lines of their own between those of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import unicodedata
from collections.abc import Iterator

_STEERING = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')  # Unicode's categories
_JOINERS = '\u200c\u200d'  # letters and emoji need them; they steer nothing


def printable(text: str, lines: bool = False) -> str:
    r"""Escapes control characters, marks of direction and separators of lines.

    Args:
        text: To be printed.
        lines: Whether it consists of lines, whose ends stay.

    >>> print(printable('conv\x1b[2J'))
    conv\x1b[2J
    """
    if text.isascii() and text.isprintable():
        return text
    return ''.join(
        character.encode('unicode_escape').decode()
        if _steers(character) and not (lines and character == '\n')
        else character
        for character in text
    )


def _steers(character: str) -> bool:
    return unicodedata.category(character) in _STEERING and character not in _JOINERS


_lock = threading.Lock()
_dropping: list[int | None] = []  # C's own stream, once for each that drops its lines


@contextlib.contextmanager
def c_output_dropped() -> Iterator[None]:
    """Drops what C code prints with ``printf`` meanwhile, in whichever thread.

    Some libraries print so whatever their options say. Python does not, and no file
    descriptor changes: what other threads write with Python arrives. Only glibc lets a
    program set its stream; with another C library nothing is dropped.
    """
    if not hasattr(ctypes.CDLL(None), 'gnu_get_libc_version'):
        yield
        return
    stream = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'stdout')
    with _lock:
        _dropping.append(_dropping[0] if _dropping else stream.value)
        stream.value = _sink() or stream.value
    try:
        yield
    finally:
        with _lock:
            own = _dropping.pop()
            if not _dropping:
                stream.value = own


@functools.cache
def _sink() -> int | None:
    """A stream of C into a few bytes of memory, which never ends."""
    fmemopen = ctypes.CDLL(None).fmemopen
    fmemopen.restype = ctypes.c_void_p
    sink: int | None = fmemopen(None, ctypes.c_size_t(64), b'w')
    return sink
