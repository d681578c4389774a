"""The arena that guided iterations allocate from: footprint, exactness, speed.

Footprint: each run is a process of its own. What counts is the highest resident set
that the system has seen (VmHWM), less what was there before, the model's parameters
excepted: arrays, what NumPy and the planner keep for themselves, our tables. A tiny
network has been trained before in the same way, so that libraries are loaded, compiled
code is there and BLAS has its buffers. Swapped maps go to a file. Allocation: an
iteration's mallocs and frees, replayed without touching the memory. Overhead: sessions
with and without arena in turns.

    python -m benchmarks run arena [--arch resnet50 ...] [--only PART ...]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import catalogue, common

# isort: split
import numpy as np

from chainer_hybridmem.planning.layouts import IterationLog, lay_out
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.training.recording.allocation_log import AllocationLog
from chainer_hybridmem.units import parse_bytes

PARTS = ('footprint', 'allocation', 'overhead')
WAYS = ('plain', 'session', 'arena')
UNLIMITED = 1 << 40
REPEATS = 15


def resident(name: str) -> int:
    """A figure of this process, in bytes: ``VmRSS`` or ``VmHWM``."""
    with open('/proc/self/status', encoding='ascii') as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f'the system does not tell {name}')


def digest(training: common.Training) -> str:
    """Of the losses and all parameters."""
    state = hashlib.sha256(np.array(training.losses).tobytes())
    for _, parameter in sorted(training.model.namedparams()):
        state.update(parameter.array.tobytes())
    return state.hexdigest()[:16]


def train(
    training: common.Training, limit: int | str, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains in the way of this process; returns the session's figures."""
    if options.child == 'plain':
        for _ in range(options.iterations):
            training.step()
        return {}
    with hybridmem.optimize(
        training.model,
        limit,
        planner='hybrid',
        swap_dir=options.swap_dir,
        arena=options.child == 'arena',
    ) as session:
        for _ in range(options.iterations):
            training.step()
    return session.statistics()


def warm_up(options: argparse.Namespace) -> None:
    """Loads what is loaded once: libraries, compiled code, the planner's solver."""
    tiny = common.Training('alexnet', 1, 67)
    if options.child == 'plain':
        train(tiny, 0, options)
        return
    with hybridmem.optimize(tiny.model, '1GB', planner='in-core') as session:
        for _ in range(5):
            tiny.step()
    problem = make_problem(session.profile)
    limit = (least_memory(problem)[0] + problem.in_core_peak_bytes) // 2
    hybridmem.make_plan(problem, limit, steps=100)


def child(options: argparse.Namespace) -> int:
    """One run in this process; prints a line of JSON."""
    warm_up(options)
    training = common.Training(options.arch[0], options.batchsize, options.insize)
    parameters = sum(
        p.array.nbytes for p in training.model.params() if p.array is not None
    )
    np.dot(np.ones((3000, 3000), np.float32), np.ones((3000, 3000), np.float32))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of the temporaries that made the parameters
    before = resident('VmRSS') - parameters
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')  # VmHWM begins anew
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    row = train(training, options.limit, options)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(
        json.dumps(
            {
                'way': options.child,
                'resident_bytes': resident('VmHWM') - before,
                'page_faults': faults,
                'digest': digest(training),
                **row,
            }
        )
    )
    return 0


def run(way: str, arch: str, limit: int, options: argparse.Namespace) -> dict[str, Any]:
    """One child."""
    command = [*catalogue.command('arena'), '--child', way]
    command += ['--arch', arch, '--limit', str(limit)]
    batchsize = options.batchsize or common.HOST_BATCHES[arch]
    command += ['--batchsize', str(batchsize), '--insize', str(options.insize)]
    command += ['--iterations', str(options.iterations)]
    command += ['--swap-dir', options.swap_dir]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def footprint(arch: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One network in-core and inside a limit, without and with an arena."""
    batchsize = options.batchsize or common.HOST_BATCHES[arch]
    peak, fixed = common.in_core_peak(arch, batchsize, options.insize)
    limit = common.half_limit(arch, peak, fixed)
    rows = []
    for way in WAYS:
        figures = run(way, arch, limit, options)
        row = {'network': f'{arch} b{batchsize}', 'limit_bytes': limit}
        names = (
            'way',
            'resident_bytes',
            'page_faults',
            'digest',
            'footprint_bytes',
            'arena_bytes',
        )
        names += ('side_bytes', 'placed', 'unplaced', 'iteration_seconds')
        names += ('predicted_seconds', 'in_core_seconds', 'lower_bound_seconds')
        row |= {name: figures.get(name) for name in names}
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    for row in rows:
        row['same_bits'] = row['digest'] == rows[0]['digest']
    return rows


# -- allocation --------------------------------------------------------------------


def log_of(training: common.Training) -> tuple[IterationLog, IterationLog]:
    """Two iterations of plain training, each as one operation."""
    device = HostDevice(UNLIMITED)
    device.memory.adopt(p.array for p in training.model.params() if p.is_initialized)
    device.memory.install(lambda nbytes: None)
    try:
        training.step()
        logs = []
        for _ in range(2):
            log = AllocationLog(device)
            log.start_operation()
            training.step()
            logs.append(log.finish())
    finally:
        device.memory.uninstall()
        device.close()
    return logs[0], logs[1]


def replay(events: list[tuple[int, int]], start: Callable[[], None]) -> float:
    """Seconds per malloc and free of one iteration, NumPy's array around included."""
    live: dict[int, Any] = {}
    empty = np.empty
    count = 0
    start()
    began = time.perf_counter()
    for event, nbytes in events:
        if event > 0:
            live[event] = empty(nbytes, np.uint8)
            count += 1
        else:
            live.pop(-event, None)
    seconds = time.perf_counter() - began
    live.clear()
    return seconds / count


def warm_replay(events: list[tuple[int, int]], start: Callable[[], None]) -> float:
    """The second of two: iterations find the pages of the one before."""
    replay(events, start)
    return replay(events, start)


def allocation(arch: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """NumPy's own allocator, the best-fit slab, and the arena, in turns."""
    batchsize = options.batchsize or common.HOST_BATCHES[arch]
    logs = log_of(common.Training(arch, batchsize, options.insize))
    rows = []
    for smallest, what in ((0, 'all'), (1 << 16, 'from 64 KiB on')):
        freed = {-event for event, _ in logs[1].events if event < 0}
        born = {event for event, _ in logs[1].events if event > 0}
        events = [
            (event, nbytes)
            for event, nbytes in logs[1].events
            if nbytes >= smallest and abs(event) in freed and abs(event) in born
        ]
        log = IterationLog(tuple(events), (0,), 0)
        device = HostDevice(UNLIMITED)
        began = time.perf_counter()
        arena = lay_out(
            (log, log), device.offsets.block_bytes, device.offsets.alignment_bytes
        )
        took = time.perf_counter() - began
        times: dict[str, list[float]] = {'numpy': [], 'slab': [], 'arena': []}
        for _ in range(REPEATS):
            times['numpy'].append(warm_replay(events, lambda: None))
            device.memory.install(lambda nbytes: None)
            times['slab'].append(warm_replay(events, lambda: None))
            assert device.offsets.follow(arena)
            before = device.offsets.figures().placed
            times['arena'].append(
                warm_replay(events, functools.partial(device.offsets.seek, 0))
            )
            placed = (device.offsets.figures().placed - before) // 2
            device.memory.uninstall()
        device.close()
        medians = {way: statistics.median(values) for way, values in times.items()}
        row = {
            'network': f'{arch} b{batchsize}',
            'allocations': what,
            'mallocs': sum(event > 0 for event, _ in events),
            'placed': placed,
            'layout_seconds': took,
            'ratio': arena.layout.competitive_ratio,
            **{f'{way}_seconds': seconds for way, seconds in medians.items()},
            'over_numpy_seconds': medians['arena'] - medians['numpy'],
        }
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


# -- overhead ----------------------------------------------------------------------


def overhead(arch: str, options: argparse.Namespace) -> dict[str, Any]:
    """Guided iterations with and without arena, in turns, after both have settled."""
    batchsize = options.batchsize or common.HOST_BATCHES[arch]
    peak, fixed = common.in_core_peak(arch, batchsize, options.insize)
    limit = common.half_limit(arch, peak, fixed)
    times: dict[str, list[float]] = {'session': [], 'arena': []}
    predicted: dict[str, float] = {}
    for number in range(options.rounds):
        order = ('session', 'arena') if number % 2 else ('arena', 'session')
        for way in order:
            training = common.Training(arch, batchsize, options.insize)
            with hybridmem.optimize(
                training.model, limit, planner='hybrid', arena=way == 'arena'
            ) as session:
                for _ in range(options.iterations):
                    training.step()
            figures = session.statistics()
            times[way].append(figures['iteration_seconds'])
            predicted[way] = figures['predicted_seconds']
    ratios = [a / b for a, b in zip(times['arena'], times['session'], strict=True)]
    row = {
        'network': f'{arch} b{batchsize}',
        'limit_bytes': limit,
        'rounds': options.rounds,
        **{f'{way}_seconds': statistics.median(t) for way, t in times.items()},
        **{f'{way}_predicted_seconds': seconds for way, seconds in predicted.items()},
        'ratio': statistics.median(ratios),
        'ratios': ratios,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=list(common.HOST_BATCHES))
    parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--batchsize', type=int)
    parser.add_argument('--insize', type=int, default=224)
    parser.add_argument('--iterations', type=int, default=12)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--swap-dir', default=tempfile.gettempdir())
    parser.add_argument('--child', choices=WAYS)
    parser.add_argument('--limit', type=parse_bytes)


def main(options: argparse.Namespace) -> int:
    if options.child:
        return child(options)
    body: dict[str, Any] = {}
    if 'footprint' in options.only:
        body['footprint'] = [r for a in options.arch for r in footprint(a, options)]
    if 'allocation' in options.only:
        body['allocation'] = [r for a in options.arch for r in allocation(a, options)]
    if 'overhead' in options.only:
        body['overhead'] = [overhead(a, options) for a in options.arch]
    common.save('host_arena', body)
    return 0
