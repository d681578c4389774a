"""Sequence to sequence: an encoder and a decoder learn to read numbers backwards.

The lengths differ in every batch, and on a CPU ``NStepLSTM`` consists of hundreds of
small functions: no iteration repeats an earlier one, so that feature maps leave without
a plan, whenever memory is short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import comparison  # before chainer: prepares NumPy for it

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

LAYERS = 2
BEGIN, WORDS = 10, 11  # ten digits, and the word that begins an answer
SHORTEST, LONGEST = 8, 12


class Translator(chainer.Chain):
    """Encoder, decoder, and a linear layer; returns the loss of a batch."""

    def __init__(self, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.source = L.EmbedID(WORDS, units)
            self.target = L.EmbedID(WORDS, units)
            self.encoder = L.NStepLSTM(LAYERS, units, units, 0.1)
            self.decoder = L.NStepLSTM(LAYERS, units, units, 0.1)
            self.last = L.Linear(units, WORDS)

    def forward(self, questions: Sequence[Any], answers: Sequence[Any]) -> Any:
        xp: Any = self.xp
        begin = xp.array([BEGIN], np.int32)
        given = [xp.concatenate([begin, answer[:-1]]) for answer in answers]
        h, c, _ = self.encoder(None, None, embed_each(self.source, questions))
        _, _, states = self.decoder(h, c, embed_each(self.target, given))
        scores = self.last(F.concat(states, axis=0))
        return F.softmax_cross_entropy(scores, xp.concatenate(answers))


def embed_each(embed: Any, sequences: Sequence[Any]) -> Any:
    """Returns the vectors of each sequence."""
    ends = np.cumsum([len(sequence) for sequence in sequences])[:-1]
    return F.split_axis(embed(embed.xp.concatenate(sequences)), ends, axis=0)


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    model = Translator(options.width)
    optimizer = chainer.optimizers.Adam().setup(model)
    draw = np.random.RandomState(1)

    def step(i: int) -> float:
        lengths = draw.randint(SHORTEST, LONGEST + 1, options.batchsize)
        questions = [draw.randint(0, 10, n).astype(np.int32) for n in lengths]
        answers = [question[::-1].copy() for question in questions]
        return comparison.learn(model, optimizer, questions, answers)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=192, width=128, share=0.7, iterations=24)
    return comparison.main('seq2seq', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
