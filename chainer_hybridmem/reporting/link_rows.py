"""How processes share a link and gradients, for reports and commands."""

from __future__ import annotations

from chainer_hybridmem.units import format_bytes, format_seconds


def sharing_rows(ranks: int, name: str = '  shared by') -> list[tuple[str, str]]:
    """Says whose the rates of a shared link are; nothing where it is not shared.

    Args:
        ranks: Processes on the link.
        name: Of the row.
    """
    if ranks == 1:
        return []
    return [(name, f'{ranks} processes; rates are of one while all copy')]


def all_reduce_rows(seconds: float, exchanged_bytes: int) -> list[tuple[str, str]]:
    """Says what the sum of gradients takes; nothing where no process sends any.

    Args:
        seconds: Of an iteration.
        exchanged_bytes: What each process sends to others, and receives.
    """
    if not exchanged_bytes:
        return []
    sent = f'each process sends {format_bytes(exchanged_bytes)}'
    return [('sum of gradients', f'{format_seconds(seconds)}, {sent}')]
