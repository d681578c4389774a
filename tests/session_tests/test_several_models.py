"""Several models in one session: two optimizers, shared links, lists of links."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.training.chainer_access.models import Models, one_model

LIMIT = 2_600_000


class Generator(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.fc = L.Linear(16, 8 * 8 * 8)
            self.bn = L.BatchNormalization(8)
            self.up = L.Deconvolution2D(8, 3, 4, stride=2, pad=1)

    def forward(self, z):
        h = F.reshape(self.fc(z), (len(z), 8, 8, 8))
        return F.tanh(self.up(F.relu(self.bn(h))))


class Discriminator(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 16, 3, pad=1)
            self.c2 = L.Convolution2D(16, 16, 4, stride=2, pad=1)
            self.out = L.Linear(None, 1)

    def forward(self, x):
        return self.out(F.leaky_relu(self.c2(F.leaky_relu(self.c1(x)))))


class GanUpdater(training.updaters.StandardUpdater):
    """As in Chainer's DCGAN example: there is no optimizer called main."""

    def __init__(self, *args, **kwargs):
        self.gen, self.dis = kwargs.pop('models')
        super().__init__(*args, **kwargs)

    def update_core(self):
        x_real = chainer.Variable(self.converter(self.get_iterator('main').next()))
        z = np.random.uniform(-1, 1, (len(x_real), 16)).astype(np.float32)
        y_real, x_fake = self.dis(x_real), self.gen(z)
        y_fake = self.dis(x_fake)
        n = len(x_real)
        self.get_optimizer('dis').update(
            lambda: F.sum(F.softplus(-y_real)) / n + F.sum(F.softplus(y_fake)) / n
        )
        self.get_optimizer('gen').update(lambda: F.sum(F.softplus(-y_fake)) / n)


def gan_trainer(out, iterations, extension):
    np.random.seed(0)
    models = Generator(), Discriminator()
    optimizers = {
        name: chainer.optimizers.Adam(2e-4, 0.5).setup(model)
        for name, model in zip(('gen', 'dis'), models, strict=True)
    }
    pictures = np.random.rand(64, 3, 16, 16).astype(np.float32)
    iterator = chainer.iterators.SerialIterator(pictures, 16)
    updater = GanUpdater(iterator, optimizers, models=models)
    trainer = training.Trainer(updater, (iterations, 'iteration'), out=str(out))
    if extension is not None:
        trainer.extend(extension)
    return trainer, models


def contents(models):
    return {
        f'{i}{name}': parameter.array.tobytes()
        for i, model in enumerate(models)
        for name, parameter in model.namedparams()
    }


def test_one_line_is_enough_for_two_optimizers(tmp_path):
    plain, expected = gan_trainer(tmp_path / 'plain', 8, None)
    plain.run()
    extension = hybridmem.HybridMemory(LIMIT)
    trainer, models = gan_trainer(tmp_path / 'guided', 8, extension)
    trainer.run()
    assert contents(models) == contents(expected)
    figures = extension.session.statistics()
    assert figures['guided_iterations'] and figures['peak_bytes'] <= LIMIT
    guides = extension.session._guidebook  # one for each loss
    labels = {op.label for guide in guides for op in guide.problem.profile.operations}
    assert '/gen/up/Deconvolution2DFunction' in labels
    assert '/dis/c1/Convolution2DFunction' in labels


@pytest.mark.parametrize('cross_iteration', [False, 'all'])
def test_states_of_both_cross_iterations(tmp_path, cross_iteration):
    plain, expected = gan_trainer(tmp_path / 'plain', 8, None)
    plain.run()
    extension = hybridmem.HybridMemory(LIMIT, cross_iteration=cross_iteration)
    trainer, models = gan_trainer(tmp_path / 'guided', 8, extension)
    trainer.run()
    assert contents(models) == contents(expected)
    labels = {s.label for s in extension.session.profile.persistent_storages()}
    assert '/gen/fc/W:m' in labels and '/dis/c2/W:v' in labels


def test_a_session_leaves_names_and_snapshots_as_they_are(tmp_path):
    trainer, (gen, dis) = gan_trainer(tmp_path, 2, hybridmem.HybridMemory(LIMIT))
    trainer.run()
    assert gen.name is None and gen.up.name == 'up'
    chainer.serializers.save_npz(tmp_path / 'dis.npz', dis)
    with np.load(tmp_path / 'dis.npz') as stored:
        assert 'c1/W' in stored.files


def test_models_may_be_given_as_a_list():
    gen, dis = Generator(), Discriminator()
    optimizers = [chainer.optimizers.SGD().setup(model) for model in (gen, dis)]
    z = np.zeros((4, 16), np.float32)
    with hybridmem.optimize([gen, dis], LIMIT, planner='hybrid') as session:
        for _ in range(6):
            loss = F.sum(dis(gen(z)))
            session.model.cleargrads()
            loss.backward()
            del loss
            for optimizer in optimizers:
                optimizer.update()
    assert session.statistics()['guided_iterations']


def test_nested_and_shared_links_count_once():
    whole, other = networks.Block(4), chainer.Chain()
    with other.init_scope():
        other.shared = whole.c1
        other.own = L.Linear(3, 3)
    assert one_model((whole.c1, whole, whole)) is whole
    joined = one_model([whole, other])
    paths = dict(joined.namedlinks())
    assert set(paths) == {'/', '/0', '/0/b1', '/0/b2', '/0/c1', '/0/c2', '/1', '/1/own'}
    assert len(list(joined.params())) == len(set(map(id, joined.params())))
    assert paths['/0'] is whole and list(joined.children()) == [whole, other]
    assert isinstance(joined, Models)
    assert {'/1/own/W', '/0/c1/W'} <= set(dict(joined.namedparams()))


def test_what_must_be_named_is_named(tmp_path):
    with pytest.raises(OptionError, match='model is empty; a chainer.Link or a list'):
        hybridmem.optimize([], LIMIT)
    with pytest.raises(OptionError, match="model '1' is a int"):
        hybridmem.optimize([L.Linear(2, 2), 3], LIMIT)
    trainer, _ = gan_trainer(tmp_path, 1, hybridmem.HybridMemory(LIMIT))
    for optimizer in trainer.updater.get_all_optimizers().values():
        optimizer.target = None
    with pytest.raises(OptionError, match=r'HybridMemory\(\.\.\., model=model\)'):
        trainer.run()
