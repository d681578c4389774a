"""What a session costs when everything fits: plain Chainer against in-core.

Both train the same network in turns in one process, so that a machine whose
speed drifts is unfair to neither; medians and their ratio are reported.

    python -m benchmarks run overhead [--arch resnet50] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

import chainer_hybridmem as hybridmem
from benchmarks import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--iterations', type=int, default=3)


def main(options: argparse.Namespace) -> int:
    rows = []
    for arch in options.arch:
        batchsize = common.HOST_BATCHES[arch]
        plain, ours = [], []
        one = common.Training(arch, batchsize)
        two = common.Training(arch, batchsize)
        one.step()
        for _ in range(options.rounds):
            for _ in range(options.iterations):
                start = time.perf_counter()
                one.step()
                plain.append(time.perf_counter() - start)
            with hybridmem.optimize(two.model, '1TB'):
                for _ in range(options.iterations):
                    start = time.perf_counter()
                    two.step()
                    ours.append(time.perf_counter() - start)
        rows.append(
            {
                'arch': arch,
                'batchsize': batchsize,
                'plain_seconds': statistics.median(plain),
                'session_seconds': statistics.median(ours),
                'ratio': statistics.median(ours) / statistics.median(plain),
                'all_plain': plain,
                'all_session': ours,
            }
        )
        print(
            common.table(
                rows[-1:],
                {
                    'arch': str,
                    'batchsize': str,
                    'plain_seconds': '{:.3f}'.format,
                    'session_seconds': '{:.3f}'.format,
                    'ratio': '{:.3f}'.format,
                },
            ),
            flush=True,
        )
    common.save('host_overhead', {'rows': rows})
    return 0
