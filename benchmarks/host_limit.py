"""Host memory as a budget: less and less RAM for what is swapped, the rest on a disk.

ResNet-50 with half of the memory that lies above parameters, gradients and optimizer
state. Copies are throttled, those to and from the disk more: the kernel keeps files in
memory it has free, and a disk would seem as fast as RAM. Limits are shares of what the
planner swaps when there is none. Each row is a session of its own with the same data
and seed; what it has learnt is compared with plain Chainer.

    python -m benchmarks run host_limit [--batchsize N] [--planner NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common

# isort: split
import numpy as np

from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.units import format_bytes, format_seconds, parse_bandwidth

PLANNERS = ('swap-all', 'hybrid')
SHARES = (1.0, 0.5, 0.25, 0.0)
LEARNING = 20  # iterations at most until the plan is settled
COLUMNS = {
    'planner': str,
    'host limit': str,
    'disk': lambda there: 'yes' if there else 'no',
    's / iteration predicted': format_seconds,
    'measured': format_seconds,
    'error': lambda share: f'{share:+.1%}',
    'bound': format_seconds,
    'RAM predicted': format_bytes,
    'RAM measured': format_bytes,
    'disk predicted': format_bytes,
    'disk measured': format_bytes,
    'keep / swap / recompute': str,
    'same numbers': lambda same: 'yes' if same else 'NO',
}


def measure(options: argparse.Namespace, limit: int, row: dict[str, Any]) -> Any:
    """Trains in one session; puts its figures into the row and returns it."""
    training = common.Training('resnet50', options.batchsize, options.insize)
    with (
        tempfile.TemporaryDirectory() as folder,
        hybridmem.optimize(
            training.model,
            limit,
            planner=row['planner'],
            link_bandwidth=options.link_bandwidth,
            host_limit=row.get('host_limit_bytes'),
            swap_dir=folder if row['disk'] else None,
            disk_bandwidth=options.disk_bandwidth if row['disk'] else None,
        ) as session,
    ):
        for _ in range(LEARNING):
            training.step()
            if session.settled:
                break
        for _ in range(options.iterations):
            training.step()
    figures = session.statistics()
    measured = statistics.median(session.iteration_times()[-options.iterations :])
    row.update(
        {
            's / iteration predicted': figures['predicted_seconds'],
            'measured': measured,
            'error': figures['predicted_seconds'] / measured - 1,
            'bound': figures['lower_bound_seconds'],
            'RAM predicted': figures['predicted_host_bytes'],
            'RAM measured': figures['host_bytes'],
            'disk predicted': figures['predicted_disk_bytes'],
            'disk measured': figures['disk_bytes'],
            'keep / swap / recompute': ' / '.join(
                str(figures[action.value]) for action in Action
            ),
            'memory limit bytes': limit,
            'peak bytes': figures['guided_peak_bytes'],
            'evictions': figures['evictions'],
            'same numbers': same_numbers(training),
        }
    )
    return session


def same_numbers(training: common.Training) -> bool:
    """Whether plain Chainer has the same losses and parameters after as many steps."""
    pictures = training.batch[0]
    plain = common.Training('resnet50', len(pictures), pictures.shape[-1])
    for _ in training.losses:
        plain.step()
    pairs = zip(plain.model.params(), training.model.params(), strict=True)
    return plain.losses == training.losses and all(
        np.array_equal(one.array, other.array) for one, other in pairs
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--batchsize', type=int, default=4)
    parser.add_argument('--insize', type=int, default=96)
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--planner', nargs='+', default=PLANNERS)
    parser.add_argument('--link-bandwidth', default='75MB/s')
    parser.add_argument('--disk-bandwidth', default='15MB/s')


def main(options: argparse.Namespace) -> int:
    """Prints a table and writes ``results/host_limit.json``."""
    peak, fixed = common.in_core_peak('resnet50', options.batchsize, options.insize)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> int:
        session = measure(options, (peak + fixed) // 2, row)
        rows.append(row)
        print(common.table(rows[-1:], COLUMNS).splitlines()[-1], file=sys.stderr)
        return int(session.plan.action_bytes(session.profile, Action.SWAP))

    for planner in options.planner:
        swapped = add({'planner': planner, 'host limit': 'none', 'disk': False})
        for share in SHARES:
            limited = {
                'planner': planner,
                'host limit': f'{share:.0%}',
                'host_limit_bytes': int(swapped * share),
            }
            add({**limited, 'disk': True})
    print(common.table(rows, COLUMNS))
    common.save(
        'host_limit',
        {
            'network': 'resnet50',
            'batchsize': options.batchsize,
            'insize': options.insize,
            'in_core_peak_bytes': peak,
            'link_bytes_per_second': parse_bandwidth(options.link_bandwidth),
            'disk_bytes_per_second': parse_bandwidth(options.disk_bandwidth),
            'rows': rows,
        },
    )
    return 0
