"""What is found out about programs that do not know of it; here they are functions."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planning.layouts import blob_bytes
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.running.follower import Follower
from chainer_hybridmem.running.watchers import (
    PassRecorder,
    ProgramRecorder,
    ProgramVerifier,
    Stopped,
)
from chainer_hybridmem.training.session.session import active_session

MANY = 100  # iterations; no program comes as far


class Layers(chainer.ChainList):
    def __init__(self, count: int = 4) -> None:
        super().__init__(*[L.Linear(64, 64) for _ in range(count)])

    def forward(self, x: np.ndarray) -> chainer.Variable:
        for layer in self:
            x = F.tanh(layer(x))
        return F.average(x)


def update(model, optimizer, size=100):
    x = np.random.rand(size, 64).astype(np.float32)
    loss = model(x)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    return loss


def one(iterations=MANY):
    np.random.seed(0)
    model = Layers()
    optimizer = chainer.optimizers.Adam().setup(model)
    for _ in range(iterations):
        loss = update(model, optimizer)  # the last graph lives while the next is made
    return loss


def critic(iterations=MANY):
    """As with Wasserstein GANs: one of two is trained more often."""
    np.random.seed(0)
    models = Layers(), Layers(6)
    optimizers = [chainer.optimizers.Adam().setup(model) for model in models]
    for number in range(iterations):
        which = number % 4 == 3
        update(models[which], optimizers[which], 400)


def differs():
    model = Layers()
    optimizer = chainer.optimizers.Adam().setup(model)
    for number in range(MANY):
        update(model, optimizer, 100 + number)


def infers():
    with chainer.no_backprop_mode():
        Layers()(np.zeros((10, 64), np.float32))


def only_set_up():
    chainer.optimizers.Adam().setup(Layers())


def few():
    one(2)


def own_session():
    model = Layers()
    with hybridmem.optimize(model, '1GB'):
        update(model, chainer.optimizers.Adam().setup(model))


def ask(program, make, *arguments):
    answers = []
    before = chainer.Optimizer.setup, list(chainer.get_function_hooks())
    with contextlib.suppress(Stopped), make(answers.append, *arguments):
        program()
    assert active_session() is None
    assert (chainer.Optimizer.setup, list(chainer.get_function_hooks())) == before
    (answer,) = answers
    return answer


def record(program, **options):
    return ask(program, ProgramRecorder, options, 16, False, False)


def measure(program):
    """Peak of plain Chainer."""
    with Follower(2**40, {}) as follower:
        program()
    return follower._figures[-1]['peak_bytes']


def test_the_peak_is_that_of_a_plain_run():
    recorded = record(one)
    assert recorded.complete
    (kind,) = recorded.kinds
    assert kind.repeats == 1 and kind.older_bytes > 0
    problem = make_problem(kind.profile)
    expected = measure(lambda: one(4))
    assert problem.in_core_peak_bytes + kind.older_bytes == expected


def test_every_kind_of_iteration_in_a_step():
    recorded = record(critic)
    assert recorded.complete
    kinds = {len(kind.profile.operations): kind.repeats for kind in recorded.kinds}
    assert kinds == {9 + 9 + 1: 3, 13 + 13 + 1: 1}


def test_a_limit_holds_while_it_is_recorded():
    peak = measure(lambda: one(4))
    recorded = record(one, memory_limit=peak * 4 // 5)
    assert recorded.kinds[0].older_bytes == 0  # it is not known
    with pytest.raises(hybridmem.OutOfMemoryError):
        record(one, memory_limit=peak // 4, splitting=False)


@pytest.mark.parametrize(
    ('program', 'reason'),
    [
        (differs, 'too few of 16 iterations have computed the same'),
        (few, 'the program ends after 2 iterations; let it train for longer'),
        (infers, 'no optimizer of Chainer has got a model'),
        (only_set_up, 'no function has run for a backward since'),
        (own_session, 'it has a session of its own'),
    ],
)
def test_it_says_why_nothing_is_recorded(program, reason):
    error = record(program)
    assert isinstance(error, hybridmem.SessionError)
    assert reason in str(error)


def test_programs_that_go_on_are_ended_again():
    ended = []

    def program():
        for _ in range(3):
            try:
                one()
            except Exception:
                raise AssertionError('programs catch it') from None
            except BaseException:
                ended.append(1)

    assert record(program).complete
    assert len(ended) == 3


class BreaksOnce(chainer.FunctionNode):
    def __init__(self, broken: list[int]) -> None:
        self.broken = broken

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        if not self.broken:
            self.broken.append(1)
            raise ValueError('once')
        return gradients


def breaks_in_backward(steps):
    """One iteration is given up; the loop goes on."""
    np.random.seed(0)
    model, broken = Layers(), []
    optimizer = chainer.optimizers.Adam().setup(model)
    for _ in range(MANY):
        (loss,) = BreaksOnce(broken).apply((model(np.ones((9, 64), np.float32)),))
        model.cleargrads()
        with contextlib.suppress(ValueError):
            loss.backward()
            optimizer.update()
        steps.append(1)


def breaks_in_a_link(steps):
    model = Layers()
    with chainer.no_backprop_mode():
        with contextlib.suppress(chainer.utils.type_check.InvalidType):
            model(np.ones((9, 63), np.float32))
        for _ in range(MANY):
            model(np.ones((9, 64), np.float32))
            steps.append(1)


@pytest.mark.parametrize(
    ('program', 'watcher', 'arguments', 'found', 'most'),
    [
        (breaks_in_a_link, PassRecorder, [16], lambda it: blob_bytes(it.profile), 1),
        (breaks_in_backward, ProgramRecorder, [{}, 99], lambda it: it.complete, 50),
        (
            breaks_in_backward,
            ProgramVerifier,
            [None, 3],
            lambda it: len(it.snapshots) == 3,
            4,
        ),
    ],
)
def test_what_a_program_catches_ends_no_watching(
    program, watcher, arguments, found, most
):
    steps = []
    assert found(ask(lambda: program(steps), watcher, *arguments))
    assert len(steps) <= most


@pytest.mark.parametrize('program', [one, critic])
def test_runs_with_and_without_a_limit_are_compared(program):
    limit = measure(lambda: program(8)) * 4 // 5
    options = {'memory_limit': limit, 'planner': 'swap-all', 'verify': 20}
    limited, plain, again = (
        ask(program, ProgramVerifier, *arguments)
        for arguments in ((options, 20), (None, 20), (None, 20))
    )
    assert len(limited.snapshots) == 20
    assert any(limited.guided) and not any(plain.guided)
    assert limited.swapped_maps and limited.verdict.maps
    assert 0 < limited.peak_bytes <= limit
    assert limited.snapshots == plain.snapshots == again.snapshots
    assert plain.snapshots[0] != plain.snapshots[1]


def test_another_seed_is_another_run():
    def seeded(seed):
        np.random.seed(seed)
        model = Layers()
        optimizer = chainer.optimizers.Adam().setup(model)
        for _ in range(3):
            update(model, optimizer)

    runs = [ask(lambda s=s: seeded(s), ProgramVerifier, None, 9) for s in (1, 2)]
    assert [len(run.snapshots) for run in runs] == [3, 3]
    assert runs[0].snapshots[0]['loss'] != runs[1].snapshots[0]['loss']


# -- estimate() --------------------------------------------------------------------
class Pair:
    """Two networks that are trained in one step, beside each other's graphs."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.models = [Layers(), Layers(6)]
        self.optimizers = [chainer.optimizers.Adam().setup(m) for m in self.models]

    def step(self, size):
        graphs = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            graphs.append(update(model, optimizer, size))


@pytest.mark.parametrize('size', [60, 200])
def test_an_estimate_is_what_a_run_needs(size):
    def run():
        pair = Pair()
        for _ in range(3):
            pair.step(size)

    pair = Pair()
    before = pair.models[0][0].W.array.copy()
    found = hybridmem.estimate(pair.step, size, pair.models, batchsizes=(40, 80))
    assert found.iterations == 2
    assert found.in_core_peak_bytes == measure(run)
    assert found.least_memory_bytes < found.in_core_peak_bytes
    assert found.in_core_seconds > 0
    assert found.plan('95%', 'swap-all').predicted_seconds > 0
    assert np.array_equal(pair.models[0][0].W.array, before)
    assert 'problem' not in repr(found)


def test_an_estimate_of_another_device():
    pair = Pair()
    found = hybridmem.estimate(pair.step, 10**6, pair.models, 'v100-16gb-pcie3')
    assert found.profile.device['model'] == 'v100-16gb-pcie3'
    assert found.in_core_peak_bytes > 10**9


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'batchsize': 0}, 'out of range'),
        ({'batchsizes': (4, 4)}, 'ascending'),
        ({'model': None}, 'model is None'),
        ({'step': 3}, 'a function of the number'),
        ({'gpu': 'v1000'}, 'v1000'),
    ],
)
def test_wrong_questions_are_refused(change, message):
    right = {'step': print, 'batchsize': 8, 'model': Layers()}
    with pytest.raises(hybridmem.HybridMemoryError, match=message):
        hybridmem.estimate(**{**right, **change})
