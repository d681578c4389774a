"""Which algorithms convolutions choose while they run for the first time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from chainer_hybridmem.training.cudnn import constants, convolutions

_KINDS = {
    'forward': 'FWD',
    'backward data': 'BWD_DATA',
    'backward filter': 'BWD_FILTER',
}
Choice = dict[str, Any]


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """What is chosen meanwhile, beside the fastest one of any workspace.

    A heuristic tells no times: -1 millisecond.
    """
    choices: list[Choice] = []
    former = convolutions._choose

    def choose(asked: Any, found: Sequence[Any]) -> Any:
        chosen = former(asked, found)
        choices.append(_describe(asked, chosen, found))
        return chosen

    convolutions._choose = choose
    try:
        yield choices
    finally:
        convolutions._choose = former


def _describe(asked: Any, chosen: Any, found: Sequence[Any]) -> Choice:
    working = [one for one in found if one.status == constants.CUDNN_STATUS_SUCCESS]
    first = working[0]
    mine = next(
        one
        for one in working
        if one.algorithm == chosen[0] and one.workspace_bytes == chosen[1]
    )
    return {
        'operation': asked.operation,
        'shapes': asked.arrays,
        'algorithm': _name(asked.operation, mine.algorithm),
        'workspace_bytes': mine.workspace_bytes,
        'milliseconds': mine.milliseconds,
        'fastest': _name(asked.operation, first.algorithm),
        'fastest_workspace_bytes': first.workspace_bytes,
        'fastest_milliseconds': first.milliseconds,
        'math': mine.math,
    }


def _name(operation: str, algorithm: int) -> str:
    start = f'CUDNN_CONVOLUTION_{_KINDS[operation]}_ALGO_'
    names = {
        value: name.removeprefix(start)
        for name, value in vars(constants).items()
        if name.startswith(start)
    }
    return names.get(algorithm, str(algorithm))


def sum_up(choices: Sequence[Choice]) -> dict[str, Any]:
    """How many convolutions take which algorithm, and what the workspace refuses.

    Nothing if all had been chosen before.
    """
    if not choices:
        return {}
    refused = [
        choice
        for choice in choices
        if choice['workspace_bytes'] < choice['fastest_workspace_bytes']
    ]
    counts = Counter(f'{c["operation"]}: {c["algorithm"]}' for c in choices)
    wanted = (choice['fastest_workspace_bytes'] for choice in refused)
    return {
        'convolutions': len(choices),
        'algorithms': dict(sorted(counts.items())),
        'largest_workspace_bytes': max(c['workspace_bytes'] for c in choices),
        'refused': len(refused),
        'largest_refused_bytes': max(wanted, default=0),
    }
