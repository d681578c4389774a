"""How many threads NumPy's matrix products run in: their bits depend on that."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

Threads = tuple[int, ...]  # of each library of BLAS in the process


@functools.cache
def _find_libraries() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().lib_controllers
    return [library for library in found if library.user_api == 'blas']


def count_threads() -> Threads:
    """The number of threads of each library."""
    return tuple([library.get_num_threads() for library in _find_libraries()])


@contextlib.contextmanager
def use_threads(threads: Threads) -> Iterator[None]:
    """Has products computed with as many threads as at another moment.

    Args:
        threads: From :func:`count_threads`; empty for those there are now.
    """
    now = count_threads() if threads else threads
    if now == threads:
        yield
        return
    _set_threads(threads)
    try:
        yield
    finally:
        _set_threads(now)


def _set_threads(threads: Threads) -> None:
    for library, number in zip(_find_libraries(), threads, strict=True):
        library.set_num_threads(number)
