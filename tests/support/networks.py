"""Small networks that contain everything feature maps come from."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.search.candidates import KEEP, RECOMPUTE, SWAP, Search
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.planning.simulation.problem import find_sources, with_sources
from chainer_hybridmem.training.recompute import drawing

# Planners that do what they do under every limit.
BLIND = ('in-core', 'checkpoint-speed', 'vdnn-all', 'vdnn-conv')
# What planners have to be told to act, and to be quick about it.
OPTIONS: dict[str, dict[str, Any]] = {
    'exact': {'time_budget': 0.5},
    'autoswap-bo': {'evaluations': 10},  # the last two by regression
    'manual': {'actions': {'*': 'swap', '*MaxPoolingND': 'recompute'}},
}


def plan_with_sources(problem: Problem, limit_bytes: int) -> Plan:
    """A planner: makes again what it can, and keeps whatever replays read for them."""
    problem = with_sources(problem, find_sources(problem))
    action = np.where(problem.recomputable, RECOMPUTE, SWAP)
    action[~problem.arrays.read] = KEEP
    search = Search(problem, limit_bytes)
    plan = search.finish('sources-for-tests', search.evaluate(action))
    action[~problem.arrays.read] = RECOMPUTE
    assert plan.sources
    assert plan.predicted_seconds < search.evaluate(action).seconds
    return plan


@chainer_hybridmem.recomputable
class Square(chainer.Function):
    """An old-style function: it retains all its inputs."""

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] * inputs[0],)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return (2 * inputs[0] * grads[0],)


@chainer_hybridmem.recomputable
class Halves(chainer.FunctionNode):
    """Two outputs, both retained, and an array as attribute."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        middle = x.shape[1] // 2
        self.factor = x[:, :middle] * 0 + 0.5
        self.retain_outputs((0, 1))
        return x[:, :middle] * self.factor, x[:, middle:] + 0

    def backward(self, indexes: Any, grads: Any) -> Any:
        left, right = self.get_retained_outputs()
        g0 = grads[0] * (left.array * 0 + self.factor)
        g1 = grads[1] + 0 * right.array
        return (F.concat((g0, g1)),)


class Block(chainer.Chain):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(None, channels, 3, pad=1)
            self.b1 = L.BatchNormalization(channels)
            self.c2 = L.Convolution2D(None, channels, 3, pad=1)
            self.b2 = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + x)


class Everything(chainer.Chain):
    """Residuals, dropout, pooling, LRN, old-style, views, two outputs."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(None, channels, 3, pad=1)
            self.block1 = Block(channels)
            self.block2 = Block(channels)
            self.last = L.Linear(None, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = self.block2(self.block1(F.relu(self.first(x))))
        h = F.max_pooling_2d(h, 2)
        h = F.dropout(h, 0.3)
        h = F.local_response_normalization(h)
        h = Square()(h)
        left, right = Halves().apply((h,))
        h = F.concat((F.sigmoid(left), F.tanh(right)))
        h = F.reshape(h, (h.shape[0], -1))
        return F.softmax_cross_entropy(self.last(h), t)


class Convolutions(chainer.Chain):
    """Few functions: a session of them is planned and begun soonest."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.rest = chainer.ChainList(*[L.Convolution2D(8, 8, 1) for _ in range(6)])
            self.last = L.Linear(None, 10)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.relu(self.norm(self.first(x)))
        for layer in self.rest:
            h = F.relu(layer(h))
        h = F.dropout(F.max_pooling_2d(h, 2), 0.2)
        return F.softmax_cross_entropy(self.last(h), t)


class Ends(chainer.Chain):
    """A first and a last layer, and the number of calls, for what lies between."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, pad=1)
            self.last = L.Linear(None, 10)
        self.calls = 0


def batches(n: int, size: int = 8, insize: int = 24) -> list[tuple[Any, Any]]:
    """Random pictures and labels, the same at every call."""
    rng = np.random.RandomState(0)
    return [
        (
            rng.rand(size, 3, insize, insize).astype(np.float32),
            rng.randint(0, 10, size).astype(np.int32),
        )
        for _ in range(n)
    ]


def train(
    make: Callable[[], chainer.Chain],
    data: list[tuple[Any, Any]],
    seed: int = 0,
    before: Callable[[Any, int], object] = lambda model, i: None,
    after: Callable[[Any, int], object] = lambda session, i: None,
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """Trains from a fixed seed, with a session if there are options for one.

    Args:
        make: The network.
        data: A batch for each iteration.
        seed: Of parameters and masks.
        before: Called with the model and the number of the iteration that follows.
        after: Called with the session and the number of the iteration that is over.
        options: Of the session.

    Returns:
        Everything that must be equal, and the session (or None).
    """
    np.random.seed(seed)
    model = make()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    losses: list[float] = []
    with session_for(model, options) as session:
        for i, batch in enumerate(data):
            before(model, i)
            losses.append(iterate(model, optimizer, *batch))
            after(session, i)
    return outcome(model, losses), session


_PLAIN: dict[tuple[Any, int], tuple[list[Any], dict[str, Any]]] = {}


def plain(
    make: Callable[[], chainer.Chain], data: list[tuple[Any, Any]]
) -> dict[str, Any]:
    """What plain Chainer gives; trained once for each network and list of batches."""
    key = make, id(data)
    if key not in _PLAIN:
        _PLAIN[key] = data, train(make, data)[0]  # holds the data, so that ids stay
    return _PLAIN[key][1]


def train_on_gpu(
    make: Callable[[], chainer.Chain], data: list[tuple[Any, Any]], **options: Any
) -> tuple[dict[str, Any], Any]:
    """As :func:`train`, with CuPy."""
    import cupy

    gc.collect()  # former models are not to hold pieces of CuPy's pool
    cupy.get_default_memory_pool().free_all_blocks()
    drawing.seed_gpu(0)
    np.random.seed(0)
    model = make()
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    losses: list[float] = []
    with session_for(model, options) as session:
        for batch in data:
            sent = chainer.get_device('@cupy:0').send(batch)
            losses.append(iterate(model, optimizer, *sent))
    model.to_device('@numpy')
    return outcome(model, losses), session


class Sigmoids(chainer.Chain):
    """Sigmoids between two layers, as many as it is told."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.last = L.Linear(64, 64), L.Linear(64, 64)

    def forward(self, x, length):
        h = self.first(x)
        for _ in range(length):
            h = F.sigmoid(h)
        return F.sum(self.last(h))


def session_for(
    model: chainer.Link, options: dict[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """A session with the options; without any, nothing at all.

    It plans from the first iteration on, unless the planner is None.
    """
    if options:
        return chainer_hybridmem.optimize(model, **{'planner': 'hybrid', **options})
    return contextlib.nullcontext()


def iterate(model: chainer.Link, optimizer: chainer.Optimizer, *batch: Any) -> float:
    """Trains once and returns the loss; the graph dies before the update."""
    loss = model(*batch)
    model.cleargrads()
    loss.backward()
    value = float(loss.array)
    del loss
    optimizer.update()
    return value


def entries_of(session: Any) -> list[dict[str, Any]]:
    """What a session has noted of each iteration, in order; see ``last_iteration``."""
    entries: list[dict[str, Any]] = session._history.entries
    return entries


def outcome(model: chainer.Chain, losses: list[float]) -> dict[str, Any]:
    """Losses, parameters, gradients, statistics and the generator's state."""
    result: dict[str, Any] = {'losses': np.array(losses)}
    for name, parameter in model.namedparams():
        result[name] = parameter.array
        result[name + '.grad'] = parameter.grad
    for name, link in model.namedlinks():
        for persistent in link._persistent:
            value = getattr(link, persistent)
            if isinstance(value, chainer.backends.cuda.ndarray):
                value = chainer.backends.cuda.to_cpu(value)
            result[f'{name}.{persistent}'] = np.asarray(value)
    result['random'] = np.random.get_state()[1]
    return result


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Every entry equal, bit for bit."""
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        other = actual[name]
        assert value.dtype == other.dtype, name
        assert value.tobytes() == other.tobytes(), name
