"""How native code asks Python for space."""

from __future__ import annotations

import ctypes
import signal
import weakref
from collections.abc import Callable

import llvmlite.binding

from chainer_hybridmem.errors import without_frames

SYMBOL = 'chainer_hybridmem_reclaim'  # by which native code finds the callback


class Reclaimer:
    """Makes space when a block does not fit.

    Args:
        reclaim: Called with the bytes missing.

    Attributes:
        error (BaseException or None): What ``reclaim`` has raised last.
    """

    def __init__(self, reclaim: Callable[[int], None]) -> None:
        self.reclaim = reclaim
        self.error: BaseException | None = None

    def serve(self, address: int) -> None:
        """Native code asks this reclaimer for the counter at an address."""
        _reclaimers[address] = weakref.ref(self)


_reclaimers: dict[int, weakref.ref[Reclaimer]] = {}


def _call_reclaim(address: int, missing_bytes: int) -> int:
    """Entered from native code; nothing may be raised from here.

    Returns:
        int: A signal that is to come again once NumPy has its block, or 0: what
        Ctrl-C raises here would be lost.
    """
    signal_number = 0
    reference = _reclaimers.get(address)
    reclaimer = reference() if reference is not None else None
    while reclaimer is not None:
        reclaimer.error = None
        try:
            reclaimer.reclaim(missing_bytes)
        except KeyboardInterrupt as error:
            reclaimer.error = without_frames(error)
            if not signal_number:  # the second time it must be meant
                signal_number = signal.SIGINT
                continue
        except BaseException as error:
            reclaimer.error = without_frames(error)
        break
    return signal_number


_callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(
    _call_reclaim
)
llvmlite.binding.add_symbol(SYMBOL, ctypes.cast(_callback, ctypes.c_void_p).value)
