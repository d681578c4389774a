"""Memory that runs short without a plan, or beside one."""

import gc
import io
import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from support import networks

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.training.execution.evictor import Evictor
from chainer_hybridmem.training.execution.live_map import State
from chainer_hybridmem.training.session.planning import planning

LIMIT = 4_600_000  # bytes; Everything needs 5.2 MB in-core
TIGHT = {'splitting': False, 'link_bandwidth': '100MB/s'}  # a plan uses what there is


def train(iterations, between=lambda i: None, **options):
    """Trains; calls ``between`` after every iteration."""
    return networks.train(
        networks.Everything,
        networks.batches(iterations),
        after=lambda session, i: between(i),
        **options,
    )


def test_memory_taken_after_planning_leads_to_another_plan():
    iterations, held, progress = 16, [], io.StringIO()

    def take(i):
        if i == 6:
            held.append(np.zeros(200_000, np.float32))

    expected, _ = train(iterations)
    result, session = train(
        iterations, take, memory_limit=LIMIT, progress=progress, **TIGHT
    )
    networks.assert_same(expected, result)
    assert 'more are held than in the profile: planned again' in progress.getvalue()
    last = networks.entries_of(session)[-3:]
    assert all(entry['guided'] and not entry['evictions'] for entry in last)
    assert last[0]['foreign_bytes'] >= held[0].nbytes
    assert session.statistics()['footprint_bytes'] <= LIMIT
    assert 'held beside what the plan knows' in session.report()


def test_without_it_iterations_evict_for_ever(monkeypatch):
    """The test above would notice."""
    monkeypatch.setattr(planning.Planning, 'make_room', lambda *args: None)
    held = []
    _, session = train(
        12,
        lambda i: held.append(np.zeros(200_000, np.float32)) if i == 6 else None,
        memory_limit=LIMIT,
        **TIGHT,
    )
    assert session.last_iteration()['evictions']
    assert 'evicted / iteration' in session.report()


def test_more_than_any_plan_can_leave_is_told_and_training_goes_on():
    held, progress = [], io.StringIO()

    def take(i):
        if i == 6:
            held.append(np.zeros(200_000, np.float32))

    expected, _ = train(20)
    result, session = train(
        20, take, memory_limit=5_300_000, planner='in-core', progress=progress
    )
    networks.assert_same(expected, result)
    assert 'no plan fits beside them' in progress.getvalue()
    assert session.last_iteration()['evictions']


class Wide(chainer.Chain):
    """A map that the program holds, and one function that needs a lot."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(1000, 1000)
            self.b = L.Linear(1000, 1000)

    def forward(self, x):
        self.held = F.sigmoid(self.a(x))
        return F.sum(F.tanh(self.b(F.sigmoid(self.held))))


def test_the_error_tells_what_was_in_memory():
    model, x = Wide(), np.zeros((300, 1000), np.float32)
    parameters = sum(p.array.nbytes for p in model.params())
    with pytest.raises(OutOfMemoryError) as caught:
        with hybridmem.optimize(model, 2 * parameters + 3 * x.nbytes + 100_000):
            loss = model(x)
            loss.backward()
    message = str(caught.value)
    for words in (
        'asked for in operation 8 (backward of LinearFunction)',
        'of parameters, gradients and optimizer states',
        'that the program holds in variables',
        'a limit known to do is',
    ):
        assert words in message
    assert caught.value.requested_bytes and caught.value.used_bytes


def test_an_old_shortage_does_not_explain_a_new_error():
    """What has been dealt with is no reason for the program's own MemoryError."""
    with pytest.raises(MemoryError, match='mine') as caught:

        def fail(i):
            if i == 5:
                raise MemoryError('mine')

        train(8, fail, memory_limit=LIMIT, planner='swap-all')
    assert not isinstance(caught.value, OutOfMemoryError)


def test_the_map_that_is_needed_last_goes_first(monkeypatch):
    """Without a profile: the first iteration's evictions."""
    evict = Evictor.evict
    evicted = []

    def noted(self, live):
        others = [
            other
            for other in self._maps
            if other.state is State.RESIDENT and other.slots.are_alive()
            if other not in self.busy and other not in self._stuck
            if not other.slots.are_held()
        ]
        if live in others and not live.may_be_written:
            evicted.append(live)
            needed = [max(other.uses, default=-1) for other in others]
            assert max(live.uses, default=-1) == min(needed)
        evict(self, live)

    monkeypatch.setattr(Evictor, 'evict', noted)
    train(1, memory_limit=4_300_000)
    assert len(evicted) > 3


def test_what_the_host_has_no_room_for_is_not_called_held():
    with pytest.raises(OutOfMemoryError, match='could not be copied out') as caught:
        networks.train(
            networks.Everything,
            networks.batches(2),
            memory_limit=3_000_000,
            host_limit='20KB',
        )
    assert 'the program holds in variables' not in str(caught.value)


class Perceptron(chainer.Chain):
    """Three layers, as in Chainer's MNIST example."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(784, 100)
            self.l2 = L.Linear(100, 100)
            self.l3 = L.Linear(100, 10)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def train_like_the_example(**options):
    """A Trainer; the classifier holds the loss, and the updater the last batch."""
    np.random.seed(0)
    rng = np.random.RandomState(1)
    model = L.Classifier(Perceptron())
    optimizer = chainer.optimizers.Adam().setup(model)
    pictures = rng.rand(1600, 784).astype(np.float32)
    labels = rng.randint(0, 10, 1600).astype(np.int32)
    dataset = chainer.datasets.TupleDataset(pictures, labels)
    iterator = chainer.iterators.SerialIterator(dataset, 400)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    with networks.session_for(model, options):
        for _ in range(7):
            updater.update()
    return networks.outcome(model, [])


def test_a_batch_that_was_held_in_the_update_leaves_for_the_next_one():
    expected = train_like_the_example()
    result = train_like_the_example(memory_limit=3_750_000)
    networks.assert_same(expected, result)


@pytest.fixture
def without_collections():
    """Garbage stays until something asks for its collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize('planner', ['checkpoint-sqrt', 'checkpoint-dp'])
def test_a_plan_that_is_switched_to_drops_nothing_that_the_former_one_needs(planner):
    """What the one has dropped may be made of what the other one would drop."""

    def train_lengths(**options):
        rng = random.Random(2)
        np.random.seed(2)
        data = [(np.random.rand(1000, 64).astype('f'), 12) for _ in range(40)]
        data = [(x, rng.choice((11, 12, 13))) for x, _ in data]
        return networks.train(networks.Sigmoids, data, **options)

    expected, _ = train_lengths()
    result, session = train_lengths(memory_limit=2_700_000, planner=planner)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 10


def test_garbage_goes_before_an_allocation_is_refused(without_collections):
    def leave_garbage(i):
        cycle = [np.zeros(100_000, np.float32)]
        cycle.append(cycle)

    result, session = train(20, leave_garbage, memory_limit=LIMIT, **TIGHT)
    expected, _ = train(20)
    networks.assert_same(expected, result)
    assert session.state == 'guided'
