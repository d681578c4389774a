"""Language models and translators: lengths vary."""

from __future__ import annotations

import itertools
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .loop import begin, step
from .registry import scenario
from .running import Run


class LanguageModel(chainer.Chain):
    """Embedding, LSTM, a linear layer."""

    def __init__(self, words: int = 50, units: int = 32):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, units)
            self.lstm = L.LSTM(units, units)
            self.out = L.Linear(units, words)

    def forward(self, words: Any) -> Any:
        return self.out(F.dropout(self.lstm(self.embed(words)), 0.2))


@scenario(signatures=None, steady=False, deviations=None)
def language_model_lengths(run: Run) -> None:
    """Backpropagation through time over 3 to 15 words; the state is carried over."""
    rng, model, optimizer = begin(LanguageModel, chainer.optimizers.SGD(0.5))
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
    with run.training(model):
        for i in range(16):
            if i % 8 == 0:
                model.lstm.reset_state()
            length = rng.randint(3, 16)
            words = rng.randint(0, 50, (length + 1, 32)).astype(np.int32)
            loss = 0
            for now, following in itertools.pairwise(words):
                loss += F.softmax_cross_entropy(model(now), following)
            model.cleargrads()
            loss.backward()
            loss.unchain_backward()
            optimizer.update()
            run.record(model, loss=loss, h=model.lstm.h, c=model.lstm.c)


class Translator(chainer.Chain):
    """An encoder whose last state starts a decoder."""

    def __init__(self, words: int = 40, units: int = 32):
        super().__init__()
        with self.init_scope():
            self.source = L.EmbedID(words, units)
            self.target = L.EmbedID(words, units)
            self.encoder = L.NStepLSTM(1, units, units, 0.1)
            self.decoder = L.NStepLSTM(1, units, units, 0.1)
            self.out = L.Linear(units, words)

    def forward(self, sources: Any, targets: Any) -> Any:
        h, c, _ = self.encoder(None, None, [self.source(x) for x in sources])
        before = [self.target(t[:-1]) for t in targets]
        _, _, states = self.decoder(h, c, before)
        logits = self.out(F.concat(states, axis=0))
        return F.softmax_cross_entropy(logits, F.concat([t[1:] for t in targets], 0))


@scenario(signatures=4, deviations=8, share=0.7)
def sequence_to_sequence(run: Run) -> None:
    """Two lengths of sources, two of targets, in random pairs."""
    rng, model, optimizer = begin(Translator, chainer.optimizers.Adam())
    with run.training(model):
        for _ in range(28):
            m, n = rng.choice((4, 7)), rng.choice((5, 8))
            sources = list(rng.randint(0, 40, (8, m)).astype(np.int32))
            targets = list(rng.randint(0, 40, (8, n)).astype(np.int32))
            loss = step(model, optimizer, sources, targets)
            run.record(model, loss=loss)
