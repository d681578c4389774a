"""Bit-equality with in-core training at half the memory, for every planner.

One session per network: it profiles, then each planner's plan is followed for
some iterations. A second run of plain Chainer, without the package active,
makes the reference. After every iteration a hash over loss, parameters,
gradients and batch-normalization statistics must be the same, and afterwards
the random number generator must stand at the same place.

    python benchmarks/exactness.py [--arch NAME ...] [--iterations 5]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import common
import numpy as np

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planners import PLANNERS


def digest(training: common.Training) -> str:
    """Hash over everything an iteration may change."""
    result = hashlib.sha256(np.float64(training.losses[-1]).tobytes())
    for name, parameter in sorted(training.model.namedparams()):
        result.update(name.encode())
        result.update(np.ascontiguousarray(parameter.array))
        result.update(np.ascontiguousarray(parameter.grad))
    for name, link in sorted(training.model.namedlinks()):
        for persistent in sorted(link._persistent):
            result.update(f'{name}.{persistent}'.encode())
            result.update(np.ascontiguousarray(getattr(link, persistent)))
    return result.hexdigest()


def run(arch: str, batchsize: int, iterations: int) -> list[dict[str, Any]]:
    """Rows of the table for one network."""
    peak, fixed = common.in_core_peak(arch, batchsize)
    limit = common.half_limit(arch, peak, fixed)
    training = common.Training(arch, batchsize)
    hashes, rows = [], []

    def step() -> None:
        training.step()
        hashes.append(digest(training))

    refused = False
    with hybridmem.optimize(training.model, limit, planner='swap-all') as session:
        while session.profile is None:
            step()
        for planner in PLANNERS:
            row: dict[str, Any] = {'arch': arch, 'batchsize': batchsize}
            row |= {'planner': planner, 'in_core_peak_bytes': peak}
            row |= {'limit_bytes': limit, 'first': len(hashes)}
            try:
                session.replan(planner)
            except hybridmem.InfeasibleError as error:
                refused |= planner == 'in-core'
                rows.append({**row, 'fits': False, 'why': str(error)})
                continue
            for _ in range(iterations):
                step()
            figures = session.statistics()
            row |= {'fits': True, 'last': len(hashes)}
            row |= {
                key: figures[key]
                for key in ('predicted_peak_bytes', 'keep', 'swap', 'recompute')
            }
            row['peak_bytes'] = session.statistics()['peak_bytes']
            rows.append(row)
    state = np.random.get_state()[1].tobytes()
    reference = common.Training(arch, batchsize)
    for row in rows:
        row['exact'] = row['fits']
    for position, value in enumerate(hashes):
        reference.step()
        same = digest(reference) == value
        for row in rows:
            if row['fits'] and position < row['last'] and not same:
                row['exact'] = False
    same_state = np.random.get_state()[1].tobytes() == state
    for row in rows:
        row['exact'] = row['exact'] and same_state
        row['iterations'] = iterations
    assert refused, 'in-core training should not fit half of its own peak'
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--iterations', type=int, default=5)
    options = parser.parse_args()
    rows = []
    start = time.time()
    for arch in options.arch:
        rows += run(arch, common.HOST_BATCHES[arch], options.iterations)
        shown = [r for r in rows if r['arch'] == arch]
        for row in shown:
            row.setdefault('peak_bytes', 0)
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
    wrong = [r for r in rows if r['fits'] and not r['exact']]
    over = [r for r in rows if r['peak_bytes'] > r['limit_bytes']]
    return 1 if wrong or over else 0


if __name__ == '__main__':
    raise SystemExit(main())
