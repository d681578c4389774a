"""Double backprop: a classifier whose gradient by the picture is kept small.

The loss contains a gradient (``chainer.grad`` with ``enable_double_backprop``), so that
backward runs through the graph of a backward. A session takes each of both for an
iteration. Feature maps of the first graph, which the second backward reads again, leave
and come back without a plan.
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

SIDE = 32  # of the pictures
WEIGHT = 10.0  # of the gradient in the loss


class Classifier(chainer.Chain):
    """Smooth layers; returns cross entropy and squared gradient of a batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, channels, 5, pad=2)
            self.conv2 = L.Convolution2D(channels, 2 * channels, 3, 2, 1)
            self.conv3 = L.Convolution2D(2 * channels, 4 * channels, 3, 2, 1)
            self.last = L.Linear(4 * channels, 10)

    def forward(self, pictures: Any, labels: Any) -> Any:
        x = chainer.Variable(pictures)
        h = x
        for layer in (self.conv1, self.conv2, self.conv3):
            h = F.softplus(layer(h))
        scores = self.last(F.average(h, axis=(2, 3)))
        loss = F.softmax_cross_entropy(scores, labels, enable_double_backprop=True)
        (slope,) = chainer.grad([loss], [x], enable_double_backprop=True)
        return loss + WEIGHT * F.sum(slope**2)


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    model = Classifier(options.width)
    optimizer = chainer.optimizers.Adam(0.003).setup(model)
    digits = load_digits()
    pictures = np.repeat(np.repeat(digits.images / 16, SIDE // 8, 1), SIDE // 8, 2)
    x = pictures[:, np.newaxis].astype(np.float32)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, digits.target.astype(np.int32)),
        options.batchsize,
    )

    def step(i: int) -> float:
        batch = chainer.dataset.concat_examples(iterator.next())
        return comparison.learn(model, optimizer, *batch)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=64, width=16, share=0.7)
    return comparison.main('double_backprop', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
