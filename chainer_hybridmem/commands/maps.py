"""Feature maps one by one: as a table, and with actions that people choose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.reporting.tables import table
from chainer_hybridmem.units import format_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.records.plan import Plan
    from chainer_hybridmem.simulation import Problem

EXPECTED = (
    'an object with an action for each pattern was expected, such as '
    '{"*Convolution2DFunction": "swap"}'
)
HEADERS = ('feature map', 'size', 'made', 'read in backward', 'recompute', 'action')


def read_actions(path: str) -> dict[str, str]:
    """A JSON file with an action for each pattern, for planner ``manual``.

    Raises:
        FormatError: If the file is missing or holds something else.
    """
    text = files.read_text(path)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f'{path} is not JSON ({error}); {EXPECTED}.') from error
    if not isinstance(body, dict):
        raise FormatError(f'{path} holds {type(body).__name__}; {EXPECTED}.')
    return body


def map_figures(problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    """The figures of each feature map, in order of production."""
    from chainer_hybridmem.records.plan import Action

    return [
        {
            'storage': storage.id,
            'label': storage.label,
            'bytes': storage.nbytes,
            'producer': storage.producer,
            'backward_uses': list(storage.backward_uses),
            'recomputable': bool(recomputable),
            'action': entry.action.value,
            'tier': entry.tier.value if entry.action is Action.SWAP else None,
        }
        for storage, recomputable, entry in zip(
            problem.maps, problem.recomputable, plan.maps, strict=True
        )
    ]


def map_table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures for people; operations are numbers."""
    return table(
        HEADERS,
        [
            [
                row['label'],
                format_bytes(row['bytes']),
                f'@{row["producer"]}',
                ', '.join(str(k) for k in row['backward_uses']),
                'yes' if row['recomputable'] else 'no',
                row['action'] + (' to disk' if row['tier'] == 'disk' else ''),
            ]
            for row in rows
        ],
    )
