"""Functions whose backward shares arrays, or writes over what it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .forms import like
from .layer import Layer, Options, kind

# From the gradient and one array of twice the columns to the gradients of two inputs.
_SHARED: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    'itself': lambda g, both: (g, g),
    'reversed': lambda g, both: (g, g[:, ::-1]),
    'columns': lambda g, both: (both[:, : g.shape[1]], both[:, g.shape[1] :]),
    'in turns': lambda g, both: (both[:, 1::2], both[:, ::2]),
    'reshaped': lambda g, both: tuple(both.reshape((2, *g.shape))),
}


@chainer_hybridmem.recomputable
class Sharing(chainer.FunctionNode):
    """Its two gradients are views of one array."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, *inputs: Any) -> Any:
        return self.apply(inputs)[0]

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] * inputs[0].dtype.type(0.5) + inputs[1],)

    def backward(self, indexes: Any, grads: Any) -> Any:
        (g,) = grads
        return _SHARED[self.way](g, F.concat((g * 0.5, g)))


@chainer_hybridmem.recomputable
class OldSharing(chainer.Function):
    """The same, old style."""

    def __init__(self, way: str) -> None:
        self.way = way

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] * inputs[0].dtype.type(0.5) + inputs[1],)

    def backward(self, inputs: Any, grads: Any) -> Any:
        (g,) = grads
        both = np.concatenate((g * g.dtype.type(0.5), g), axis=1)
        return _SHARED[self.way](g, both)


def _dense(**_: Any) -> dict[str, chainer.Link]:
    """What tells the gradient of a function."""
    return {'dense': L.Linear(None, 12)}


def _crossed(x: Any, y: Any, kind: Any, way: str, times: int) -> Any:
    """Sums of gradients, each of which is a view of an array with others."""
    y = like(x, y)
    for _ in range(times):
        x, y = kind(way)(x, y), kind(way)(F.tanh(y), x)
    return x + F.sigmoid(y)


def _sharing(rng: random.Random) -> Options:
    return {'way': rng.choice(list(_SHARED)), 'times': rng.randint(1, 3)}


@kind('vector', inputs=2, draw=_sharing, links=_dense)
def sharing(at: Layer, x: Any, y: Any, way: str, times: int) -> Any:
    return _crossed(at.dense(x), y, Sharing, way, times)


@kind('vector', inputs=2, draw=_sharing, links=_dense, twice=False)
def old_sharing(at: Layer, x: Any, y: Any, way: str, times: int) -> Any:
    return _crossed(at.dense(x), y, OldSharing, way, times)


def _keep(function: Any, x: Any) -> None:
    function.slope = x * x.dtype.type(0.125) + x.dtype.type(0.75)
    function.masks = [x > 0, x > 0.5]


def _write(function: Any, g: Any) -> Any:
    """Writes over arrays of a function; returns what its gradient is multiplied by."""
    if function.way in ('slope', 'gradient'):
        function.slope *= g.dtype.type(0.5)
    elif function.way == 'part':
        function.slope[::2] = g[::2]
    elif function.way == 'anew':
        function.slope = function.slope * g.dtype.type(0.5)
    elif function.way == 'mask':
        function.masks[1] ^= function.masks[0]
    return function.slope + function.masks[1].astype(g.dtype)


_WRITTEN = 'slope', 'part', 'anew', 'mask', 'gradient'


@chainer_hybridmem.recomputable
class Overwriting(chainer.FunctionNode):
    """Its backward writes over its attributes."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, x: Any) -> Any:
        return self.apply((x,))[0]

    def forward(self, inputs: Any) -> Any:
        _keep(self, inputs[0])
        return (np.tanh(inputs[0]),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        return (grads[0] * _write(self, grads[0].array),)


@chainer_hybridmem.recomputable
class OldOverwriting(chainer.Function):
    """Old style; its gradient may be an attribute itself."""

    def __init__(self, way: str) -> None:
        self.way = way

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs(())
        _keep(self, inputs[0])
        return (np.tanh(inputs[0]),)

    def backward(self, inputs: Any, grads: Any) -> Any:
        (g,) = grads
        factor = _write(self, g)
        if self.way == 'gradient':
            self.slope *= g
            return (self.slope,)
        return (g * factor,)


def _chained(x: Any, kind: Any, way: str, times: int) -> Any:
    for _ in range(times):
        x = F.sigmoid(kind(way)(x))
    return x


def _overwriting(rng: random.Random) -> Options:
    return {'way': rng.choice(_WRITTEN), 'times': rng.randint(1, 4)}


@kind('vector', links=_dense, draw=_overwriting)
def overwriting(at: Layer, x: Any, way: str, times: int) -> Any:
    return _chained(at.dense(x), Overwriting, way, times)


@kind('vector', links=_dense, draw=_overwriting, twice=False)
def old_overwriting(at: Layer, x: Any, way: str, times: int) -> Any:
    return _chained(at.dense(x), OldOverwriting, way, times)
