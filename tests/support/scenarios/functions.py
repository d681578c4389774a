"""Functions of the program's own: in place, with several outputs."""

from __future__ import annotations

from typing import Any

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .classifier import Classifier, Trunk, pictures
from .loop import begin, learn, seeded, start
from .registry import scenario
from .running import Run


@hybridmem.recomputable
class Negate(chainer.Function):
    """Old-style, its own inverse, writes into its input and returns it."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        self.retain_inputs(())
        np.negative(x, out=x)
        return (x,)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return (-grads[0],)


@hybridmem.recomputable
class Scale(chainer.FunctionNode):
    """Writes into its input and returns it; retains what it has written."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        x *= 0.5
        self.retain_outputs((0,))
        return (x,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        (y,) = self.get_retained_outputs()
        return (0.5 * grads[0] + 0 * y,)


@hybridmem.recomputable
class Same(chainer.FunctionNode):
    """Returns its input as it is."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        return inputs

    def backward(self, indexes: Any, grads: Any) -> Any:
        return (grads[0] * F.sign(self.get_retained_inputs()[0]),)


@scenario()
def in_place_functions(run: Run) -> None:
    """Functions that write into their inputs, after functions that retain them."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            h = Negate()(h)
            h = F.tanh(h)
            (h,) = Scale().apply((h,))
            (h,) = Same().apply((h,))
            h = F.sigmoid(F.max_pooling_2d(h, 2))
            loss = model.loss(h, t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@hybridmem.recomputable
class Parts(chainer.FunctionNode):
    """Two outputs, both retained; either may have no gradient."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        middle = x.shape[1] // 2
        self.retain_outputs((0, 1))
        return np.tanh(x[:, :middle]), np.tanh(x[:, middle:])

    def backward(self, indexes: Any, grads: Any) -> Any:
        parts = []
        for y, g in zip(self.get_retained_outputs(), grads, strict=True):
            parts.append(y * 0 if g is None else g * (1 - y * y))
        return (F.concat(parts),)


@scenario()
def outputs_that_die(run: Run) -> None:
    """Of functions with several outputs some are never used."""
    rng = seeded()
    model = Classifier()
    model.add_link('lstm', L.StatelessLSTM(8 * 4 * 4, 64))
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            x, t = pictures(rng)
            h = model.trunk(x)
            a, _, c, _ = F.split_axis(h, 4, axis=1)
            _, b = Parts().apply((F.concat((a, c)),))
            _, hidden = model.lstm(None, None, F.average_pooling_2d(h, 4))
            last, _ = model.lstm(None, hidden, F.max_pooling_2d(h, 4))
            del hidden
            loss = model.loss(h, t)
            loss += F.mean(b) + F.mean(last**2)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
