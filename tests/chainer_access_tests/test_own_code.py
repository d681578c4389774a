"""Whether what a function of Chainer runs is Chainer's own code."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from unittest import mock

import numpy as np
import pytest

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
from chainer.functions.activation.sigmoid import Sigmoid
from chainer.functions.connection import convolution_nd
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.normalization import batch_normalization
from chainer.utils import conv

from chainer_hybridmem.training.chainer_access import own_code


def list_kinds(base):
    for kind in base.__subclasses__():
        yield kind
        yield from list_kinds(kind)


def find_foreign(kind):
    own_code.look_anew()
    return own_code.find_foreign(kind)


def test_every_function_of_chainer_is_its_own():
    for module in pkgutil.walk_packages(F.__path__, 'chainer.functions.'):
        importlib.import_module(module.name)
    model = chainer.Sequential(chainer.links.Linear(3, 3))
    with hybridmem.optimize(model, '1GiB'):  # which replaces forwards by its own
        kinds = {
            kind
            for base in (chainer.FunctionNode, chainer.Function)
            for kind in list_kinds(base)
            if kind.__module__.startswith('chainer.')
        }
        assert len(kinds) > 200
        assert not [found for found in map(find_foreign, kinds) if found]


def wrap(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


class Called:
    """An object that can be called, with the names of what it stands for."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        return self.__wrapped__(*args)


def method(self, inputs):
    return inputs


WAYS = {
    'wraps': wrap,
    'partial': lambda function: functools.partial(wrap(function)),
    'cache': lambda function: functools.lru_cache(wrap(function)),
    'object': Called,
    'mock': lambda function: mock.MagicMock(wraps=function),
    'ufunc': lambda function: np.frompyfunc(function, 1, 1),
    'dispatch': lambda function: functools.singledispatch(wrap(function)),
}
PLACES = {
    'forward': (Sigmoid, 'forward_cpu', Sigmoid),
    'inherited': (Sigmoid, 'forward', Sigmoid),
    'method that forward calls': (
        *(Convolution2DFunction, '_forward_cpu_core', Convolution2DFunction),
    ),
    'function of a module': (conv, 'im2col_cpu', Convolution2DFunction),
    'helper of a helper': (conv, 'get_conv_outsize', Convolution2DFunction),
    'method of a helper class': (
        batch_normalization.GeneralBatchNormalizationImpl,
        'forward',
        batch_normalization.BatchNormalization,
    ),
    'function of NumPy': (np, 'einsum', Convolution2DFunction),
}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('place', PLACES)
def test_code_of_the_program_is_found_wherever_it_is_put(place, way, monkeypatch):
    holder, name, kind = PLACES[place]
    assert not find_foreign(kind)
    with monkeypatch.context() as patched:
        patched.setattr(holder, name, WAYS[way](getattr(holder, name)))
        found = find_foreign(kind)
        assert name in found
        other = F.noise.dropout.Dropout
        assert not find_foreign(other)
    assert not find_foreign(kind)


def test_code_that_is_exchanged_inside_of_a_function_is_found(monkeypatch):
    monkeypatch.setattr(Sigmoid.forward_cpu, '__code__', method.__code__)
    assert 'test_own_code.py' in find_foreign(Sigmoid)


def test_code_compiled_in_a_module_of_chainer_is_found(monkeypatch):
    made = dict(vars(conv))
    exec('def im2col_cpu(*args, **kwargs): raise ValueError', made)
    monkeypatch.setattr(conv, 'im2col_cpu', made['im2col_cpu'])
    assert 'im2col_cpu' in find_foreign(Convolution2DFunction)


def test_what_is_replaced_in_mid_training_is_found_in_the_next_iteration(monkeypatch):
    assert not find_foreign(Sigmoid)
    monkeypatch.setattr(Sigmoid, 'forward', method)
    assert not own_code.find_foreign(Sigmoid)  # looked at once in an iteration
    assert find_foreign(Sigmoid)


def test_what_two_classes_share_is_found_though_one_is_looked_at_later(monkeypatch):
    """It is replaced between two looks in one iteration."""
    other = convolution_nd.ConvolutionND
    own_code.look_anew()
    find_foreign = own_code.find_foreign
    assert not find_foreign(Convolution2DFunction)
    monkeypatch.setattr(conv, 'get_conv_outsize', wrap(conv.get_conv_outsize))
    assert find_foreign(other)
    own_code.look_anew()
    assert find_foreign(Convolution2DFunction) and find_foreign(other)


def test_a_backward_of_the_program_leaves_forward_alone(monkeypatch):
    monkeypatch.setattr(Sigmoid, 'backward', method)
    monkeypatch.setattr(chainer.Variable, 'backward', method)
    assert not find_foreign(Sigmoid)
