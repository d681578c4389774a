"""The same tables as ``host_methods.py`` on an NVIDIA GPU with a small limit.

In-core figures come first, without a limit, as the card has enough memory; then
the same batch under the limit.

    python benchmarks/gpu/methods_on_gpu.py --memory-limit 16GiB
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import common
import methods

from chainer_hybridmem.units import parse_bytes

BATCHES = {'resnet50': 256, 'googlenet': 512, 'alexnet': 2048}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--arch', nargs='+', default=list(BATCHES))
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.0, help='of the batches')
    options = parser.parse_args()
    start, rows, tables, failures = time.time(), [], [], []
    limit = parse_bytes(options.memory_limit)
    for arch in options.arch:
        batchsize = max(1, int(BATCHES[arch] * options.scale))
        try:
            first = methods.in_core(arch, batchsize, True, 5)
            rows.append(first)
            found = methods.out_of_core(
                arch, batchsize, limit, None, True, options.iterations
            )
        except Exception:
            # One network must not cost the others their time on a GPU.
            failures.append({'arch': arch, 'traceback': traceback.format_exc()})
            traceback.print_exc()
            continue
        rows += found
        tables.append(methods.show([first, *found], first['iteration_seconds']))
        print(tables[-1], flush=True)
    body = {'limit_bytes': limit, 'rows': rows, 'tables': tables}
    common.save(
        'gpu_methods', {**body, 'failures': failures, 'seconds': time.time() - start}
    )
    return 1 if failures else 0


if __name__ == '__main__':
    raise SystemExit(main())
