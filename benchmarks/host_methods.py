"""Ito et al., Fig. 14, on the host device: measured next to predicted.

The paper's testbed trains ResNet-50 in-core at 316 images/s and copies 12 GB/s
each way: 38 MB of link per picture computed. Here the link is throttled to the
same ratio: bytes/s = 12e9 / 316 x (images/s of in-core ResNet-50 on this
machine, measured at the start of the run). All three networks use that link, as
they used one GPU and one bus.

    python -m benchmarks run host_methods [--arch NAME ...] [--iterations 3]
"""

from __future__ import annotations

import argparse
import time

from benchmarks import common, methods

LINK_BYTES_PER_PICTURE = 12e9 / 316


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--link-bandwidth', type=float, help='instead of measuring')
    parser.add_argument('--name', default='host_methods')


def main(options: argparse.Namespace) -> int:
    start, rows, tables = time.time(), [], []
    bandwidth = options.link_bandwidth
    for arch in options.arch:
        batchsize = common.HOST_BATCHES[arch]
        if bandwidth is None:
            reference = methods.in_core('resnet50', common.HOST_BATCHES['resnet50'],
                                        False, 3)  # fmt: skip
            rate = reference['batchsize'] / reference['iteration_seconds']
            bandwidth = LINK_BYTES_PER_PICTURE * rate
        first = methods.in_core(arch, batchsize, False, 3)
        limit = common.half_limit(arch, first['peak_bytes'], first['fixed_bytes'])
        print(f'{arch}: limit {limit} bytes, link {bandwidth:.3g} bytes/s', flush=True)
        found = methods.out_of_core(
            arch, batchsize, limit, bandwidth, False, options.iterations
        )
        rows += [first, *found]
        tables.append(methods.show([first, *found], first['iteration_seconds']))
        print(tables[-1], flush=True)
    body = {'link_bandwidth': bandwidth, 'rows': rows, 'tables': tables}
    common.save(options.name, {**body, 'seconds': time.time() - start})
    return 0
