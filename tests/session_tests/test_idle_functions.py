"""Functions whose maps a plan leaves alone: not looked at, and found when needed."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.execution.executor import Executor
from chainer_hybridmem.training.execution.live_maps import LiveMaps

ITERATIONS = 9
UNITS = 64


class Through(chainer.FunctionNode):
    """Reads what it has been given, and does something while it runs."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, inputs):
        self.retain_inputs((0,))
        self.act()
        return (inputs[0] * 1,)

    def backward(self, indexes, gradients):
        del indexes
        self.act()
        return (self.get_retained_inputs()[0] * 0 + gradients[0],)


class Deep(chainer.Chain):
    """Many small functions; the program may act between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(
                *(L.Linear(UNITS, UNITS) for _ in range(12))
            )
            self.last = L.Linear(UNITS, 10)
        self.act = lambda k: None  # in layer k, forward and backward

    def forward(self, x, t):
        for k, layer in enumerate(self.layers):
            x = F.dropout(F.tanh(layer(x)) + x, 0.2)
            (x,) = Through(lambda k=k: self.act(k)).apply((x,))
        return F.softmax_cross_entropy(self.last(x), t)


def train(between=lambda i: None, keep=False, inside=None, **options):
    """Trains; returns parameters and losses, and the session."""
    np.random.seed(0)
    model = Deep()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    data, losses, kept = np.random.RandomState(1), [], []
    session = contextlib.nullcontext()
    if options:
        session = hybridmem.optimize(model, **options)
    with session as opened:
        for i in range(ITERATIONS):
            if inside is not None:
                model.act = lambda k, i=i: inside(opened, i, k)
            x = data.rand(128, UNITS).astype(np.float32)
            loss = model(x, data.randint(0, 10, 128).astype(np.int32))
            between(i)
            model.cleargrads()
            loss.backward()
            losses.append(float(loss.array))
            if keep:
                kept.append(loss)
                del kept[:-2]
            del loss
            optimizer.update()
    return networks.outcome(model, losses), opened


@pytest.fixture(scope='module')
def expected():
    return train()[0]


@pytest.fixture(scope='module')
def limit():
    """A limit under which a few maps have to leave."""
    _, session = train(memory_limit='1GB', planner='swap-all')
    problem = make_problem(session.profile)
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    return int(least + 0.8 * (most - least))


@pytest.fixture
def looked_at(monkeypatch):
    """How many functions were looked at, by iteration."""
    counts, begin, find = [0], Executor.begin, LiveMaps.find_left

    def begun(self, *args):
        counts.append(0)
        return begin(self, *args)

    def found(self, *args):
        counts[-1] += 1
        return find(self, *args)

    monkeypatch.setattr(Executor, 'begin', begun)
    monkeypatch.setattr(LiveMaps, 'find_left', found)
    return counts


def test_few_functions_are_looked_at(expected, limit, looked_at):
    result, session = train(memory_limit=limit, planner='hybrid')
    networks.assert_same(expected, result)
    last = session.last_iteration()
    assert last['guided'] and not last['evictions']
    assert any(entry.action is not Action.KEEP for entry in session.plan.maps)
    assert session.statistics()['guided_peak_bytes'] <= limit
    forwards = session.profile.first_backward
    assert looked_at[2] == forwards  # while they are recorded
    assert 0 < looked_at[-1] < 0.7 * forwards


def test_plans_leave_kept_maps_to_the_graph(limit):
    _, session = train(memory_limit=limit, planner='hybrid')
    dropped = [entry.drop_before >= 0 for entry in session.plan.maps]
    assert 0 < sum(dropped) < len(dropped)
    assert session.plan.predicted_peak_bytes <= limit


def test_all_are_found_when_memory_is_short(expected, limit, looked_at):
    def take(i):
        if i == ITERATIONS - 1:  # all that is left, and more
            held.append(np.zeros(limit // 8, np.float32))

    held: list[np.ndarray] = []
    result, session = train(take, memory_limit=limit, planner='hybrid')
    networks.assert_same(expected, result)
    assert session.last_iteration()['guided']
    assert session.last_iteration()['evictions'] > 0
    assert looked_at[-1] >= session.profile.first_backward - 1
    assert session.statistics()['peak_bytes'] <= limit


@pytest.mark.parametrize('planner', ['hybrid', 'checkpoint-sqrt', 'in-core'])
def test_graphs_that_live_on(expected, limit, planner):
    """What is kept of older iterations can leave; limits and bits are kept."""
    options = {'memory_limit': '1GB' if planner == 'in-core' else limit}
    result, session = train(keep=True, planner=planner, **options)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 0


@pytest.mark.matrix
@pytest.mark.parametrize('layer', range(12))
@pytest.mark.parametrize('planner', ['hybrid', 'checkpoint-sqrt'])
def test_memory_may_be_short_inside_of_any_function(
    expected, limit, planner, layer, looked_at
):
    """The function under way completes as ever, whether a plan leaves it alone."""

    def reclaim(session, i, k):
        if i == ITERATIONS - 1 and k == layer:
            assert session.state == 'guided'
            session._loop.reclaim(1 << 40)  # all that may leave leaves

    result, session = train(inside=reclaim, memory_limit=limit, planner=planner)
    networks.assert_same(expected, result)
    assert session.last_iteration()['guided']
    assert session.last_iteration()['evictions'] > 0
    assert not session.deviations
    assert looked_at[-1] == session.profile.first_backward  # all, once
