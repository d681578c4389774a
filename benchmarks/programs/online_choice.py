"""Swap or recompute without a plan: what the choice saves over links of any speed.

A residual network whose depth and picture size are drawn anew in each iteration, so
that none has the signature of another one and no plan is ever followed. Trained plain,
under a session that only swaps, and under one that chooses, in turns.

    python -m benchmarks run programs.online_choice
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any
from unittest import mock

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from benchmarks import common, saving
from chainer_hybridmem.training.session.iterations.replay_trials import ReplayTrials

LINKS = (None, '2GB/s', '500MB/s', '100MB/s')
CHANNELS = 16
SMALLEST, LARGEST = 40, 72  # pixels on a side
SHALLOWEST, DEEPEST = 8, 20  # blocks
LIMIT = 30_000_000  # bytes; iterations take 30 to 207 MB
COMPARED = 24  # iterations at the end


class Network(chainer.Chain):
    """Blocks of one convolution of single pixels, repeated as often as asked."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, CHANNELS, 1)
            self.convolutions = chainer.ChainList(
                *(L.Convolution2D(CHANNELS, CHANNELS, 1) for _ in range(6))
            )
            self.normalisations = chainer.ChainList(
                *(L.BatchNormalization(CHANNELS) for _ in range(6))
            )
            self.last = L.Linear(CHANNELS, 10)

    def forward(self, x: Any, depth: int) -> Any:
        x = F.relu(self.first(x))
        for i in range(depth):
            convolution = self.convolutions[i % 6]
            x = F.relu(self.normalisations[i % 6](convolution(x)) + x)
        return self.last(F.average(x, (2, 3)))


def train(count: int, recomputes: bool = True, **session: Any) -> dict[str, Any]:
    """Seconds of each iteration, and what the session has made again."""
    gc.collect()
    np.random.seed(0)
    model = Network()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    rng = np.random.RandomState(1)
    seconds: list[float] = []
    recomputed = [0]

    def loop(opened: Any = None) -> None:
        for _ in range(count):
            size = int(rng.randint(SMALLEST, LARGEST))
            depth = int(rng.randint(SHALLOWEST, DEEPEST))
            x = rng.rand(8, 3, size, size).astype(np.float32)
            labels = rng.randint(0, 10, 8)
            start = time.perf_counter()
            loss = F.softmax_cross_entropy(model(x, depth), labels)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            seconds.append(time.perf_counter() - start)
            if opened is not None:
                opened.finish_iteration()
                recomputed[0] += opened.last_iteration()['recomputed_bytes']

    if not session:
        loop()
    else:
        begin = ReplayTrials.begin

        def never(self: ReplayTrials, passive: bool) -> None:
            begin(self, passive and recomputes)

        with (
            mock.patch.object(ReplayTrials, 'begin', never),
            hybridmem.optimize(model, LIMIT, **session) as opened,
        ):
            loop(opened)
    digest = [parameter.array.tobytes() for parameter in model.params()]
    return {'seconds': seconds, 'recomputed': recomputed[0], 'digest': digest}


def measure(options: argparse.Namespace, link: str | None) -> dict[str, Any]:
    """The row of one link."""
    plain, swapped, chosen = [], [], []
    kinds = [(False, swapped), (True, chosen)]
    for _ in range(options.rounds):
        plain.append(train(options.iterations))
        kinds.reverse()  # the second of two similar runs may be the slower one
        for recomputes, runs in kinds:
            runs.append(train(options.iterations, recomputes, link_bandwidth=link))
    base = columns(plain)
    return {
        'link': link or 'memory',
        'limit_bytes': LIMIT,
        'equal': all(r['digest'] == plain[0]['digest'] for r in swapped + chosen),
        'swaps': over(columns(swapped), base),
        'chooses': over(columns(chosen), base),
        'recomputed_bytes': chosen[0]['recomputed'] // options.iterations,
        'plain_seconds': statistics.median(base),
    }


def columns(runs: list[dict[str, Any]]) -> list[float]:
    """For each of the last iterations the median over rounds."""
    found = [run['seconds'][-COMPARED:] for run in runs]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def over(ours: list[float], base: list[float]) -> float:
    """Median ratio of an iteration to the same one of plain Chainer."""
    return statistics.median(a / b for a, b in zip(ours, base, strict=True))


COLUMNS: dict[str, Any] = {
    'link': str,
    'equal': lambda value: 'yes' if value else 'no',
    'swaps': '{:.2f}'.format,
    'chooses': '{:.2f}'.format,
    'recomputed_bytes': '{:,}'.format,
    'plain_seconds': '{:.3f}'.format,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--iterations', type=int, default=48)
    parser.add_argument('--rounds', type=int, default=4)


def main(options: argparse.Namespace) -> int:
    rows = saving.Rows('programs_online_choice', iterations=options.iterations)
    train(2)  # warms up
    for link in LINKS:
        rows.add(measure(options, link))
    print(common.table(rows.rows, COLUMNS))
    return 0
