"""GoogLeNet with local response normalization and auxiliary classifiers.

Szegedy et al.: Going Deeper with Convolutions (2014), table 1 and section 5.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier

_AUXILIARY_WEIGHT = 0.3  # section 5 of the paper

# Table 1 of the paper: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj.
_INCEPTIONS = {
    'inception3a': (192, 64, 96, 128, 16, 32, 32),
    'inception3b': (256, 128, 128, 192, 32, 96, 64),
    'inception4a': (480, 192, 96, 208, 16, 48, 64),
    'inception4b': (512, 160, 112, 224, 24, 64, 64),
    'inception4c': (512, 128, 128, 256, 24, 64, 64),
    'inception4d': (512, 112, 144, 288, 32, 64, 64),
    'inception4e': (528, 256, 160, 320, 32, 128, 128),
    'inception5a': (832, 256, 160, 320, 32, 128, 128),
    'inception5b': (832, 384, 192, 384, 48, 128, 128),
}


class Inception(chainer.Chain):
    """Four parallel paths over one feature map, concatenated by channel.

    Args:
        n_in: Channels of the input.
        n_1x1: Channels of the 1x1 path.
        n_3x3_reduce: Channels of the 1x1 reduction before the 3x3 convolution.
        n_3x3: Channels of the 3x3 path.
        n_5x5_reduce: Channels of the 1x1 reduction before the 5x5 convolution.
        n_5x5: Channels of the 5x5 path.
        n_pool: Channels of the projection after the 3x3 max pooling.
    """

    def __init__(
        self,
        n_in: int,
        n_1x1: int,
        n_3x3_reduce: int,
        n_3x3: int,
        n_5x5_reduce: int,
        n_5x5: int,
        n_pool: int,
    ) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(n_in, n_1x1, 1)
            self.reduce3 = L.Convolution2D(n_in, n_3x3_reduce, 1)
            self.conv3 = L.Convolution2D(n_3x3_reduce, n_3x3, 3, pad=1)
            self.reduce5 = L.Convolution2D(n_in, n_5x5_reduce, 1)
            self.conv5 = L.Convolution2D(n_5x5_reduce, n_5x5, 5, pad=2)
            self.project = L.Convolution2D(n_in, n_pool, 1)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the four paths' outputs, of shape ``(N, sum of channels, H, W)``."""
        # One expression: the paths' outputs die with the concatenation.
        return F.relu(
            F.concat(
                (
                    self.conv1(x),
                    self.conv3(F.relu(self.reduce3(x))),
                    self.conv5(F.relu(self.reduce5(x))),
                    self.project(F.max_pooling_2d(x, 3, stride=1, pad=1)),
                )
            )
        )


class AuxiliaryClassifier(chainer.Chain):
    """A small classifier on an inner feature map, used in training only.

    Args:
        n_in: Channels of the feature map.
        n_class: Number of classes.
    """

    def __init__(self, n_in: int, n_class: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(n_in, 128, 1)
            self.fc1 = L.Linear(None, 1024)
            self.fc2 = L.Linear(1024, n_class)

    def forward(self, x: chainer.Variable, t: chainer.Variable) -> chainer.Variable:
        """Returns the scalar loss, unweighted."""
        # 5x5 as in the paper; smaller pictures have smaller maps here.
        window = min(5, *x.shape[2:])
        h = F.relu(self.conv(F.average_pooling_2d(x, window, stride=3)))
        h = self.fc2(F.dropout(F.relu(self.fc1(h)), 0.7))
        return F.softmax_cross_entropy(h, t)


class GoogLeNet(PictureClassifier):
    """Nine inception modules; ``loss = main + 0.3 (auxiliary 1 + auxiliary 2)``.

    Outside training (``chainer.config.train``) the loss is the main one alone. The
    picture size is free: the paper's last 7x7 pooling is an average over the map.

    Args:
        n_class: Number of classes.
    """

    def __init__(self, n_class: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, stride=2, pad=3)
            self.conv2_reduce = L.Convolution2D(64, 64, 1)
            self.conv2 = L.Convolution2D(64, 192, 3, pad=1)
            self.auxiliary1 = AuxiliaryClassifier(512, n_class)
            self.auxiliary2 = AuxiliaryClassifier(528, n_class)
            self.fc = L.Linear(1024, n_class)
            for name, channels in _INCEPTIONS.items():
                setattr(self, name, Inception(*channels))

    def forward(self, x: chainer.Variable, t: chainer.Variable) -> chainer.Variable:
        """Returns the loss of a batch and reports ``loss`` and ``accuracy``.

        Args:
            x: Pictures, float32 of shape ``(N, 3, H, W)``.
            t: Labels, int32 of shape ``(N,)``.

        Returns:
            The scalar loss, in training with both auxiliary classifiers.
        """
        h = self._until_stage4(x)
        h = self.inception4a(h)
        losses = self._auxiliary_losses(self.auxiliary1, h, t)
        # Rebinding h frees each module's input before the next one runs.
        for module in (self.inception4b, self.inception4c, self.inception4d):
            h = module(h)
        losses += self._auxiliary_losses(self.auxiliary2, h, t)
        h = F.max_pooling_2d(self.inception4e(h), 3, stride=2)
        h = self.inception5b(self.inception5a(h))
        h = F.dropout(F.average(h, axis=(2, 3)), 0.4)
        auxiliary = _AUXILIARY_WEIGHT * F.add(*losses) if losses else None
        return self.report(self.fc(h), t, auxiliary)

    def _until_stage4(self, x: chainer.Variable) -> chainer.Variable:
        h = F.max_pooling_2d(F.relu(self.conv1(x)), 3, stride=2)
        h = F.relu(self.conv2_reduce(F.local_response_normalization(h)))
        h = F.local_response_normalization(F.relu(self.conv2(h)))
        h = self.inception3a(F.max_pooling_2d(h, 3, stride=2))
        return F.max_pooling_2d(self.inception3b(h), 3, stride=2)

    def _auxiliary_losses(
        self, classifier: AuxiliaryClassifier, x: chainer.Variable, t: chainer.Variable
    ) -> list[chainer.Variable]:
        return [classifier(x, t)] if chainer.config.train else []
