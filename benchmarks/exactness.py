"""Bit-equality with in-core training at half the memory, for every planner.

One session per network: it profiles, then each planner's plan is followed for
some iterations. Beside it a second process trains the same with plain Chainer, the
package not active. After every iteration a hash over loss, parameters, gradients and
batch-normalization statistics must be the same, and at the end the random
number generators must stand at the same place.

    python -m benchmarks run exactness [--arch NAME ...] [--iterations 5]
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from typing import Any

import numpy as np

import chainer_hybridmem as hybridmem
from benchmarks import catalogue, common
from chainer_hybridmem.planning.planners import PLANNERS
from chainer_hybridmem.training.chainer_access.snapshots import snapshot

LINK = 150e6  # bytes per second, each way
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 5.0},
    'manual': {'actions': {'*': 'swap'}},
}
# Static rules, which need what they need.
MAY_NOT_FIT = ('in-core', 'vdnn-all', 'vdnn-conv', 'checkpoint-sqrt')
MAY_NOT_FIT += ('checkpoint-speed', 'checkpoint-dp', 'checkpoint-dp-exact')


def digest(training: common.Training) -> str:
    """Hash over everything an iteration may change."""
    everything = snapshot(training.model, np.float64(training.losses[-1]))
    return hashlib.sha256(repr(everything).encode()).hexdigest()


def random_state() -> str:
    """Where NumPy's random number generator stands."""
    return hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest()


def plain(arch: str, batchsize: int) -> int:
    """One iteration of plain Chainer for each line read; prints its hash."""
    training = common.Training(arch, batchsize)
    for _ in sys.stdin:
        training.step()
        print(digest(training), flush=True)
    print(random_state(), flush=True)
    return 0


def run(arch: str, batchsize: int, iterations: int) -> list[dict[str, Any]]:
    """Rows of the table for one network."""
    peak, fixed = common.in_core_peak(arch, batchsize)
    limit = common.half_limit(arch, peak, fixed)
    reference = subprocess.Popen(
        [*catalogue.command('exactness'), '--plain', arch],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reference.stdin is not None
    training = common.Training(arch, batchsize)
    hashes, rows = [], []

    def step() -> None:
        reference.stdin.write('step\n')
        reference.stdin.flush()
        training.step()
        hashes.append(digest(training))

    # Slow enough that planners recompute instead of swapping everything.
    with hybridmem.optimize(
        training.model, limit, planner='swap-all', link_bandwidth=LINK
    ) as session:
        while session.profile is None:
            step()
        for planner in PLANNERS:
            row = {'arch': arch, 'batchsize': batchsize, 'planner': planner}
            row |= {'in_core_peak_bytes': peak, 'limit_bytes': limit}
            try:
                session.replan(planner, **OPTIONS.get(planner, {}))
            except hybridmem.InfeasibleError as error:
                rows.append({**row, 'fits': False, 'why': str(error), 'peak_bytes': 0})
                continue
            for _ in range(iterations):
                step()
            figures = session.statistics()
            row |= {'fits': True, 'last': len(hashes), 'iterations': iterations}
            for key in ('predicted_peak_bytes', 'keep', 'swap', 'recompute'):
                row[key] = figures[key]
            rows.append({**row, 'peak_bytes': figures['peak_bytes']})
    hashes.append(random_state())
    expected = reference.communicate()[0].split()
    if len(expected) != len(hashes):
        raise SystemExit(f'the plain run of {arch} failed')
    for row in rows:
        last = row.get('last', 0)
        same = expected[:last] == hashes[:last] and expected[-1] == hashes[-1]
        row['exact'] = row['fits'] and same
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--iterations', type=int, default=5)
    parser.add_argument('--plain', help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    if options.plain:
        return plain(options.plain, common.HOST_BATCHES[options.plain])
    rows = []
    start = time.time()
    for arch in options.arch:
        rows += run(arch, common.HOST_BATCHES[arch], options.iterations)
        shown = [r for r in rows if r['arch'] == arch]
        mib = lambda value: f'{value / 2**20:.1f} MiB'  # noqa: E731
        print(
            common.table(
                shown,
                {
                    'arch': str,
                    'planner': str,
                    'limit_bytes': mib,
                    'peak_bytes': mib,
                    'fits': str,
                    'exact': str,
                },
            ),
            flush=True,
        )
    common.save('host_exactness', {'rows': rows, 'seconds': time.time() - start})
    # What fits must be exact, and in-core training must be refused.
    wrong = [r for r in rows if r['fits'] != r['exact']]
    wrong += [r for r in rows if r['fits'] and r['planner'] == 'in-core']
    wrong += [r for r in rows if not r['fits'] and r['planner'] not in MAY_NOT_FIT]
    over = [r for r in rows if r['peak_bytes'] > r['limit_bytes']]
    return 1 if wrong or over else 0
