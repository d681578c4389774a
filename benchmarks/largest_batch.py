"""The largest batch: does it train, and does one example more not?

    python -m benchmarks run largest_batch [--cases 200] [--seed 0] [--jobs 2]

Draws networks, optimizers, limits and planners; asks ``largest_batch()`` and then
trains with the answer and with one example more, under that planner in that limit. The
answer must train and the other must end in an error. Writes
``largest_batch.json``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from benchmarks import saving

PLANNERS = (
    'hybrid',
    'hybrid',
    'hybrid',
    'in-core',
    'swap-all',
    'pooch',
    'superneurons',
    'vdnn-all',
    'checkpoint-speed',
    'autoswap-swdoa',
    'capuchin',
    'dtr',
)
OPTIMIZERS: dict[str, Callable[[], chainer.Optimizer]] = {
    'SGD': chainer.optimizers.SGD,
    'MomentumSGD': chainer.optimizers.MomentumSGD,
    'Adam': chainer.optimizers.Adam,
}
MIB = 2**20
ITERATIONS = 9
CLASSES = 10


class Pictures(chainer.Chain):
    """Convolutions drawn from a seed, with shortcuts and pooling between them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.side = rng.choice((16, 24, 32))
        self.shape: tuple[int, ...] = (3, self.side, self.side)
        self.kinds = [
            rng.choice(('plain', 'normal', 'short', 'pool', 'dropout', 'dense'))
            for _ in range(rng.randint(2, 6))
        ]
        width = rng.choice((8, 16, 24))
        with self.init_scope():
            self.first = L.Convolution2D(3, width, 3, pad=1)
            self.convolutions = chainer.ChainList(
                *(
                    L.Convolution2D(None, width, rng.choice((1, 3, 5)))
                    for _ in self.kinds
                )
            )
            self.normalisations = chainer.ChainList(
                *(L.BatchNormalization(width) for _ in self.kinds)
            )
            self.last = L.Linear(None, CLASSES)
        for convolution in self.convolutions:
            convolution.pad = (convolution.ksize // 2,) * 2

    def forward(self, x: Any, t: Any) -> Any:
        """The loss."""
        h = F.relu(self.first(x))
        for kind, convolution, norm in zip(
            self.kinds, self.convolutions, self.normalisations, strict=True
        ):
            y = convolution(h)
            if kind == 'normal':
                y = norm(y)
            y = F.relu(y)
            if kind == 'short':
                y = y + h
            elif kind == 'dense':
                y = F.concat((y, h))
            elif kind == 'dropout':
                y = F.dropout(y, 0.3)
            elif kind == 'pool' and y.shape[2] > 4:
                y = F.max_pooling_2d(y, 2)
            # Where widths differ, the next ones are made for what comes.
            h = y if y.shape[1] == norm.avg_mean.size else y[:, : norm.avg_mean.size]
        return F.softmax_cross_entropy(self.last(h), t)

    def examples(self, number: int) -> tuple[Any, Any]:
        """A batch."""
        x = np.random.rand(number, *self.shape).astype(np.float32)
        return x, np.random.randint(0, CLASSES, number).astype(np.int32)


class Sentences(chainer.Chain):
    """An LSTM over words, with a loss for each."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.length = rng.randint(4, 12)
        width = rng.choice((64, 128))
        with self.init_scope():
            self.embedding = L.EmbedID(200, width)
            self.lstm = L.LSTM(width, width)
            self.last = L.Linear(width, 200)

    def forward(self, x: Any, t: Any) -> Any:
        """The loss."""
        self.lstm.reset_state()
        loss = 0
        for now in range(self.length):
            h = F.dropout(self.lstm(self.embedding(x[:, now])), 0.2)
            loss += F.softmax_cross_entropy(self.last(h), t[:, now])
        return loss

    def examples(self, number: int) -> tuple[Any, Any]:
        """A batch."""
        words = np.random.randint(0, 200, (number, self.length + 1)).astype(np.int32)
        return words[:, :-1].copy(), words[:, 1:].copy()


class Dense(chainer.Chain):
    """Linear layers of drawn widths."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        widths = [rng.choice((256, 512, 1024)) for _ in range(rng.randint(3, 8))]
        self.apply = rng.choice((F.relu, F.sigmoid, F.tanh, F.leaky_relu))
        with self.init_scope():
            self.layers = chainer.ChainList(*(L.Linear(None, w) for w in widths))
            self.last = L.Linear(None, CLASSES)

    def forward(self, x: Any, t: Any) -> Any:
        """The loss."""
        for layer in self.layers:
            x = self.apply(layer(x))
        return F.softmax_cross_entropy(self.last(x), t)

    def examples(self, number: int) -> tuple[Any, Any]:
        """A batch."""
        x = np.random.rand(number, 512).astype(np.float32)
        return x, np.random.randint(0, CLASSES, number).astype(np.int32)


NETWORKS: tuple[Callable[[random.Random], Any], ...] = (
    Pictures,
    Pictures,
    Pictures,
    Sentences,
    Dense,
)


class Case:
    """One drawn question.

    Args:
        seed: Of everything.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.network = rng.choice(NETWORKS)
        self.optimizer = rng.choice(sorted(OPTIMIZERS))
        self.planner = rng.choice(PLANNERS)
        self.splitting = rng.choice((False, 'exact', 'exact'))
        self.free_bytes = int(MIB * rng.uniform(6, 30))
        model = self.training()[0]
        initialised = sum(4 * p.size for p in model.params() if p.is_initialized)
        self.limit_bytes = self.free_bytes + 4 * initialised

    def training(self) -> tuple[Any, Callable[[int], None]]:
        """The model, and a function that trains it with as many examples."""
        np.random.seed(self.seed)
        model = self.network(random.Random(self.seed + 1))
        optimizer = OPTIMIZERS[self.optimizer]().setup(model)

        def step(number: int) -> None:
            optimizer.update(model, *model.examples(number))

        return model, step

    def describe(self) -> dict[str, Any]:
        """What was drawn."""
        return {
            'seed': self.seed,
            'network': self.network.__name__,
            'optimizer': self.optimizer,
            'planner': self.planner,
            'splitting': self.splitting,
            'limit_bytes': self.limit_bytes,
        }


def train(case: Case, batchsize: int) -> dict[str, Any]:
    """Trains a new model in a session: how that ended."""
    model, step = case.training()
    session = hybridmem.optimize(
        model, case.limit_bytes, case.planner, splitting=case.splitting
    )
    error = ''
    try:
        with session:
            for _ in range(ITERATIONS):
                step(batchsize)
    except (hybridmem.HybridMemoryError, MemoryError) as caught:
        error = f'{type(caught).__name__}: {caught}'
    return {
        'batchsize': batchsize,
        'state': session.state,
        'peak_bytes': session.statistics()['guided_peak_bytes'],
        'error': error,
    }


def run(seed: int) -> dict[str, Any]:
    """One case: the answer, and how training with it and with one more ended."""
    case = Case(seed)
    row = case.describe()
    model, step = case.training()
    began = time.perf_counter()
    try:
        found = hybridmem.largest_batch(
            step, case.limit_bytes, model, case.planner, splitting=case.splitting
        )
    except hybridmem.HybridMemoryError as error:
        return {**row, 'right': False, 'error': f'{type(error).__name__}: {error}'}
    row['seconds'] = time.perf_counter() - began
    row['answer'] = found.batchsize
    row['in_core'] = found.in_core.batchsize if found.in_core else 0
    row['refusal'] = found.refusal.reason if found.refusal else ''
    if found.plan is not None:
        row['predicted_peak_bytes'] = found.plan.predicted_peak_bytes
        row['with'] = train(case, found.batchsize)
    row['with_one_more'] = train(case, found.batchsize + 1)
    trains = found.plan is None or not row['with']['error']
    row['right'] = trains and bool(row['with_one_more']['error'])
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--cases', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--jobs', type=int, default=2, help='processes')


def main(options: argparse.Namespace) -> int:
    """Runs every case and saves each row as it is measured."""
    rows = saving.Rows('largest_batch', iterations=ITERATIONS)
    seeds = range(options.seed, options.seed + options.cases)
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs,
        multiprocessing.get_context('spawn'),
    ) as pool:
        for row in pool.map(run, seeds):
            rows.add(row)
            print(describe(row), file=sys.stderr, flush=True)
    right = sum(row['right'] for row in rows.rows)
    print(f'{right} of {len(rows.rows)} right')
    return 0 if right == len(rows.rows) else 1


def describe(row: dict[str, Any]) -> str:
    """A case in a line; everything of one that is wrong."""
    if not row['right']:
        return str(row)
    return '{seed} {network} {planner}: {answer}, in-core {in_core}'.format(**row)
