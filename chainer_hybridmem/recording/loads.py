"""The load of a sequence of mallocs and frees."""

from __future__ import annotations

from collections.abc import Iterable


def measure_load(changes: Iterable[int]) -> tuple[int, int]:
    """Highest load above the beginning, and the load at the end, in bytes.

    Args:
        changes: Bytes of each event, below zero for a free.
    """
    load = peak = 0
    for change in changes:
        load += change
        peak = max(peak, load)
    return peak, load
