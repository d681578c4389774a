"""Image classification: a residual network learns handwritten digits.

The digits are those that scikit-learn ships, in four times their size. Each block is
convolution, batch normalization and ReLU; outputs of convolutions and of ReLU are the
feature maps, all of one size. A convolution alone needs more than half of the peak.
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
from sklearn.datasets import load_digits

BLOCKS = 3
SCALE = 4  # of digits of 8 by 8


class Block(chainer.Chain):
    """Two convolutions beside a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.bn1 = L.BatchNormalization(channels)
            self.conv2 = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.bn2 = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + x)


class Network(chainer.Chain):
    """A convolution, blocks, and a linear layer of the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(1, channels, 3, pad=1, nobias=True)
            self.blocks = chainer.Sequential(*(Block(channels) for _ in range(BLOCKS)))
            self.last = L.Linear(channels, 10)

    def forward(self, x: Any) -> Any:
        h = self.blocks(F.relu(self.first(x)))
        return self.last(F.average(h, axis=(2, 3)))


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    model = L.Classifier(Network(options.width))
    optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
    digits = load_digits()
    pictures = np.repeat(np.repeat(digits.images, SCALE, 1), SCALE, 2)
    x = (pictures[:, np.newaxis] / 16).astype(np.float32)
    t = digits.target.astype(np.int32)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, t), options.batchsize
    )

    def step(i: int) -> float:
        batch = chainer.dataset.concat_examples(iterator.next())
        return comparison.learn(model, optimizer, *batch)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=32, width=16, share=0.6, iterations=18)
    return comparison.main('image_classification', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
