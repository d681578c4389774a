"""Arrays that were made before a device was installed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class AdoptedArrays:
    """Counts such arrays until they die.

    Args:
        count: Counts so many bytes; returns an id.
        uncount: Takes an id and its bytes back.

    Attributes:
        nbytes (int): Of those that live.
    """

    def __init__(
        self, count: Callable[[int], int], uncount: Callable[[int, int], None]
    ) -> None:
        self.nbytes = 0
        self._count = count
        self._uncount = uncount
        self._known: dict[int, tuple[int, Any]] = {}  # id and reference, by address

    def ident_at(self, address: int) -> int:
        """Id of the memory that begins at an address; 0 if it is not adopted."""
        known = self._known.get(address)
        return 0 if known is None else known[0]

    def add(self, address: int, owner: Any, nbytes: int) -> None:
        """Counts memory for as long as its owner lives.

        Args:
            address: Of its first byte.
            owner: Can be referred to weakly; dies before the memory is freed.
            nbytes: Its size.
        """

        def died(_: Any) -> None:
            # Runs before the memory is freed, so the address is not in use.
            known = self._known.pop(address, None)
            if known is not None:
                self.nbytes -= nbytes
                self._uncount(known[0], nbytes)

        ident = self._count(nbytes)
        self.nbytes += nbytes
        self._known[address] = ident, weakref.ref(owner, died)

    def clear(self) -> None:
        """Forgets all arrays; what they hold stays counted."""
        self._known.clear()
