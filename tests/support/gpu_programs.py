"""Programs on a GPU, each trained by an updater from a fixed seed.

Nothing in their loops waits for the GPU but what their authors wrote. The tests and
``benchmarks/gpu`` train them with and without a session.
"""

from __future__ import annotations

import gc
import os
from typing import NamedTuple

import chainer_hybridmem  # noqa: F401  before chainer

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training

from benchmarks.gpu import smoke
from chainer_hybridmem.training.recompute import drawing

from . import networks, zoo

ITERATIONS = 9
EMULATED = 'EMU_LIBRARY' in os.environ
BATCH_SIZE = 8 if EMULATED else 32  # the emulator takes a second for 32
# Their backward functions add atomically: other bits each time, also in plain Chainer.
ATOMIC = ('GetItem', 'EmbedID', 'ROI', 'ResizeImages', 'SpatialTransformerSampler')
TOLERANCE = 1e-3  # of an array's largest value, after nine updates


class AtomicFunctions(chainer.FunctionHook):
    """Which functions have run that add atomically."""

    name = 'atomic functions'

    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward_preprocess(self, function, in_data):
        inner = getattr(function, '_function', None) or function  # of old style
        name = type(inner).__name__
        if name.startswith(ATOMIC):
            self.seen.add(name)


class Inception(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one = L.Convolution2D(None, 8, 1)
            self.few = L.Convolution2D(None, 8, 1)
            self.three = L.Convolution2D(8, 12, 3, pad=1)
            self.fewer = L.Convolution2D(None, 4, 1)
            self.five = L.Convolution2D(4, 8, 5, pad=2)
            self.pooled = L.Convolution2D(None, 8, 1)

    def forward(self, x):
        ways = (
            self.one(x),
            self.three(F.relu(self.few(x))),
            self.five(F.relu(self.fewer(x))),
            self.pooled(F.max_pooling_2d(x, 3, stride=1, pad=1)),
        )
        return F.relu(F.concat(ways))


class GoogLeNet(chainer.Chain):
    """Normalized responses, concatenations, pooling of both kinds."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 16, 5, pad=2)
            self.first = Inception()
            self.second = Inception()
            self.last = L.Linear(None, 10)

    def forward(self, x, t):
        h = F.max_pooling_2d(F.relu(self.conv(x)), 3, stride=2)
        h = self.second(self.first(F.local_response_normalization(h, n=5)))
        h = F.dropout(F.average_pooling_2d(F.max_pooling_2d(h, 3, stride=2), 3), 0.4)
        return F.softmax_cross_entropy(self.last(h), t)


class AlexNet(chainer.Chain):
    """Few, large layers; most of the parameters in the last ones."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 24, 5, stride=2)
            self.second = L.Convolution2D(24, 32, 5, pad=2)
            self.third = L.Convolution2D(32, 48, 3, pad=1)
            self.dense = L.Linear(None, 128)
            self.denser = L.Linear(128, 128)
            self.last = L.Linear(128, 10)

    def forward(self, x, t):
        h = F.local_response_normalization(F.relu(self.first(x)))
        h = F.relu(self.second(F.max_pooling_2d(h, 3, stride=2)))
        h = F.max_pooling_2d(F.local_response_normalization(h), 3, stride=2)
        h = F.max_pooling_2d(F.relu(self.third(h)), 3, stride=2)
        h = F.dropout(F.relu(self.denser(F.dropout(F.relu(self.dense(h))))))
        return F.softmax_cross_entropy(self.last(h), t)


class Reported(chainer.Chain):
    """Reports its loss as Chainer's classifier does."""

    def __init__(self, make):
        super().__init__()
        with self.init_scope():
            self.network = make()

    def forward(self, x, t):
        loss = self.network(x, t)
        chainer.report({'loss': loss}, self)
        return loss


class Program(NamedTuple):
    """What is trained, and on what.

    Attributes:
        make: The network.
        batch: From a generator to a batch.
        share: Of the memory that plain Chainer needs.
    """

    make: object
    batch: object
    share: float = 0.75


def pictures(size, batch=16):
    def draw(rng):
        x = rng.rand(batch, 3, size, size).astype(np.float32)
        return x, rng.randint(0, 10, batch).astype(np.int32)

    return draw


PROGRAMS = {
    'residual': Program(
        lambda: networks.Everything(channels=16), pictures(24, BATCH_SIZE)
    ),
    'googlenet': Program(GoogLeNet, pictures(40, min(BATCH_SIZE, 16))),
    'alexnet': Program(AlexNet, pictures(64, min(BATCH_SIZE, 16)), 0.9),
    **{
        name: Program(network.make, network.batch, 0.8)
        for name, network in zoo.NETWORKS.items()
    },
}


def taken_bytes():
    """Most memory taken from the driver since last asked, where that can be known."""
    if not EMULATED:
        return None
    from tests.cuda_emulator import control

    return control.take_device_peak()


def begin(seed):
    import cupy

    gc.collect()
    np.random.seed(0)
    drawing.seed_gpu(0)
    cupy.get_default_memory_pool().free_all_blocks()
    if EMULATED:
        from tests.cuda_emulator import control

        control.schedule(os.environ.get('EMU_MODE', 'random'), seed)


def end(model, losses):
    """Everything that must be equal."""
    losses = [float(chainer.get_device('@numpy').send(x)) for x in losses]
    states = {}
    for path, parameter in model.namedparams():
        for key, value in (parameter.update_rule.state or {}).items():
            states[f'{path}:{key}'] = chainer.get_device('@numpy').send(value)
    model.to_device('@numpy')
    result = networks.outcome(model, losses)
    del result['random']
    return {**result, **{k: np.asarray(v) for k, v in states.items()}}


def update(updater, models, options):
    """Runs an updater; what is equal, the session, and what it took from the driver.

    Args:
        updater: Of the model ``models['main']``.
        models: What reports losses, by name.
        options: Of a session; none without any.
    """
    reporter = chainer.Reporter()
    for name, model in models.items():
        reporter.add_observer(name, model)
    losses = []
    taken_bytes()
    with networks.session_for(models['main'], options) as session:
        for _ in range(ITERATIONS):
            observation = {}
            with reporter.scope(observation):
                updater.update()
            losses.append(observation['main/loss'].array)
        taken = taken_bytes()
    return end(models['main'], losses), session, taken


def assert_same(expected, actual, functions):
    """Every bit; within the tolerance where a GPU has added atomically."""
    if EMULATED or not functions.seen:
        networks.assert_same(expected, actual)
        return
    found = smoke.compare(expected, actual)
    assert found['largest_difference'] is not None, found
    assert found['largest_difference'] <= TOLERANCE, found


def train(program, seed=0, **options):
    """By an updater, which waits for nothing; the session and what it took as well."""
    begin(seed)
    rng = np.random.RandomState(1)
    batches = [program.batch(rng) for _ in range(ITERATIONS)]
    size = len(batches[0][0])
    columns = [np.concatenate(column) for column in zip(*batches, strict=True)]
    model = Reported(program.make)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    model.to_device('@cupy:0')
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(*columns), size, shuffle=False
        ),
        optimizer,
        device='@cupy:0',
    )
    return update(updater, {'main': model}, options)
