"""The operating system as the judge: in-core dies, a session finishes.

Both children get the same address-space limit: what the process has mapped
before the model exists, plus the memory limit, plus a margin for what is no array data
(copy buffers, compiled code, BLAS). The plain child must fail; the one with a
session, which swaps to a file, must finish all its iterations.

    python benchmarks/os_limit.py [--arch resnet50] [--batchsize 16]
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import tempfile

import common

import chainer_hybridmem as hybridmem

MARGIN_BYTES = 448 * 2**20


def mapped_bytes() -> int:
    """Address space of this process."""
    with open('/proc/self/statm', encoding='utf-8') as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def child(options: argparse.Namespace) -> int:
    """Trains under an address-space limit."""
    common.Training('alexnet', 1, 67).step()  # BLAS threads and buffers exist
    gc.collect()
    limit = mapped_bytes() + options.memory_limit + MARGIN_BYTES
    training = common.Training(options.arch, options.batchsize)
    if options.child == 'session':
        session = hybridmem.optimize(
            training.model, options.memory_limit, swap_dir=options.swap_dir
        )
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with session:
            for _ in range(options.iterations):
                training.step()
        print(session.report())
    else:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in range(options.iterations):
            training.step()
    print(f'finished, last loss {training.losses[-1]:.6f}')
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--batchsize', type=int, default=16)
    parser.add_argument('--iterations', type=int, default=5)
    parser.add_argument('--memory-limit', type=int, default=0)
    parser.add_argument('--swap-dir', default=tempfile.gettempdir())
    parser.add_argument('--child', choices=('plain', 'session'))
    options = parser.parse_args()
    if options.child:
        return child(options)
    peak, fixed = common.in_core_peak(options.arch, options.batchsize)
    limit = common.half_limit(options.arch, peak, fixed)
    rows = {}
    for kind in ('plain', 'session'):
        command = [sys.executable, os.path.abspath(__file__), '--child', kind]
        for name in ('arch', 'batchsize', 'iterations', 'swap_dir'):
            command += [f'--{name.replace("_", "-")}', str(getattr(options, name))]
        command += ['--memory-limit', str(limit)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (result.stdout + result.stderr).strip().splitlines()
        rows[kind] = {'exit': result.returncode, 'last_line': lines[-1][:200]}
        print(f'{kind}: exit {result.returncode}\n' + '\n'.join(lines[-24:]))
    body = {'arch': options.arch, 'batchsize': options.batchsize, 'children': rows}
    body |= {'in_core_peak_bytes': peak, 'limit_bytes': limit}
    common.save('host_os_limit', {**body, 'margin_bytes': MARGIN_BYTES})
    right = rows['plain']['exit'] != 0 and rows['session']['exit'] == 0
    print('as it should be' if right else 'NOT as it should be')
    return 0 if right else 1


if __name__ == '__main__':
    raise SystemExit(main())
