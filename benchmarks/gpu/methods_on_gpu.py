"""The same tables as ``host_methods.py`` on an NVIDIA GPU with a small limit.

Plain Chainer comes first, without a limit, as the card has enough memory; then the
same batch under the limit; in TF32 and mixed16 by the first planner only, in mixed16
with half the limit. Convolutions measure their algorithms, within 256 MiB of workspace.
Each row is saved as it is measured.

    python -m benchmarks run gpu.methods_on_gpu --memory-limit 16GiB
    python -m benchmarks run gpu.methods_on_gpu --arch resnet50:640 --result gpu_large

The second one is the largest case of Ito et al. Rows of networks, arithmetics and
planners that are left out stay as an earlier run has saved them.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from typing import Any

from benchmarks import methods, saving
from benchmarks.gpu import arithmetic
from chainer_hybridmem.units import parse_bytes

BATCHES = {'resnet50': 256, 'googlenet': 512, 'alexnet': 1024}
# The most valuable ones first.
CASES = ('resnet50', 'resnet50@tf32', 'resnet50@mixed16', 'googlenet', 'alexnet')
KEY = ('arch', 'batchsize', 'planner', 'arithmetic')
PLANNERS = ('hybrid', 'swap-all', 'pooch')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        '--arch', nargs='+', default=list(CASES), help='NAME[:BATCHSIZE][@ARITHMETIC]'
    )
    parser.add_argument('--result', default='gpu_methods', help='name of its file')
    parser.add_argument('--planners', nargs='+', default=list(PLANNERS))
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--iterations', type=int, default=3)
    parser.add_argument('--scale', type=float, default=1.0, help='of the batches')
    parser.add_argument(
        '--autotune', action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument('--workspace', default=arithmetic.TUNED_WORKSPACE)


def main(options: argparse.Namespace) -> int:
    start, failures = time.time(), []
    limit = parse_bytes(options.memory_limit)
    result = saving.Rows(options.result, limit_bytes=limit, failures=[])
    if os.path.exists(saving.path(options.result, 'json')):
        result.keep_earlier()
        for row in result.rows:  # from before there were others
            row.setdefault('arithmetic', 'float32')
    for named in options.arch:
        network, _, kind = named.partition('@')
        kind = kind or 'float32'
        arch, _, batch = network.partition(':')
        batchsize = max(1, int(int(batch or BATCHES[arch]) * options.scale))
        found: list[dict[str, Any]] = []
        tuned = arithmetic.tuned(options.autotune, parse_bytes(options.workspace))
        try:
            with arithmetic.using(kind), tuned:
                measure(result, found, (arch, batchsize, kind), limit, options)
        except Exception as error:
            # One network must not cost the others their time on a GPU.
            failures.append(
                {'arch': named, 'why': repr(error), 'traceback': traceback.format_exc()}
            )
            traceback.print_exc()
        if found:
            print(methods.show(found, found[0]['iteration_seconds']), flush=True)
        result.tell(failures=failures, seconds=time.time() - start)
    return 1 if failures else 0


def measure(
    result: saving.Rows,
    found: list[dict[str, Any]],
    case: tuple[str, int, str],
    limit: int,
    options: argparse.Namespace,
) -> None:
    """The rows of one case, which are ``found``.

    Args:
        result: Where they are saved.
        found: Grows by each row.
        case: Architecture, pictures per iteration, and name of the arithmetic.
        limit: Bytes, of float32.
        options: Of the command line.
    """
    arch, batchsize, kind = case
    setting = {
        'arithmetic': kind,
        'autotune': options.autotune,
        'workspace_bytes': parse_bytes(options.workspace),
        'cudnn': arithmetic.cudnn_version(),
    }
    first = methods.plain(arch, batchsize, methods.FIRST) | setting
    found.append(first)
    result.put(first, *KEY)

    def keep(row: dict[str, Any]) -> None:
        """Saves it; its session's first losses are compared with plain Chainer's."""
        row |= setting
        if 'losses' in row:
            row['same_losses'] = row['losses'] == first['losses'][: methods.FIRST]
        found.append(row)
        result.put(row, *KEY)
        print(methods.show([row], first['iteration_seconds']), flush=True)

    methods.out_of_core(
        arch,
        batchsize,
        arithmetic.limit_of(kind, limit),
        None,
        True,
        options.iterations,
        options.planners if kind == 'float32' else options.planners[:1],
        keep,
    )
