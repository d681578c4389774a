"""What a session costs a program of small functions on an NVIDIA GPU.

The language model of Chainer's example ``ptb`` with 1,500 units: two layers of LSTM,
backpropagation through 35 words. Its kernels are so small that Python sets the pace,
which is where bookkeeping shows. Plain Chainer, a session in which all
fits and one with a part of what the plan can move train in turns; seconds are those of
blocks of iterations that wait for the GPU at their end only, *issuing* is the time
before that wait.

    python -m benchmarks run gpu.small_on_gpu [--rounds 3] [--part 0.6]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from benchmarks import common, saving

VOCABULARY, UNITS, SEQUENCES, WORDS = 10_000, 1_500, 128, 35
BLOCK = 6  # iterations
BLOCKS = 2
LONGEST = 40  # iterations until a plan has settled
ROOMY = 1 << 40


class LanguageModel(chainer.Chain):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(VOCABULARY, UNITS)
            self.first = L.LSTM(UNITS, UNITS)
            self.second = L.LSTM(UNITS, UNITS)
            self.last = L.Linear(UNITS, VOCABULARY)

    def forward(self, words: Any, following: Any) -> Any:
        h = self.first(F.dropout(self.embed(words)))
        h = self.second(F.dropout(h))
        return F.softmax_cross_entropy(self.last(F.dropout(h)), following)


class Training:
    """Truncated backpropagation, as the example's updater does it."""

    def __init__(self) -> None:
        common.free_gpu()
        np.random.seed(0)
        self.model = LanguageModel()
        self.model.to_device('@cupy:0')
        self.optimizer = chainer.optimizers.SGD(lr=1.0).setup(self.model)
        self.optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
        rng = np.random.RandomState(1)
        text = rng.randint(0, VOCABULARY, (WORDS + 1, SEQUENCES)).astype(np.int32)
        self.text = chainer.get_device('@cupy:0').send(text)

    def step(self) -> None:
        """One iteration, which waits for nothing."""
        loss: Any = 0
        for now, following in zip(self.text[:-1], self.text[1:], strict=True):
            loss += self.model(now, following)
        self.model.cleargrads()
        loss.backward()
        loss.unchain_backward()
        self.optimizer.update()

    def blocks(self) -> list[tuple[float, float]]:
        """Seconds of an iteration, and of issuing it, for each block."""
        import cupy

        found = []
        for _ in range(BLOCKS):
            cupy.cuda.Device().synchronize()
            began = time.perf_counter()
            for _ in range(BLOCK):
                self.step()
            issued = time.perf_counter()
            cupy.cuda.Device().synchronize()
            ended = time.perf_counter()
            found.append(((ended - began) / BLOCK, (issued - began) / BLOCK))
        return found


def plain() -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Blocks of plain Chainer."""
    training = Training()
    for _ in range(3):
        training.step()
    return training.blocks(), {}


def session(limit: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Blocks of a settled session, and its figures."""
    training = Training()
    with hybridmem.optimize(training.model, limit, progress=sys.stderr) as run:
        for _ in range(LONGEST):
            if run.settled:
                break
            training.step()
            run.finish_iteration()
        found = training.blocks()
    figures = run.statistics()
    names = ('footprint_bytes', 'peak_bytes', 'evictions')
    names += ('keep', 'swap', 'recompute', 'predicted_seconds', 'state')
    return found, {name: figures[name] for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--part', type=float, default=0.6, help='of what can leave')


def main(options: argparse.Namespace) -> int:
    """Measures all ways in turns."""
    training = Training()
    training.step()
    fixed = sum(2 * parameter.array.nbytes for parameter in training.model.params())
    del training
    peak = session(ROOMY)[1]['peak_bytes']
    limits: dict[str, int | None] = {'plain': None, 'all fits': ROOMY}
    limits['under the limit'] = fixed + int(options.part * (peak - fixed))
    result = saving.Rows('gpu_small', units=UNITS, words=WORDS, sequences=SEQUENCES)
    blocks: dict[str, list[tuple[float, float]]] = {way: [] for way in limits}
    figures: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for way, limit in limits.items():
            found, figures[way] = plain() if limit is None else session(limit)
            blocks[way] += found
        result.rows = list(rows(limits, blocks, figures))
        result.tell(rounds=options.rounds)  # what half a run has left
    for row in result.rows:
        print(row, flush=True)
    return 0


def rows(
    limits: dict[str, int | None],
    blocks: dict[str, list[tuple[float, float]]],
    figures: dict[str, dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """What has been measured so far, a row for each way."""
    base = statistics.median(seconds for seconds, _ in blocks['plain'])
    for way, limit in limits.items():
        seconds = statistics.median(seconds for seconds, _ in blocks[way])
        yield {
            'way': way,
            'limit_bytes': limit,
            'iteration_seconds': seconds,
            'issuing_seconds': statistics.median(issued for _, issued in blocks[way]),
            'over_plain': seconds / base - 1,
            'all_seconds': [seconds for seconds, _ in blocks[way]],
            **figures[way],
        }
