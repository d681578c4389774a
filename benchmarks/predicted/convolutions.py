"""Twelve convolutions with batch normalization: python convolutions.py ITERATIONS."""

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

LAYERS, CHANNELS, SIDE, BATCH = 12, 16, 32, 16


class Block(chainer.Chain):
    """Adds to what it gets."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1)
            self.norm = L.BatchNormalization(CHANNELS)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Network(chainer.Sequential):
    """Tells which of ten classes a picture is of."""

    def __init__(self):
        super().__init__(
            L.Convolution2D(3, CHANNELS, 3, pad=1),
            *(Block() for _ in range(LAYERS)),
            lambda x: F.mean(x, axis=(2, 3)),
            L.Linear(CHANNELS, 10),
        )


np.random.seed(0)
model = L.Classifier(Network())
optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
x = np.random.rand(BATCH, 3, SIDE, SIDE).astype(np.float32)
t = np.random.randint(0, 10, BATCH).astype(np.int32)
for _ in range(int(sys.argv[1])):
    loss = model(x, t)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    del loss
