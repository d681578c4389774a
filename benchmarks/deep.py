"""A residual network of a thousand layers, for measuring how planning scales.

He, Zhang, Ren, Sun: Identity Mappings in Deep Residual Networks (2016) have a
ResNet-1001 for pictures of 32x32: three stages of 111 bottleneck blocks. Blocks here
are those of ``architectures/resnet.py`` (version 1): another order of functions.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier
from chainer_hybridmem.architectures.resnet import ResidualBlock


class ResNet1001(PictureClassifier):
    """Three stages of residual blocks on small pictures.

    Args:
        n_class: Number of classes.
        blocks: Blocks in each stage; 111 give a thousand convolutions.
    """

    insize = 32

    def __init__(self, n_class: int = 10, blocks: int = 111) -> None:
        super().__init__()
        made, n_in = [], 16
        for stage, n_mid in enumerate((16, 32, 64)):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                made.append(ResidualBlock(n_in, n_mid, stride, True))
                n_in = 4 * n_mid
        with self.init_scope():
            self.stem = L.Convolution2D(3, 16, 3, 1, 1, nobias=True)
            self.stem_bn = L.BatchNormalization(16)
            self.blocks = chainer.ChainList(*made)
            self.fc = L.Linear(256, n_class)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the class scores, of shape ``(N, n_class)``."""
        h = F.relu(self.stem_bn(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        return self.fc(F.average(h, axis=(2, 3)))
