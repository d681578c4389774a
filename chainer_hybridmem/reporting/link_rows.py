"""How the link is shared, for reports and commands."""

from __future__ import annotations


def sharing_rows(ranks: int, name: str = '  shared by') -> list[tuple[str, str]]:
    """Says whose the rates of a shared link are; nothing where it is not shared.

    Args:
        ranks: Processes on the link.
        name: Of the row.
    """
    if ranks == 1:
        return []
    return [(name, f'{ranks} processes; rates are of one while all copy')]
