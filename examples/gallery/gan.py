"""GAN with two updaters: a generator and a critic of handwritten digits.

Both networks are in one session and in the iteration of one updater, which updates
first the critic, then the generator, as Chainer's DCGAN does. Their graphs share the
generated pictures. A session takes each update for an iteration and has a plan for
each.
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

HIDDEN = 32  # numbers a picture is made of
SIDE = 32  # of the pictures


class Generator(chainer.Chain):
    """Makes pictures of random numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        with self.init_scope():
            self.first = L.Linear(HIDDEN, 4 * channels * (SIDE // 4) ** 2)
            self.bn1 = L.BatchNormalization(4 * channels)
            self.up1 = L.Deconvolution2D(4 * channels, 2 * channels, 4, 2, 1)
            self.bn2 = L.BatchNormalization(2 * channels)
            self.up2 = L.Deconvolution2D(2 * channels, 1, 4, 2, 1)

    def forward(self, z: Any) -> Any:
        shape = (-1, 4 * self.channels, SIDE // 4, SIDE // 4)
        h = F.relu(self.bn1(F.reshape(self.first(z), shape)))
        h = F.relu(self.bn2(self.up1(h)))
        return F.sigmoid(self.up2(h))


class Critic(chainer.Chain):
    """Tells digits from what the generator makes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.down1 = L.Convolution2D(1, channels, 4, 2, 1)
            self.down2 = L.Convolution2D(channels, 2 * channels, 4, 2, 1)
            self.bn2 = L.BatchNormalization(2 * channels)
            self.down3 = L.Convolution2D(2 * channels, 4 * channels, 4, 2, 1)
            self.bn3 = L.BatchNormalization(4 * channels)
            self.last = L.Linear(None, 1)

    def forward(self, x: Any) -> Any:
        h = F.leaky_relu(self.down1(x))
        h = F.leaky_relu(self.bn2(self.down2(h)))
        h = F.leaky_relu(self.bn3(self.down3(h)))
        return self.last(h)


class Updater(chainer.training.updaters.StandardUpdater):
    """Trains the critic, then the generator, in every iteration."""

    loss = float('nan')

    def update_core(self) -> None:
        generate, critic = self.get_optimizer('generate'), self.get_optimizer('critic')
        batch = chainer.dataset.concat_examples(self.get_iterator('main').next())
        z = np.random.uniform(-1, 1, (len(batch), HIDDEN)).astype(np.float32)
        batch, z = critic.target.device.send((batch, z))
        made = generate.target(z)
        real_score, made_score = critic.target(batch), critic.target(made)
        critic_loss = F.average(F.softplus(-real_score) + F.softplus(made_score))
        critic.target.cleargrads()
        critic_loss.backward()
        critic.update()
        made_loss = F.average(F.softplus(-critic.target(made)))
        generate.target.cleargrads()
        made_loss.backward()
        generate.update()
        self.loss = float(critic_loss.array) + float(made_loss.array)


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    generator, critic = Generator(options.width), Critic(options.width)
    optimizers = {
        'generate': chainer.optimizers.Adam(2e-4, beta1=0.5).setup(generator),
        'critic': chainer.optimizers.Adam(2e-4, beta1=0.5).setup(critic),
    }
    digits = load_digits().images[:, np.newaxis] / 16
    pictures = np.repeat(np.repeat(digits, SIDE // 8, 2), SIDE // 8, 3)
    iterator = chainer.iterators.SerialIterator(
        pictures.astype(np.float32), options.batchsize
    )
    updater = Updater(iterator, optimizers)

    def step(i: int) -> float:
        updater.update()
        return updater.loss

    return comparison.Program([generator, critic], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=64, width=24, share=0.7)
    return comparison.main('gan', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
