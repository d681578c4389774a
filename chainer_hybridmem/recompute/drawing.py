"""Whether somebody has drawn random numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

WORDS = 624  # of a Mersenne Twister; its position follows them


def position() -> int:
    """Where NumPy's global generator is: another number once one was drawn.

    Takes a microsecond, where the whole state takes fifty. A number that the last draw
    of normal ones has left over is not seen.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return hash(repr(bits.state))
    state = (ctypes.c_uint32 * (WORDS + 1)).from_address(bits.ctypes.state_address)
    return int(state[0]) << 32 | int(state[WORDS])
