"""Early refusals: the limit they name does, and one a little lower does not."""

from __future__ import annotations

import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.training.session.guides import forecast as forecasting
from chainer_hybridmem.training.session.iterations import learning
from chainer_hybridmem.training.session.iterations.overrun import SMALL_BYTES

KNOWN = r'known to do is [^(]+ \((\d+) bytes\)'
BATCH = networks.batches(1)[0]
RNG = np.random.RandomState(0)
VECTORS = RNG.rand(600, 400).astype('f'), RNG.randint(0, 10, 600).astype('i')
FEW = VECTORS[0][:32], VECTORS[1][:32]
WORDS = (RNG.randint(0, 100, (40, 8)).astype('i'),)
WIDTHS = (256, 128, 512, 256, 128, 256, 256)
WHOLE = {'splitting': False, 'planner': 'hybrid'}  # recorded from the first on


class Dense(chainer.Chain):
    def __init__(self, lazy=False):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(None if lazy else 400, 300)
            self.b = L.Linear(None if lazy else 300, 300)
            self.c = L.Linear(300, 10)

    def forward(self, x, t):
        h = F.relu(self.b(F.relu(self.a(x))))
        return F.softmax_cross_entropy(self.c(h), t)


class Convolutions(chainer.Chain):
    def __init__(self, norm=False):
        super().__init__()
        with self.init_scope():
            self.a = L.Convolution2D(3, 16, 3, pad=1)
            self.b = L.Convolution2D(16, 16, 3, pad=1)
            if norm:
                self.m = L.BatchNormalization(16)
                self.n = L.BatchNormalization(16)
            self.c = L.Linear(16 * 12 * 12, 200)
            self.d = L.Linear(200, 10)
        self.norm = norm

    def forward(self, x, t):
        h = self.a(x)
        h = self.b(F.relu(self.m(h) if self.norm else h))
        h = F.max_pooling_2d(F.relu(self.n(h) if self.norm else h), 2)
        return F.softmax_cross_entropy(self.d(F.relu(self.c(h))), t)


class Words(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.e = L.EmbedID(100, 100)
            self.l = L.LSTM(100, 150)
            self.o = L.Linear(150, 100)

    def forward(self, x):
        self.l.reset_state()
        loss = 0
        for i in range(x.shape[1] - 1):
            y = self.o(self.l(self.e(x[:, i])))
            loss = loss + F.softmax_cross_entropy(y, x[:, i + 1])
        return loss


OPTIMIZERS = chainer.optimizers
# Model, optimizer, batch, options, and a limit at which the first forward fits.
PROGRAMS = {
    'MLP, Adam': (Dense, OPTIMIZERS.Adam, FEW, {}, 4_600_000),
    'MLP, Adam, update': (Dense, OPTIMIZERS.Adam, FEW, {}, 2_500_000),
    'lazy MLP, Adam': (lambda: Dense(True), OPTIMIZERS.Adam, VECTORS, {}, 4_700_000),
    'convolutions': (Convolutions, OPTIMIZERS.MomentumSGD, BATCH, WHOLE, 11_000_000),
    'statistics': (
        lambda: Convolutions(True), OPTIMIZERS.MomentumSGD, BATCH, WHOLE, 11_000_000
    ),
    'Everything': (
        networks.Everything, OPTIMIZERS.MomentumSGD, BATCH, WHOLE, 3_560_000
    ),
    'Everything, Adam': (
        networks.Everything, OPTIMIZERS.Adam, BATCH, WHOLE, 3_590_000
    ),
    'LSTM': (Words, OPTIMIZERS.Adam, WORDS, {}, 3_700_000),
    'LSTM, crossing': (
        Words, OPTIMIZERS.Adam, WORDS, {'cross_iteration': 'all'}, 3_700_000
    ),
}  # fmt: skip


def train(name, limit, iterations=8, later_bytes=0):
    """The session after some iterations, half of which hold this much more."""
    make, optimizer, batch, options, _ = PROGRAMS[name]
    np.random.seed(0)
    model = make()
    optimizer = optimizer().setup(model)
    session = hybridmem.optimize(model, limit, **{'planner': 'hybrid', **options})
    with session:
        for i in range(iterations):
            if i == iterations // 2:
                held = np.ones(later_bytes, np.uint8)
            optimizer.update(model, *batch)
        del held
    return session


def refusal(name, limit):
    """The limit that the program is told."""
    with pytest.raises(OutOfMemoryError, match=KNOWN) as caught:
        train(name, limit)
    return int(re.search(KNOWN, str(caught.value)).group(1))


@pytest.mark.parametrize('name', PROGRAMS)
def test_the_limit_that_is_named_does_and_is_about_the_smallest(name):
    """Also if the program holds more later, such as from its second epoch on."""
    known = refusal(name, PROGRAMS[name][-1])
    session = train(name, known)
    assert session.state == 'guided'
    assert session.statistics()['footprint_bytes'] <= known
    in_core_bytes = session.statistics()['in_core_peak_bytes']
    later_bytes = in_core_bytes // 64
    assert known <= in_core_bytes + SMALL_BYTES
    if known < 0.999 * in_core_bytes:  # no more is named, nothing to spare then
        assert train(name, known, 12, later_bytes).state == 'guided'
    if PROGRAMS[name][3] == WHOLE or name.startswith('MLP'):  # else in parts
        assert refusal(name, int((known - later_bytes) * 0.99)) <= known * 1.01


def test_one_iteration_that_fits_is_not_refused():
    assert train('MLP, Adam', 4_600_000, 1).iterations == 1


def test_a_smaller_batch_goes_on_after_a_refusal():
    model = Convolutions()
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    smaller = [array[:6] for array in BATCH]
    with hybridmem.optimize(model, 11_000_000, **WHOLE) as session:
        with pytest.raises(OutOfMemoryError, match=KNOWN):
            for _ in range(6):
                optimizer.update(model, *BATCH)
        for _ in range(6):
            optimizer.update(model, *smaller)
    assert session.state == 'guided'


def test_gradients_without_an_update_need_no_states():
    model = Dense()
    chainer.optimizers.Adam().setup(model)
    with hybridmem.optimize(model, 2_500_000, planner='hybrid') as session:
        for _ in range(6):
            model.cleargrads()
            model(*FEW).backward()
    assert session.state == 'guided'


def test_what_was_made_to_stay_is_there_when_it_comes_again(monkeypatch):
    drafts = []

    def noted(draft, limit_bytes):
        drafts.append(draft)

    monkeypatch.setattr(learning, 'forecast', noted)
    model = Dense(lazy=True)
    optimizer = chainer.optimizers.Adam().setup(model)
    with hybridmem.optimize(model, 20_000_000, planner='hybrid') as session:
        for _ in range(4):
            optimizer.update(model, *FEW)
    again = forecasting.repeated(drafts[0])
    assert again.initial_bytes == session.profile.initial_bytes
    assert {s.producer for s in again.persistent_storages()} == {-1}
    states = [s for s in again.storages if s.category is Category.OPTIMIZER_STATE]
    assert sum(s.nbytes for s in states) == 2 * sum(
        p.array.nbytes for p in model.params()
    )


def test_nothing_is_worked_out_where_the_limit_does(monkeypatch):
    def fail(*args):
        raise AssertionError('takes time')

    monkeypatch.setattr(forecasting, 'least_memory', fail)
    assert train('MLP, Adam', 20_000_000, 3).iterations == 3


def test_what_makes_parameters_is_needed_once():
    """Random numbers for a lazy parameter are no part of later iterations."""

    rng = np.random.RandomState(0)
    x = rng.rand(260, 256).astype(np.float32)
    t = rng.randint(0, 10, 260).astype(np.int32)

    def run(limit):
        np.random.seed(0)
        layers = [L.Linear(None, n) for n in WIDTHS]
        model = L.Classifier(
            chainer.Sequential(*[f for a in layers for f in (a, F.tanh)], L.Linear(10))
        )
        optimizer = chainer.optimizers.MomentumSGD().setup(model)
        with hybridmem.optimize(model, limit, 'swap-all', splitting=False) as session:
            for _ in range(6):
                optimizer.update(model, x, t)
        return session.statistics()['guided_peak_bytes']

    peak = run('1GiB')
    for _ in range(3):  # in less memory, maps leave sooner
        peak = run(peak)
    assert run(peak) <= peak


def test_free_memory_in_pieces_is_said_and_counts_in_the_limit_that_is_named(
    monkeypatch,
):
    model = chainer.Sequential(L.Linear(4, 4), F.relu)
    with (
        pytest.raises(hybridmem.OutOfMemoryError) as found,
        hybridmem.optimize(model, '1MiB', planner='in-core') as session,
    ):
        memory = type(session.device.memory)
        monkeypatch.setattr(memory, 'last_failure', property(lambda _: (4096, 512)))
        model(np.ones((2, 4), np.float32))
        raise MemoryError
    assert 'What is free lies in pieces' in str(found.value)
    assert f'a limit of at least 1.01 MiB ({2**20 + 4096} bytes)' in str(found.value)
