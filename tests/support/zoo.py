"""Small networks of the shapes people train: skips, recurrence, attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

Batch = tuple[Any, Any]


class DenseNet(chainer.Chain):
    """Every layer reads all layers before it in its block."""

    def __init__(self, layers: int = 4, growth: int = 8) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(None, 2 * growth, 3, pad=1)
            self.norms = chainer.ChainList(
                *(L.BatchNormalization((2 + i) * growth) for i in range(layers))
            )
            self.convs = chainer.ChainList(
                *(L.Convolution2D(None, growth, 3, pad=1) for _ in range(layers))
            )
            self.transition = L.Convolution2D(None, 2 * growth, 1)
            self.last = L.Linear(None, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = F.concat((h, conv(F.relu(norm(h)))))
        h = F.average_pooling_2d(F.relu(self.transition(h)), 2)
        return F.softmax_cross_entropy(self.last(h), t)


class UNet(chainer.Chain):
    """Down, up, and what was on the way down beside what is on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        with self.init_scope():
            self.down1 = L.Convolution2D(None, width, 3, pad=1)
            self.down2 = L.Convolution2D(None, 2 * width, 3, pad=1)
            self.bottom = L.Convolution2D(None, 4 * width, 3, pad=1)
            self.up2 = L.Deconvolution2D(None, 2 * width, 2, stride=2)
            self.side2 = L.Convolution2D(None, 2 * width, 3, pad=1)
            self.up1 = L.Deconvolution2D(None, width, 2, stride=2)
            self.side1 = L.Convolution2D(None, width, 3, pad=1)
            self.last = L.Convolution2D(None, 10, 1)

    def forward(self, x: Any, t: Any) -> Any:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pooling_2d(one, 2)))
        h = F.dropout(F.relu(self.bottom(F.max_pooling_2d(two, 2))), 0.2)
        h = F.relu(self.side2(F.concat((self.up2(h), two))))
        h = F.relu(self.side1(F.concat((self.up1(h), one))))
        return F.softmax_cross_entropy(self.last(h), t)


class LanguageModel(chainer.Chain):
    """Two LSTM layers over a sentence, a loss for every word."""

    def __init__(self, words: int = 50, width: int = 64) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, width)
            self.lower = L.LSTM(width, width)
            self.upper = L.LSTM(width, width)
            self.last = L.Linear(width, words)

    def forward(self, x: Any, t: Any) -> Any:
        self.lower.reset_state()
        self.upper.reset_state()
        loss = 0
        for now in range(x.shape[1]):
            h = F.dropout(self.lower(self.embed(x[:, now])), 0.2)
            h = self.upper(h)
            loss += F.softmax_cross_entropy(self.last(h), t[:, now])
        return loss


class _Attention(chainer.Chain):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.joint = L.Linear(width, 3 * width)
            self.out = L.Linear(width, width)

    def forward(self, h: Any, shape: tuple[int, int]) -> Any:
        """Of rows (sentences x words, width)."""
        sentences, words = shape
        q, k, v = F.split_axis(self.joint(h), 3, axis=1)

        def split(y: Any) -> Any:
            y = F.reshape(y, (sentences, words, self.heads, -1))
            y = F.transpose(y, (0, 2, 1, 3))
            return F.reshape(y, (sentences * self.heads, words, -1))

        weights = F.matmul(split(q), split(k), transb=True) * 0.125
        mixed = F.matmul(F.dropout(F.softmax(weights, axis=2), 0.1), split(v))
        mixed = F.reshape(mixed, (sentences, self.heads, words, -1))
        mixed = F.transpose(mixed, (0, 2, 1, 3))
        return self.out(F.reshape(mixed, (sentences * words, -1)))


class Transformer(chainer.Chain):
    """Encoder layers: attention, normalisation, two dense layers."""

    def __init__(
        self, words: int = 50, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, width)
            self.attentions = chainer.ChainList(
                *(_Attention(width, heads) for _ in range(layers))
            )
            self.norms = chainer.ChainList(
                *(L.LayerNormalization(width) for _ in range(2 * layers))
            )
            self.wide = chainer.ChainList(
                *(L.Linear(width, 4 * width) for _ in range(layers))
            )
            self.narrow = chainer.ChainList(
                *(L.Linear(4 * width, width) for _ in range(layers))
            )
            self.last = L.Linear(width, words)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.reshape(self.embed(x), (x.size, -1))
        for i, attention in enumerate(self.attentions):
            h = self.norms[2 * i](h + F.dropout(attention(h, x.shape), 0.1))
            wide = F.relu(self.wide[i](h))
            h = self.norms[2 * i + 1](h + F.dropout(self.narrow[i](wide), 0.1))
        return F.softmax_cross_entropy(self.last(h), t.reshape(-1))


def pictures(rng: np.random.RandomState) -> Batch:
    x = rng.rand(4, 3, 16, 16).astype(np.float32)
    return x, rng.randint(0, 10, 4).astype(np.int32)


def segmented(rng: np.random.RandomState) -> Batch:
    x = rng.rand(2, 3, 16, 16).astype(np.float32)
    return x, rng.randint(0, 10, (2, 16, 16)).astype(np.int32)


def sentences(rng: np.random.RandomState) -> Batch:
    words = rng.randint(0, 50, (32, 9)).astype(np.int32)
    return words[:, :-1].copy(), words[:, 1:].copy()


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and what it is trained on."""

    make: Callable[[], chainer.Chain]
    batch: Callable[[np.random.RandomState], Batch]


NETWORKS = {
    'densenet': Network(DenseNet, pictures),
    'unet': Network(UNet, segmented),
    'lstm': Network(LanguageModel, sentences),
    'transformer': Network(Transformer, sentences),
}
