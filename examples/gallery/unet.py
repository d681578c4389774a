"""Segmentation with a U-Net: which pixels belong to a disc?

On every level the decoder gets what the encoder has found there, beside its own: such
concatenations are the largest feature maps. The pictures, discs under noise, are drawn
on the spot.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import comparison  # before chainer: prepares NumPy for it

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

SIDE = 64  # of the pictures
DEPTH = 3


class Stage(chainer.Chain):
    """A convolution, its normalization, and ReLU, twice."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(channels_in, channels, 3, pad=1, nobias=True)
            self.bn1 = L.BatchNormalization(channels)
            self.conv2 = L.Convolution2D(channels, channels, 3, pad=1, nobias=True)
            self.bn2 = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)))


class UNet(chainer.Chain):
    """Encoder and decoder with ways across; returns the loss of a batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(DEPTH)]
        with self.init_scope():
            self.down = chainer.ChainList(
                *(Stage(a, b) for a, b in zip([1, *widths], widths, strict=False))
            )
            self.up = chainer.ChainList(
                *(Stage(a + b, a) for a, b in itertools.pairwise(widths))
            )
            self.last = L.Convolution2D(channels, 1, 1)

    def forward(self, x: Any, truth: Any) -> Any:
        across = []
        h = x
        for stage in self.down:
            h = stage(h)
            across.append(h)
            h = F.max_pooling_2d(h, 2)
        h = across.pop()
        for stage in reversed(list(self.up)):
            h = stage(F.concat([across.pop(), F.unpooling_2d(h, 2, cover_all=False)]))
        return F.sigmoid_cross_entropy(self.last(h), truth)


def draw_discs(draw: np.random.RandomState, count: int) -> tuple[Any, Any]:
    """Returns pictures of noisy discs, and 1 where a disc is."""
    y, x = np.mgrid[:SIDE, :SIDE]
    centres = draw.uniform(SIDE / 4, 3 * SIDE / 4, (count, 2, 1, 1))
    radii = draw.uniform(SIDE / 8, SIDE / 4, (count, 1, 1))
    inside = (y - centres[:, 0]) ** 2 + (x - centres[:, 1]) ** 2 < radii**2
    pictures = inside + draw.normal(0, 1, inside.shape)
    truth = inside[:, np.newaxis].astype(np.int32)
    return pictures[:, np.newaxis].astype(np.float32), truth


def make(options: argparse.Namespace) -> comparison.Program:
    """Returns the training; equal options give equal bits."""
    np.random.seed(0)
    model = UNet(options.width)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    draw = np.random.RandomState(1)

    def step(i: int) -> float:
        batch = draw_discs(draw, options.batchsize)
        return comparison.learn(model, optimizer, *batch)

    return comparison.Program([model], step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    defaults = comparison.Defaults(batchsize=8, width=8, share=0.6)
    return comparison.main('unet', __doc__, make, defaults, arguments)


if __name__ == '__main__':
    sys.exit(main())
