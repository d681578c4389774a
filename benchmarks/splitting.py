"""Training below the working set of single functions, measured on the host.

    python -m benchmarks run splitting --batch 8 --limit 380MB 340MB
        [--splitting exact any] [--cross-iteration states] [--iterations 7]

Trains ResNet-50 at 224x224 in each limit and mode: whether it trains, the seconds of
each iteration and its peak, the functions that ran in parts, and the in-core peak of
plain Chainer over the limit. The in-core peak is measured, too, unless it is given for
a batch that does not fit. Results are added to ``splitting.json`` in
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from benchmarks import common, saving

# isort: split
import chainer_hybridmem as hybridmem
from chainer_hybridmem.units import format_bytes, parse_bytes

ARCH = 'resnet50'
MODES: dict[str, bool | str] = {'off': False, 'exact': 'exact', 'any': True}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--batch', type=int, required=True)
    parser.add_argument('--limit', nargs='+', required=True)
    parser.add_argument('--splitting', nargs='+', choices=MODES, default=list(MODES))
    parser.add_argument('--cross-iteration', choices=('states', 'all'), default=False)
    parser.add_argument('--iterations', type=int, default=7)
    parser.add_argument('--in-core-bytes', type=int)


def main(options: argparse.Namespace) -> int:
    """Trains in every limit and mode, and saves what came of it."""
    peak = options.in_core_bytes or common.in_core_peak(ARCH, options.batch)[0]
    rows = _saved()
    for limit in options.limit:
        for mode in options.splitting:
            row = {
                'batch': options.batch,
                'in_core_peak_bytes': peak,
                'in_core_peak_is': 'given' if options.in_core_bytes else 'measured',
                'limit_bytes': parse_bytes(limit, 'limit'),
                'ratio': peak / parse_bytes(limit, 'limit'),
                'splitting': mode,
                'cross_iteration': options.cross_iteration,
                **run(options, parse_bytes(limit, 'limit'), MODES[mode]),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
            common.save('splitting', {'rows': rows})
    print(common.table(rows, COLUMNS))
    return 0


def run(options: argparse.Namespace, limit_bytes: int, mode: bool | str) -> Row:
    """One training run: figures of its iterations, or the error that ended it."""
    training = common.Training(ARCH, options.batch)
    iterations: list[Row] = []
    error = ''
    session = hybridmem.optimize(
        training.model,
        limit_bytes,
        splitting=mode,
        cross_iteration=options.cross_iteration,
    )
    try:
        with session:
            for _ in range(options.iterations):
                state = session.state
                training.step()
                session.finish_iteration()
                last = session.last_iteration()
                iterations.append(
                    {
                        'state': state,
                        'seconds': last['seconds'],
                        'peak_bytes': last['peak_bytes'],
                        'split': last['split'],
                        'split_inexact': last['split_inexact'],
                    }
                )
                print(json.dumps(iterations[-1]), flush=True)
    except hybridmem.HybridMemoryError as caught:
        error = str(caught)
    return {
        'losses': training.losses,
        'iterations': iterations,
        'state': session.state,
        'guided_seconds': session.statistics()['iteration_seconds'],
        'in_core_seconds': session.statistics()['in_core_seconds'],
        'error': error,
    }


def _saved() -> list[Row]:
    if not os.path.exists(saving.path('splitting', 'json')):
        return []
    rows: list[Row] = saving.read('splitting')['rows']
    return rows


COLUMNS = {
    'batch': str,
    'limit_bytes': format_bytes,
    'ratio': '{:.2f}'.format,
    'splitting': str,
    'cross_iteration': str,
    'state': str,
    'iterations': lambda iterations: str(len(iterations)),
    'error': lambda error: error[:60],
}
