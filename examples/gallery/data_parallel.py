"""Data parallel training with ChainerMN: two processes, each inside its own limit.

Each process has a part of the digits and a session of its own, which plans by itself.
Gradients are averaged over the processes, as without the package. The first process
writes the figures and the picture. Start it with ``mpiexec -n 2``.
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
import chainermn
import numpy as np
from sklearn.datasets import load_digits

SCALE = 4  # of digits of 8 by 8


class Network(chainer.Chain):
    """Convolutions with batch normalization, and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, channels, 3, pad=1, nobias=True)
            self.bn1 = L.BatchNormalization(channels)
            self.conv2 = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.bn2 = L.BatchNormalization(channels)
            self.conv3 = L.Convolution2D(channels, 2 * channels, 3, 2, 1, nobias=True)
            self.bn3 = L.BatchNormalization(2 * channels)
            self.last = L.Linear(2 * channels, 10)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = F.relu(self.bn3(self.conv3(h)))
        return self.last(F.average(h, axis=(2, 3)))


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training of this process; equal options give equal bits."""
    np.random.seed(0)
    communicator = chainermn.create_communicator('naive')
    model = L.Classifier(Network(options.width))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.05), communicator
    ).setup(model)
    digits = load_digits()
    mine = slice(communicator.rank, None, communicator.size)
    pictures = np.repeat(np.repeat(digits.images[mine], SCALE, 1), SCALE, 2)
    x = (pictures[:, np.newaxis] / 16).astype(np.float32)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(x, digits.target[mine].astype(np.int32)),
        options.batchsize,
    )

    def step(i: int) -> float:
        batch = chainer.dataset.concat_examples(iterator.next())
        return comparison.learn(model, optimizer, *batch)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example in one process; returns the exit status."""
    defaults = comparison.Defaults(batchsize=32, width=16, share=0.6, iterations=18)
    communicator = chainermn.create_communicator('naive')
    writes = communicator.rank == 0
    return comparison.main(
        'data_parallel', __doc__, make, defaults, arguments, writes=writes
    )


if __name__ == '__main__':
    sys.exit(main())
