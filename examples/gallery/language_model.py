"""Language model: two LSTMs learn the next letter, with another length each time.

The text is the license of this repository. Each length is a signature of its own: the
first iterations of a length evict without a plan, later ones follow its plan.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import comparison  # before chainer: prepares NumPy for it

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

TEXT = pathlib.Path(__file__).resolve().parents[2] / 'LICENSE'
LENGTHS = (16, 24, 32)  # letters


class LanguageModel(chainer.Chain):
    """Embedding, two LSTMs, a linear layer; returns the loss of a text."""

    def __init__(self, letters: int, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(letters, units)
            self.lstm1 = L.LSTM(units, units)
            self.lstm2 = L.LSTM(units, units)
            self.last = L.Linear(units, letters)

    def forward(self, text: Any) -> Any:
        self.lstm1.reset_state()
        self.lstm2.reset_state()
        losses = [
            F.softmax_cross_entropy(self.predict(now), following)
            for now, following in itertools.pairwise(text)
        ]
        return sum(losses) / len(losses)

    def predict(self, letters: Any) -> Any:
        """Returns scores of the next letter of each text."""
        h = self.lstm1(F.dropout(self.embed(letters), 0.1))
        return self.last(F.dropout(self.lstm2(h), 0.1))


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    text = TEXT.read_text(encoding='utf-8')
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(letter) for letter in text], np.int32)
    model = LanguageModel(len(alphabet), options.width)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    draw = np.random.RandomState(1)

    def step(i: int) -> float:
        length = draw.choice(LENGTHS)
        starts = draw.randint(0, len(numbers) - length, options.batchsize)
        rows = [numbers[start : start + length] for start in starts]
        return comparison.learn(model, optimizer, np.stack(rows, axis=1))

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=192, width=128, share=0.6, iterations=48)
    return comparison.main('language_model', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
