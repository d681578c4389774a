"""The same tables as ``host_methods.py`` on an NVIDIA GPU with a small limit.

Plain Chainer comes first, without a limit, as the card has enough memory; then the
same batch under the limit. Each row is saved as it is measured.

    python -m benchmarks run gpu.methods_on_gpu --memory-limit 16GiB
    python -m benchmarks run gpu.methods_on_gpu --arch resnet50:640 --result gpu_large

The second one is the largest case of Ito et al. Rows of networks and planners that are
left out stay as an earlier run has saved them.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from typing import Any

from benchmarks import methods, saving
from chainer_hybridmem.units import parse_bytes

# AlexNet's second convolution in 2048 pictures does not fit 16 GiB without cuDNN.
BATCHES = {'resnet50': 256, 'googlenet': 512, 'alexnet': 1024}
PLANNERS = ('hybrid', 'swap-all', 'pooch')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        '--arch', nargs='+', default=list(BATCHES), help='NAME or NAME:BATCHSIZE'
    )
    parser.add_argument('--result', default='gpu_methods', help='name of its file')
    parser.add_argument('--planners', nargs='+', default=list(PLANNERS))
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.0, help='of the batches')


def main(options: argparse.Namespace) -> int:
    start, failures = time.time(), []
    limit = parse_bytes(options.memory_limit)
    result = saving.Rows(options.result, limit_bytes=limit, failures=[])
    if os.path.exists(saving.path(options.result, 'json')):
        result.keep_earlier()
    for named in options.arch:
        arch, _, batch = named.partition(':')
        batchsize = max(1, int(int(batch or BATCHES[arch]) * options.scale))
        found: list[dict[str, Any]] = []
        try:
            measure(result, found, arch, batchsize, limit, options)
        except Exception as error:
            # One network must not cost the others their time on a GPU.
            failures.append(
                {'arch': arch, 'why': repr(error), 'traceback': traceback.format_exc()}
            )
            traceback.print_exc()
        if found:
            print(methods.show(found, found[0]['iteration_seconds']), flush=True)
        result.tell(failures=failures, seconds=time.time() - start)
    return 1 if failures else 0


def measure(
    result: saving.Rows,
    found: list[dict[str, Any]],
    arch: str,
    batchsize: int,
    limit: int,
    options: argparse.Namespace,
) -> None:
    """The rows of one network, which are ``found``."""
    first = methods.plain(arch, batchsize, methods.FIRST)
    found.append(first)
    result.put(first, 'arch', 'batchsize', 'planner')

    def keep(row: dict[str, Any]) -> None:
        """Saves it; its session's first losses are compared with plain Chainer's."""
        if 'losses' in row:
            row['same_losses'] = row['losses'] == first['losses'][: methods.FIRST]
        found.append(row)
        result.put(row, 'arch', 'batchsize', 'planner')
        print(methods.show([row], first['iteration_seconds']), flush=True)

    methods.out_of_core(
        arch,
        batchsize,
        limit,
        None,
        True,
        options.iterations,
        options.planners,
        keep,
    )
