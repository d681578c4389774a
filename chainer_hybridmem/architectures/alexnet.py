"""AlexNet in one tower.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional
Neural Networks (2012), without the split over two GPUs.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier


class AlexNet(PictureClassifier):
    """Five convolutions, three fully connected layers.

    The first fully connected layer takes its size from the first batch, so that
    every picture size from 67 up works.

    Args:
        n_class: Number of classes.
    """

    insize = 227

    def __init__(self, n_class: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 96, 11, stride=4)
            self.conv2 = L.Convolution2D(96, 256, 5, pad=2)
            self.conv3 = L.Convolution2D(256, 384, 3, pad=1)
            self.conv4 = L.Convolution2D(384, 384, 3, pad=1)
            self.conv5 = L.Convolution2D(384, 256, 3, pad=1)
            self.fc6 = L.Linear(None, 4096)
            self.fc7 = L.Linear(4096, 4096)
            self.fc8 = L.Linear(4096, n_class)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the class scores, of shape ``(N, n_class)``."""
        h = F.dropout(F.relu(self.fc6(self.features(x))))
        return self.fc8(F.dropout(F.relu(self.fc7(h))))

    def features(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the last feature map, of shape ``(N, 256, H', W')``."""
        h = F.local_response_normalization(F.relu(self.conv1(x)))
        h = F.max_pooling_2d(h, 3, stride=2)
        h = F.local_response_normalization(F.relu(self.conv2(h)))
        h = F.max_pooling_2d(h, 3, stride=2)
        h = F.relu(self.conv4(F.relu(self.conv3(h))))
        return F.max_pooling_2d(F.relu(self.conv5(h)), 3, stride=2)
