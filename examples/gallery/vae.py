"""Variational autoencoder: convolutions press digits into a few random numbers.

The encoder draws with NumPy's generator. A function that draws is never run again;
everything around it may be, and the losses stay the same bit for bit.
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

HIDDEN = 8  # numbers a picture is pressed into
SIDE = 32  # of the pictures


class Autoencoder(chainer.Chain):
    """Encoder and decoder; returns the negative bound of a batch of pictures."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        with self.init_scope():
            self.down1 = L.Convolution2D(1, channels, 4, 2, 1)
            self.down2 = L.Convolution2D(channels, 2 * channels, 4, 2, 1)
            self.mean = L.Linear(None, HIDDEN)
            self.log_variance = L.Linear(None, HIDDEN)
            self.first = L.Linear(HIDDEN, 2 * channels * (SIDE // 4) ** 2)
            self.up1 = L.Deconvolution2D(2 * channels, channels, 4, 2, 1)
            self.up2 = L.Deconvolution2D(channels, channels, 4, 2, 1)
            self.last = L.Convolution2D(channels, 1, 3, pad=1)

    def forward(self, x: Any) -> Any:
        h = F.elu(self.down2(F.elu(self.down1(x))))
        mean, log_variance = self.mean(h), self.log_variance(h)
        decoded = self.decode(F.gaussian(mean, log_variance))
        likelihood = F.bernoulli_nll(x, decoded) / len(x)
        return likelihood + F.gaussian_kl_divergence(mean, log_variance) / len(x)

    def decode(self, z: Any) -> Any:
        """Returns the logit of every pixel."""
        shape = (-1, 2 * self.channels, SIDE // 4, SIDE // 4)
        h = F.reshape(F.elu(self.first(z)), shape)
        return self.last(F.elu(self.up2(F.elu(self.up1(h)))))


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    model = Autoencoder(options.width)
    optimizer = chainer.optimizers.Adam().setup(model)
    digits = load_digits().images[:, np.newaxis] / 16
    pictures = np.repeat(np.repeat(digits, SIDE // 8, 2), SIDE // 8, 3)
    iterator = chainer.iterators.SerialIterator(
        pictures.astype(np.float32), options.batchsize
    )

    def step(i: int) -> float:
        batch = chainer.dataset.concat_examples(iterator.next())
        return comparison.learn(model, optimizer, batch)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=64, width=24, share=0.6)
    return comparison.main('vae', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
