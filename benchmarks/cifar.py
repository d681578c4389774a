"""VGG and ResNet for pictures of 32x32, as SmartPool's Table I has them.

Zhang et al. (2019) name http://torch.ch/blog/2015/07/30/cifar.html for VGG: batch
normalisation after every convolution and one hidden dense layer of 512; and ResNets of
many depths whose memory (4.4 GB for ResNet-50 at batch 100) fits the blocks of
``architectures/resnet.py`` behind a 3x3 convolution without stride or pooling.
"""

from __future__ import annotations

from collections.abc import Sequence

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier
from chainer_hybridmem.architectures.resnet import ResNet


class _VGG(PictureClassifier):
    """Convolution, batch normalisation and ReLU in five stages, then 512 and 10."""

    insize = 32
    blocks: Sequence[int]

    def __init__(self, n_class: int = 10) -> None:
        super().__init__()
        convolutions, n_in = [], 3
        for n_out, count in zip((64, 128, 256, 512, 512), self.blocks, strict=True):
            for _ in range(count):
                convolutions.append(L.Convolution2D(n_in, n_out, 3, pad=1))
                n_in = n_out
        with self.init_scope():
            self.convs = chainer.ChainList(*convolutions)
            self.bns = chainer.ChainList(
                *(L.BatchNormalization(conv.out_channels) for conv in convolutions)
            )
            self.fc1 = L.Linear(512, 512)
            self.fc1_bn = L.BatchNormalization(512)
            self.fc2 = L.Linear(512, n_class)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the class scores, of shape ``(N, n_class)``."""
        h, index = x, 0
        for count in self.blocks:
            for _ in range(count):
                h = self.convs[index](h)
                h = self.bns[index](h)
                h = F.relu(h)
                index += 1
            h = F.max_pooling_2d(h, 2, stride=2)
        h = self.fc1(F.dropout(h))
        h = F.relu(self.fc1_bn(h))
        return self.fc2(F.dropout(h))


class VGG11(_VGG):
    """Configuration A."""

    blocks = (1, 1, 2, 2, 2)


class VGG13(_VGG):
    """Configuration B."""

    blocks = (2, 2, 2, 2, 2)


class VGG16(_VGG):
    """Configuration D."""

    blocks = (2, 2, 3, 3, 3)


class VGG19(_VGG):
    """Configuration E."""

    blocks = (2, 2, 4, 4, 4)


class _ResNet(ResNet):
    """A residual network that keeps the size of the picture in its first stage."""

    insize = 32
    depths: Sequence[int]
    wide = True

    def __init__(self, n_class: int = 10) -> None:
        super().__init__(n_class, self.depths, self.wide)
        del self.stem
        with self.init_scope():
            self.stem = L.Convolution2D(3, 64, 3, 1, 1, nobias=True)

    def features(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the last feature map, of shape ``(N, C, 4, 4)``."""
        h = F.relu(self.stem_bn(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        return h


class ResNet18(_ResNet):
    """18 layers, basic blocks."""

    depths, wide = (2, 2, 2, 2), False


class ResNet34(_ResNet):
    """34 layers, basic blocks."""

    depths, wide = (3, 4, 6, 3), False


class ResNet50(_ResNet):
    """50 layers, bottleneck blocks."""

    depths = (3, 4, 6, 3)


class ResNet101(_ResNet):
    """101 layers, bottleneck blocks."""

    depths = (3, 4, 23, 3)
