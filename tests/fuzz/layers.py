"""The layers that networks are drawn from.

A layer takes one or two variables of any shape whose first axis is the batch, and
brings them into the form it needs; so every list of layers is a network, and a list
from which some have been dropped still is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import weakref
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import static_graph

Options = dict[str, Any]
MOST_FEATURES = 256  # per example; longer variables are pooled or cut


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of layer.

    Attributes:
        apply: From the layer, its inputs and its options to the output.
        draw: Draws the options.
        links: Makes the links from the options.
        form: ``'picture'`` (four axes), ``'vector'`` (two) or ``'any'``.
        inputs: How many variables it takes.
        twice: Whether its gradient can be differentiated again.
    """

    apply: Callable[..., Any]
    draw: Callable[[random.Random], Options]
    links: Callable[..., dict[str, chainer.Link]]
    form: str
    inputs: int
    twice: bool


KINDS: dict[str, Kind] = {}


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def kind(
    form: str = 'any',
    inputs: int = 1,
    twice: bool = True,
    draw: Callable[[random.Random], Options] = _nothing,
    links: Callable[..., dict[str, chainer.Link]] = _nothing,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a kind of layer under the name of its function."""

    def register(apply: Callable[..., Any]) -> Callable[..., Any]:
        name = apply.__name__.strip('_')
        KINDS[name] = Kind(apply, draw, links, form, inputs, twice)
        return apply

    return register


class Layer(chainer.Chain):
    """One layer of a drawn network.

    Attributes:
        chance (random.Random): The same in every run of an iteration.
        state (dict): What outlives iterations.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__()
        self.kind = KINDS[name]
        self.options = options
        self.chance = random.Random(0)
        self.state: dict[str, Any] = {}
        with self.init_scope():
            for key, link in self.kind.links(**options).items():
                setattr(self, key, link)

    def forward(self, *inputs: Any) -> Any:
        brought = [bring(x, self.kind.form) for x in inputs]
        return self.kind.apply(self, *brought, **self.options)


# -- forms ---------------------------------------------------------------------
def bring(x: Any, form: str) -> Any:
    """The variable in a form, and not too long."""
    x = _shorter(x)
    if form == 'picture' and x.ndim != 4:
        return _as_picture(x)
    if form == 'vector' and x.ndim != 2:
        return F.reshape(x, (x.shape[0], _features(x)))
    return x


def _features(x: Any) -> int:
    return int(np.prod(x.shape[1:], dtype=int))


def _shorter(x: Any) -> Any:
    if _features(x) <= MOST_FEATURES:
        return x
    if x.ndim == 4 and min(x.shape[2:]) >= 4:
        return _shorter(F.average_pooling_2d(x, 2))
    return F.reshape(x, (x.shape[0], _features(x)))[:, :MOST_FEATURES]


def _as_picture(x: Any) -> Any:
    n, length = x.shape[0], _features(x)
    side = 6 if length >= 72 else 3 if length >= 9 else 1
    channels = max(length // (side * side), 1)
    x = F.reshape(x, (n, length))
    if length == 0:
        return F.pad(x, ((0, 0), (0, 1)), 'constant')[:, :, None, None]
    return F.reshape(x[:, : channels * side * side], (n, channels, side, side))


def like(x: Any, other: Any) -> Any:
    """The second variable in the shape and type of the first."""
    length = _features(x)
    y = F.reshape(other, (other.shape[0], _features(other)))
    if y.shape[1] == 0:
        y = F.pad(y, ((0, 0), (0, 1)), 'constant')
    if y.shape[1] < length:
        y = F.tile(y, (1, -(-length // y.shape[1])))
    if y.shape[1] > length:
        y = y[:, :length]
    y = F.reshape(y, x.shape)
    return y if y.dtype == x.dtype else F.cast(y, x.dtype)


def _made(at: Layer, make: Callable[[], chainer.Link]) -> chainer.Link:
    """A link that needs the shape of its input, made once."""
    if not hasattr(at, 'made'):
        with at.init_scope():
            at.made = make()
        at.made.to_device(at.device)
    return at.made


def _windows(x: Any, ksize: int) -> bool:
    return min(x.shape[2:]) >= ksize


def beside(x: Any, array: Any) -> Any:
    """An array of NumPy where another one is."""
    return chainer.backend.get_device_from_array(x).send(array)


# -- functions of our own ------------------------------------------------------
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


# -- convolutions --------------------------------------------------------------
def _convolved(rng: random.Random) -> Options:
    return {
        'out': 2 * rng.randint(1, 4),
        'ksize': rng.choice((1, 2, 3)),
        'stride': rng.choice((1, 1, 1, 2)),
        'pad': rng.choice((0, 1, 1)),
        'dilate': rng.choice((1, 1, 1, 2)),
        'groups': rng.choice((1, 1, 1, 2)),
        'nobias': rng.random() < 0.3,
    }


@kind('picture', draw=_convolved, links=lambda **o: {'even': L.Convolution2D(
    None, o['out'], o['ksize'], o['stride'], o['pad'], nobias=o['nobias'],
    dilate=o['dilate'], groups=o['groups'])})  # fmt: skip
def convolution(at: Layer, x: Any, **o: Any) -> Any:
    if x.shape[1] % o['groups']:
        x = F.concat((x, x[:, :1]))
    reach = (o['ksize'] - 1) * o['dilate'] + 1
    return at.even(x) if min(x.shape[2:]) + 2 * o['pad'] >= reach else F.tanh(x)


@kind('picture', twice=False, draw=lambda r: {'multiplier': r.randint(1, 2)})
def depthwise(at: Layer, x: Any, multiplier: int) -> Any:
    return _made(at, lambda: L.DepthwiseConvolution2D(
        x.shape[1], multiplier, 3, pad=1))(x)  # fmt: skip


@kind('picture', draw=lambda r: {'out': r.randint(1, 5), 'stride': r.choice((1, 2))},
      links=lambda out, stride: {'up': L.Deconvolution2D(None, out, 2, stride)},
      twice=False)  # fmt: skip
def deconvolution(at: Layer, x: Any, out: int, stride: int) -> Any:
    if not x.requires_grad:  # Chainer's backward fails for the weights alone
        x = chainer.Variable(x.array)
    return at.up(x)


@kind('picture', links=lambda: {'same': L.Convolution2D(None, 4, 3, pad=1)})
def shared_convolution(at: Layer, x: Any) -> Any:
    """One link twice: its gradients add up."""
    if x.shape[1] != 4:
        x = F.concat((x,) * (-(-4 // x.shape[1])))[:, :4]
    return at.same(F.relu(at.same(x)))


@kind('picture', draw=lambda r: {'ksize': r.choice((2, 3))})
def windows(at: Layer, x: Any, ksize: int) -> Any:
    if not _windows(x, ksize):
        return F.sigmoid(x)
    return F.im2col(x, ksize, stride=2)


# -- dense ---------------------------------------------------------------------
@kind('vector', draw=lambda r: {'out': r.choice((4, 8, 16)), 'nobias': r.random() < .3},
      links=lambda out, nobias: {
          'dense': L.Linear(None, out, nobias=nobias)})  # fmt: skip
def linear(at: Layer, x: Any, out: int, nobias: bool) -> Any:
    return at.dense(x)


@kind('vector', links=lambda: {'dense': L.Linear(None, 12)})
def tied_linear(at: Layer, x: Any) -> Any:
    """There and back with the same parameter, once transposed."""
    h = F.tanh(at.dense(x))
    return F.linear(h, F.transpose(at.dense.W))


@kind('vector', twice=False, links=lambda: {'out': L.Linear(None, 12),
                               'maxout': L.Maxout(None, 8, 2)})  # fmt: skip
def maxout(at: Layer, x: Any) -> Any:
    return at.maxout(F.relu(at.out(x)))


@kind('vector', links=lambda: {'dense': L.Linear(None, 10), 'highway': L.Highway(10)})
def highway(at: Layer, x: Any) -> Any:
    return at.highway(at.dense(x))


def _bilinear() -> dict[str, chainer.Link]:
    with chainer.using_config('dtype', np.dtype('float32')):
        both = L.Bilinear(6, 5, 7)
    return {'a': L.Linear(None, 6), 'b': L.Linear(None, 5), 'both': both}


@kind('vector', inputs=2, twice=False, links=_bilinear)
def bilinear(at: Layer, x: Any, y: Any) -> Any:
    a, b = (F.cast(h, 'float32') for h in (at.a(x), at.b(like(x, y))))
    return F.cast(at.both(a, b), x.dtype)


@kind('vector', draw=lambda r: {'heads': r.choice((1, 2))},
      links=lambda heads: {'joint': L.Linear(None, 3 * 8 * heads)})  # fmt: skip
def attention(at: Layer, x: Any, heads: int) -> Any:
    n = x.shape[0]
    q, k, v = F.split_axis(at.joint(x), 3, axis=1)
    q, k, v = (
        F.transpose(F.reshape(h, (n, heads, 4, 2)), (0, 2, 1, 3)) for h in (q, k, v)
    )
    weights = F.softmax(F.matmul(q, k, transb=True), axis=3)
    return F.matmul(F.dropout(weights, 0.2), v)


@kind('vector', draw=lambda r: {'words': r.randint(3, 9)},
      links=lambda words: {'embed': L.EmbedID(words, 6)})  # fmt: skip
def embed(at: Layer, x: Any, words: int) -> Any:
    index = np.nan_to_num(x.array[:, :7].astype(np.float64) * 8, posinf=0, neginf=0)
    index = np.clip(np.abs(index), 0, words - 1).astype(np.int32)
    y = F.reshape(at.embed(index), (x.shape[0], 6 * index.shape[1]))
    return F.concat((x, F.cast(y, x.dtype)), axis=1)


@kind('vector', draw=lambda r: {'steps': r.randint(2, 3), 'carry': r.random() < 0.4},
      links=lambda steps, carry: {'lstm': L.LSTM(None, 8)})  # fmt: skip
def lstm(at: Layer, x: Any, steps: int, carry: bool) -> Any:
    """Shared parameters over time; the state may outlive the iteration."""
    last = at.lstm.h
    if not carry or last is None or last.shape[0] != x.shape[0]:
        at.lstm.reset_state()
    else:
        at.lstm.h.unchain_backward()
        at.lstm.c.unchain_backward()
    width = max(x.shape[1] // steps, 1)
    outputs = []
    for step in range(steps):
        part = x[:, step * width : (step + 1) * width]
        outputs.append(at.lstm(like(x[:, :width], part)))
    return F.concat(outputs, axis=1)


@kind('vector', draw=lambda r: {'steps': r.randint(2, 4)}, twice=False,
      links=lambda steps: {'dense': L.Linear(None, 6), 'gru': L.GRU(6, 6)})  # fmt: skip
def gru(at: Layer, x: Any, steps: int) -> Any:
    at.gru.reset_state()
    h = at.dense(x)
    for _ in range(steps):
        h = at.gru(h)
    return h


@kind('vector', twice=False, draw=lambda r: {'dropout': r.choice((0.0, 0.3))},
      links=lambda dropout: {'dense': L.Linear(None, 12),
                             'many': L.NStepLSTM(2, 4, 3, dropout)})  # fmt: skip
def n_step_lstm(at: Layer, x: Any, dropout: float) -> Any:
    """Sentences of different lengths."""
    h = F.reshape(at.dense(x), (x.shape[0], 3, 4))
    sentences = [h[i, : 1 + i % 3] for i in range(x.shape[0])]
    _, cell, outputs = at.many(None, None, sentences)
    ends = F.stack([y[-1] for y in outputs])
    return F.concat((ends, F.reshape(F.swapaxes(cell, 0, 1), (x.shape[0], -1))), axis=1)


# -- normalisation -------------------------------------------------------------
def _normalised(at: Layer, x: Any, **options: Any) -> Any:
    return _made(at, lambda: L.BatchNormalization(x.shape[1], **options))(x)


@kind(draw=lambda r: {'decay': r.choice((0.9, 0.5)), 'scaled': r.random() < 0.8})
def batch_normalization(at: Layer, x: Any, decay: float, scaled: bool) -> Any:
    if x.ndim < 2 or not x.size:
        return x * 1
    return _normalised(at, x, decay=decay, use_gamma=scaled, use_beta=scaled)


@kind('picture')
def normalised_relu(at: Layer, x: Any) -> Any:
    return F.relu(_normalised(at, x))


@kind('picture', draw=lambda r: {'both': r.random() < 0.5}, links=lambda both: {
    'first': L.Convolution2D(None, 4, 3, pad=1), 'one': L.BatchNormalization(4),
    'second': L.Convolution2D(4, 4, 3, pad=1), 'two': L.BatchNormalization(4),
    'third': L.Convolution2D(None, 4, 1), 'side': L.BatchNormalization(4),
})  # fmt: skip
def residual(at: Layer, x: Any, both: bool) -> Any:
    """A block as in ResNet, with a projection beside it."""
    h = at.two(at.second(F.relu(at.one(at.first(x)))))
    beside = at.third(x)
    return F.relu(h + (at.side(beside) if both else beside))


@kind('vector', links=lambda: {'norm': L.LayerNormalization()})
def layer_normalization(at: Layer, x: Any) -> Any:
    return at.norm(x) if x.shape[1] > 1 else F.tanh(x)


@kind('picture', twice=False, draw=lambda r: {'groups': r.choice((1, 2))},
      links=lambda groups: {'norm': L.GroupNormalization(groups)})  # fmt: skip
def group_normalization(at: Layer, x: Any, groups: int) -> Any:
    return at.norm(F.concat((x, x)) if x.shape[1] % groups else x)


@kind('picture', twice=False)
def batch_renormalization(at: Layer, x: Any) -> Any:
    return _made(at, lambda: L.BatchRenormalization(x.shape[1]))(x)


@kind('picture', twice=False, draw=lambda r: {'n': r.choice((3, 5))})
def local_response(at: Layer, x: Any, n: int) -> Any:
    return F.local_response_normalization(x, n)


@kind('vector')
def normalize(at: Layer, x: Any) -> Any:
    return F.normalize(x + 0.01)


@kind('picture')
def fixed_normalization(at: Layer, x: Any) -> Any:
    """Fine-tuning with the statistics as they are."""
    _normalised(at, F.tanh(x))
    with chainer.using_config('train', False):
        return _normalised(at, x)


# -- elementwise ---------------------------------------------------------------
_PLAIN = {
    'relu': F.relu,
    'leaky_relu': F.leaky_relu,
    'elu': F.elu,
    'selu': F.selu,
    'sigmoid': F.sigmoid,
    'hard_sigmoid': F.hard_sigmoid,
    'tanh': F.tanh,
    'softplus': F.softplus,
    'clipped_relu': lambda x: F.clipped_relu(x, 0.7),
    'relu6': F.relu6,
    'crelu': F.crelu,
    'identity': F.identity,
    'sin': F.sin,
    'absolute': F.absolute,
    'square_root': lambda x: F.sqrt(x * x + 1),
    'exp': lambda x: F.exp(F.clip(x, -2.0, 1.0)),
    'log1p': lambda x: F.log1p(x * x),
    'erf': F.erf,
    'power': lambda x: (x * x + 1) ** 0.3,
    'divide': lambda x: x / (x * x + 1),
    'minus': lambda x: 0.5 - x,
    'rsqrt': lambda x: F.rsqrt(x * x + 0.5),
}
_NOT_TWICE = ('hard_sigmoid',)


def _activated(rng: random.Random) -> Options:
    return {'name': rng.choice([n for n in _PLAIN if n not in _NOT_TWICE])}


@kind(draw=_activated)
def activation(at: Layer, x: Any, name: str) -> Any:
    return _PLAIN[name](x)


@kind(twice=False)
def hard_sigmoid(at: Layer, x: Any) -> Any:
    return F.hard_sigmoid(x)


# The gradient of its gradient takes the one of its parameter for granted.
@kind('vector', links=lambda: {'swish': L.Swish(None)}, twice=False)
def swish(at: Layer, x: Any) -> Any:
    return at.swish(x)


@kind(links=lambda: {'prelu': L.PReLU()}, twice=False)  # the same
def prelu(at: Layer, x: Any) -> Any:
    return at.prelu(x)


@kind('vector')
def scaled(at: Layer, x: Any) -> Any:
    return _made(at, lambda: L.Scale(1, x.shape[1:], bias_term=True))(x)


@kind('vector', draw=lambda r: {'name': r.choice(('softmax', 'log', 'maximum', 'sum'))})
def over_features(at: Layer, x: Any, name: str) -> Any:
    if name == 'softmax':
        return F.softmax(x)
    if name == 'log':
        return F.log_softmax(x)
    if name == 'maximum':
        return x - F.broadcast_to(F.max(x, axis=1, keepdims=True), x.shape)
    return x * F.broadcast_to(F.logsumexp(x, axis=1)[:, None], x.shape) * 0.1


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


# -- random --------------------------------------------------------------------
@kind(draw=lambda r: {'ratio': r.choice((0.0, 0.2, 0.5))})
def dropout(at: Layer, x: Any, ratio: float) -> Any:
    return F.dropout(x, ratio)


@kind(inputs=2)
def zoneout(at: Layer, x: Any, y: Any) -> Any:
    return F.zoneout(x, like(x, y), 0.4)


@kind(twice=False)
def random_relu(at: Layer, x: Any) -> Any:
    return F.rrelu(x)


@kind()
def noise(at: Layer, x: Any) -> Any:
    return F.gaussian(x, F.tanh(x)) if chainer.config.train else x


@kind('vector', twice=False)
def gumbel(at: Layer, x: Any) -> Any:
    return F.gumbel_softmax(x, tau=0.7)


@kind('vector', twice=False, links=lambda: {'dense': L.Linear(None, 9),
                               'drop': L.SimplifiedDropconnect(9, 6)})  # fmt: skip
def dropconnect(at: Layer, x: Any) -> Any:
    return at.drop(at.dense(x))


# -- pooling -------------------------------------------------------------------
@kind('picture', draw=lambda r: {'ksize': r.choice((2, 3)), 'stride': r.choice((1, 2)),
                                 'pad': r.choice((0, 1)),
                                 'cover_all': r.random() < 0.5})  # fmt: skip
def max_pooling(at: Layer, x: Any, **o: Any) -> Any:
    return F.max_pooling_2d(x, **o) if _windows(x, 3) else x * 1.5


@kind('picture', draw=lambda r: {'pad': r.choice((0, 1))})
def average_pooling(at: Layer, x: Any, pad: int) -> Any:
    return F.average_pooling_2d(x, 2, 2, pad) if _windows(x, 2) else F.tanh(x)


@kind('picture', twice=False)
def pooled_and_back(at: Layer, x: Any) -> Any:
    """Pooling with its indexes returned, and the way back through them."""
    if not _windows(x, 2):
        return F.tanh(x)
    y, indexes = F.max_pooling_2d(x, 2, cover_all=False, return_indices=True)
    return F.upsampling_2d(F.tanh(y), indexes, 2, outsize=x.shape[2:], cover_all=False)


@kind('picture')
def unpooling(at: Layer, x: Any) -> Any:
    return F.unpooling_2d(x, 2, cover_all=False) if max(x.shape[2:]) < 5 else F.elu(x)


@kind('picture', twice=False)
def pyramid(at: Layer, x: Any) -> Any:
    return F.spatial_pyramid_pooling_2d(x, 2, 'max') if _windows(x, 3) else F.relu(x)


@kind('picture')
def resized(at: Layer, x: Any) -> Any:
    return F.resize_images(x, (4, 5)) if x.dtype == np.float32 else F.tanh(x)


# -- shapes --------------------------------------------------------------------
_SHAPES = {
    'transposed': lambda x: F.transpose(x, (0, 2, 3, 1)),
    'swapped': lambda x: F.swapaxes(x, 2, 3),
    'rolled': lambda x: F.rollaxis(x, 3, 1),
    'cropped': lambda x: x[:, :, 1:, :-1] if min(x.shape[2:]) > 2 else x[:, ::-1],
    'strided': lambda x: x[:, :, ::2, ::-1],
    'flipped': lambda x: F.flip(x, 2),
    'padded': lambda x: F.pad(x, ((0, 0), (0, 0), (1, 0), (0, 1)), 'constant'),
    'picked': lambda x: x[:, np.arange(x.shape[1])[::-1]],
    'space': lambda x: x if any(s % 2 for s in x.shape[2:]) else F.space2depth(x, 2),
    'mean': lambda x: F.mean(x, axis=(2, 3)),
    'moved': lambda x: F.moveaxis(x, 1, 3),
    'repeated': lambda x: F.repeat(x, 2, axis=1),
    'as_strided': lambda x: F.flatten(x).reshape(x.shape[0], -1, 1, 1),
    'columns': lambda x: F.squeeze(F.expand_dims(F.tanh(x).T, 0), 0).T,
    'none': lambda x: F.concat((x[:, :0], x, x[:, :0])),
}  # fmt: skip


@kind('picture', draw=lambda r: {'name': r.choice(list(_SHAPES))})
def shape(at: Layer, x: Any, name: str) -> Any:
    return _SHAPES[name](x)


@kind('vector', draw=lambda r: {'parts': r.randint(2, 4), 'lost': r.randint(0, 3)})
def split(at: Layer, x: Any, parts: int, lost: int) -> Any:
    """Several outputs, one of which nobody reads."""
    width = max(x.shape[1] // parts, 1)
    ends = [width * i for i in range(1, parts) if width * i < x.shape[1]]
    if not ends:
        return F.sigmoid(x)
    pieces = list(F.split_axis(x, ends, axis=1))
    del pieces[lost % len(pieces)]
    return F.concat([F.tanh(piece) for piece in pieces], axis=1)


@kind('vector')
def separated(at: Layer, x: Any) -> Any:
    columns = F.separate(x[:, :3], axis=1)
    return F.concat((F.stack([F.sin(c) for c in columns], axis=1), x), axis=1)


@kind('vector')
def cumulated(at: Layer, x: Any) -> Any:
    return F.cumsum(x, axis=1) * 0.1


@kind('any')
def nothing_at_all(at: Layer, x: Any) -> Any:
    """Arrays without elements."""
    empty = F.reshape(x, (x.shape[0], -1))[:, :0] if x.size else x
    return x * 1.25 + F.broadcast_to(F.sum(F.tanh(empty)), x.shape)


@kind('any')
def scalar(at: Layer, x: Any) -> Any:
    """Arrays without axes."""
    one = F.tanh(F.sum(x)) * 0.1
    return x * F.broadcast_to(one, x.shape)


@kind(draw=lambda r: {'dtype': r.choice(('float16', 'float32', 'float64'))})
def cast(at: Layer, x: Any, dtype: str) -> Any:
    return F.cast(F.tanh(F.cast(x, dtype)), x.dtype)


@kind('vector')
def einsum(at: Layer, x: Any) -> Any:
    gram = F.einsum('ij,ik->jk', x[:, :6], x[:, :6])
    return F.concat((F.matmul(x[:, :6], gram) * 0.1, x), axis=1)


# -- of several variables ------------------------------------------------------
_PAIRS = {
    'add': lambda x, y: x + y,
    'subtract': lambda x, y: x - y,
    'multiply': lambda x, y: x * y,
    'maximum': F.maximum,
    'minimum': F.minimum,
    'where': lambda x, y: F.where(x.array > 0, x, y),
    'difference': F.squared_difference,
    'concat': lambda x, y: F.concat((x, y, x), axis=x.ndim - 1),
    'stack': lambda x, y: F.sum(F.stack((x, y, x)), axis=0),
    'in_place': lambda x, y: _plus_equals(x, y),
    'three': lambda x, y: F.add(x, y, x),
    'gate': lambda x, y: F.sigmoid(x) * y,
}


def _plus_equals(x: Any, y: Any) -> Any:
    x += y
    x *= 0.5
    return x


@kind(inputs=2, draw=lambda r: {'name': r.choice(list(_PAIRS))})
def pair(at: Layer, x: Any, y: Any, name: str) -> Any:
    if x.ndim < 2:
        x = bring(x, 'vector')
    return _PAIRS[name](x, like(x, y))


@kind('vector', inputs=2)
def products(at: Layer, x: Any, y: Any) -> Any:
    return F.matmul(F.matmul(x, like(x, y), transb=True), x) * 0.05


@kind('picture', twice=False, links=lambda: {
    'one': L.Convolution2D(None, 3, 3, pad=1),
    'two': L.Convolution2D(3, 3, 3, pad=1)})  # fmt: skip
def forgotten(at: Layer, x: Any) -> Any:
    return F.forget(lambda h: F.tanh(at.two(F.relu(at.one(h)))), x)


@kind('picture', draw=lambda r: {'survival': r.choice((0.5, 0.8))},
      links=lambda survival: {
          'inside': L.Convolution2D(None, 4, 3, pad=1)})  # fmt: skip
def sometimes(at: Layer, x: Any, survival: float) -> Any:
    """Stochastic depth: another graph in another iteration."""
    if at.chance.random() > survival and at.inside.W.array is not None:
        return x
    return x + like(x, F.relu(at.inside(x)))


@kind(draw=lambda r: {'deep': r.random() < 0.2})
def detached(at: Layer, x: Any, deep: bool) -> Any:
    """Half of the value comes without a gradient, or all that was before."""
    beside = F.tanh(x) * 0.5
    if deep:
        beside.unchain_backward()
    else:
        beside.unchain()
    return x * 0.5 + beside


@kind()
def held(at: Layer, x: Any) -> Any:
    """Somebody keeps the variable and looks at it after backward."""
    y = F.tanh(x)
    at.state['held'] = y
    return y * 0.7


# -- programs that do more than compute ----------------------------------------
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
                      'since': r.choice((0, 0, 0, 3, 5))})  # fmt: skip
def written(at: Layer, x: Any, late: bool, through: str, since: int) -> Any:
    """The program writes into what a function has read or made, and lets go of it.

    At once, or when forward is over (``late``); from some iteration on.
    """
    at.state['calls'] = at.state.get('calls', 0) + 1
    h = F.sigmoid(x)
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


_REACHED: dict[str, Callable[[Any, Any], Any]] = {
    'node': lambda function, node: node.data,
    'variable': lambda function, node: node.get_variable().array,
    'outputs': lambda function, node: function.get_retained_outputs()[0].array,
    'list': lambda function, node: function.saved[1],
    'tuple': lambda function, node: function.pair[0],
}


@kind(draw=lambda r: {'through': r.choice(list(_REACHED)),
                      'writes': r.random() < 0.6})  # fmt: skip
def reached(at: Layer, x: Any, through: str, writes: bool) -> Any:
    """When forward is over, the program reaches into the graph, and may write there."""
    function = Keeping()
    (y,) = function.apply((F.tanh(x),))
    at.state['to reach'] = weakref.ref(function), weakref.ref(y.node), through, writes
    return F.sigmoid(y)


def reach(
    function: Callable[[], Any], node: Callable[[], Any], through: str, writes: bool
) -> None:
    """Does what the layer ``reached`` has been told, if the graph lives."""
    if function() is None or node() is None:
        return
    array = _REACHED[through](function(), node())
    array.sum()
    if writes:
        overwrite(array)


def overwrite(array: Any) -> None:
    """Changes half of the elements in place."""
    if array.ndim and getattr(array.flags, 'writeable', True):
        array[::2] *= array.dtype.type(0.5)


class _Static(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.dense = L.Linear(4, 4)

    @static_graph
    def forward(self, x: Any) -> Any:
        return F.tanh(self.dense(x))


@kind('vector', twice=False, draw=lambda r: {'rare': r.random()},
      links=lambda rare: {'static': _Static()})  # fmt: skip
def static(at: Layer, x: Any, rare: float) -> Any:
    """A static chain, which a session refuses."""
    if x.shape[1] < 4 or rare > 0.3 or x.dtype != np.float32:
        return F.sigmoid(x)
    with contextlib.redirect_stdout(io.StringIO()):  # it talks
        return F.concat((at.static(x[:, :4]), x), axis=1)
