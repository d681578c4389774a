"""What it costs to watch the memory pool: training with and without, in turns.

Plain Chainer and a session under half of its memory, each with and without
``profile_memory()``. A run without the profiler but with the same pool under NumPy
tells the pool's own effect from the profiler's, one with a hook that does nothing what
Chainer takes for any hook.

    python -m benchmarks run memory_profile [--arch resnet50] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.training.devices.host.device import HostDevice


class Small(chainer.Chain):
    """Operations of some microseconds: the profiler's worst case."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(64, 64) for _ in range(20)))

    def forward(self, x: Any, t: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.softmax_cross_entropy(x, t)


class SmallTraining(common.Training):
    """Like :class:`common.Training` for the small network."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.model = Small()
        x = np.random.rand(32, 64).astype(np.float32)
        t = np.random.randint(0, 64, 32).astype(np.int32)
        self.batch = (x, t)
        self.optimizer = chainer.optimizers.MomentumSGD(0.002).setup(self.model)
        self.losses = []


class NoHook(chainer.FunctionHook):
    """What Chainer itself takes for a hook that does nothing."""

    name = 'nothing'

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Does nothing."""

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Does nothing."""


@contextlib.contextmanager
def pool_only() -> Any:
    """The profiler's pool under NumPy, and nobody who looks at it."""
    device = HostDevice(1 << 60)
    device.memory.install(lambda missing_bytes: None)
    try:
        yield
    finally:
        device.memory.uninstall()
        device.close()


def timed(training: common.Training, count: int) -> list[float]:
    """Seconds of each of ``count`` steps, after one that warms up."""
    training.step()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def in_turns(
    ways: dict[str, Callable[[], Any]],
    training: common.Training,
    rounds: int,
    count: int,
) -> dict[str, list[float]]:
    """Times of each way, one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    training.step()
    for number in range(rounds):
        names = list(ways)
        for name in names if number % 2 else names[::-1]:
            with ways[name]():
                times[name] += timed(training, count)
    return times


def quantiles(values: list[float]) -> dict[str, float]:
    """Of the seconds of all iterations of one way."""
    ordered = sorted(values)
    n = len(ordered)
    return {
        'iterations': n,
        'fastest_tenth': ordered[n // 10],
        'median': statistics.median(ordered),
        'slowest_tenth': ordered[n - 1 - n // 10],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', default=['small', 'resnet50'])
    parser.add_argument('--batchsize', type=int)
    parser.add_argument('--insize', type=int, default=224)
    parser.add_argument('--limit', default='4GB', help='of the session')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--iterations', type=int, default=3)


def main(options: argparse.Namespace) -> int:
    rows = []
    for arch in options.arch:
        small = arch == 'small'
        training = (
            SmallTraining()
            if small
            else common.Training(
                arch, options.batchsize or common.HOST_BATCHES[arch], options.insize
            )
        )
        count = options.iterations * (100 if small else 1)
        ways: dict[str, Callable[[], Any]] = {
            'plain': contextlib.nullcontext,
            'hook': NoHook,
            'pool': pool_only,
            'profiled': hybridmem.profile_memory,
        }
        times = in_turns(ways, training, options.rounds, count)
        limit = '1TB' if small else options.limit
        with hybridmem.optimize(training.model, limit, planner='hybrid') as session:
            while not session.settled:
                training.step()
            ways = {
                'session': contextlib.nullcontext,
                'session profiled': hybridmem.profile_memory,
            }
            times.update(in_turns(ways, training, options.rounds, count))
        figures = {name: quantiles(values) for name, values in times.items()}
        rows.append({'arch': arch, **figures})
        for of in ('fastest_tenth', 'median'):
            at = {name: each[of] for name, each in figures.items()}
            row = {
                'arch': arch,
                'of': of,
                'plain_seconds': at['plain'],
                'hook_over_plain': at['hook'] / at['plain'],
                'profiled_over_plain': at['profiled'] / at['plain'],
                'profiled_over_pool': at['profiled'] / at['pool'],
                'session_seconds': at['session'],
                'profiled_over_session': at['session profiled'] / at['session'],
            }
            columns = {name: '{:.4f}'.format for name in row}
            columns.update(arch=str, of=str)
            print(common.table([row], columns), flush=True)
    common.save('memory_profile', {'options': vars(options), 'rows': rows})
    return 0
