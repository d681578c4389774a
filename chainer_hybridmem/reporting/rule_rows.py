"""What rules cost, for people."""

from __future__ import annotations

from collections.abc import Iterable

from chainer_hybridmem.records.rules import RuleCost
from chainer_hybridmem.units import format_bytes, format_seconds


def rule_rows(costs: Iterable[RuleCost]) -> list[tuple[str, str]]:
    """A name and a value for each rule: what it names, and what it costs."""
    return [(f'rule {cost.pattern}: {cost.says}', _value(cost)) for cost in costs]


def _value(cost: RuleCost) -> str:
    named = 'no feature map'
    if cost.maps:
        named = f'{cost.maps} feature maps, {format_bytes(cost.nbytes)}'
    if cost.seconds is None:
        return f'{named}; no plan is found without it'
    if cost.seconds <= 0:
        return f'{named}; costs nothing'
    return f'{named}; costs {format_seconds(cost.seconds)} ({cost.share:+.1%})'
