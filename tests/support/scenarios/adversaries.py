"""The two networks of a GAN."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .loop import start


class Generator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.l0 = L.Linear(16, 16 * 16)
            self.b0 = L.BatchNormalization(16 * 16)
            self.d1 = L.Deconvolution2D(16, 16, 2, stride=2)
            self.b1 = L.BatchNormalization(16)
            self.d2 = L.Deconvolution2D(16, 16, 2, stride=2)
            self.b2 = L.BatchNormalization(16)
            self.last = L.Convolution2D(16, 3, 1)

    def forward(self, z: Any) -> Any:
        h = F.relu(self.b0(self.l0(z))).reshape(len(z), 16, 4, 4)
        h = F.relu(self.b2(self.d2(F.relu(self.b1(self.d1(h))))))
        return F.sigmoid(self.last(h))


class Discriminator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 16, 1)
            self.c2 = L.Convolution2D(16, 16, 1)
            self.c3 = L.Convolution2D(16, 16, 2, stride=2)
            self.last = L.Linear(None, 1)

    def forward(self, x: Any) -> Any:
        h = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x))))
        return self.last(F.leaky_relu(self.c3(h)))


def adversaries() -> tuple[Any, Any, Any, Any, Any]:
    generator, discriminator = Generator(), Discriminator()
    discriminator(np.zeros((1, 3, 16, 16), np.float32))
    both = chainer.Chain(generator=generator, discriminator=discriminator)
    return (
        both,
        generator,
        discriminator,
        start(generator, chainer.optimizers.Adam(1e-3)),
        start(discriminator, chainer.optimizers.Adam(1e-3)),
    )


def noise(rng: np.random.RandomState, n: int = 8) -> Any:
    return rng.normal(size=(n, 16)).astype(np.float32)
