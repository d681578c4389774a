"""What reaches a terminal or a pipe: nothing that steers it, nothing that is not ours.

A name from a foreign file may hold escapes that move the cursor, and marks that turn
the order of letters around, so that a line tells something else than what is there.
Compiled libraries print lines of their own between those of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
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


@contextlib.contextmanager
def c_output_on_stderr() -> Iterator[None]:
    """Diverts what C code prints on standard output to standard error meanwhile.

    Standard output belongs to the program, which may print JSON there; some libraries
    print with ``printf`` whatever their options say. Where the process has no standard
    output or error, nothing is diverted.
    """
    flush = ctypes.CDLL(None).fflush
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        flush(None)  # what C has printed before stays where it belongs
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        flush(None)  # C keeps what it prints to a pipe until then
        os.dup2(kept, 1)
        os.close(kept)
