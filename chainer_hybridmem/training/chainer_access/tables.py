"""What Chainer's ``LogReport`` and ``PrintReport`` make of observations.

Bytes are printed as people read them, and of peaks the highest counts.
"""

from __future__ import annotations

import collections
from typing import Any

from chainer.reporter import Summary
from chainer.training import extensions

from chainer_hybridmem.units import format_bytes


class SizeTemplate:
    """Stands in for the format of a column.

    Args:
        blank: What the column prints where there is no value; as wide as it.
    """

    def __init__(self, blank: str) -> None:
        self._width = len(blank)

    def format(self, value: Any) -> str:
        """Bytes such as ``'497.3 MiB'``, as wide as the column."""
        return f'{format_bytes(float(value)):<{self._width - 2}}  '


def print_sizes(trainer: Any, prefix: str) -> None:
    """Has the tables of a trainer print entries in bytes with a unit.

    Args:
        trainer: With its extensions.
        prefix: Entries that begin with it and end in ``_bytes`` are meant.
    """
    for entry in trainer._extensions.values():
        table = entry.extension
        if isinstance(table, extensions.PrintReport):
            table._templates = [
                (name, SizeTemplate(blank), blank)
                if name.startswith(prefix) and name.endswith('_bytes')
                else (name, template, blank)
                for name, template, blank in table._templates
            ]


class Highest(Summary):
    """Of several values the highest, where others have their mean."""

    _x: Any
    _x2: Any
    _n: Any

    def add(self, value: Any, weight: Any = 1) -> None:
        """Takes a value; each counts as much, whatever its weight."""
        if not self._n or value > self._x:
            self._x, self._x2, self._n = value, value * value, 1


class _Summaries(collections.defaultdict[str, Summary]):
    """Makes the summary of each entry that it is asked for."""

    def __init__(self, highest: str, known: dict[str, Summary]) -> None:
        super().__init__(Summary, known)
        self._highest = highest
        if highest in known:  # of a snapshot
            vars(self.__missing__(highest)).update(vars(known[highest]))

    def __missing__(self, name: str) -> Summary:
        self[name] = Highest() if name == self._highest else Summary()
        return self[name]


def log_highest(trainer: Any, name: str) -> None:
    """Has the logs of a trainer tell the highest value of an entry, not the mean.

    A log begins anew with each of its lines: called in every iteration, before it.

    Args:
        trainer: With its extensions.
        name: Of the entry.
    """
    for entry in trainer._extensions.values():
        log = entry.extension
        if isinstance(log, extensions.LogReport):
            summary = log._summary
            if not isinstance(summary._summaries, _Summaries):
                summary._summaries = _Summaries(name, summary._summaries)
