"""``hybrid`` against ``pooch`` on the host device, measured in turns.

The speed of a shared machine drifts by more than two good plans differ. So both follow
the same profile in one session and take turns, a few iterations each, in several
rounds; what counts is the median of the rounds' ratios.

    python -m benchmarks run pairs [--arch NAME ...] [--rounds 6]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common, methods

PLANNERS = ('pooch', 'hybrid')


def compare(
    arch: str, share: float, bandwidth: float, rounds: int, iterations: int
) -> dict[str, Any]:
    """Both planners on one network at a share of its in-core peak."""
    batchsize = common.HOST_BATCHES[arch]
    peak, fixed = common.in_core_peak(arch, batchsize)
    limit = common.half_limit(arch, peak, fixed)
    if arch != 'alexnet':
        limit = int(peak * share)
    training = common.Training(arch, batchsize)
    predicted: dict[str, float] = {}
    measured: dict[str, list[float]] = {name: [] for name in PLANNERS}
    with hybridmem.optimize(
        training.model, limit, 'hybrid', link_bandwidth=bandwidth, progress=sys.stderr
    ) as session:
        methods.settle(session, training)
        for _ in range(rounds):
            for name in PLANNERS:
                predicted[name] = session.replan(name).predicted_seconds
                for _ in range(iterations):
                    training.step()
                session.finish_iteration()
                measured[name].append(statistics.mean(session.iteration_times()))
    ratios = [p / h for p, h in zip(*measured.values(), strict=True)]
    return {
        'arch': arch,
        'batchsize': batchsize,
        'limit_bytes': limit,
        'link_bandwidth': bandwidth,
        'predicted_seconds': predicted,
        'measured_seconds': measured,
        'predicted_ratio': predicted['pooch'] / predicted['hybrid'],
        'measured_ratio': statistics.median(ratios),
        'ratios': ratios,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--share', type=float, default=0.5, help='of the peak')
    parser.add_argument('--link-bandwidth', type=float, default=72e6)
    parser.add_argument('--rounds', type=int, default=6)
    parser.add_argument('--iterations', type=int, default=2)


def main(options: argparse.Namespace) -> int:
    rows = []
    for arch in options.arch:
        rows.append(
            compare(
                arch,
                options.share,
                options.link_bandwidth,
                options.rounds,
                options.iterations,
            )
        )
        row = rows[-1]
        print(
            f'{arch}: pooch / hybrid predicted {row["predicted_ratio"]:.3f}, measured '
            f'{row["measured_ratio"]:.3f} (rounds '
            + ', '.join(f'{ratio:.3f}' for ratio in row['ratios'])
            + ')',
            flush=True,
        )
    common.save('host_pairs', {'rows': rows})
    return 0
