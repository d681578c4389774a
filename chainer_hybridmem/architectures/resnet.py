"""Residual networks, version 1.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (2015), table 1:
the first 1x1 convolution of a stage has the stride, shortcuts are projections
(option B) where the shape changes, and the activation comes after the addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier

_STAGE_CHANNELS = (64, 128, 256, 512)


class ResidualBlock(chainer.Chain):
    """A stack of convolutions with a shortcut around it.

    Args:
        n_in: Channels of the input.
        n_mid: Channels inside.
        stride: Stride of the first convolution and of the projection.
        bottleneck: Whether the stack is 1x1, 3x3, 1x1 with ``4 * n_mid`` channels
            at its end, or 3x3, 3x3 with ``n_mid``.
    """

    def __init__(self, n_in: int, n_mid: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        shapes = _bottleneck_shapes if bottleneck else _basic_shapes
        convolutions = [_convolution(*s) for s in shapes(n_in, n_mid, stride)]
        n_out = convolutions[-1].out_channels
        with self.init_scope():
            self.convs = chainer.ChainList(*convolutions)
            self.bns = chainer.ChainList(
                *(L.BatchNormalization(conv.out_channels) for conv in convolutions)
            )
            if stride != 1 or n_in != n_out:
                self.projection = _convolution(n_in, n_out, 1, stride)
                self.projection_bn = L.BatchNormalization(n_out)
            else:
                self.projection = None

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the block's output, of shape ``(N, n_out, H', W')``."""
        return F.relu(self._residual(x) + self._shortcut(x))

    def _residual(self, x: chainer.Variable) -> chainer.Variable:
        h = x
        for index, (conv, bn) in enumerate(zip(self.convs, self.bns, strict=True)):
            if index > 0:
                h = F.relu(h)
            # One call a line: in bn(conv(h)) the input h would live on during bn.
            h = conv(h)
            h = bn(h)
        return h

    def _shortcut(self, x: chainer.Variable) -> chainer.Variable:
        if self.projection is None:
            return x
        return self.projection_bn(self.projection(x))


def _convolution(n_in: int, n_out: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    """Makes a convolution for use before batch normalization, padded to keep size."""
    return L.Convolution2D(
        n_in,
        n_out,
        ksize,
        stride,
        ksize // 2,
        nobias=True,
        initialW=chainer.initializers.HeNormal(),
    )


def _expansion(bottleneck: bool) -> int:
    """Returns how many times wider a block's output is than its inside."""
    return 4 if bottleneck else 1


def _bottleneck_shapes(n_in: int, n_mid: int, stride: int) -> Sequence[tuple]:
    return (n_in, n_mid, 1, stride), (n_mid, n_mid, 3), (n_mid, 4 * n_mid, 1)


def _basic_shapes(n_in: int, n_mid: int, stride: int) -> Sequence[tuple]:
    return (n_in, n_mid, 3, stride), (n_mid, n_mid, 3)


class ResNet(PictureClassifier):
    """A residual network.

    Args:
        n_class: Number of classes.
        blocks: Residual blocks in each of the four stages; ``(3, 4, 6, 3)`` is
            ResNet-50, larger numbers make networks as deep as you like.
        bottleneck: Whether blocks are bottlenecks (50 layers and more) or basic
            (18 and 34).
    """

    def __init__(
        self,
        n_class: int = 1000,
        blocks: Sequence[int] = (3, 4, 6, 3),
        bottleneck: bool = True,
    ) -> None:
        super().__init__()
        if len(blocks) != len(_STAGE_CHANNELS) or min(blocks) < 1:
            raise ValueError(
                f'blocks must be {len(_STAGE_CHANNELS)} positive numbers, one for each '
                f'stage, not {tuple(blocks)}.'
            )
        with self.init_scope():
            self.stem = _convolution(3, _STAGE_CHANNELS[0], 7, 2)
            self.stem_bn = L.BatchNormalization(_STAGE_CHANNELS[0])
            self.blocks = chainer.ChainList(*_make_blocks(blocks, bottleneck))
            self.fc = L.Linear(_STAGE_CHANNELS[-1] * _expansion(bottleneck), n_class)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the class scores, of shape ``(N, n_class)``."""
        return self.fc(F.average(self.features(x), axis=(2, 3)))

    def features(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the last feature map, of shape ``(N, C, ~H / 32, ~W / 32)``."""
        h = F.max_pooling_2d(F.relu(self.stem_bn(self.stem(x))), 3, stride=2, pad=1)
        for block in self.blocks:
            h = block(h)
        return h


def _make_blocks(blocks: Sequence[int], bottleneck: bool) -> list[ResidualBlock]:
    made = []
    n_in = _STAGE_CHANNELS[0]
    for stage, (n_mid, count) in enumerate(zip(_STAGE_CHANNELS, blocks, strict=True)):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            made.append(ResidualBlock(n_in, n_mid, stride, bottleneck))
            n_in = n_mid * _expansion(bottleneck)
    return made
