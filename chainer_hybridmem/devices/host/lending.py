"""One who counts NumPy's allocations may let another one count for a while.

A test that measures its peak may train in a session, whose device counts and limits.
"""

from __future__ import annotations

import contextvars
from typing import Protocol

from chainer_hybridmem.devices.ports import Memory


class Lender(Protocol):
    """Counts until another memory is installed, and after that one is uninstalled."""

    guest: Memory | None

    def lend(self, guest: Memory) -> None:
        """The guest counts from now on."""

    def take_back(self) -> None:
        """The guest counts no more."""


_lender: contextvars.ContextVar[Lender | None] = contextvars.ContextVar(
    'hybridmem_lender', default=None
)


def offer(lender: Lender | None) -> None:
    """From now on memories that are installed in this context are its guests.

    Args:
        lender: It counts already. None ends this.
    """
    _lender.set(lender)


def lend(guest: Memory) -> bool:
    """Whether what counts in this context lets a guest count."""
    lender = _lender.get()
    if lender is None or lender.guest is not None:
        return False
    lender.lend(guest)
    return True


def take_back(guest: Memory) -> None:
    """The guest has been uninstalled, if it has been one."""
    lender = _lender.get()
    if lender is not None and lender.guest is guest:
        lender.take_back()
