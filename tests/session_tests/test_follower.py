"""Sessions around programs that do not know of them."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import numpy as np
import pytest

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

import chainer_hybridmem as hybridmem
from chainer_hybridmem.session.follower import Follower
from chainer_hybridmem.session.limit_finder import find_least_limit
from chainer_hybridmem.session.recording_session import (
    RecordingSession,
    recording_options,
)
from chainer_hybridmem.session.session import active_session

LIMIT = 3_000_000  # of 4.3 MB
ITERATIONS = 6


class Layers(chainer.ChainList):
    def __init__(self) -> None:
        super().__init__(*[L.Linear(64, 64) for _ in range(8)])

    def forward(self, x: np.ndarray) -> chainer.Variable:
        for layer in self:
            x = F.tanh(layer(x))
        return F.average(x)


def train(model: chainer.Chain, optimizer: chainer.Optimizer) -> list[bytes]:
    x = np.random.RandomState(0).rand(1000, 64).astype(np.float32)
    losses = []
    for _ in range(ITERATIONS):
        loss = model(x)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(loss.array.tobytes())
    return losses


def one_model() -> list[bytes]:
    np.random.seed(0)
    model = Layers()
    return train(model, chainer.optimizers.SGD(0.1).setup(model))


def two_models() -> list[bytes]:
    """The second one gets its optimizer when the first one has trained."""
    np.random.seed(0)
    first, second = Layers(), Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(first)
    losses = train(first, optimizer)
    other = chainer.optimizers.SGD(0.1).setup(second)
    return losses + train(second, other) + train(first, optimizer)


def set_up_again() -> list[bytes]:
    """As with another learning rate, and the same model."""
    np.random.seed(0)
    model = Layers()
    losses = train(model, chainer.optimizers.SGD(0.1).setup(model))
    return losses + train(model, chainer.optimizers.SGD(0.01).setup(model))


def part_of_another() -> list[bytes]:
    """A model and one of its links have an optimizer each."""
    np.random.seed(0)
    model = Layers()
    inner = chainer.optimizers.SGD(0.1).setup(model[0])
    losses = train(model, chainer.optimizers.SGD(0.1).setup(model))
    inner.update()
    return losses


def in_a_thread() -> list[bytes]:
    """Another one than that in which the session is ended."""
    losses: list[bytes] = []
    thread = threading.Thread(target=lambda: losses.extend(one_model()))
    thread.start()
    thread.join()
    return losses


def in_one_thread_after_another() -> list[bytes]:
    """The second one goes on with the model of the first."""
    np.random.seed(0)
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    losses: list[bytes] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: losses.extend(train(model, optimizer)))
        thread.start()
        thread.join()
    return losses


PROGRAMS = {
    one_model: '6 iterations, ',
    two_models: '18 iterations in 2 sessions, ',
    set_up_again: '12 iterations, ',
    part_of_another: '6 iterations, ',
    in_a_thread: '6 iterations, ',
    in_one_thread_after_another: '11 iterations in 2 sessions, ',
}


@pytest.mark.parametrize('program', PROGRAMS, ids=lambda program: program.__name__)
def test_what_trains_keeps_the_limit_and_its_bits(program):
    expected = program()
    follower = Follower(LIMIT, {})
    assert program() == expected
    follower.__exit__()
    peak, limit, _ = follower.describe()
    assert peak.startswith('peak ')
    assert PROGRAMS[program] in limit
    assert active_session() is None


@pytest.mark.parametrize('limit', ['60%', 'auto', LIMIT])
def test_the_first_iterations_show_what_a_limit_is(limit, tmp_path):
    expected = two_models()
    profile = str(tmp_path / 'p.json')
    follower = Follower(limit, {}, profile=profile if limit != '60%' else None)
    assert two_models() == expected
    follower.__exit__()
    peak, told, _ = follower.describe()
    shares = re.search(r'peak ([\d.]+) MiB of ([\d.]+) MiB in-core', peak)
    assert float(shares[1]) < float(shares[2])
    assert (f'({limit})' in told) == isinstance(limit, str)
    if limit != '60%':
        assert hybridmem.load_profile(profile).operations


def test_what_the_first_iterations_cannot_show():
    follower = Follower('60%', {})
    model = Layers()
    model(np.zeros((10, 64), np.float32))
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    model(np.zeros((10, 64), np.float32)).backward()
    optimizer.update()
    follower.__exit__()
    (told,) = follower.describe()
    assert told.endswith('it has ended before iterations have shown what 60% is')


def test_auto_is_the_least_limit_that_costs_little():
    session = RecordingSession(Layers(), recording_options(2**40))
    with session:
        optimizer = chainer.optimizers.SGD(0.1).setup(session.model)
        train(session.model, optimizer)
    problem = session.problem
    found = {cost: find_least_limit(problem, {}, cost) for cost in (0.0, 0.1, 9.0)}
    assert found[9.0] <= found[0.1] <= found[0.0] <= problem.in_core_peak_bytes
    assert found[9.0] < problem.in_core_peak_bytes
    plan = hybridmem.make_plan(problem, found[0.1])
    assert plan.predicted_seconds <= 1.1 * plan.in_core_seconds


def test_a_second_thread_is_refused_while_the_first_one_trains():
    follower = Follower(LIMIT, {})
    one_model()
    errors: list[BaseException] = []

    def another() -> None:
        model = Layers()
        try:
            model(np.zeros((10, 64), np.float32)).backward()
        except hybridmem.SessionError as error:
            errors.append(error)

    thread = threading.Thread(target=another, name='another')
    thread.start()
    thread.join()
    one_model()  # the first one may go on
    follower.__exit__()
    (error,) = errors
    assert "Thread 'another' trains while the memory limit is that of" in str(error)


def test_options_are_those_of_optimize():
    follower = Follower(LIMIT, {'planner': 'swap-all'})
    one_model()
    assert active_session().planner == 'swap-all'
    follower.__exit__()
    follower = Follower(LIMIT, {'planner': 'missing'})
    with pytest.raises(hybridmem.UnknownNameError):
        one_model()
    follower.__exit__()


def test_a_program_with_a_session_keeps_its_own():
    follower = Follower(LIMIT, {})
    model = Layers()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    train(model, optimizer)  # under ours
    assert active_session() is not None
    with hybridmem.optimize(model, '1GB') as own:
        assert active_session() is own
        optimizer.setup(model)
        train(model, optimizer)
    assert own.statistics()['iterations'] == ITERATIONS
    follower.__exit__()
    assert '6 iterations, ' in follower.describe()[1]


def only_own() -> None:
    model = Layers()
    with hybridmem.optimize(model, '1GB'):
        train(model, chainer.optimizers.SGD(0.1).setup(model))


def only_infers() -> None:
    with chainer.no_backprop_mode():
        Layers()(np.zeros((10, 64), np.float32))


def an_sgd_of_its_own() -> None:
    model = Layers()
    model(np.zeros((10, 64), np.float32)).backward()
    for parameter in model.params():
        parameter.array -= 0.1 * parameter.grad


def only_set_up() -> None:
    model = Layers()
    chainer.optimizers.SGD(0.1).setup(model)
    with chainer.no_backprop_mode():
        model(np.zeros((10, 64), np.float32))


@pytest.mark.parametrize(
    ('program', 'reason'),
    [
        (only_own, 'the program has a session of its own'),
        (only_infers, 'it only infers: no optimizer has got a model'),
        (an_sgd_of_its_own, 'it trains without an optimizer of Chainer'),
        (only_set_up, 'no function has run for a backward since'),
    ],
)
def test_it_says_why_there_was_no_limit(program, reason):
    follower = Follower(LIMIT, {})
    program()
    follower.__exit__()
    (told,) = follower.describe()
    assert told.startswith(f'the limit was not applied: {reason}')


def test_too_little_memory_ends_in_an_error_with_a_limit_that_will_do():
    follower = Follower(1_000_000, {'splitting': False})
    with pytest.raises(hybridmem.OutOfMemoryError) as caught:
        try:
            one_model()
        except MemoryError as error:
            follower.__exit__(type(error), error, error.__traceback__)
            raise
    assert re.search(
        'smallest limit known to do for all is [0-9]+ bytes', str(caught.value)
    )
    assert active_session() is None


def test_nothing_of_it_is_left_in_chainer():
    setup, apply = chainer.Optimizer.setup, chainer.FunctionNode.apply
    follower = Follower(LIMIT, {})
    chainer.optimizers.SGD(0.1).setup(Layers())
    assert chainer.FunctionNode.apply is not apply
    follower.__exit__()
    assert (chainer.Optimizer.setup, chainer.FunctionNode.apply) == (setup, apply)


def test_models_of_sessions_that_have_ended_are_let_go():
    with Follower(LIMIT, {}) as follower:
        model = Layers()
        alive = weakref.ref(model)
        train(model, chainer.optimizers.SGD(0.1).setup(model))
        del model
        one_model()
        gc.collect()
        assert alive() is None
    assert '12 iterations in 2 sessions, ' in follower.describe()[1]
