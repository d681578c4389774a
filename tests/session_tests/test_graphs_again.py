"""Graphs that are used in ways a single backward pass does not use them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

ITERATIONS = 7


class Critic(chainer.Chain):
    """Its gradient is part of its loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(None, 64)
            self.two = L.Linear(None, 64)
            self.three = L.Linear(None, 1)

    def forward(self, x):
        h = F.dropout(F.tanh(self.one(x)), 0.3)
        return F.sum(self.three(F.tanh(self.two(h))))


def penalised(model, x):
    """As for a Wasserstein GAN: the second backward walks through the first one."""
    x = chainer.Variable(x)
    y = model(x)
    (slope,) = chainer.grad([y], [x], enable_double_backprop=True)
    loss = y + F.sum(slope * slope)
    model.cleargrads()
    loss.backward()
    return loss


def interleaved(model, x):
    """Two graphs at once; the first one dies while the second one is needed."""
    first, second = model(x), model(x + 1)
    model.cleargrads()
    first.backward()
    del first
    second.backward()
    return second


def outcome_of(iterate, **options):
    np.random.seed(0)
    model = Critic()
    optimizer = chainer.optimizers.MomentumSGD(0.001).setup(model)
    data = np.random.RandomState(1).randn(ITERATIONS, 64, 64).astype(np.float32)
    losses = []
    session = hybridmem.optimize(model, '4MB', **options) if options else None
    with session or contextlib.nullcontext():
        for x in data:
            losses.append(float(iterate(model, x).array))
            optimizer.update()
    return networks.outcome(model, losses), session


@pytest.mark.matrix
@pytest.mark.parametrize('iterate', [penalised, interleaved])
@pytest.mark.parametrize(
    'options',
    [
        {'planner': 'swap-all'},
        {'planner': 'in-core'},
        # What is kept is dropped after its last use, masks of dropout among it.
        {'planner': 'manual', 'actions': {'*': 'keep', '*Tanh*': 'swap'}},
    ],
    ids=lambda options: options['planner'],
)
def test_the_same_bits(iterate, options):
    expected, _ = outcome_of(iterate)
    result, session = outcome_of(iterate, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] >= ITERATIONS - 3
    assert session.deviations == 0


def test_the_last_graph_of_an_iteration_ends_it():
    _, session = outcome_of(interleaved, planner='in-core')
    profile = session.profile
    assert profile.graph_end_event >= profile.operations[-1].first_event


class Remembering(chainer.Chain):
    """It keeps what it has before the loss, as a recurrent link keeps its state."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one = L.Linear(64, 64)
        self.state = None

    def forward(self, x):
        self.state = None
        for _ in range(8):
            x = F.tanh(self.one(x))
        self.state = x
        return F.mean(x)


def test_a_graph_of_which_a_part_is_kept_lives_through_the_update():
    """What plain Chainer needs counts it then, and a plan drops what it keeps."""
    np.random.seed(0)
    model = Remembering()
    optimizer = chainer.optimizers.Adam().setup(model)
    x = np.random.RandomState(1).randn(64, 64).astype(np.float32)
    with hybridmem.optimize(model, '4MB', planner='in-core') as session:
        while session.profile is None:
            model.cleargrads()
            model(x).backward()
            optimizer.update()
    profile = session.profile
    assert profile.graph_end_event == len(profile.events)
    problem = make_problem(profile)
    assert problem.in_core_peak_bytes >= profile.initial_bytes + 8 * x.nbytes
    map_bytes = sum(s.nbytes for s in profile.storages if s.backward_uses)
    assert least_memory(problem)[0] < problem.in_core_peak_bytes - map_bytes // 2


def test_a_graph_that_the_next_iteration_replaces_is_not_copied_out():
    """Both do not fit, and nothing of the older one is asked for any more."""
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(64, 64), F.tanh).repeat(7)
    optimizer = chainer.optimizers.SGD(0.001).setup(model)
    x = np.random.RandomState(1).randn(2000, 64).astype(np.float32)
    with hybridmem.optimize(model, '6MB') as session:
        for _ in range(9):
            loss = F.mean(model(x))  # the older one lives until here
            model.cleargrads()
            loss.backward()
            optimizer.update()
    figures = session.statistics()
    assert figures['state'] == 'guided' and figures['swap'] == 0
    assert figures['swapped_bytes'] == 0 and figures['evictions'] == 0
    assert figures['predicted_peak_bytes'] == figures['guided_peak_bytes']


class Rewired(chainer.Chain):
    """Passes on another array than a function has made, or swaps two, when it is told.

    Args:
        way (str): ``'pool'``, as a pool of pictures does, or ``'paths'``.
        retained (bool): Whether the function keeps what it makes.
        activation (callable): Reads it.
    """

    def __init__(self, way, retained, activation):
        super().__init__()
        self.way, self.retained, self.activation = way, retained, activation
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(64, 64) for _ in range(8)])

    def forward(self, x, told):
        layers = iter(self.layers)
        for one, other in zip(layers, layers, strict=True):
            h, beside = one(x), other(x)
            h = F.tanh(h) if self.retained else h
            if told and self.way == 'pool' and one is self.layers[2]:
                h = chainer.Variable(h.array * 2)
            elif told and self.way == 'paths':
                h, beside = beside, h
            x = self.activation(h) + beside
        return F.mean(x)


@pytest.mark.parametrize('planner', ['swap-all', 'checkpoint-sqrt'])
@pytest.mark.parametrize('activation', [F.sigmoid, F.sin])
@pytest.mark.parametrize('retained', [True, False])
@pytest.mark.parametrize('way', ['pool', 'paths'])
def test_functions_that_read_what_others_have_made(way, retained, activation, planner):
    """The functions are the same, but no replay makes what they read."""

    def train(session):
        np.random.seed(0)
        model = Rewired(way, retained, activation)
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        data = np.random.RandomState(1)
        with session(model) as opened:
            losses = [
                networks.iterate(
                    model,
                    optimizer,
                    data.rand(2000, 64).astype(np.float32),
                    i > 7 and i % 2,
                )
                for i in range(12)
            ]
        return networks.outcome(model, losses), opened

    expected, _ = train(contextlib.nullcontext)
    result, session = train(lambda model: hybridmem.optimize(model, '4MiB', planner))
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert figures['guided_iterations'] >= 4
    assert figures['swap'] or figures['recompute']


@pytest.mark.parametrize('limit', ['5MiB', '6MiB'])
def test_a_last_function_that_reads_what_others_have_made(limit):
    """No other function follows it, and its backward is not the first one."""

    def compute(model, x, told):
        first, second = model[0](x), model[1](x)
        h = first + second
        for layer in list(model)[2:]:
            h = F.sin(layer(h))
        two = [F.sin(first), F.sin(second)]
        return F.mean(h), F.mean_squared_error(*(two[::-1] if told else two))

    def train(session):
        np.random.seed(0)
        model = chainer.ChainList(*[L.Linear(64, 64) for _ in range(9)])
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        data, losses = np.random.RandomState(1), []
        with session(model) as opened:
            for i in range(14):
                x = data.rand(2000, 64).astype(np.float32)
                both = compute(model, x, i > 7 and i % 2)
                model.cleargrads()
                for loss in both:
                    loss.backward()
                losses.append(float(loss.array))
                del both, loss
                optimizer.update()
        return networks.outcome(model, losses), opened

    expected, _ = train(contextlib.nullcontext)
    result, session = train(
        lambda model: hybridmem.optimize(model, limit, 'checkpoint-sqrt')
    )
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] >= 4
    assert session.statistics()['recompute']


def test_parameters_made_in_a_session_are_no_feature_maps():
    np.random.seed(0)
    model = Critic()
    optimizer = chainer.optimizers.SGD(0.001).setup(model)
    x = np.random.RandomState(1).randn(64, 64).astype(np.float32)
    with hybridmem.optimize(model, '4MB') as session:
        for _ in range(2):
            loss = model(x)
            session._loop.reclaim(1 << 40)  # everything that may leave leaves
            model.cleargrads()
            loss.backward()
            del loss
            optimizer.update()
    assert np.isfinite(model.one.W.grad).all()
