"""Prints names from foreign files: characters that steer a terminal are escaped.

A name may hold escapes that move the cursor, and marks that turn the order of letters
around, so that a line tells something else than what is there.
"""

from __future__ import annotations

import unicodedata

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
