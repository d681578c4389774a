"""Two networks that are no stacks of convolutions.

``--arch benchmarks.rivals.sequences:NAME`` chooses one.

Both read pictures, as every architecture does: the LSTM row by row, the transformer
patch by patch.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L


class LSTM(chainer.Chain):
    """Two layers of LSTM over the rows of a picture."""

    insize = 28

    def __init__(self, n_class: int = 1000, units: int = 512) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.LSTM(None, units)
            self.second = L.LSTM(units, units)
            self.head = L.Linear(units, n_class)

    def forward(self, x: chainer.Variable, t: chainer.Variable) -> chainer.Variable:
        self.first.reset_state()
        self.second.reset_state()
        rows = F.separate(F.transpose(x, (2, 0, 1, 3)), axis=0)
        for row in rows:
            h = self.second(self.first(row))
        return F.softmax_cross_entropy(self.head(h), t)


class Block(chainer.Chain):
    """Self-attention and a perceptron, each normalised before and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.norm1 = L.LayerNormalization(width)
            self.qkv = L.Linear(width, 3 * width)
            self.project = L.Linear(width, width)
            self.norm2 = L.LayerNormalization(width)
            self.widen = L.Linear(width, 4 * width)
            self.narrow = L.Linear(4 * width, width)

    def forward(self, x: chainer.Variable, length: int) -> chainer.Variable:
        x = x + self.project(self.attend(self.qkv(self.norm1(x)), length))
        return x + self.narrow(F.relu(self.widen(self.norm2(x))))

    def attend(self, qkv: chainer.Variable, length: int) -> chainer.Variable:
        rows, width = qkv.shape[0], qkv.shape[1] // 3
        depth = width // self.heads
        parts = F.reshape(qkv, (-1, length, 3, self.heads, depth))
        query, key, value = F.separate(F.transpose(parts, (2, 0, 3, 1, 4)), axis=0)
        scores = F.softmax(F.matmul(query, key, transb=True) * depth**-0.5, axis=3)
        mixed = F.transpose(F.matmul(scores, value), (0, 2, 1, 3))
        return F.reshape(mixed, (rows, width))


class Transformer(chainer.Chain):
    """A small vision transformer: patches of 16x16, eight blocks of width 256."""

    insize = 224
    PATCH = 16

    def __init__(self, n_class: int = 1000, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        with self.init_scope():
            self.patches = L.Convolution2D(3, width, self.PATCH, self.PATCH)
            made = (Block(width, heads=4) for _ in range(blocks))
            self.blocks = chainer.ChainList(*made)
            self.norm = L.LayerNormalization(width)
            self.head = L.Linear(width, n_class)

    def forward(self, x: chainer.Variable, t: chainer.Variable) -> chainer.Variable:
        h = self.patches(x)
        batchsize, width, height, across = h.shape
        length = height * across
        h = F.reshape(F.transpose(h, (0, 2, 3, 1)), (-1, width))
        for block in self.blocks:
            h = block(h, length)
        h = F.reshape(self.norm(h), (batchsize, length, width))
        return F.softmax_cross_entropy(self.head(F.mean(h, axis=1)), t)
