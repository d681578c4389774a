"""What to do next: what a little more memory would save, or what needs no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainer_hybridmem.reporting.page.prices import Prices
from chainer_hybridmem.units import format_enough

WORTH = 0.005  # of an iteration: less is nothing to change a limit for


def advise(
    prices: Prices,
    limit_bytes: int,
    seconds: float,
    in_core_seconds: float,
    planned: Sequence[dict[str, Any]],
) -> dict[str, Any] | None:
    """The change of the limit that saves most for each byte, else most bytes.

    Args:
        prices: At the limit.
        limit_bytes: The limit.
        seconds: Of an iteration at the limit.
        in_core_seconds: Of an iteration of plain Chainer.
        planned: Plans at other limits, as in :func:`.data.make_data`.

    Returns:
        dict or None: ``bytes`` and whether they are ``more`` or less; ``seconds`` that
        they save an iteration; the new ``limit`` as options have it; ``planner`` of the
        plan that shows it, None if the proven bound does. None if nothing is known that
        is worth a change.
    """
    fitting = [
        (
            row['memory_limit_bytes'] - limit_bytes,
            seconds - in_core_seconds * (1 + row['overhead']),
            row['planner'],
        )
        for row in planned
        if row['fits'] and row['overhead'] is not None
    ]
    worth = WORTH * seconds
    saving = [row for row in fitting if row[0] > 0 and row[1] > worth]
    if saving:
        chosen = max(saving, key=lambda row: row[1] / row[0])
    else:
        falls = prices.bound_seconds - prices.bound_with_more_seconds
        if falls > worth:
            chosen = prices.more_bytes, falls, None
        else:
            spare = [row for row in fitting if row[0] < 0 and row[1] >= -worth]
            if not spare:
                return None
            chosen = min(spare, key=lambda row: row[0])
    more_bytes, saved, planner = chosen
    return {
        'bytes': abs(more_bytes),
        'more': more_bytes > 0,
        'seconds': saved if more_bytes > 0 else 0.0,
        'limit': format_enough(limit_bytes + more_bytes).replace(' ', ''),
        'planner': planner,
    }
