"""What several reports and commands say in the same rows: names and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from chainer_hybridmem.planning.records.plan import FOR_REPLAYS, Action, Plan, Tier
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.rules import RuleCost
from chainer_hybridmem.reporting.tables import Row
from chainer_hybridmem.terminal import printable
from chainer_hybridmem.units import format_bytes, format_seconds

LANE_TITLES = {
    'compute': 'compute',
    'd2h': 'swap-out (device to host)',
    'h2d': 'swap-in (host to device)',
}
IN_CORE_PEAK = 'in-core peak'
IN_CORE_PEAK_IN_PARTS = 'in-core peak, functions in parts'


def in_core_row(plain_bytes: int | None, in_parts_bytes: int | None) -> tuple[str, str]:
    """A name and a value: plain Chainer's peak, or the one that is known instead.

    Args:
        plain_bytes: Of plain Chainer; None if the recording ran functions in parts.
        in_parts_bytes: With functions in parts as recorded; None before a recording.
    """
    if plain_bytes is None and in_parts_bytes is not None:
        return IN_CORE_PEAK_IN_PARTS, format_bytes(in_parts_bytes)
    return IN_CORE_PEAK, 'unknown' if plain_bytes is None else format_bytes(plain_bytes)


def times_rows(device: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Says which assumptions the times of a profile are from; nothing if it was run.

    Args:
        device: Of the profile.
    """
    model = device.get('model')
    if model is None:
        return []
    text = (
        f'device model {model}, convolution {device.get("convolution")}, '
        f'recompute {device.get("recompute")}'
    )
    match device:  # perhaps from a file of others
        case {
            'compute_factor': int() | float() as factor,
            'calibration': {
                'images_per_second': int() | float() as speed,
                'batchsize': int() as batchsize,
            },
        }:
            text += f', x {factor:.3f} for {speed:g} images/s at batch size {batchsize}'
    return [('times', printable(text))]


def sharing_rows(ranks: int, name: str = '  shared by') -> list[tuple[str, str]]:
    """Says whose the rates of a shared link are; nothing where it is not shared.

    Args:
        ranks: Processes on the link.
        name: Of the row.
    """
    if ranks == 1:
        return []
    return [(name, f'{ranks} processes; rates are of one while all copy')]


ALL_REDUCE = Row(
    'sum of gradients',
    '{all_reduce_seconds:seconds}, each process sends {exchanged_bytes:bytes}',
    'exchanged_bytes',
)
SOURCES = Row(FOR_REPLAYS, '{sources:map}, {source_bytes:bytes}', 'sources')
ACTIONS = tuple(
    Row(action.value, f'{{{action.value}:feature map}}, {{{action.value}_bytes:bytes}}')
    for action in Action
)
IN_PARTS = 'run in parts, of these not exact'


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


def as_table(profile: Profile, plan: Plan) -> str:
    """What happens to each feature map and source, in order of production.

    Returns:
        str: Lines ``layer :: operation -> action``, with ``@`` and the operation's
        number; several maps of one operation have a line each.
    """
    found = [(source.storage, FOR_REPLAYS) for source in plan.sources]
    for entry in plan.maps:
        disk = entry.action is Action.SWAP and entry.tier is Tier.DISK
        found.append((entry.storage, entry.action.value + ' to disk' * disk))
    storages = profile.storages
    found.sort(key=lambda row: (storages[row[0]].persistent, storages[row[0]].producer))
    rows = []
    for storage, action in found:
        layer, _, operation = storages[storage].label.rpartition('/')
        operation = f'{operation}@{storages[storage].producer}'
        rows.append((printable(layer or '/'), printable(operation), action))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return ''.join(
        f'{layer:<{widths[0]}} :: {operation:<{widths[1]}} -> {action}\n'
        for layer, operation, action in rows
    )
