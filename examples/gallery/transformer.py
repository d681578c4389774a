"""Transformer: attention over letters learns to predict the next one.

The weights of attention grow with the square of the length; softmax and dropout each
leave arrays of this size behind for backward. The text is the license of this
repository.
"""

from __future__ import annotations

import argparse
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
LAYERS, HEADS, LENGTH = 2, 4, 64
EARLIER = np.tri(LENGTH, dtype=bool)  # which letters each letter may look at
NEVER = np.array(-1e9, np.float32)


class Layer(chainer.Chain):
    """Attention to earlier letters, then two linear layers, beside ways around."""

    def __init__(self, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.norm1 = L.LayerNormalization(units)
            self.three = L.Linear(units, 3 * units)
            self.mix = L.Linear(units, units)
            self.norm2 = L.LayerNormalization(units)
            self.wide = L.Linear(units, 4 * units)
            self.narrow = L.Linear(4 * units, units)

    def forward(self, x: Any) -> Any:
        x = x + self.attend(self.norm1(x))
        return x + F.dropout(self.narrow(F.relu(self.wide(self.norm2(x)))), 0.1)

    def attend(self, x: Any) -> Any:
        """Returns what each letter takes from the earlier ones."""
        units = x.shape[1]
        heads = F.reshape(self.three(x), (-1, LENGTH, 3, HEADS, units // HEADS))
        query, key, value = F.separate(F.transpose(heads, (2, 0, 3, 1, 4)))
        scores = F.matmul(query, key, transb=True) * (units // HEADS) ** -0.5
        xp: Any = self.xp
        earlier = xp.broadcast_to(xp.asarray(EARLIER), scores.shape)
        scores = F.where(earlier, scores, xp.asarray(NEVER))
        taken = F.matmul(F.dropout(F.softmax(scores, axis=3), 0.1), value)
        return self.mix(F.reshape(F.transpose(taken, (0, 2, 1, 3)), (-1, units)))


class Transformer(chainer.Chain):
    """Layers between an embedding and a linear layer; returns the loss of texts."""

    def __init__(self, letters: int, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(letters, units)
            self.place = L.EmbedID(LENGTH, units)
            self.layers = chainer.Sequential(*(Layer(units) for _ in range(LAYERS)))
            self.last = L.Linear(units, letters)

    def forward(self, texts: Any) -> Any:
        xp: Any = self.xp
        places = xp.tile(xp.arange(LENGTH, dtype=np.int32), len(texts))
        h = self.embed(texts[:, :-1].reshape(-1)) + self.place(places)
        scores = self.last(self.layers(h))
        return F.softmax_cross_entropy(scores, texts[:, 1:].reshape(-1))


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    text = TEXT.read_text(encoding='utf-8')
    alphabet = sorted(set(text))
    numbers = np.array([alphabet.index(letter) for letter in text], np.int32)
    model = Transformer(len(alphabet), HEADS * options.width)
    optimizer = chainer.optimizers.Adam(0.002).setup(model)
    draw = np.random.RandomState(1)

    def step(i: int) -> float:
        starts = draw.randint(0, len(numbers) - LENGTH - 1, options.batchsize)
        rows = [numbers[start : start + LENGTH + 1] for start in starts]
        return comparison.learn(model, optimizer, np.stack(rows))

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=64, width=24, share=0.5)
    return comparison.main('transformer', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
