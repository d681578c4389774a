"""The arena on an NVIDIA GPU: footprint as the driver sees it, exactness, speed.

Footprint: the least memory that the driver has called free during each iteration,
against what was free before the model was made; CUDA's own context and libraries are
loaded before. Allocation: an iteration's mallocs and frees, replayed with CuPy's pool,
with ours and with the arena; the pool's real size is set beside the model of
``lab/pools/replay.py``. Losses are compared with those of in-core training, with
``cudnn_deterministic``.

    python -m benchmarks run gpu.arena_on_gpu [--arch resnet50] [--part 0.5]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer

from benchmarks import common, saving
from chainer_hybridmem.lab.pools.replay import replay as replay_model
from chainer_hybridmem.planning.layouts import IterationLog, from_log, lay_out
from chainer_hybridmem.training.devices.cuda.device import CudaDevice
from chainer_hybridmem.training.recording.allocation_log import AllocationLog

ITERATIONS = 20  # an arena is laid out anew where timing changes the plan
REPEATS = 9
WITHOUT_LIMIT = 1 << 40


def free_bytes() -> int:
    """What the driver calls free."""
    import cupy

    cupy.cuda.Device().synchronize()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def session(
    arch: str, batchsize: int, limit: int, arena: bool, planner: str = 'hybrid'
) -> dict[str, Any]:
    """One session; the driver is asked after every iteration."""
    common.free_gpu()
    before = least = free_bytes()
    training = common.Training(arch, batchsize, gpu=True)
    with (
        chainer.using_config('cudnn_deterministic', True),
        hybridmem.optimize(training.model, limit, planner=planner, arena=arena) as run,
    ):
        for _ in range(ITERATIONS):
            training.step()
            least = min(least, free_bytes())
    figures = run.statistics()
    names = ('footprint_bytes', 'arena_bytes', 'side_bytes', 'placed', 'unplaced')
    names += ('iteration_seconds', 'predicted_seconds', 'in_core_seconds', 'evictions')
    names += ('peak_bytes', 'in_core_peak_bytes', 'restores')
    return {
        'network': f'{arch} b{batchsize}',
        'limit_bytes': limit,
        'arena': arena,
        'driver_bytes': before - least,
        'losses': training.losses,
        **{name: figures[name] for name in names},
    }


def log_of(arch: str, batchsize: int) -> IterationLog:
    """One iteration without a plan."""
    training = common.Training(arch, batchsize, gpu=True)
    device = CudaDevice(WITHOUT_LIMIT)
    device.memory.install(lambda nbytes: None)
    try:
        training.step()
        log = AllocationLog(device)
        log.start_operation()
        training.step()
        return log.finish()
    finally:
        device.memory.uninstall()
        device.close()


def replay(events: list[tuple[int, int]], start: Callable[[], None]) -> float:
    """Seconds per malloc and free of one iteration."""
    import cupy

    live: dict[int, Any] = {}
    count = 0
    start()
    began = time.perf_counter()
    for event, nbytes in events:
        if event > 0:
            live[event] = cupy.cuda.alloc(nbytes)
            count += 1
        else:
            live.pop(-event, None)
    seconds = time.perf_counter() - began
    return seconds / count


def allocation(arch: str, batchsize: int) -> dict[str, Any]:
    """CuPy's pool, ours without places, and the arena, in turns."""
    import cupy

    log = log_of(arch, batchsize)
    born = {event for event, _ in log.events if event > 0}
    freed = {-event for event, _ in log.events if event < 0}
    events = [
        (event, nbytes)
        for event, nbytes in log.events
        if abs(event) in born and abs(event) in freed
    ]
    common.free_gpu()
    device = CudaDevice(WITHOUT_LIMIT)
    one = IterationLog(tuple(events), (0,), 0)
    arena = lay_out(
        (one, one), device.offsets.block_bytes, device.offsets.alignment_bytes
    )
    times: dict[str, list[float]] = {'cupy': [], 'pool': [], 'arena': []}
    real = cupy.cuda.MemoryPool()
    previous = cupy.cuda.get_allocator()
    for number in range(REPEATS):
        cupy.cuda.set_allocator(real.malloc)
        replay(events, lambda: None)
        times['cupy'].append(replay(events, lambda: None))
        if not number:
            real_bytes = real.total_bytes()
        cupy.cuda.set_allocator(previous)
        device.memory.install(lambda nbytes: None)
        device.offsets.seek(-1)
        replay(events, lambda: None)
        times['pool'].append(replay(events, lambda: None))
        assert device.offsets.follow(arena)
        replay(events, functools.partial(device.offsets.seek, 0))
        times['arena'].append(replay(events, functools.partial(device.offsets.seek, 0)))
        device.memory.uninstall()
    figures = device.offsets.figures()
    device.close()
    ids = [(abs(e), n if e > 0 else -1) for e, n in events]
    model = replay_model(from_log(ids), 'cupy', 2)
    medians = {f'{way}_seconds': statistics.median(t) for way, t in times.items()}
    return {
        'network': f'{arch} b{batchsize}',
        'mallocs': len(born & freed),
        'placed': figures.placed,
        'arena_bytes': arena.slab_bytes,
        'ratio': arena.layout.competitive_ratio,
        'cupy_pool_bytes': real_bytes,
        'cupy_model_bytes': model.footprint_bytes,
        **medians,
        'over_cupy_seconds': medians['arena_seconds'] - medians['cupy_seconds'],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--batchsize', type=int, default=128)
    parser.add_argument('--part', type=float, default=0.5, help='of the in-core peak')
    parser.add_argument('--scale', type=float, default=1.0, help='of the batch')


def main(options: argparse.Namespace) -> int:
    arch, batchsize = options.arch, max(2, int(options.batchsize * options.scale))
    common.Training(arch, 2, gpu=True).step()  # context, libraries, kernels
    result = saving.Rows('gpu_arena')
    first = session(arch, batchsize, WITHOUT_LIMIT, False, 'in-core')
    losses = first.pop('losses')
    result.add({**first, 'same_losses': True})
    limit = int(first['in_core_peak_bytes'] * options.part)
    for arena in (True, False):
        row = session(arch, batchsize, limit, arena)
        row['same_losses'] = row.pop('losses') == losses
        result.add(row)
    result.tell(allocation=allocation(arch, batchsize))
    for row in result.rows:
        print(row, flush=True)
    return 0
