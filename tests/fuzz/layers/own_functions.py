"""Functions of the program's own, old style and new."""

from __future__ import annotations

from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np

from .forms import beside
from .layer import Layer, kind


@chainer_hybridmem.recomputable
class Square(chainer.Function):
    """An old-style function: it retains all its inputs."""

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] * inputs[0] * inputs[0].dtype.type(0.25),)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return (inputs[0] * grads[0] * inputs[0].dtype.type(0.5),)


@chainer_hybridmem.recomputable
class OldMask(chainer.Function):
    """An old-style random function with attributes, outputs retained."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        drawn = beside(x, np.random.rand(*x.shape))
        self.masks = [drawn > 0.3, x > 0]
        self.retain_inputs(())
        self.retain_outputs((0,))
        return (np.where(self.masks[0], np.tanh(x), x * x.dtype.type(0.5)),)

    def backward(self, inputs: Any, grads: Any) -> Any:
        (y,), (gy,) = self.output_data, grads
        slope = np.where(self.masks[0], 1 - y * y, y.dtype.type(0.5))
        return (gy * slope.astype(gy.dtype) + gy * self.masks[1] * gy.dtype.type(0.01),)


@chainer_hybridmem.recomputable
class Halves(chainer.FunctionNode):
    """Two outputs that are views of one array, both retained, and an attribute."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        both = x * x.dtype.type(0.5)
        middle = x.shape[1] // 2
        self.factor = both[:, :middle] * 0 + both.dtype.type(0.5)
        self.retain_outputs((0, 1))
        return both[:, :middle], both[:, middle:]

    def backward(self, indexes: Any, grads: Any) -> Any:
        left, right = self.get_retained_outputs()
        half = left.dtype.type(0.5)
        g0 = left.array * 0 if grads[0] is None else grads[0].array * self.factor
        g1 = right.array * 0 if grads[1] is None else grads[1].array * half
        g1 = g1 + right.array * right.dtype.type(0.01)
        return (chainer.as_variable(np.concatenate((g0, g1), axis=1)),)


@chainer_hybridmem.recomputable
class RunningMean(chainer.FunctionNode):
    """Moves an array of its link in place; retains a view and a nested tuple."""

    def __init__(self, running: Any) -> None:
        self.running = running

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        mean = x.mean()
        self.running *= 0.9
        self.running += 0.1 * mean
        self.kept = (x[..., ::2], x * x.dtype.type(0.1))
        return (x - mean.astype(x.dtype),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        every_second, tenth = self.kept
        g = grads[0].array + tenth
        g[..., ::2] += every_second * g.dtype.type(0.01)
        return (chainer.as_variable(g),)


@kind(twice=False)
def square(at: Layer, x: Any) -> Any:
    return Square()(x)


@kind(twice=False)
def old_mask(at: Layer, x: Any) -> Any:
    return OldMask()(x)


@kind(twice=False, draw=lambda r: {'die': r.choice(('left', 'right', 'none'))})
def halves(at: Layer, x: Any, die: str) -> Any:
    """Two outputs of which one may die at once."""
    if x.ndim < 2 or x.shape[1] < 2:
        return F.tanh(x)
    left, right = Halves().apply((x,))
    if die == 'none':
        return F.concat((F.sigmoid(left), F.tanh(right)))
    return F.tanh(right) if die == 'left' else F.sigmoid(left)


@kind(twice=False)
def running_mean(at: Layer, x: Any) -> Any:
    if not hasattr(at, 'running'):
        at.add_persistent('running', at.xp.zeros((), x.dtype))
    return RunningMean(at.running).apply((x,))[0] if x.size else x + 1
