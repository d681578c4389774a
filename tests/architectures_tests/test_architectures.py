"""The architectures: sizes from the literature, gradients, names and errors."""

import sys

import numpy as np
import pytest

from chainer_hybridmem import architectures
from chainer_hybridmem.commands.training import Training
from chainer_hybridmem.errors import OptionError, UnknownNameError

# isort: split
import chainer

OWN_MODULE = """
import chainer
import chainer.links as L


class Tiny(chainer.Chain):
    insize = 48

    def __init__(self, n_class=3):
        super().__init__(fc=L.Linear(None, n_class))

    def forward(self, x, t):
        return chainer.functions.softmax_cross_entropy(self.fc(x), t)


class Fixed(Tiny):
    def __init__(self):
        super().__init__(7)


class Sized(Tiny):
    def __init__(self, width, n_class=3):
        super().__init__(n_class)


class Named(Tiny):
    def __init__(self, n_classes):
        super().__init__(n_classes)


def not_a_chain():
    return 42
"""


def batch(insize, n=2):
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 3, insize, insize)).astype(np.float32)
    return x, np.arange(n, dtype=np.int32)


@pytest.fixture
def zeros(monkeypatch):
    """Weights are zero: to draw a hundred million of them takes seconds."""

    def fill(self, array):
        array[...] = 0

    monkeypatch.setattr(chainer.initializers.Normal, '__call__', fill)


def count_parameters(model, insize):
    with chainer.no_backprop_mode():
        model(*batch(insize, n=1))  # sizes what is sized by the first batch
    return sum(parameter.size for parameter in model.params())


@pytest.mark.parametrize(
    'name, expected',
    [
        ('resnet18', 11_689_512),
        ('resnet34', 21_797_672),
        ('resnet50', 25_557_032),
        ('resnet101', 44_549_160),
        ('resnet152', 60_192_808),
    ],
)
def test_resnets_have_the_published_number_of_parameters(name, expected, zeros):
    model = architectures.make(name)

    assert sum(parameter.size for parameter in model.params()) == expected


@pytest.mark.parametrize(
    'name, expected',
    # GoogLeNet: 5.6 M of it are the two auxiliary classifiers.
    [('googlenet', 13_378_280), ('alexnet', 62_378_344), ('vgg16', 138_357_544)],
)
def test_others_have_the_published_number_of_parameters(name, expected, zeros):
    model = architectures.make(name)

    assert count_parameters(model, architectures.insize(name)) == expected


@pytest.mark.parametrize(
    'name, insize',
    [
        ('alexnet', 67),
        ('googlenet', 33),
        ('googlenet', 64),
        ('resnet18', 32),
        ('resnet50', 32),
        ('vgg11', 32),
    ],
)
def test_forward_and_backward(name, insize):
    model = architectures.make(name, n_class=5)
    observation = {}
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)

    with reporter.scope(observation):
        loss = model(*batch(insize))
    model.cleargrads()
    loss.backward()

    assert np.isfinite(loss.array) and loss.shape == ()
    assert set(observation) == {'main/loss', 'main/accuracy'}
    assert all(np.isfinite(p.grad).all() for p in model.params())


@pytest.mark.parametrize('name', ['googlenet', 'resnet18'])
def test_forward_keeps_no_variable_on_the_links(name):
    model = architectures.make(name, n_class=5)
    before = {link: set(vars(link)) for link in model.links()}

    model(*batch(32))

    # Lazily sized layers only fill attributes that they had.
    assert {link: set(vars(link)) for link in model.links()} == before


def test_googlenet_has_auxiliary_losses_in_training_only():
    model = architectures.make('googlenet', n_class=5)
    x, t = batch(64)

    model(x, t).backward()
    with chainer.using_config('train', False):
        evaluated = model(x, t)
    model.cleargrads()
    evaluated.backward()

    assert model.auxiliary1.fc2.W.grad is None
    assert model.fc.W.grad is not None


def test_deeper_resnet_through_blocks():
    model = architectures.make('resnet50', n_class=5, blocks=(1, 2, 4, 1))

    assert len(model.blocks) == 8


@pytest.mark.parametrize('name', ['resnet50', 'vgg16'])
@pytest.mark.parametrize('blocks', [(1, 1), (1, 1, 1, 0), (1, 1, 1, 1, 1, 0)])
def test_wrong_blocks(name, blocks):
    with pytest.raises(ValueError, match='positive numbers'):
        architectures.make(name, blocks=blocks)


def test_a_deep_network_without_normalisation_does_not_diverge():
    """Batch size, picture size and pictures with which 0.01 did."""
    training = Training('vgg16', (2, 3, 64, 64), 1000, 'cpu')
    with np.errstate(over='raise', invalid='raise'):
        for _ in range(5):
            training.step()
    assert all(np.isfinite(p.array).all() for p in training.model.params())


@pytest.mark.parametrize(
    'name, expected', [('vgg16', 0.0005), ('resnet50', 0.01), ('alexnet', 0.01)]
)
def test_learning_rates(name, expected):
    assert architectures.learning_rate(name) == expected


def test_unknown_name_lists_the_known_and_the_closest():
    with pytest.raises(UnknownNameError, match=r"'resnet50'\?.*googlenet.*vgg19"):
        architectures.make('ResNet-50')


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / 'own_networks.py').write_text(OWN_MODULE)
    (tmp_path / 'own_broken.py').write_text('import there_is_no_such_module')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, 'own_networks', raising=False)
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p])
    yield 'own_networks'
    sys.modules.pop('own_networks', None)


def test_own_class_from_the_current_directory(own_module):
    model = architectures.make(f'{own_module}:Tiny', n_class=4)

    assert model.fc.out_size == 4
    assert architectures.insize(f'{own_module}:Tiny') == 48


def test_own_class_without_n_class(own_module):
    assert architectures.make(f'{own_module}:Fixed', n_class=4).fc.out_size == 7


@pytest.mark.parametrize(
    'name, message',
    [
        ('own_networks:', 'incomplete'),
        (':Tiny', 'incomplete'),
        ('own_networks:Tny', "no class 'Tny'"),
        ('there.is.none:Tiny', "no module 'there'"),
        ('own_networks:not_a_chain', 'made a int'),
    ],
)
def test_wrong_own_class(own_module, name, message):
    with pytest.raises(UnknownNameError, match=message):
        architectures.make(name)


@pytest.mark.parametrize(
    'name, message',
    [
        ('Sized', r"made with n_class, .* Sized\(width, n_class=3\): .*'width'; only "),
        ('Sized', r'from --n-class; .* def make\(n_class\): return Sized\(\.\.\.\)'),
        ('Named', r"made with no arguments, .*'n_classes'; call 'n_classes' n_class, "),
    ],
)
def test_an_own_class_that_needs_other_arguments(own_module, name, message):
    with pytest.raises(OptionError, match=message):
        architectures.make(f'{own_module}:{name}')
    if name == 'Sized':
        assert architectures.make(f'{own_module}:{name}', width=3) is not None


def test_an_error_inside_an_own_module_is_shown_as_it_is(own_module):
    with pytest.raises(ModuleNotFoundError, match='there_is_no_such_module'):
        architectures.make('own_broken:Net')
