"""Profiles made by hand, as files, and a way to run the command line."""

import math
import sys

import pytest
from support import toys

from chainer_hybridmem import commands
from chainer_hybridmem.commands import progress
from chainer_hybridmem.planning.records import library

NETWORKS = """
import chainer
import chainer.functions as F
import chainer.links as L


class Tiny(chainer.Chain):
    insize = 16

    def __init__(self, n_class):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 8, 3, pad=1)
            self.norm = L.BatchNormalization(8)
            self.fc = L.Linear(8 * 8 * 8, n_class)

    def forward(self, x, t):
        h = self.conv(x)
        for _ in range(4):
            h = F.tanh(h)
        h = F.max_pooling_2d(F.relu(self.norm(h)), 2)
        return F.softmax_cross_entropy(self.fc(h), t)


class Wide(Tiny):
    def __init__(self, n_class):
        super().__init__(n_class)
        with self.init_scope():
            self.before = L.Convolution2D(3, 64, 3, pad=1)
            self.between = L.Convolution2D(64, 64, 3, pad=1)
            self.after = L.Convolution2D(64, 3, 3, pad=1)

    def forward(self, x, t):
        h = F.relu(self.between(F.relu(self.before(x))))
        return super().forward(self.after(h), t)


class Picky(Tiny):
    def forward(self, x, t):
        return super().forward(F.tanh(x) if len(x) > 2 else x, t)
"""


# What is trained: in it, one is broken, one has an argument, and some never settle.
TRAINED = """
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Tiny(chainer.Chain):
    insize = 8

    def __init__(self, n_class):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 4, 3, pad=1)
            self.norm = L.BatchNormalization(4)
            self.fc = L.Linear(4 * 8 * 8, n_class)

    def forward(self, x, t):
        h = F.relu(self.norm(self.conv(x)))
        for _ in range(6):
            h = F.tanh(h)
        return F.softmax_cross_entropy(self.fc(F.dropout(h)), t)


class Unlike(Tiny):
    runs = 0

    def forward(self, x, t):
        Unlike.runs += 1
        if Unlike.runs == 10:
            self.norm.avg_mean += 1
        return super().forward(x, t)


class Restless(Tiny):
    runs = 0

    def forward(self, x, t):
        self.runs += 1
        for _ in range(self.runs):
            x = F.tanh(x)
        return super().forward(x, t)


class Broken(Tiny):
    def forward(self, x, t):
        return self.missing(x)


class Demanding(Tiny):
    def __init__(self, n_class, wish):
        super().__init__(n_class)
"""


@pytest.fixture(autouse=True)
def untold_steps(monkeypatch):
    """On a busy machine a step may take long; it has no line all the same."""
    monkeypatch.setattr(progress, 'EVERY_SECONDS', math.inf)
    monkeypatch.setattr(progress, 'LATE_SECONDS', math.inf)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def profile(folder):
    """The running example: six layers of 10 MiB; ``p.json`` in the folder."""
    profile = toys.chain()
    library.save(profile, str(folder / 'p.json'))
    return profile


@pytest.fixture
def hybridmem(capsys):
    """Runs a command line; returns exit status, standard output, standard error."""

    def run(*arguments):
        try:
            status = commands.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(hybridmem):
    """Runs a command line that must fail with one line; returns that line."""

    def run(*arguments):
        status, out, err = hybridmem(*arguments)
        assert status == 1
        assert out == ''
        assert err.startswith('hybridmem: error: ')
        assert err.count('\n') == 1
        return err

    return run


@pytest.fixture
def network(folder, monkeypatch):
    """Arguments for a tiny network; its recordings are kept in a file."""
    (folder / 'own_networks.py').write_text(NETWORKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, 'own_networks', raising=False)
    return ('--arch', 'own_networks:Tiny', '--n-class', '10', '--samples', 's.json')


@pytest.fixture
def trained(folder, monkeypatch):
    """A module with networks to train, as ``trained_networks:Tiny``."""
    (folder / 'trained_networks.py').write_text(TRAINED)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, 'trained_networks', raising=False)
