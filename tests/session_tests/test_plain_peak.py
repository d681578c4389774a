"""The in-core peak of a session is plain Chainer's, older graphs included."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainer_hybridmem as hybridmem
from chainer_hybridmem.training.session.iterations.iteration_history import PlainPeak
from chainer_hybridmem.training.session.setting import link_measurement

ITERATIONS = 30  # until the longest one has been recorded, too
RNG = np.random.RandomState(0)
X, T = RNG.rand(400, 256).astype('f'), RNG.randint(0, 10, 400).astype('i')


class Dense(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a, self.b = L.Linear(256, 256), L.Linear(256, 256)
            self.c = L.Linear(256, 10)

    def forward(self, x):
        return self.c(F.tanh(self.b(F.tanh(self.a(x)))))


class Recurrent(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l, self.o = L.LSTM(256, 64), L.Linear(64, 10)

    def forward(self, x):
        return self.o(self.l(x))


def keep_outputs(model, update, number, kept):
    """Each output lives on, and its graph with it, for three iterations."""
    y = model(X)
    update(F.softmax_cross_entropy(y, T))
    kept.append(y)
    del kept[:-3]


def unchain_seldom(model, update, number, kept):
    """A graph grows over four iterations."""
    update(F.softmax_cross_entropy(model(X), T))
    if number % 4 == 3:
        model.l.h.unchain_backward()
        model.l.c.unchain_backward()


def give_up_before_backward(model, update, number, kept):
    """The last graph is beside forward, and not beside backward, which needs more."""
    loss = F.softmax_cross_entropy(model(X), T)
    kept[:] = [loss]
    update(loss)


PROGRAMS = {
    'kept outputs': (Dense, keep_outputs, (0.75, 0.55)),
    'given up before backward': (Dense, give_up_before_backward, (0.9, 0.8)),
    'unchained seldom': (Recurrent, unchain_seldom, (0.9, 0.8)),
}


def train(name, limit):
    np.random.seed(0)
    make, step, _ = PROGRAMS[name]
    model, kept = make(), []
    optimizer = chainer.optimizers.SGD().setup(model)

    def update(loss):
        model.cleargrads()
        loss.backward()
        optimizer.update()

    with hybridmem.optimize(model, limit, arena=False) as session:
        for number in range(ITERATIONS):
            step(model, update, number, kept)
    return session


@pytest.mark.parametrize('name', PROGRAMS)
def test_it_counts_what_was_evicted_of_older_graphs(name):
    plain = train(name, 10**9).statistics()
    assert plain['older_bytes'] == 0
    for share in PROGRAMS[name][2]:
        session = train(name, int(plain['peak_bytes'] * share))
        figures = session.statistics()
        assert figures['older_bytes'] > 0
        told = figures['in_core_peak_bytes']
        # What comes back while an iteration is recorded counts twice.
        assert plain['peak_bytes'] <= told <= 1.05 * plain['peak_bytes']
        report = session.report()
        assert 'without older graphs' in report and 'maps of older graphs' in report


def test_what_no_profile_tells_is_not_known():
    peak = PlainPeak()
    assert peak.of(50) == 50 and peak.of(None) is None
    peak.note(10, 0, None)  # nothing of older graphs was away
    assert peak.of(50) == 50
    peak.note(30, 20, 40)
    assert peak.of(50) == 70 and peak.older_bytes == 20
    peak.note(25, 5, None)
    assert peak.of(50) == 70
    peak.note(60, 25, None)  # it may have needed more than all that are known
    assert peak.of(50) is None


def test_what_plain_chainer_was_seen_to_need_is_told_as_it_is():
    """An estimate counts older graphs until backward, though they may go before."""
    peak = PlainPeak()
    peak.seen_bytes = 60
    peak.note(30, 20, 40)
    assert peak.of(50) == 60
    assert peak.of(80) == 60  # the profile may have what came back of them twice
    assert peak.of(90) == 90  # iterations have grown


@pytest.mark.parametrize('when', ['before', 'after'])
def test_the_peak_of_a_session_is_that_of_what_is_no_iteration_as_well(when):
    """A graph that no backward follows ends none."""
    model = Dense()
    optimizer = chainer.optimizers.SGD().setup(model)
    large = np.concatenate([X] * 4)
    with hybridmem.optimize(model, 10**9, arena=False) as session:
        if when == 'before':
            model(large)
        for _ in range(3):
            model.cleargrads()
            F.softmax_cross_entropy(model(X), T).backward()
            optimizer.update()
        if when == 'after':
            kept = model(large)
            assert kept.creator is not None
        used = session.device.memory.peak_bytes
    figures = session.statistics()
    seen = max(kind['peak_bytes'] for kind in figures['kinds'])
    assert figures['peak_bytes'] > 1.5 * seen
    assert figures['footprint_bytes'] >= figures['peak_bytes'] >= used


def test_what_measures_the_link_is_in_no_peak(monkeypatch):
    """It is more than small programs need."""
    measure = link_measurement.measure_link

    def allocate(device, **options):
        used_bytes = device.memory.used_bytes
        block = np.empty(2**25, np.uint8)
        assert device.memory.used_bytes == used_bytes + block.nbytes
        return measure(device, **options)

    monkeypatch.setattr(link_measurement, 'measure_link', allocate)
    model = Dense()
    optimizer = chainer.optimizers.SGD().setup(model)
    with hybridmem.optimize(model, 10**9, planner='hybrid') as session:
        for _ in range(6):
            model.cleargrads()
            F.softmax_cross_entropy(model(X), T).backward()
            optimizer.update()
    figures = session.statistics()
    assert session.plan is not None
    assert figures['peak_bytes'] == max(k['peak_bytes'] for k in figures['kinds'])
