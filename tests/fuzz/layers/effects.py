"""Programs with effects: on generators, on state, on arrays in the graph."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import numpy as np

from .forms import beside
from .layer import Layer, kind
from .reaching import REACHED, overwrite


class Effects(chainer.FunctionNode):
    """Multiplies by a number whose making changes something; not declared."""

    def __init__(self, state: dict[str, Any], effect: str) -> None:
        self.state = state
        self.effect = effect

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        self.retain_outputs((0,))
        factor = _FACTORS[self.effect](self.state, x)
        return (x * beside(x, np.asarray(factor).astype(x.dtype)),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        (y,) = self.get_retained_outputs()
        return (grads[0] * F.sigmoid(y),)


def _average(state: dict[str, Any], x: Any) -> Any:
    state['average'] = 0.5 * state['average'] + 0.5 * float(np.tanh(x.mean() or 0))
    return state['average']


def _code(state: dict[str, Any], x: Any) -> Any:
    state['codes'] *= 0.9
    state['codes'] += float(np.tanh(x.mean() if x.size else 0))
    state['seen'].append(x.shape)
    return state['codes'].mean() + len(state['seen'])


_FACTORS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    'own generator': lambda state, x: state['own'].rand(*x.shape),
    'new generator': lambda state, x: state['new'].random(x.shape),
    "Python's generator": lambda state, x: state['python'].random(),
    'average': _average,
    'codes': _code,
}


@kind(twice=False, draw=lambda r: {'effect': r.choice(list(_FACTORS)),
                                   'since': r.choice((0, 0, 3, 5))})  # fmt: skip
def effects(at: Layer, x: Any, effect: str, since: int) -> Any:
    """A function of the program that has effects, from some iteration on."""
    state = at.state
    if not state:
        state.update(
            own=np.random.RandomState(1), new=np.random.default_rng(2),
            python=random.Random(3), average=1.0, codes=np.ones(3), seen=[], calls=0,
        )  # fmt: skip
    state['calls'] += 1
    if state['calls'] <= since:
        return F.tanh(x) * 0.5
    (y,) = Effects(state, effect).apply((F.tanh(x),))
    return y


@kind(draw=lambda r: {'late': r.random() < 0.5, 'through': r.choice(('x', 'y')),
                      'since': r.choice((0, 0, 0, 3, 5)),
                      'unread': r.random() < 0.3})  # fmt: skip
def written(
    at: Layer, x: Any, late: bool, through: str, since: int, unread: bool = False
) -> Any:
    """The program writes into what a function has read or made, and lets go of it.

    At once, or when forward is over (``late``); from some iteration on. It may be what
    no backward reads (``unread``).
    """
    at.state['calls'] = at.state.get('calls', 0) + 1
    h = F.cumsum(x, 0) if unread else F.sigmoid(x)
    y = F.tanh(h)
    if at.state['calls'] > since:
        array = (h if through == 'x' else y).array
        if late:
            at.state['to write'] = array
        else:
            overwrite(array)
    return y * 0.5


@chainer_hybridmem.recomputable
class Keeping(chainer.FunctionNode):
    """Keeps arrays in a list and in a tuple, and retains what it makes."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        self.saved = [x * 0 + x.dtype.type(0.5), x * 0 + x.dtype.type(0.25)]
        self.pair = x * 0 + x.dtype.type(0.125), x * 0
        self.retain_outputs((0,))
        return (x * x.dtype.type(0.875),)

    def backward(self, indexes: Any, grads: Any) -> Any:
        (y,) = self.get_retained_outputs()
        factor = self.saved[0] + self.saved[1] + self.pair[0] + self.pair[1]
        return (grads[0] * factor + 0 * y,)


@kind(draw=lambda r: {'through': r.choice(list(REACHED)),
                      'writes': r.random() < 0.6})  # fmt: skip
def reached(at: Layer, x: Any, through: str, writes: bool) -> Any:
    """When forward is over, the program reaches into the graph, and may write there."""
    function = Keeping()
    (y,) = function.apply((F.tanh(x),))
    at.state['to reach'] = weakref.ref(function), weakref.ref(y.node), through, writes
    return F.sigmoid(y)
