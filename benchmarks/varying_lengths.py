"""What varying lengths cost a language model in a session.

Trains one language model twice under the same limit: with lengths drawn anew for every
iteration, and with the mean of them. Seconds per word are medians over the last
iterations, when the lengths have been seen; plain Chainer's are beside them.

    python -m benchmarks run varying_lengths [--share 0.5] [--iterations 480] [--step 1]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

SHORTEST, LONGEST = 5, 35  # words of a sequence
WORDS = 500


class LanguageModel(chainer.Chain):
    """Embedding, two LSTMs, a linear layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(WORDS, units)
            self.l1 = L.LSTM(units, units)
            self.l2 = L.LSTM(units, units)
            self.out = L.Linear(units, WORDS)

    def forward(self, words: Any) -> Any:
        h = self.l1(F.dropout(self.embed(words), 0.2))
        return self.out(F.dropout(self.l2(h), 0.2))


class Training:
    """A model that goes on from sequence to sequence, its state carried over."""

    def __init__(self, units: int, batchsize: int) -> None:
        np.random.seed(0)
        self.model = LanguageModel(units)
        self.optimizer = chainer.optimizers.SGD(0.1).setup(self.model)
        self.batchsize = batchsize
        self.rng = np.random.RandomState(1)

    def step(self, length: int) -> float:
        """Trains one sequence; returns seconds per word of one row."""
        words = self.rng.randint(0, WORDS, (length + 1, self.batchsize))
        words = words.astype(np.int32)
        start = time.perf_counter()
        loss: Any = 0
        for now, following in itertools.pairwise(words):
            loss += F.softmax_cross_entropy(self.model(now), following)
        self.model.cleargrads()
        loss.backward()
        loss.unchain_backward()
        self.optimizer.update()
        return (time.perf_counter() - start) / length


def run(
    options: argparse.Namespace, lengths: Sequence[int], limit: int | None
) -> tuple[list[float], dict[str, Any]]:
    """Seconds per word of the last iterations, and the session's figures."""
    training = Training(options.units, options.batchsize)
    if limit is None:
        seconds, figures = [training.step(length) for length in lengths], {}
    else:
        with hybridmem.optimize(training.model, limit) as session:
            seconds = [training.step(length) for length in lengths]
        figures = session.statistics()
        figures['last_guided'] = sum(
            bool(entry['guided']) for entry in session._history.entries[-options.last :]
        )
    return seconds[-options.last :], figures


def longest_peak(options: argparse.Namespace) -> int:
    """In-core peak of the longest sequences, in bytes."""
    training = Training(options.units, options.batchsize)
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(4):
            training.step(LONGEST)
    return int(session.statistics()['peak_bytes'])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--units', type=int, default=200)
    parser.add_argument('--batchsize', type=int, default=32)
    parser.add_argument(
        '--share', type=float, default=0.5, help='limit over the longest peak'
    )
    parser.add_argument('--iterations', type=int, default=480)
    parser.add_argument(
        '--step', type=int, default=1, help='words between one length and the next'
    )
    parser.add_argument('--last', type=int, default=60, help='iterations that count')


def main(options: argparse.Namespace) -> int:
    limit = int(longest_peak(options) * options.share)
    rng = np.random.RandomState(2)
    lengths = range(SHORTEST, LONGEST + 1, options.step)
    varying = rng.choice(lengths, options.iterations).tolist()
    fixed = [round(statistics.mean(varying))] * options.iterations
    rows = []
    for name, lengths in (('fixed', fixed), ('varying', varying)):
        plain, _ = run(options, lengths[: options.last], None)
        seconds, figures = run(options, lengths, limit)
        rows.append(
            {
                'lengths': name,
                'plain_ms_per_word': statistics.median(plain) * 1e3,
                'ms_per_word': statistics.median(seconds) * 1e3,
                'guided': f'{figures["last_guided"]} of {options.last}',
                'deviations': figures['deviations'],
                'peak_bytes': figures['peak_bytes'],
            }
        )
    ratio = rows[1]['ms_per_word'] / rows[0]['ms_per_word']
    print(
        common.table(
            rows,
            {
                'lengths': str,
                'plain_ms_per_word': '{:.3f}'.format,
                'ms_per_word': '{:.3f}'.format,
                'guided': str,
                'deviations': str,
                'peak_bytes': str,
            },
        )
    )
    print(f'limit {limit} bytes; varying over fixed: {ratio:.2f}')
    common.save('varying_lengths', {'limit_bytes': limit, 'ratio': ratio, 'rows': rows})
    return 0
