"""The sum of gradients over processes is an operation of its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import networks, toys
from support.mpi import needs_mpi

import chainer_hybridmem as hybridmem

# isort: split
import chainer

from chainer_hybridmem import timing
from chainer_hybridmem.forecasting.estimation import with_all_reduce
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Phase
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.recording.stopwatch import Times
from chainer_hybridmem.training.session.guides.profiling_plan import with_median_times

pytestmark = needs_mpi
LIMIT = '3MiB'
SLOW_SECONDS = 0.02


@pytest.fixture
def communicator():
    import chainermn

    return chainermn.create_communicator('naive')  # one process


def slow_down(communicator, monkeypatch):
    """As if another process came late."""
    sum_up = communicator.multi_node_mean_grad

    def late(*args, **kwargs):
        timing.sleep(SLOW_SECONDS)
        return sum_up(*args, **kwargs)

    monkeypatch.setattr(communicator, 'multi_node_mean_grad', late)


class Training:
    """A model, its data and what updates it."""

    def __init__(self, communicator, **options):
        import chainermn

        np.random.seed(0)
        self.model = networks.Convolutions()
        self.optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.Adam(), communicator
        ).setup(self.model)
        self.data = np.random.RandomState(0)
        self.session = hybridmem.optimize(
            self.model,
            LIMIT,
            communicator=communicator,
            link_bandwidth='400MB/s',
            **options,
        )

    def batch(self):
        x = self.data.rand(16, 3, 24, 24).astype(np.float32)
        return x, self.data.randint(0, 10, 16).astype(np.int32)

    def run(self, iterations):
        for _ in range(iterations):
            self.optimizer.update(self.model, *self.batch())

    def parameters(self):
        return [p.array.copy() for _, p in sorted(self.model.namedparams())]


def phases_after_backward(profile):
    return [op.phase for op in profile.operations[profile.first_update :]]


@pytest.mark.parametrize('crossing', [False, 'all'])
def test_it_comes_between_backward_and_the_update(crossing, communicator, monkeypatch):
    slow_down(communicator, monkeypatch)
    training = Training(communicator, cross_iteration=crossing)
    with training.session as session:
        training.run(10)
        session.trace_iteration()
        training.run(2)
    profile = session.profile
    assert phases_after_backward(profile) == [Phase.ALL_REDUCE, Phase.UPDATE]
    assert profile.operations[-2].device_seconds >= SLOW_SECONDS
    assert profile.operations[-1].device_seconds < SLOW_SECONDS
    assert session.plan.predicted_seconds >= SLOW_SECONDS
    kinds = [i.kind for i in session.timeline.intervals]
    assert kinds.count('all-reduce') == kinds.count('update') == 1
    assert parse_profile(serialise_profile(profile)) == profile
    assert session.state == 'guided'


def test_parameters_are_as_without_a_session(communicator):
    one = Training(communicator, cross_iteration='all')
    with one.session:
        one.run(8)
    other = Training(communicator)
    other.run(8)
    for ours, plain in zip(one.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_the_communicator_is_as_it_was(communicator):
    before = dict(vars(communicator))
    training = Training(communicator)
    with training.session:
        assert vars(communicator) != before
    assert vars(communicator) == before


def test_without_one_in_some_iterations(communicator):
    """The program trains without others now and then."""
    training = Training(communicator)
    actual = training.optimizer.actual_optimizer
    with training.session as session:
        for i in range(14):
            optimizer = training.optimizer if i % 3 else actual
            optimizer.update(training.model, *training.batch())
    assert session.state == 'guided'
    assert session.statistics()['peak_bytes'] <= session.limit_bytes


def test_a_backward_after_it(communicator):
    """Then it was not the end of backward; nothing is counted twice."""
    training = Training(communicator)
    model, optimizer = training.model, training.optimizer
    with training.session as session:
        for _ in range(12):
            x, t = training.batch()
            first, second = model(x, t), model(x, t)
            model.cleargrads()
            first.backward()
            communicator.multi_node_mean_grad(model)
            second.backward()
            communicator.multi_node_mean_grad(model)
            optimizer.actual_optimizer.update()
    profile = session.profile
    assert phases_after_backward(profile) == [Phase.ALL_REDUCE, Phase.UPDATE]
    assert len(profile.operations) == len({op.index for op in profile.operations})
    assert sum(op.phase is Phase.ALL_REDUCE for op in profile.operations) == 1


def test_in_another_thread_it_is_no_operation(communicator):
    training = Training(communicator)
    model, actual = training.model, training.optimizer.actual_optimizer
    with training.session as session:
        for _ in range(10):
            loss = model(*training.batch())
            model.cleargrads()
            loss.backward()
            thread = threading.Thread(
                target=communicator.multi_node_mean_grad, args=(model,)
            )
            thread.start()
            thread.join()
            actual.update()
    assert phases_after_backward(session.profile) == [Phase.UPDATE]


def swap_nothing(profile):
    return make_plan(make_problem(profile), '1GB', 'in-core')


def test_it_takes_what_the_slowest_process_costs():
    """Each iteration another operation is late, of this process or another one."""
    profile = with_all_reduce(toys.with_persistent(toys.chain(3), 1), 2)
    usual = [Times(op.device_seconds, 0.0) for op in profile.operations]
    timings = []
    for late in (0, 2, 4):
        timings.append(list(usual))
        timings[-1][late] = Times(usual[late].device_seconds + 3.0, 0.0)
    nothing = swap_nothing(profile)
    timed = with_median_times(profile, timings, nothing)
    k = profile.first_update
    assert timed.compute_seconds == pytest.approx(profile.compute_seconds + 3.0)
    assert timed.operations[k].phase is Phase.ALL_REDUCE
    others = [op for op in timed.operations if op.index != k]
    assert others == [op for op in profile.operations if op.index != k]
    replayed = [recipe.operation for recipe in profile.recipes]
    usual = [
        t._replace(replay_seconds=float(k in replayed)) for k, t in enumerate(usual)
    ]
    timings = []
    for late in replayed[:3]:  # now it is another replay
        timings.append(list(usual))
        timings[-1][late] = usual[late]._replace(replay_seconds=4.0)
    timed = with_median_times(profile, timings, nothing)
    assert [recipe.seconds for recipe in timed.recipes] == [1.0] * len(replayed)
    assert timed.compute_seconds == pytest.approx(profile.compute_seconds + 3.0)
    alone = toys.chain(3)
    rows = [[Times(op.device_seconds, 0.0) for op in alone.operations]] * 3
    assert with_median_times(alone, rows, swap_nothing(alone)) == alone
