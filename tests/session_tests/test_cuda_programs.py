"""Programs as people write them, on a GPU: updaters, several optimizers, a trainer.

Nothing in these loops waits for the GPU but what their authors wrote.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from support import networks
from support.gpu_programs import (
    BATCH_SIZE,
    ITERATIONS,
    PROGRAMS,
    AtomicFunctions,
    Reported,
    assert_same,
    begin,
    end,
    taken_bytes,
    train,
    update,
)
from support.matrices import several

from chainer_hybridmem.training.recompute import drawing

pytestmark = pytest.mark.gpu
LONGER = 16  # where several graphs are learnt


SEEDS = several(1, all_of_them=4)  # of the emulator's order of work


@pytest.fixture(scope='module')
def plain():
    """By name: what plain Chainer gives, and what it needs."""
    known = {}

    def of(name):
        if name not in known:
            program = PROGRAMS[name]
            with AtomicFunctions() as functions:
                expected = train(program)[0]
            _, session, _ = train(program, memory_limit='4GiB', planner='in-core')
            peak = session.statistics()['in_core_peak_bytes']
            known[name] = expected, functions, peak
        return known[name]

    return of


@pytest.mark.matrix
@pytest.mark.parametrize('seed', range(SEEDS))
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
@pytest.mark.parametrize('name', PROGRAMS)
def test_the_same_bits_inside_the_limit(name, planner, seed, plain):
    expected, functions, peak = plain(name)
    limit = int(peak * PROGRAMS[name].share)
    result, session, taken = train(
        PROGRAMS[name], seed, memory_limit=limit, planner=planner
    )
    assert_same(expected, result, functions)
    figures = session.statistics()
    assert figures['state'] == 'guided'
    assert figures['footprint_bytes'] <= limit
    if taken is not None:
        assert taken <= limit


# -- what else people do -------------------------------------------------------
class Adversaries(training.updaters.StandardUpdater):
    """Two networks, two optimizers, one update of each."""

    def update_core(self):
        make, judge = self.get_optimizer('make'), self.get_optimizer('judge')
        real = chainer.Variable(self.converter(self.get_iterator('main').next(), 0))
        noise = self.device.xp.random.rand(len(real.array), 16).astype(np.float32)
        made = make.target(noise)
        real_score, made_score = judge.target(real), judge.target(made)
        judge.target.cleargrads()
        loss = F.mean(F.softplus(-real_score)) + F.mean(F.softplus(made_score))
        make_loss = F.mean(F.softplus(-made_score))
        make.target.cleargrads()
        make_loss.backward()
        make.update()
        made.unchain_backward()
        judge.target.cleargrads()
        loss.backward()
        judge.update()
        self.losses += [loss.array, make_loss.array]


class Maker(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.dense = L.Linear(16, 16 * 8 * 8)
            self.norm = L.BatchNormalization(16)
            self.up = L.Deconvolution2D(16, 8, 4, stride=2, pad=1)
            self.last = L.Deconvolution2D(8, 3, 4, stride=2, pad=1)

    def forward(self, z):
        h = F.reshape(self.dense(z), (-1, 16, 8, 8))
        return F.sigmoid(self.last(F.relu(self.up(F.relu(self.norm(h))))))


class Judge(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 4, stride=2, pad=1)
            self.second = L.Convolution2D(8, 16, 4, stride=2, pad=1)
            self.norm = L.BatchNormalization(16)
            self.last = L.Linear(None, 1)

    def forward(self, x):
        h = F.leaky_relu(self.first(x))
        return self.last(F.leaky_relu(self.norm(self.second(h))))


def train_adversaries(**options):
    begin(0)
    both = chainer.Sequential(Maker(), Judge())
    both.to_device('@cupy:0')
    optimizers = {}
    for name, link in zip(('make', 'judge'), both, strict=True):
        optimizers[name] = chainer.optimizers.Adam(2e-4, beta1=0.5).setup(link)
    x = np.random.RandomState(1).rand(LONGER * 16, 3, 32, 32).astype(np.float32)
    updater = Adversaries(
        chainer.iterators.SerialIterator(x, 16, shuffle=False),
        optimizers,
        device='@cupy:0',
    )
    updater.losses = []
    with networks.session_for(both, options) as session:
        for _ in range(LONGER):
            updater.update()
    return end(both, updater.losses), session


@pytest.mark.matrix(first=1, every=2)
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
def test_two_optimizers(planner):
    expected, _ = train_adversaries()
    _, session = train_adversaries(memory_limit='1GiB', planner='in-core')
    peak = session.statistics()['in_core_peak_bytes']
    result, session = train_adversaries(memory_limit=int(peak * 0.95), planner=planner)
    networks.assert_same(expected, result)
    assert session.statistics()['guided_iterations'] > 0


def train_with_a_trainer(folder, **options):
    """With an evaluator and snapshots, and the extension where there are options."""
    begin(0)
    rng = np.random.RandomState(1)
    x = rng.rand(3 * BATCH_SIZE, 3, 24, 24).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, rng.randint(0, 10, len(x)).astype('i'))
    model = Reported(lambda: networks.Everything(channels=16))
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(data, BATCH_SIZE, shuffle=False),
        optimizer,
        device='@cupy:0',
    )
    trainer = training.Trainer(updater, (4, 'epoch'), out=str(folder))
    tests = chainer.iterators.SerialIterator(
        data, BATCH_SIZE, repeat=False, shuffle=False
    )
    trainer.extend(training.extensions.Evaluator(tests, model, device='@cupy:0'))
    trainer.extend(training.extensions.snapshot(), trigger=(2, 'epoch'))
    trainer.extend(training.extensions.LogReport(trigger=(1, 'epoch')))
    if options:
        trainer.extend(hybridmem.HybridMemory(**options))
    trainer.run()
    log = trainer.get_extension('LogReport').log
    losses = [
        entry[key] for entry in log for key in ('main/loss', 'validation/main/loss')
    ]
    return end(model, losses)


def test_a_trainer_with_evaluator_and_snapshots(tmp_path):
    expected = train_with_a_trainer(tmp_path / 'plain')
    result = train_with_a_trainer(
        tmp_path / 'ours', memory_limit=750_000 * BATCH_SIZE, planner='hybrid'
    )
    networks.assert_same(expected, result)


def train_on_two_gpus(**options):
    """The session manages the first GPU; a copy of the model trains on the other."""
    import cupy

    begin(0)
    with cupy.cuda.Device(1):
        drawing.seed_gpu(0)
    rng = np.random.RandomState(1)
    x = rng.rand(ITERATIONS * 16, 3, 24, 24).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, rng.randint(0, 10, len(x)).astype('i'))
    model = Reported(lambda: networks.Everything(channels=8))
    model(*chainer.dataset.concat_examples(data[:2]))  # a copy needs parameters
    model.cleargrads()
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    updater = training.updaters.ParallelUpdater(
        chainer.iterators.SerialIterator(data, 16, shuffle=False),
        optimizer,
        devices={'main': '@cupy:0', 'second': '@cupy:1'},
    )
    return update(updater, updater._models, options)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
def test_a_parallel_updater(planner):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip('needs two GPUs')
    expected = train_on_two_gpus()[0]
    _, session, _ = train_on_two_gpus(memory_limit='1GiB', planner='in-core')
    limit = int(session.statistics()['in_core_peak_bytes'] * 0.85)
    del session  # it has the model, whose states are on the GPU
    result, session, taken = train_on_two_gpus(memory_limit=limit, planner=planner)
    networks.assert_same(expected, result)
    figures = session.statistics()
    assert figures['guided_iterations'] > 0 and figures['swap'] + figures['recompute']
    if taken is not None:
        assert taken <= limit


def train_in_two_parts(program, **options):
    """The first part without a session: states and parameters lie among its maps."""
    begin(0)
    rng = np.random.RandomState(1)
    batches = [program.batch(rng) for _ in range(ITERATIONS)]
    model = Reported(program.make)
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    losses = []

    def step(batch):
        loss = model(*batch)
        model.cleargrads()
        loss.backward()
        losses.append(float(loss.array))
        del loss
        optimizer.update()

    for batch in batches[:2]:
        step(chainer.get_device('@cupy:0').send(list(batch)))
    model.cleargrads()
    with networks.session_for(model, options) as session:
        taken_bytes()
        for batch in batches[2:]:
            step(chainer.get_device('@cupy:0').send(list(batch)))
        taken = taken_bytes()
    return end(model, losses), session, taken


def test_what_was_trained_before_moves_in(plain):
    """CuPy's pool keeps the pieces that small arrays were cut from."""
    program = PROGRAMS['googlenet']
    limit = int(plain('googlenet')[-1] * program.share)
    expected = train_in_two_parts(program)[0]
    result, session, taken = train_in_two_parts(
        program, memory_limit=limit, planner='hybrid'
    )
    networks.assert_same(expected, result)
    assert session.statistics()['state'] == 'guided'
    if taken is not None:
        assert taken <= limit


WIDE = 400  # units; gradients take as much memory as what plans move


class Recurrent(chainer.Chain):
    """Gradients live until the next backward, whose beginning takes most memory."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.wide = L.Linear(WIDE, 4 * WIDE)
            self.back = L.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        h = x
        for _ in range(8):
            h = F.tanh(self.back(F.relu(self.wide(h))) + x)
        h = F.broadcast_to(F.expand_dims(h, 1), (len(x), 64, WIDE))
        return F.average(F.exp(-h) * F.tanh(h) * h)


def train_recurrent(**options):
    """Parameters and losses, the session, and rows of its iterations."""
    begin(0)
    model = Recurrent()
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    x = np.random.RandomState(1).rand(24, WIDE).astype(np.float32)
    x = chainer.get_device('@cupy:0').send(x)
    losses, rows = [], []
    with networks.session_for(model, options) as session:
        for _ in range(14):
            loss = model(x)
            model.cleargrads()
            loss.backward()
            losses.append(float(loss.array))
            del loss
            optimizer.update()
            if session is not None:
                session.finish_iteration()
                rows.append(session.last_iteration())
                footprint = session.device.memory.pool.footprint_bytes
                assert footprint <= session.statistics()['limit_bytes']
    return end(model, losses), session, rows


def test_an_arena_takes_over_what_gradients_have_had():
    """Those of the iteration before lie elsewhere when it is first followed."""
    expected = train_recurrent()[0]
    _, session, _ = train_recurrent(memory_limit='2GiB', planner='in-core')
    peak = session.statistics()['in_core_peak_bytes']
    if not session.device.offsets.moves_in:
        pytest.skip('this driver maps no memory')
    fixed = 2 * sum(p.array.nbytes for p in Recurrent().params())
    limit = fixed + int(0.8 * (peak - fixed))
    result, session, rows = train_recurrent(memory_limit=limit, planner='hybrid')
    networks.assert_same(expected, result)
    assert session.statistics()['state'] == 'guided'
    if not session.device.offsets.moves_in:
        return  # so small a limit has too few granules
    guided = [row for row in rows if row['guided']]
    assert len(guided) > 5 and not any(row['evictions'] for row in guided)
    assert rows[-1]['placed'] > 50 and not rows[-1]['unplaced']


def train_and_keep_graphs(**options):
    """Keeps every loss, as a careless loop does, and goes back to one at the end."""
    begin(0)
    model = networks.Everything(channels=8)
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    send, losses = chainer.get_device('@cupy:0').send, []
    batches = networks.batches(ITERATIONS, 16)
    with networks.session_for(model, options):
        for batch in batches:
            losses.append(model(*send(batch)))
            model.cleargrads()
            losses[-1].backward()
            optimizer.update()
        losses.append(model(*send(batches[0])))
        model.cleargrads()
    losses[-1].backward()
    return end(model, [loss.array for loss in losses])


@pytest.mark.matrix(first=1, every=2)
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
def test_graphs_that_outlive_the_session_come_back(planner):
    """Beyond the limit, which is the session's."""
    expected = train_and_keep_graphs()
    options = {'memory_limit': '5MB', 'planner': planner, 'keep_graph': True}
    networks.assert_same(expected, train_and_keep_graphs(**options))


def test_the_driver_never_gives_more_than_the_limit_while_a_session_ends():
    """The program keeps the last graph, as a classifier's loss does."""
    import cupy

    def free_bytes():
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    model = networks.Everything()
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    before, limit = free_bytes(), 5_000_000
    with hybridmem.optimize(model, limit) as session:
        for batch in networks.batches(6):
            loss = model(*model.device.send(batch))
            model.cleargrads()
            loss.backward()
            optimizer.update()
    assert session.device.memory.pool.footprint_bytes <= limit
    assert before - free_bytes() <= limit
    assert np.isfinite(float(loss.array))


@pytest.mark.alone
def test_a_session_leaves_nothing_on_the_gpu():
    """Neither does what outlives it, in the end: states die with the model."""
    import cupy

    def free_bytes():
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    free = []
    for _ in range(2):
        train(PROGRAMS['unet'], memory_limit='4GiB', planner='in-core')
        free.append(free_bytes())
    assert free[0] == free[1]


@pytest.mark.alone
@pytest.mark.parametrize('when', ['before it', 'inside of it'])
def test_memory_of_earlier_graphs_is_not_lost_for_the_session(when):
    """What plain Chainer has left lies in reference cycles, in CuPy's default pool."""
    import cupy

    class Kept:
        pass

    gc.collect()
    kept, nbytes = Kept(), 3 << 20
    kept.array, kept.itself = cupy.zeros(nbytes, np.uint8), kept
    model = networks.Everything()
    model.to_device('@cupy:0')
    gc.disable()
    try:
        if when == 'before it':
            del kept
        with hybridmem.optimize(model, 5_000_000) as session:
            if when == 'inside of it':
                assert session.device.memory.other_bytes >= nbytes
                del kept
            array = cupy.zeros(nbytes, np.uint8)
            assert session.device.memory.other_bytes < nbytes
            assert not array.any()
    finally:
        gc.enable()


@pytest.mark.alone
def test_a_batch_from_before_the_session_counts_no_longer_than_it_lives():
    """A session of `hybridmem run` begins when a program has made its first batch."""
    import cupy

    gc.collect()
    model = networks.Everything()
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.SGD(0.01).setup(model)
    batches = networks.batches(4)
    batch = [cupy.array(array) for array in batches[0]]
    nbytes = batch[0].nbytes
    gc.disable()
    try:
        with hybridmem.optimize(model, '1GiB') as session:
            assert session.device.memory.other_bytes >= nbytes
            for following in [*batches[1:], None]:
                loss = model(*batch)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                if following is not None:
                    batch = [cupy.array(array) for array in following]
            assert session.device.memory.other_bytes < nbytes
    finally:
        gc.enable()


class _Halves(chainer.Chain):
    """Only its children have been moved, as in Chainer's model parallel example."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        with self.init_scope():
            self.first = chainer.Sequential(
                *(L.Linear(32, 32, initialW=0.1) for _ in range(6))
            )
            self.second = L.Linear(32, 10, initialW=0.1)
        self.first.to_device(first)
        self.second.to_device(second)

    def forward(self, x: Any) -> Any:
        h = x
        for link in self.first:
            h = F.tanh(link(h))
        return F.sum(self.second(F.copy(h, self.second.device)) ** 2)


@pytest.mark.parametrize('places', ['@cupy:0 @cupy:0', '@numpy @cupy:0'])
def test_layers_may_be_where_the_model_is_not(places):
    """The limit is about the device of the model, or the only one of its layers."""

    def losses_of(limit):
        model = _Halves(*places.split())
        optimizer = chainer.optimizers.SGD(0.01).setup(model)
        x = model.first.device.xp.ones((64, 32), np.float32)
        session = hybridmem.optimize(model, limit) if limit else None
        losses = []
        with session or contextlib.nullcontext():
            for _ in range(ITERATIONS):
                loss = model(x)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses.append(float(chainer.backends.cuda.to_cpu(loss.array)))
        return losses, session and session.statistics()

    expected, _ = losses_of(None)
    _, found = losses_of('1MiB')
    limit = int(found['peak_bytes'] * 0.7)
    losses, figures = losses_of(limit)
    assert losses == expected
    assert figures['state'] == 'guided' and figures['peak_bytes'] <= limit
