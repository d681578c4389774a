"""The table that Chainer's ``PrintReport`` prints: bytes as people read them."""

from __future__ import annotations

from typing import Any

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
