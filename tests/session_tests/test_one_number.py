"""A limit that is too small is told once, with one that does."""

from __future__ import annotations

import random
import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support.matrices import several

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.training.devices.host.memory import HostMemory
from chainer_hybridmem.units import parse_bytes

KNOWN = r'known to do is [^(]+ \((\d+) bytes\)'
ITERATIONS = 9
BATCH, SIDE, CHANNELS, CLASSES = 24, 12, 8, 10


class Drawn(chainer.Chain):
    """Layers of all kinds, some results of which the program holds."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        with self.init_scope():
            self.first = L.Convolution2D(3, CHANNELS, 3, pad=1)
            self.last = L.Linear(None, CLASSES)
            self.layers = chainer.ChainList()
        self.kinds = [
            rng.choice(['conv', 'norm', 'act', 'skip', 'pool', 'drop', 'wide', 'pad'])
            for _ in range(rng.randint(2, 6))
        ]
        for kind in self.kinds:
            if kind == 'conv':
                self.layers.append(L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1))
            elif kind == 'norm':
                self.layers.append(L.BatchNormalization(CHANNELS))
            elif kind == 'wide':
                self.layers.append(L.Convolution2D(CHANNELS, CHANNELS, 5, pad=2))
            else:
                self.layers.append(chainer.Link())
        self.holds = rng.random() < 0.4
        self.held = None
        name = rng.choice(['SGD', 'MomentumSGD', 'Adam', 'RMSprop'])
        self.optimizer = getattr(chainer.optimizers, name)()
        self.keeps = rng.random() < 0.3  # the loss of the iteration before
        self.share = rng.uniform(0.1, 0.75)
        self.planner = rng.choice([None, None, 'hybrid', 'swap-all', 'superneurons'])

    def forward(self, x):
        h = F.relu(self.first(x))
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ('conv', 'norm', 'wide'):
                h = layer(h)
            elif kind == 'act':
                h = F.tanh(h)
            elif kind == 'skip':
                h = h + F.sigmoid(h)
            elif kind == 'drop':
                h = F.dropout(h, 0.3)
            elif kind == 'pool':
                h = F.max_pooling_2d(h, 3, 1, 1)
            else:
                h = F.concat([h, h])[:, :CHANNELS]
            if self.holds and kind in ('act', 'conv'):
                self.held = h
        return self.last(h)


def train(seed, limit=None, later_bytes=0):
    """Trains a drawn program that holds more later; its session and its losses."""
    np.random.seed(seed)
    model = Drawn(seed)
    optimizer = model.optimizer.setup(model)
    rng = np.random.RandomState(seed)
    x = rng.rand(BATCH, 3, SIDE, SIDE).astype('f')
    t = rng.randint(0, CLASSES, BATCH).astype('i')
    planner = None if limit is None else model.planner
    losses, kept = [], None
    with hybridmem.optimize(model, limit or 10**9, planner) as session:
        for i in range(ITERATIONS):
            if i == ITERATIONS // 2:
                later = np.ones(later_bytes, np.uint8)
            loss = F.softmax_cross_entropy(model(x), t)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array.tobytes())
            kept = loss if model.keeps else None
            del loss
    del kept, later
    return session, losses


@pytest.mark.parametrize('seed', range(several(4, all_of_them=12)))
def test_the_number_is_followed_once(seed):
    plain, expected = train(seed)
    limit = int(plain.statistics()['peak_bytes'] * Drawn(seed).share)
    try:
        _, losses = train(seed, limit)
    except OutOfMemoryError as error:
        message = str(error)
        known = int(re.search(KNOWN, message).group(1))
        assert known > limit
        spare_bytes = known // 65  # and a 64th of any in-core peak is more
        session, losses = train(seed, known, spare_bytes)
        assert session.statistics()['peak_bytes'] <= known
        assert 'plain Chainer needs' in message
        assert 'so the traceback is of a later line' in message
        rounded = re.search(r'known to do is ([^(]+) \(', message).group(1)
        assert parse_bytes(rounded) >= known
        assert 'least memory of any plan' in message
    assert losses == expected


def small_steps(limit, batches, caught=(), layers=1):
    """Trains with one batch after the other; what is caught ends a batch."""
    np.random.seed(0)
    deep = chainer.Sequential(L.Linear(256, 256), F.tanh).repeat(layers - 1)
    model = L.Classifier(
        chainer.Sequential(L.Linear(64, 256), F.tanh, *deep, L.Linear(256, 4))
    )
    optimizer = chainer.optimizers.SGD().setup(model)
    sizes, losses = [], []
    with hybridmem.optimize(model, limit, splitting=False) as session:
        for size in batches:
            x, t = np.ones((size, 64), 'f'), np.zeros(size, 'i')
            try:
                optimizer.update(model, x, t)
            except caught:
                continue
            sizes.append(size)
            losses.append(float(model.loss.array))
            model.cleargrads()
            del model.loss, model.y, model.accuracy
    return session, sizes, losses


def test_what_is_told_of_plain_chainer_is_no_less_than_what_was_asked_for():
    """The iteration that shows it is another one than that which did not fit."""
    batches = [*[1000] * 6, 3000, *[1000] * 3]
    peak = small_steps(10**9, batches[:5], layers=6)[0].statistics()['peak_bytes']
    with pytest.raises(OutOfMemoryError) as caught:
        small_steps(int(0.8 * peak), batches, layers=6)
    error, message = caught.value, str(caught.value)
    wanted = error.used_bytes + error.requested_bytes
    told = re.findall(r'(?:needs|any plan is).*? \((\d+) bytes\)', message)
    assert all(int(nbytes) >= wanted for nbytes in told)
    assert 'for the 2 passes seen; others may need more' in message
    known = int(re.search(KNOWN, message).group(1))
    session, sizes, _ = small_steps(known, batches, layers=6)
    assert sizes == batches
    assert session.statistics()['peak_bytes'] <= known


def test_a_program_that_catches_the_error_goes_on_inside_the_limit():
    limit = 1_500_000
    batches = [800, 800, 800, 16, 16, 800, 16]
    with pytest.raises(OutOfMemoryError, match='known to do'):
        small_steps(limit, batches)
    session, sizes, losses = small_steps(limit, batches, MemoryError)
    # Two go beyond the limit; the third is told, and what comes later is refused.
    assert sizes == [800, 800, 16, 16, 16]
    assert session.last_iteration()['peak_bytes'] <= limit
    assert losses[:2] == small_steps(10**9, batches)[2][:2]


def test_what_the_machine_has_not_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(HostMemory, 'raise_limit', lambda self, nbytes: False)
    with pytest.raises(OutOfMemoryError, match='needs a limit of at least') as caught:
        small_steps(1_500_000, [800])
    least = int(re.search(r'at least [^(]+\((\d+) bytes', str(caught.value)).group(1))
    assert least == caught.value.used_bytes + caught.value.requested_bytes
    for known in re.findall(KNOWN, str(caught.value)):
        assert int(known) >= least


def test_the_limit_gives_way_no_further_than_the_machine(monkeypatch):
    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.host.memory.available_ram', lambda: 1000
    )
    with pytest.raises(OutOfMemoryError, match='needs a limit of at least'):
        small_steps(1_500_000, [800])
