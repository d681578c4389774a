"""Rows of the linear program, and sums over the operations that become rows."""

from __future__ import annotations

from typing import Any

import numpy as np

Row = tuple[np.ndarray, np.ndarray, float]
"""Columns, values and right side of ``sum(values * x[columns]) <= right``."""


def make_row(columns: Any, values: Any, right: float) -> Row:
    """A row of plain arrays."""
    return np.asarray(columns, np.int64), np.asarray(values, float), float(right)


class Events:
    """Changes of a sum over the operations.

    Args:
        parts (list): Positions, columns and values of changes: from the position on
            the sum is higher by the value times the column.
        slots (list or None): Per part, a second position of each change.
    """

    def __init__(
        self,
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        slots: list[np.ndarray] | None = None,
    ) -> None:
        position, column, value = (
            np.concatenate([part[i] for part in parts]) for i in range(3)
        )
        order = np.argsort(position, kind='stable')
        self.position, self.column = position[order], column[order]
        self.value = value[order].astype(float)
        self.slot = np.concatenate(slots)[order] if slots else self.position

    def sums(self, x: np.ndarray, n: int) -> np.ndarray:
        """(n,) the sum at every operation."""
        changes = np.bincount(
            self.position, self.value * x[self.column], minlength=n + 1
        )
        return np.cumsum(changes)[:n]

    def amounts(
        self, x: np.ndarray, n: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pointers by position, slots and values times columns."""
        pointers = np.searchsorted(self.position, np.arange(n + 1))
        return pointers, self.slot, self.value * x[self.column]

    def between(self, positions: np.ndarray, first: int) -> list[Row]:
        """Equations that make ``first + k`` the sum at every one of the positions."""
        ends = np.searchsorted(self.position, positions, side='right')
        rows: list[Row] = []
        begin, before = 0, -1
        for k, end in zip(positions.tolist(), ends.tolist(), strict=True):
            others = [first + k] if before < 0 else [first + k, first + before]
            signs = [1.0, -1.0][: len(others)]
            columns = np.concatenate([others, self.column[begin:end]])
            values = np.concatenate([signs, -self.value[begin:end]])
            rows.append(make_row(columns, values, 0))
            begin, before = end, k
        return rows
