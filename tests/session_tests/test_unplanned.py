"""Iterations for which there is no plan, but which fit in passive mode."""

from __future__ import annotations

import io
import linecache
import random
import threading

import numpy as np
import pytest
from support import networks

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

import chainer_hybridmem as hybridmem
from chainer_hybridmem.training.session.guides.guide import Stage
from chainer_hybridmem.training.session.guides.guidebook import (
    FREE_TRIES,
    MOST_UNUSED_DRAFTS,
)
from chainer_hybridmem.training.session.iterations.learning import PROFILING_RUNS
from chainer_hybridmem.training.session.setting.session_thread import warn_user

ITERATIONS = 9
LIMIT = 3_000_000


class Residual(chainer.ChainList):
    """What two backward passes read stays between them in every plan."""

    def __init__(self):
        super().__init__(*[L.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        h = x
        for layer in self:
            h = h + F.relu(layer(h))
        return F.average(h**2)


def train(**options):
    np.random.seed(0)
    model = Residual()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = np.random.rand(1024, 64).astype(np.float32)
    records, states = [], []
    with networks.session_for(model, options) as session:
        for _ in range(ITERATIONS):
            loss = model(x)
            (gradient,) = chainer.grad([loss], [model[2].W])
            model.cleargrads()
            loss.backward()
            records.append((loss.array.tobytes(), gradient.array.tobytes()))
            del loss, gradient
            optimizer.update()
            records.append([p.array.tobytes() for p in model.params()])
            states.append(session and session.state)
    return records, states, session


@pytest.fixture(scope='module')
def expected():
    return train()[0]


def test_without_a_plan_training_goes_on(expected):
    with pytest.warns(UserWarning, match='least memory of any plan.*without a plan'):
        records, states, session = train(memory_limit=LIMIT, splitting=False)
    assert records == expected
    assert states[-4:] == ['passive'] * 4
    figures = session.statistics()
    assert figures['unplanned'] == 1 and figures['peak_bytes'] <= LIMIT
    assert 'no plan fits' in session.report()


def test_a_planner_that_was_asked_for_says_so():
    told = io.StringIO()
    with pytest.raises(hybridmem.InfeasibleError, match='least memory of any plan'):
        train(memory_limit=LIMIT, splitting=False, planner='swap-opt', progress=told)
    assert f'trained inside the limit of {LIMIT} bytes' in told.getvalue()


class Differentiating(chainer.training.StandardUpdater):
    """Two backward passes, as in :func:`train`."""

    def update_core(self):
        optimizer, model = self.get_optimizer('main'), self.get_optimizer('main').target
        loss = model(self.converter(self.get_iterator('main').next()))
        chainer.grad([loss], [model[2].W])
        model.cleargrads()
        loss.backward()
        del loss
        optimizer.update()


def run_trainer(out):
    model = Residual()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = np.random.rand(1024, 64).astype(np.float32)
    iterator = chainer.iterators.SerialIterator(x, len(x))
    updater = Differentiating(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (ITERATIONS, 'iteration'), out=out)
    trainer.extend(hybridmem.HybridMemory(LIMIT, splitting=False))
    trainer.run()


def test_the_warning_points_to_the_users_line(tmp_path):
    def line_of(way):
        with pytest.warns(UserWarning, match='without a plan') as warned:
            way()
        assert warned[0].filename == __file__
        return linecache.getline(__file__, warned[0].lineno).strip()

    assert (
        line_of(lambda: train(memory_limit=LIMIT, splitting=False)) == 'loss = model(x)'
    )
    assert line_of(lambda: run_trainer(str(tmp_path))) == 'trainer.run()'


def test_a_warning_without_a_line_of_the_users_points_to_its_caller():
    names = {'__name__': 'chainer_hybridmem.somewhere', 'warn_user': warn_user}
    code = compile('\n\nwarn_user("away")', 'somewhere.py', 'exec')
    with pytest.warns(UserWarning, match='hybridmem: away') as warned:
        thread = threading.Thread(target=exec, args=(code, names))
        thread.start()
        thread.join()
    assert (warned[0].filename, warned[0].lineno) == ('somewhere.py', 3)


class Chain(chainer.Chain):
    """Takes rows of any length, as often as asked; a layer may read any one before."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layer = L.Linear(1, 1)

    def forward(self, x, depth, path=None):
        made = [x]
        for _ in range(depth):
            x = F.tanh(self.layer(x if path is None else path.choice(made)))
            if path is not None:
                made.append(x)
        return F.average(x if path is None else sum(made))


@pytest.mark.parametrize('what', ['sizes', 'depths', 'paths'])
def test_what_never_comes_again_is_recorded_at_first_only(what):
    """However iterations begin; what then comes again and again is still learnt."""
    model, states = Chain(), []
    with hybridmem.optimize(model, 3_000_000, planner='hybrid', steps=50) as session:
        for number in [*range(40), *[40] * 30]:
            rows = 9000 + number if what == 'sizes' else 9000
            depth = number + 2 if what == 'depths' else 20
            path = random.Random(number) if what == 'paths' else None
            x = np.ones((rows, 1), np.float32)
            model.cleargrads()
            model(x, depth, path).backward()
            states.append(session.state)
    new = states[:40]
    recorded = [i for i, state in enumerate(new) if state == Stage.WARM_UP.value]
    assert len(recorded) <= MOST_UNUSED_DRAFTS + FREE_TRIES
    assert states[-1] == Stage.GUIDED.value


def test_what_comes_once_in_a_while_costs_no_other_iteration_its_plan():
    """Batches of a seldom size among others, as of molecules or sentences."""
    rng, model, states = np.random.RandomState(3), Chain(), []
    with hybridmem.optimize(model, 1_300_000) as session:
        for number in range(80):
            seldom = number > 10 and rng.rand() < 0.08
            x = np.ones((8500 if seldom else 9000, 1), np.float32)
            model.cleargrads()
            model(x, 40).backward()
            states.append((seldom, session.state))
    assert sum(seldom for seldom, _ in states) >= 3
    profiled = [state for state in states if state == (False, Stage.PROFILING.value)]
    assert len(profiled) == PROFILING_RUNS, states
    usual = [state for seldom, state in states[10:] if not seldom]
    assert usual.count(Stage.GUIDED.value) >= 0.9 * len(usual), states
