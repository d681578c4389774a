"""The network of pictures that most scenarios train, and its batches."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Block(chainer.Chain):
    """A residual block whose workspaces are no larger than its maps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(channels, channels, 1)
            self.b1 = L.BatchNormalization(channels)
            self.c2 = L.Convolution2D(channels, channels, 1)
            self.b2 = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + x)


class Trunk(chainer.Chain):
    """Convolutions with residuals, batch normalisation and dropout."""

    def __init__(self, channels: int = 8, blocks: int = 3, dropout: float = 0.2):
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.first = L.Convolution2D(None, channels, 2, pad=1)
            self.blocks = chainer.ChainList(*(Block(channels) for _ in range(blocks)))

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            h = block(h)
        return F.dropout(h, self.dropout)


class Classifier(chainer.Chain):
    """A trunk, global pooling (any size of picture) and a linear layer."""

    def __init__(self, trunk: chainer.Link | None = None, classes: int = 5):
        super().__init__()
        with self.init_scope():
            self.trunk = trunk or Trunk()
            self.head = L.Linear(None, classes)

    def forward(self, x: Any, t: Any) -> Any:
        h = self.trunk(x)
        return self.loss(F.max_pooling_2d(h, 2), t)

    def loss(self, h: Any, t: Any) -> Any:
        """The loss of a trunk's features."""
        return F.softmax_cross_entropy(self.head(F.mean(h, axis=(2, 3))), t)


def pictures(
    rng: np.random.RandomState, n: int = 8, insize: int = 16, dtype: Any = np.float32
) -> tuple[Any, Any]:
    """A batch of random pictures and labels."""
    x = rng.rand(n, 3, insize, insize).astype(dtype)
    return x, rng.randint(0, 5, n).astype(np.int32)
