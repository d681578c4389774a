"""What all picture classifiers of this package share: loss and accuracy."""

from __future__ import annotations

import chainer
import chainer.functions as F


class PictureClassifier(chainer.Chain):
    """Base of the architectures: a chain from pictures to a reported loss.

    A subclass defines :meth:`logits`. Nothing computed is kept on ``self`` and no
    local outlives its use: a Variable that is still referenced keeps its feature
    map in memory, which no plan could swap out.

    Attributes:
        insize: Height and width of the pictures the architecture was designed for.
    """

    insize: int = 224

    def forward(self, x: chainer.Variable, t: chainer.Variable) -> chainer.Variable:
        """Returns the loss of a batch and reports ``loss`` and ``accuracy``.

        Args:
            x: Pictures, float32 of shape ``(N, 3, H, W)``.
            t: Labels, int32 of shape ``(N,)``.

        Returns:
            The scalar loss.
        """
        return self.report(self.logits(x), t)

    def logits(self, x: chainer.Variable) -> chainer.Variable:
        """Returns the unnormalised class scores, of shape ``(N, n_class)``."""
        raise NotImplementedError

    def report(
        self,
        y: chainer.Variable,
        t: chainer.Variable,
        auxiliary: chainer.Variable | None = None,
    ) -> chainer.Variable:
        """Reports loss and accuracy of class scores.

        Args:
            y: Class scores of shape ``(N, n_class)``.
            t: Labels of shape ``(N,)``.
            auxiliary: A further scalar loss to add, already weighted.

        Returns:
            The scalar loss: softmax cross entropy plus ``auxiliary``.
        """
        loss = F.softmax_cross_entropy(y, t)
        if auxiliary is not None:
            loss = loss + auxiliary
        with chainer.no_backprop_mode():
            accuracy = F.accuracy(y, t)
        chainer.report({'loss': loss, 'accuracy': accuracy}, self)
        return loss
