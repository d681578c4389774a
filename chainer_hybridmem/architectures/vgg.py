"""VGG networks.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image
Recognition (2014), configurations A (11 layers), B (13), D (16) and E (19).
"""

from __future__ import annotations

from collections.abc import Sequence

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.architectures.classifier import PictureClassifier

_STAGE_CHANNELS = (64, 128, 256, 512, 512)


class VGG(PictureClassifier):
    """Stages of 3x3 convolutions, each halving the size, and three dense layers.

    The first dense layer takes its size from the first batch, so that every
    picture size works.

    Args:
        n_class: Number of classes.
        blocks: Convolutions in each of the five stages.
    """

    # Nothing normalises the maps: with small batches, the first steps at 0.01 move the
    # scores by tens, and the next ones overflow.
    learning_rate = 0.0005

    def __init__(
        self, n_class: int = 1000, blocks: Sequence[int] = (2, 2, 3, 3, 3)
    ) -> None:
        super().__init__()
        if len(blocks) != len(_STAGE_CHANNELS) or min(blocks) < 1:
            raise ValueError(
                f'blocks must be {len(_STAGE_CHANNELS)} positive numbers, one for each '
                f'stage, not {tuple(blocks)}.'
            )
        with self.init_scope():
            self.stages = chainer.ChainList(*_make_stages(blocks))
            self.fc6 = L.Linear(None, 4096)
            self.fc7 = L.Linear(4096, 4096)
            self.fc8 = L.Linear(4096, n_class)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the class scores, of shape ``(N, n_class)``."""
        h = F.dropout(F.relu(self.fc6(self.features(x))))
        return self.fc8(F.dropout(F.relu(self.fc7(h))))

    def features(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the last feature map, of shape ``(N, 512, ~H / 32, ~W / 32)``."""
        h = x
        for stage in self.stages:
            for convolution in stage:
                # One call a line: nested, the input would live on during relu.
                h = convolution(h)
                h = F.relu(h)
            h = F.max_pooling_2d(h, 2, stride=2)
        return h


def _make_stages(blocks: Sequence[int]) -> list[chainer.ChainList]:
    made = []
    n_in = 3
    for n_out, count in zip(_STAGE_CHANNELS, blocks, strict=True):
        stage = chainer.ChainList()
        for _ in range(count):
            # Without batch normalization the deep ones only train from He's scale.
            initial = chainer.initializers.HeNormal()
            stage.append(L.Convolution2D(n_in, n_out, 3, pad=1, initialW=initial))
            n_in = n_out
        made.append(stage)
    return made
