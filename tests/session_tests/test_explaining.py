"""What an out-of-memory message says about the moment, and what helps."""

from __future__ import annotations

import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.training.session.session import active_session

SIDE = 500
PARAMETERS = 2 * 4 * (SIDE * SIDE + SIDE)  # bytes
X = np.ones((20, SIDE), np.float32)


class Net(chainer.Chain):
    def __init__(self, forward=None):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(SIDE, SIDE)
            self.b = L.Linear(SIDE, SIDE)
        self.between = lambda: None

    def forward(self, x):
        h = F.tanh(self.a(x))
        self.between()
        return F.sum(self.b(h))


def big():
    """More than there is."""
    return np.zeros(10 * PARAMETERS, np.int8)


def error_of(train, limit=10 * PARAMETERS, make=chainer.optimizers.SGD):
    """What a program is told that runs out of memory."""
    model = Net()
    optimizer = make().setup(model)
    with pytest.raises(OutOfMemoryError) as caught:
        with hybridmem.optimize(model, limit, splitting=False):
            train(model, optimizer)
    return str(caught.value)


def step(model, optimizer):
    model.cleargrads()
    loss = model(X)
    loss.backward()
    del loss
    optimizer.update()


def test_what_an_update_allocates_is_said_to_be_its_own():
    def train(model, optimizer):
        model.a.W.update_rule.add_hook(lambda rule, param: big(), 'greedy')
        step(model, optimizer)

    message = error_of(train)
    assert 'asked for in the update of a parameter' in message
    assert 'backward of' not in message


def test_the_first_batch_comes_before_the_first_operation():
    message = error_of(lambda model, optimizer: big())
    assert 'asked for before the first operation of iteration 1 do not fit' in message


def test_the_next_batch_comes_before_its_first_operation():
    def train(model, optimizer):
        step(model, optimizer)
        step(model, optimizer)
        big()

    message = error_of(train)
    assert 'after the backward pass of iteration 2, before the first' in message
    assert 'before the first operation of iteration 3' in message
    assert 'backward of' not in message


def test_so_does_a_batch_after_an_iteration_that_has_been_ended():
    def train(model, optimizer):
        step(model, optimizer)
        active_session().finish_iteration()
        big()

    assert 'asked for before the first operation of iteration 2' in error_of(train)


def test_an_evaluation_is_no_operation():
    def train(model, optimizer):
        step(model, optimizer)
        model.between = big
        with chainer.no_backprop_mode():
            model(X)

    assert 'after the backward pass of iteration 1' in error_of(train)


@pytest.mark.parametrize('as_link', [False, True])
def test_a_loss_function_that_update_calls_is_not_the_update(as_link):
    def train(model, optimizer):
        optimizer.update(model, X)
        model.between = big
        optimizer.update(model if as_link else lambda x: model(x), X)

    assert 'asked for in or right after operation 1 (/Tanh) do not' in error_of(train)


def test_a_backward_function_is_an_operation():
    class Twice(chainer.FunctionNode):
        def forward(self, inputs):
            return (np.asarray(inputs[0] + 0),)

        def backward(self, indexes, grads):
            big()
            return grads

    def train(model, optimizer):
        Twice().apply((model(X),))[0].backward()

    assert 'asked for in operation 5 (backward of Twice)' in error_of(train)


WIDE = np.ones((3000, SIDE), np.float32)  # one map is three times the parameters


def adam_steps(limit, iterations, **options):
    model = Net()
    optimizer = chainer.optimizers.Adam().setup(model)
    with hybridmem.optimize(model, limit, splitting=False, **options) as session:
        for _ in range(iterations):
            optimizer.update(model, WIDE)
    return session


def test_what_crosses_iterations_is_suggested_where_that_helps():
    with pytest.raises(OutOfMemoryError, match="leave with cross_iteration='all'"):
        adam_steps(29_000_000, 3)
    assert adam_steps(29_000_000, 6, cross_iteration='all').state == 'guided'


@pytest.mark.parametrize(
    ('limit', 'options'),
    [
        (26_000_000, {}),  # the first iteration: there are no states yet
        (28_000_000, {'host_limit': '1MB'}),  # no room for them
        (26_000_000, {'cross_iteration': 'all'}),
    ],
)
def test_it_is_not_suggested_where_it_does_not_help(limit, options):
    with pytest.raises(OutOfMemoryError) as caught:
        adam_steps(limit, 6, **options)
    assert "cross_iteration='all'" not in str(caught.value)


def test_it_is_not_suggested_where_the_update_needs_more_than_there_is():
    """All states have been made before there was a limit."""
    model = Net()
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.update(model, X)
    model.cleargrads()
    with pytest.raises(OutOfMemoryError) as caught:
        with hybridmem.optimize(model, int(3.5 * PARAMETERS), splitting=False):
            for _ in range(3):
                optimizer.update(model, X)
    assert 'asked for in operation' in str(caught.value)
    assert "cross_iteration='all'" not in str(caught.value)


def test_it_is_not_suggested_for_what_an_update_needs():
    def train(model, optimizer):
        step(model, optimizer)
        model.a.W.update_rule.add_hook(
            lambda rule, param: np.zeros(3 * PARAMETERS, np.int8), 'more'
        )
        step(model, optimizer)

    message = error_of(train, 6 * PARAMETERS, chainer.optimizers.Adam)
    assert 'asked for in the update of a parameter' in message
    assert 'cross_iteration' not in message


@pytest.mark.parametrize('planner', [None, 'hybrid'])
def test_feature_maps_that_are_too_small_to_leave_are_counted(planner):
    """They are no temporary arrays: a program can be told what its memory is."""
    layers, small = 300, np.ones((9, 100), np.float32)
    model = chainer.links.Linear(100, 100)
    chainer.optimizers.SGD().setup(model)
    with pytest.raises(OutOfMemoryError) as caught:
        with hybridmem.optimize(model, 600_000, planner):
            for _ in range(3):
                h = model(small)
                for _ in range(layers):
                    h = F.tanh(h)
                model.cleargrads()
                F.sum(h).backward()
    found = re.search(r'of (\d+) feature maps below 4.0 KiB, which', str(caught.value))
    count = int(found.group(1))
    held = caught.value.used_bytes - 2 * 4 * (100 * 100 + 100)
    assert count == pytest.approx(held // small.nbytes, abs=15)
    assert 'temporary arrays' not in str(caught.value)
