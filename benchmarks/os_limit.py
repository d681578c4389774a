"""The operating system as the judge: in-core dies, a session finishes.

Both children train under the same limit set by the system: the memory limit plus a
margin for what is no array data (copy buffers, compiled code, BLAS). The plain
child must fail; the one with a session, which swaps to a file, must finish all
its iterations. The judge is a memory control group, which counts pages in use and
kills (Linux, needs the right to make one), or the address space.

An address-space limit is the harsher judge: it counts what a fragmented heap has
reserved but not in use, so it needs a larger margin.

    python -m benchmarks run os_limit [--arch resnet50] [--batchsize 8]
        [--judge cgroup|address-space] [--margin 256MiB]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import resource
import subprocess
import tempfile
from collections.abc import Iterator

import chainer_hybridmem as hybridmem
from benchmarks import catalogue, common
from chainer_hybridmem.units import parse_bytes

GROUPS = pathlib.Path('/sys/fs/cgroup')


def mapped_bytes() -> int:
    """Address space of this process."""
    with open('/proc/self/statm', encoding='utf-8') as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[pathlib.Path]:
    """A memory control group, version 1 or 2, that is gone afterwards."""
    version_1 = GROUPS / 'memory'
    root = version_1 if version_1.is_dir() else GROUPS
    name = 'memory.limit_in_bytes' if version_1.is_dir() else 'memory.max'
    group = root / f'chainer_hybridmem-{os.getpid()}'
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def enter(options: argparse.Namespace) -> None:
    """From here on the system counts and limits."""
    if options.group:
        (pathlib.Path(options.group) / 'cgroup.procs').write_text(str(os.getpid()))
    else:
        limit = mapped_bytes() + options.memory_limit + options.margin
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def child(options: argparse.Namespace) -> int:
    """Trains under the system's limit."""
    common.Training('alexnet', 1, 67).step()  # BLAS threads and buffers exist
    gc.collect()
    enter(options)
    training = common.Training(options.arch, options.batchsize)
    if options.child == 'session':
        with hybridmem.optimize(
            training.model, options.memory_limit, swap_dir=options.swap_dir
        ) as session:
            for _ in range(options.iterations):
                training.step()
        print(session.report())
    else:
        for _ in range(options.iterations):
            training.step()
    print(f'finished, last loss {training.losses[-1]:.6f}')
    return 0


def run(kind: str, options: argparse.Namespace, limit: int, group: str) -> dict:
    """One child: how it ended and what it said last."""
    command = [*catalogue.command('os_limit'), '--child', kind]
    for name in ('arch', 'batchsize', 'iterations', 'swap_dir', 'margin'):
        command += [f'--{name.replace("_", "-")}', str(getattr(options, name))]
    command += ['--memory-limit', str(limit), '--group', group]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).strip().splitlines() or ['']
    print(f'{kind}: exit {result.returncode}\n' + '\n'.join(lines[-24:]))
    return {'exit': result.returncode, 'last_line': lines[-1][:200]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--batchsize', type=int, default=8)
    parser.add_argument('--iterations', type=int, default=6)
    parser.add_argument('--memory-limit', type=int, default=0)
    parser.add_argument('--margin', type=parse_bytes, default=256 * 2**20)
    parser.add_argument('--swap-dir', default=tempfile.gettempdir())
    parser.add_argument('--judge', choices=('cgroup', 'address-space'))
    parser.add_argument('--child', choices=('plain', 'session'))
    parser.add_argument('--group', default='')


def main(options: argparse.Namespace) -> int:
    if options.child:
        return child(options)
    peak, fixed = common.in_core_peak(options.arch, options.batchsize)
    limit = common.half_limit(options.arch, peak, fixed)
    rows = {}
    for kind in ('plain', 'session'):
        if options.judge == 'address-space':
            rows[kind] = run(kind, options, limit, '')
        else:
            with control_group(limit + options.margin) as group:
                rows[kind] = run(kind, options, limit, str(group))
    body = {'arch': options.arch, 'batchsize': options.batchsize, 'children': rows}
    body |= {'in_core_peak_bytes': peak, 'limit_bytes': limit}
    body |= {'judge': options.judge or 'cgroup', 'margin_bytes': options.margin}
    common.save('host_os_limit', body)
    right = rows['plain']['exit'] != 0 and rows['session']['exit'] == 0
    print('as it should be' if right else 'NOT as it should be')
    return 0 if right else 1
