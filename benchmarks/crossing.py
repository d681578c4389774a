"""What it is worth that optimizer states and parameters may leave.

    python -m benchmarks run crossing [--samples FOLDER] [--only NETWORK ...]

Networks, devices and speeds are those of ``combined.py``: CIFAR-10 shapes, batch 100, a
GTX 1080 Ti. Bisection finds the least load that ``hybrid`` reaches without overhead and
with little; once with feature maps only, once with optimizer states, once with
parameters as well. Writes ``crossing.json`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks import combined, common, pools
from chainer_hybridmem import make_plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem
from chainer_hybridmem.reporting.tables import table

Row = dict[str, Any]

HALVINGS = 8
KINDS: dict[str, bool | str] = {'maps': False, 'states': 'states', 'all': 'all'}
HEADERS = ('network', 'speed', 'may leave', 'no overhead', 'up to 15 %', 'least')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument(
        '--only', nargs='+', choices=combined.NETWORKS, default=['VGG16']
    )


def main(options: argparse.Namespace) -> int:
    """Runs the networks, writes the results, prints the table."""
    rows: list[Row] = []
    for arch in options.only:
        pair = common.recordings(
            f'benchmarks.cifar:{arch}', options.samples, pools.CIFAR_CLASSES
        )
        for speed, like in combined.estimators(options.samples).items():
            estimator = dataclasses.replace(like, samples=pair)
            for row in network(estimator.profile(pools.CIFAR_BATCH)):
                rows.append({'network': arch, 'speed': speed, **row})
                common.save('crossing', {'rows': rows})
    print(table(HEADERS, [_cells(row) for row in rows]))
    return 0


def network(profile: Profile) -> list[Row]:
    """The figures of one network by what may leave."""
    return [
        {
            'may_leave': name,
            'persistent_bytes': sum(s.nbytes for s in profile.persistent_storages()),
            **figures(make_problem(profile, kind)),
        }
        for name, kind in KINDS.items()
    ]


def figures(problem: Problem) -> Row:
    """The least loads of one problem, in bytes."""
    peak, least = problem.in_core_peak_bytes, least_memory(problem)[0]

    def overhead(limit_bytes: int) -> float:
        return make_plan(problem, limit_bytes, combined.PLANNER).overhead

    def least_with(most: float, high: int) -> int:
        return combined.halve(
            lambda limit: overhead(limit) <= most, least, high, HALVINGS
        )

    none = least_with(combined.NO_OVERHEAD, peak)
    return {
        'in_core_bytes': peak,
        'least_bytes': least,
        'no_overhead_bytes': none,
        'little_overhead_bytes': least_with(combined.LITTLE_OVERHEAD, none),
    }


def _cells(row: Row) -> list[str]:
    cuts = (
        f'{row[name] / 1e6:.0f} MB (-{1 - row[name] / row["in_core_bytes"]:.1%})'
        for name in ('no_overhead_bytes', 'little_overhead_bytes', 'least_bytes')
    )
    return [row['network'], row['speed'], row['may_leave'], *cuts]
