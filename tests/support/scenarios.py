"""Programs whose iterations change, or use the graph in unusual ways.

Each program trains from a fixed seed inside ``run.training(model)`` and hands
everything that must be equal to ``run.record`` after every update. A run with a limit
trains under a session, one without is plain Chainer.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import chainer_hybridmem as hybridmem  # before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

from chainer_hybridmem.devices.host.device import HostDevice

UNLIMITED = 1 << 32


class Run:
    """One run of a program.

    Args:
        options: Of :func:`chainer_hybridmem.optimize`; None for plain Chainer.
        counted: Whether a plain run has its memory counted.

    Attributes:
        records (list): What was recorded, in order: digests by name.
        session (Session or None): The session.
        peak_bytes (int): Of a plain run that was counted.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, counted: bool = False
    ) -> None:
        self.options = options
        self.counted = counted
        self.records: list[dict[str, str]] = []
        self.session: Any = None
        self.peak_bytes = 0

    @contextlib.contextmanager
    def training(self, model: chainer.Link) -> Iterator[None]:
        """Around the loop of a program."""
        if self.options is not None:
            with hybridmem.optimize(model, **self.options) as self.session:
                yield
        elif self.counted:
            device = HostDevice(UNLIMITED)
            device.adopt(p.array for p in model.params() if p.array is not None)
            device.install(lambda nbytes: None)
            try:
                yield
            finally:
                self.peak_bytes = device.peak_bytes
                device.uninstall()
                device.close()
        else:
            yield

    def record(self, *links: chainer.Link, **values: Any) -> None:
        """Takes down losses and other arrays, and all there is of the links."""
        contextvars.Context().run(self._record, links, values)  # not counted

    def _record(self, links: tuple[chainer.Link, ...], values: dict[str, Any]) -> None:
        digests = {name: digest(value) for name, value in values.items()}
        for i, link in enumerate(links):
            for path, parameter in link.namedparams():
                digests[f'{i}{path}'] = digest(parameter.array)
                gradient = parameter.grad if parameter.is_initialized else None
                digests[f'{i}{path}.grad'] = digest(gradient)
            for path, part in link.namedlinks():
                for name in part._persistent:
                    digests[f'{i}{path}.{name}'] = digest(part.__dict__[name])
        digests['random'] = digest(np.random.get_state()[1])
        self.records.append(digests)


def digest(value: Any) -> str:
    """Type, shape and bits of a Variable, array or number."""
    if isinstance(value, chainer.Variable):
        value = value.array
    if value is None:
        return 'None'
    array = np.asarray(value)
    bits = hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()
    return f'{array.dtype}{array.shape}:{bits}'


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A program and what its session is expected to do.

    Attributes:
        name: Of the program.
        program: What runs.
        share: Limit in parts of the in-core peak.
        steady: Whether every iteration follows a plan in the end.
        signatures: How many kinds of iterations are learnt; None if chance decides.
        deviations: Most iterations that leave their plan; None if chance decides.
        evictions: Whether iterations may need them in the end: what lies in memory
            beside the plan's maps changes, or is of graphs that live on.
    """

    name: str
    program: Callable[[Run], None]
    share: float = 0.6
    steady: bool = True
    signatures: int | None = 1
    deviations: int | None = 0
    evictions: bool = False


SCENARIOS: dict[str, Scenario] = {}


def scenario(**expected: Any) -> Callable[[Callable[[Run], None]], Any]:
    """Registers a program with what is expected of its session."""

    def register(program: Callable[[Run], None]) -> Callable[[Run], None]:
        name = program.__name__
        SCENARIOS[name] = Scenario(name, program, **expected)
        return program

    return register


# -- parts ----------------------------------------------------------------------------
class Block(chainer.Chain):
    """A residual block whose workspaces are no larger than its maps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(channels, channels, 1)
            self.b1 = L.BatchNormalization(channels)
            self.c2 = L.Convolution2D(channels, channels, 1)
            self.b2 = L.BatchNormalization(channels)

    def forward(self, x: Any) -> Any:
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + x)


class Trunk(chainer.Chain):
    """Convolutions with residuals, batch normalisation and dropout."""

    def __init__(self, channels: int = 8, blocks: int = 3, dropout: float = 0.2):
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.first = L.Convolution2D(None, channels, 2, pad=1)
            self.blocks = chainer.ChainList(*(Block(channels) for _ in range(blocks)))

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            h = block(h)
        return F.dropout(h, self.dropout)


class Classifier(chainer.Chain):
    """A trunk, global pooling (any size of picture) and a linear layer."""

    def __init__(self, trunk: chainer.Link | None = None, classes: int = 5):
        super().__init__()
        with self.init_scope():
            self.trunk = trunk or Trunk()
            self.head = L.Linear(None, classes)

    def forward(self, x: Any, t: Any) -> Any:
        h = self.trunk(x)
        return self.loss(F.max_pooling_2d(h, 2), t)

    def loss(self, h: Any, t: Any) -> Any:
        """Of features, whoever has made them."""
        return F.softmax_cross_entropy(self.head(F.mean(h, axis=(2, 3))), t)


def pictures(
    rng: np.random.RandomState, n: int = 8, insize: int = 16, dtype: Any = np.float32
) -> tuple[Any, Any]:
    """A batch of random pictures and labels."""
    x = rng.rand(n, 3, insize, insize).astype(dtype)
    return x, rng.randint(0, 5, n).astype(np.int32)


def start(
    model: chainer.Link, optimizer: chainer.Optimizer | None = None
) -> chainer.Optimizer:
    """An optimizer for a model whose parameters exist."""
    optimizer = optimizer or chainer.optimizers.MomentumSGD(0.02)
    optimizer.setup(model)
    return optimizer


def seeded(seed: int = 0) -> np.random.RandomState:
    """Seeds NumPy; returns a generator of its own for the data."""
    np.random.seed(seed)
    return np.random.RandomState(seed + 1)


def begin(
    make: Callable[[], Any] = Classifier, optimizer: chainer.Optimizer | None = None
) -> tuple[np.random.RandomState, Any, chainer.Optimizer]:
    """A generator for the data, a model made after seeding, and its optimizer."""
    rng = seeded()
    model = make()
    return rng, model, start(model, optimizer)


def learn(model: chainer.Link, optimizer: chainer.Optimizer, loss: Any) -> None:
    """What follows forward; who calls it holds the loss, and lets go of it."""
    model.cleargrads()
    loss.backward()
    optimizer.update()


def step(model: Any, optimizer: Any, *arguments: Any) -> Any:
    """A usual iteration; the loss lives on, as in most people's loops."""
    loss = model(*arguments)
    learn(model, optimizer, loss)
    return loss


# -- batches --------------------------------------------------------------------------
@scenario(signatures=2)
def last_small_batch(run: Run) -> None:
    """Epochs of four batches, of which the last one is smaller."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(10):
            for n in (8, 8, 8, 5):
                loss = step(model, optimizer, *pictures(rng, n))
                run.record(model, loss=loss)


@scenario(signatures=1)
def evaluation_without_graph(run: Run) -> None:
    """Evaluation in test mode, now and then."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(14):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)
            if i % 4 == 3:
                with chainer.using_config('train', False), chainer.no_backprop_mode():
                    for n in (8, 3):
                        run.record(model, loss=model(*pictures(rng, n)))


@scenario(deviations=8)
def evaluation_with_graph(run: Run) -> None:
    """Evaluation in test mode that builds a graph nobody goes backward through."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(40):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)
            if i % 5 == 4:
                with chainer.using_config('train', False):
                    loss = model(*pictures(rng))
                    run.record(model, loss=loss)
                    del loss


@scenario(signatures=3, evictions=True)
def multi_scale(run: Run) -> None:
    """Every iteration has one of three sizes of pictures."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(36):
            insize = rng.choice((12, 16, 20))
            loss = step(model, optimizer, *pictures(rng, insize=insize))
            run.record(model, loss=loss)


@scenario(share=0.5)
def refilled_input_buffer(run: Run) -> None:
    """One input array for all batches; the old loss lives during the next forward."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        x, t = np.zeros((8, 3, 16, 16), np.float32), np.zeros(8, np.int32)
        for _ in range(12):
            x[...], t[...] = pictures(rng)
            loss = step(model, optimizer, x, t)
            run.record(model, loss=loss)


# -- recurrent ------------------------------------------------------------------------
class LanguageModel(chainer.Chain):
    """Embedding, LSTM, a linear layer."""

    def __init__(self, words: int = 50, units: int = 32):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(words, units)
            self.lstm = L.LSTM(units, units)
            self.out = L.Linear(units, words)

    def forward(self, words: Any) -> Any:
        return self.out(F.dropout(self.lstm(self.embed(words)), 0.2))


@scenario(signatures=None, steady=False, deviations=None)
def language_model_lengths(run: Run) -> None:
    """Backpropagation through time over 5 to 35 words; the state is carried over."""
    rng, model, optimizer = begin(LanguageModel, chainer.optimizers.SGD(0.5))
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
    with run.training(model):
        for i in range(16):
            if i % 8 == 0:
                model.lstm.reset_state()
            length = rng.randint(5, 36)
            words = rng.randint(0, 50, (length + 1, 32)).astype(np.int32)
            loss = 0
            for now, following in itertools.pairwise(words):
                loss += F.softmax_cross_entropy(model(now), following)
            model.cleargrads()
            loss.backward()
            loss.unchain_backward()
            optimizer.update()
            run.record(model, loss=loss, h=model.lstm.h, c=model.lstm.c)


class Translator(chainer.Chain):
    """An encoder whose last state starts a decoder."""

    def __init__(self, words: int = 40, units: int = 32):
        super().__init__()
        with self.init_scope():
            self.source = L.EmbedID(words, units)
            self.target = L.EmbedID(words, units)
            self.encoder = L.NStepLSTM(1, units, units, 0.1)
            self.decoder = L.NStepLSTM(1, units, units, 0.1)
            self.out = L.Linear(units, words)

    def forward(self, sources: Any, targets: Any) -> Any:
        h, c, _ = self.encoder(None, None, [self.source(x) for x in sources])
        before = [self.target(t[:-1]) for t in targets]
        _, _, states = self.decoder(h, c, before)
        logits = self.out(F.concat(states, axis=0))
        return F.softmax_cross_entropy(logits, F.concat([t[1:] for t in targets], 0))


@scenario(signatures=4, deviations=8, share=0.7)
def sequence_to_sequence(run: Run) -> None:
    """Two lengths of sources, two of targets, in random pairs."""
    rng, model, optimizer = begin(Translator, chainer.optimizers.Adam())
    with run.training(model):
        for _ in range(40):
            m, n = rng.choice((4, 7)), rng.choice((5, 8))
            sources = list(rng.randint(0, 40, (8, m)).astype(np.int32))
            targets = list(rng.randint(0, 40, (8, n)).astype(np.int32))
            loss = step(model, optimizer, sources, targets)
            run.record(model, loss=loss)


# -- several losses -------------------------------------------------------------------
class Generator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.l0 = L.Linear(16, 16 * 16)
            self.b0 = L.BatchNormalization(16 * 16)
            self.d1 = L.Deconvolution2D(16, 16, 2, stride=2)
            self.b1 = L.BatchNormalization(16)
            self.d2 = L.Deconvolution2D(16, 16, 2, stride=2)
            self.b2 = L.BatchNormalization(16)
            self.last = L.Convolution2D(16, 3, 1)

    def forward(self, z: Any) -> Any:
        h = F.relu(self.b0(self.l0(z))).reshape(len(z), 16, 4, 4)
        h = F.relu(self.b2(self.d2(F.relu(self.b1(self.d1(h))))))
        return F.sigmoid(self.last(h))


class Discriminator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 16, 1)
            self.c2 = L.Convolution2D(16, 16, 1)
            self.c3 = L.Convolution2D(16, 16, 2, stride=2)
            self.last = L.Linear(None, 1)

    def forward(self, x: Any) -> Any:
        h = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x))))
        return self.last(F.leaky_relu(self.c3(h)))


def adversaries() -> tuple[Any, Any, Any, Any, Any]:
    generator, discriminator = Generator(), Discriminator()
    discriminator(np.zeros((1, 3, 16, 16), np.float32))
    both = chainer.Chain(generator=generator, discriminator=discriminator)
    return (
        both,
        generator,
        discriminator,
        start(generator, chainer.optimizers.Adam(1e-3)),
        start(discriminator, chainer.optimizers.Adam(1e-3)),
    )


def noise(rng: np.random.RandomState, n: int = 8) -> Any:
    return rng.normal(size=(n, 16)).astype(np.float32)


@scenario(signatures=2, deviations=2, evictions=True)
def gan_second_forward(run: Run) -> None:
    """Each network is updated by a forward and a backward of its own."""
    rng = seeded()
    both, generator, discriminator, g_optimizer, d_optimizer = adversaries()
    with run.training(both):
        for _ in range(14):
            x, _ = pictures(rng)
            fake = generator(noise(rng))
            loss = F.sum(F.softplus(-discriminator(x))) / 8
            loss += F.sum(F.softplus(discriminator(fake.array))) / 8
            learn(discriminator, d_optimizer, loss)
            run.record(both, loss=loss)
            loss = F.sum(F.softplus(-discriminator(generator(noise(rng))))) / 8
            learn(generator, g_optimizer, loss)
            run.record(both, loss=loss)


@scenario(signatures=2, evictions=True)
def gan_shared_graph(run: Run) -> None:
    """The updater of Chainer's DCGAN: two losses over one graph, updates between."""
    rng = seeded()
    both, generator, discriminator, g_optimizer, d_optimizer = adversaries()
    with run.training(both):
        for _ in range(14):
            x, _ = pictures(rng)
            y_real = discriminator(x)
            y_fake = discriminator(generator(noise(rng)))
            loss = F.sum(F.softplus(-y_real)) / 8 + F.sum(F.softplus(y_fake)) / 8
            learn(discriminator, d_optimizer, loss)
            run.record(both, loss=loss)
            loss = F.sum(F.softplus(-y_fake)) / 8
            learn(generator, g_optimizer, loss)
            run.record(both, loss=loss)


@scenario(share=0.7)
def gan_two_losses_first(run: Run) -> None:
    """Both losses are made before the first backward."""
    rng = seeded()
    both, generator, discriminator, g_optimizer, d_optimizer = adversaries()
    with run.training(both):
        for _ in range(12):
            x, _ = pictures(rng)
            y_real = discriminator(x)
            y_fake = discriminator(generator(noise(rng)))
            loss_d = F.sum(F.softplus(-y_real)) / 8 + F.sum(F.softplus(y_fake)) / 8
            loss_g = F.sum(F.softplus(-y_fake)) / 8
            learn(discriminator, d_optimizer, loss_d)
            learn(generator, g_optimizer, loss_g)
            run.record(both, loss_d=loss_d, loss_g=loss_g)


@scenario()
def gradient_accumulation(run: Run) -> None:
    """Four forwards and backwards for each update."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(4):
            model.cleargrads()
            for _ in range(4):
                loss = model(*pictures(rng)) / 4
                loss.backward()
            optimizer.update()
            run.record(model, loss=loss)


@scenario()
def losses_summed(run: Run) -> None:
    """Three losses, one backward."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(10):
            loss = sum(model(*pictures(rng)) for _ in range(3))
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario(share=0.7)
def two_losses_one_trunk(run: Run) -> None:
    """Two heads on one trunk, each with a backward of its own."""
    rng = seeded()
    trunk = Trunk()
    heads = chainer.ChainList(L.Linear(None, 5), L.Linear(None, 1))
    model = chainer.ChainList(trunk, heads)
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.average_pooling_2d(trunk(x), 4)
            one = F.softmax_cross_entropy(heads[0](h), t)
            two = F.mean_squared_error(heads[1](h)[:, 0], t.astype(np.float32))
            model.cleargrads()
            one.backward()
            two.backward()
            optimizer.update()
            run.record(model, one=one, two=two)


@scenario(share=0.7)
def backward_twice(run: Run) -> None:
    """The gradients of one loss are added twice."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(12):
            loss = model(*pictures(rng))
            model.cleargrads()
            loss.backward()
            loss.backward()
            optimizer.update()
            run.record(model, loss=loss)


@scenario()
def grad_twice(run: Run) -> None:
    """``chainer.grad`` asks twice, for other things, over the same graph."""
    rng, model, optimizer = begin()
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            x = chainer.Variable(x)
            loss = model(x, t)
            (saliency,) = chainer.grad([loss], [x])
            parameters = [p for p in model.params() if p.is_initialized]
            gradients = chainer.grad([loss], parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.array
            optimizer.update()
            run.record(model, loss=loss, saliency=saliency)


@scenario(signatures=3, share=0.7, evictions=True)
def gradient_penalty(run: Run) -> None:
    """WGAN-GP: the norm of a gradient is part of the loss."""
    rng = seeded()
    both, generator, critic, g_optimizer, d_optimizer = adversaries()
    with run.training(both):
        for _ in range(14):
            x, _ = pictures(rng)
            fake = generator(noise(rng)).array
            mixed = chainer.Variable((x + fake) / 2)
            (gradient,) = chainer.grad(
                [critic(mixed)], [mixed], enable_double_backprop=True
            )
            norm = F.sqrt(F.batch_l2_norm_squared(gradient))
            loss = F.mean(critic(fake)) - F.mean(critic(x))
            loss += 10 * F.mean_squared_error(norm, np.ones_like(norm.array))
            learn(critic, d_optimizer, loss)
            run.record(both, loss=loss)
            loss = -F.mean(critic(generator(noise(rng))))
            learn(generator, g_optimizer, loss)
            run.record(both, loss=loss)


# -- changing networks ----------------------------------------------------------------
class Deep(Trunk):
    """Blocks that are skipped by chance."""

    rng: np.random.RandomState

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            if self.rng.rand() < 0.5:
                h = block(h)
        return h


@scenario(signatures=3, deviations=10, evictions=True)
def stochastic_depth(run: Run) -> None:
    """Blocks are left out by chance."""
    rng = seeded()
    trunk = Deep(blocks=2)
    trunk.rng = np.random.RandomState(5)
    model = Classifier(trunk)
    optimizer = start(model)
    with run.training(model):
        for _ in range(48):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def frozen_then_thawed(run: Run) -> None:
    """``disable_update`` and a trunk without a graph; later all of it is trained."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(20):
            x, t = pictures(rng)
            if i == 0:
                model.trunk.disable_update()
            if i == 8:
                model.trunk.enable_update()
            h = model.trunk(x)
            if i < 8:
                h.unchain_backward()
            h = F.mean(F.max_pooling_2d(h, 2), axis=(2, 3))
            loss = F.softmax_cross_entropy(model.head(h), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario()
def update_disabled(run: Run) -> None:
    """Some layers are not updated at first; the graph stays the same."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(13):
            if i == 0:
                model.trunk.first.disable_update()
            if i == 8:
                model.trunk.first.enable_update()
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def growing_network(run: Run) -> None:
    """A block is added in the middle of training."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(blocks=1)))
    with run.training(model):
        for i in range(20):
            if i == 8:
                block = Block(8)
                model.trunk.blocks.add_link(block)
                for parameter in block.params():
                    parameter.update_rule = optimizer.create_update_rule()
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(signatures=2, deviations=2)
def lazy_in_a_later_iteration(run: Run) -> None:
    """A layer without parameters yet is used from the tenth iteration on."""
    rng = seeded()
    model = Classifier()
    model.add_link('extra', L.Convolution2D(None, 8, 3, pad=1))
    optimizer = start(model)
    with run.training(model):
        for i in range(20):
            x, t = pictures(rng)
            h = model.trunk(x)
            if i >= 8:
                h = F.relu(model.extra(h))
            h = F.mean(F.max_pooling_2d(h, 2), axis=(2, 3))
            loss = F.softmax_cross_entropy(model.head(h), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario(signatures=2)
def unchained_in_the_middle(run: Run) -> None:
    """The features of the first blocks are cut off."""
    rng = seeded()
    model = Classifier(Trunk(blocks=1))
    model.add_link('second', Trunk(blocks=2))
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = model.trunk(x)
            first = model.loss(h, t)
            model.cleargrads()
            first.backward()
            h.unchain_backward()
            second = F.mean(model.second(h) ** 2)
            second.backward()
            optimizer.update()
            run.record(model, first=first, second=second)


class Forgetful(Trunk):
    """Blocks inside ``F.forget``."""

    def forward(self, x: Any) -> Any:
        h = F.relu(self.first(x)[:, :, 1:, 1:])
        for block in self.blocks:
            h = F.forget(block, h)
        return h


@scenario(share=0.9, evictions=True)
def forgotten_blocks(run: Run) -> None:
    """``F.forget`` in the model: forwards in backward, hooks and all."""
    rng, model, optimizer = begin(lambda: Classifier(Forgetful()))
    with run.training(model):
        for _ in range(12):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


# -- what the user holds --------------------------------------------------------------
@scenario(deviations=2)
def queue_of_features(run: Run) -> None:
    """Features of the last iterations are used in the next one (as in MoCo)."""
    rng, model, optimizer = begin()
    with run.training(model):
        queue: list[Any] = []
        for _ in range(14):
            x, t = pictures(rng)
            h = model.trunk(x)
            features = F.max_pooling_2d(h, 2)
            loss = F.softmax_cross_entropy(model.head(F.mean(features, (2, 3))), t)
            for old in queue:
                loss += 0.1 * F.mean_squared_error(features, old)
            learn(model, optimizer, loss)
            queue = [*queue, features.array][-2:]
            run.record(model, loss=loss)


@scenario(deviations=2)
def queue_of_variables(run: Run) -> None:
    """The same with Variables, whose graph lives on until they are let go."""
    rng, model, optimizer = begin()
    with run.training(model):
        old = None
        for _ in range(14):
            x, t = pictures(rng)
            h = model.trunk(x)
            loss = model.loss(h, t)
            if old is not None:
                loss += 0.1 * F.mean_squared_error(h, old.array)
            learn(model, optimizer, loss)
            old = h
            run.record(model, loss=loss, old=old)


@scenario(signatures=2, deviations=2, share=0.7, evictions=True)
def gradients_through_two_iterations(run: Run) -> None:
    """Every second backward goes on through the graph of the iteration before."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.3)))
    with run.training(model):
        old = None
        for i in range(28):
            x, t = pictures(rng)
            h = model.trunk(x)
            loss = model.loss(h, t)
            if i % 2:
                loss += F.mean_squared_error(h, old)
            learn(model, optimizer, loss)
            old = h if i % 2 == 0 else None
            run.record(model, loss=loss)


@scenario()
def changed_after_backward(run: Run) -> None:
    """A held array is modified after backward, before the next iteration."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.relu(model.trunk(x))
            loss = model.loss(h, t)
            learn(model, optimizer, loss)
            h.array[...] = -1
            run.record(model, loss=loss, h=h)


@scenario()
def changed_before_backward(run: Run) -> None:
    """A held array is modified between forward and backward."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            g = F.tanh(h)
            loss = F.softmax_cross_entropy(model.head(F.mean(g, axis=(2, 3))), t)
            h.array[...] *= 0.5
            learn(model, optimizer, loss)
            run.record(model, loss=loss, h=h)


@scenario()
def held_array_changed(run: Run) -> None:
    """The same where only the array is held and not its Variable."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            held = h.array
            h = F.tanh(h)
            loss = model.loss(h, t)
            held *= 0.5
            learn(model, optimizer, loss)
            run.record(model, loss=loss, held=held)


@scenario(share=0.9, evictions=True)
def growing_replay_buffer(run: Run) -> None:
    """NumPy arrays of the user's own, more and more of them."""
    rng, model, optimizer = begin()
    buffer = []
    with run.training(model):
        for _ in range(14):
            x, t = pictures(rng)
            buffer.append(x.copy())
            old = buffer[rng.randint(len(buffer))]
            loss = step(model, optimizer, (x + old) / 2, t)
            run.record(model, loss=loss)


@scenario()
def early_break(run: Run) -> None:
    """Some forwards are thrown away."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(40):
            loss = model(*pictures(rng))
            if i % 5 == 4:
                del loss
                continue
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del loss


class Fault(Exception):
    """Raised by a program on purpose."""


class Faulty(chainer.FunctionHook):
    """Raises at the n-th function of a phase."""

    name = 'faulty'

    def __init__(self, phase: str, at: int = 6) -> None:
        self.phase, self.at = phase, at

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        self._count('forward')

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._count('backward')

    def _count(self, phase: str) -> None:
        self.at -= phase == self.phase
        if self.at == 0:
            raise Fault


@scenario(deviations=4, evictions=True)
def exceptions_caught(run: Run) -> None:
    """An exception in forward or backward is caught and training goes on."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(36):
            batch = pictures(rng)
            try:
                if i in (1, 8, 16, 17):
                    with Faulty('forward' if i % 2 else 'backward'):
                        step(model, optimizer, *batch)
                else:
                    run.record(model, loss=step(model, optimizer, *batch))
            except Fault:
                model.cleargrads()


@scenario()
def part_of_the_model(run: Run) -> None:
    """The session is told of the trunk only; the head has its own optimizer."""
    rng = seeded()
    trunk, head = Trunk(), L.Linear(8 * 8 * 8, 60)
    optimizers = start(trunk), start(head, chainer.optimizers.Adam())
    with run.training(trunk):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.max_pooling_2d(trunk(x), 2)
            loss = F.softmax_cross_entropy(head(h), t)
            trunk.cleargrads()
            head.cleargrads()
            loss.backward()
            for optimizer in optimizers:
                optimizer.update()
            run.record(trunk, head, loss=loss)


# -- functions ------------------------------------------------------------------------
class Siamese(chainer.Chain):
    """One trunk for two inputs, and one parameter in two links."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.trunk = Trunk()
            self.encode = L.Linear(8 * 16, 64)
            self.decode = L.Linear(64, 64)
            self.again = L.Linear(64, 64)
        self.again.W = self.decode.W

    def forward(self, a: Any, b: Any) -> Any:
        def features(x: Any) -> Any:
            h = F.relu(self.encode(F.average_pooling_2d(self.trunk(x), 4)))
            return self.again(F.relu(self.decode(h)))

        return F.mean((features(a) - features(b)) ** 2)


@scenario()
def shared_parameters(run: Run) -> None:
    """The same link twice in a forward, and two links with one parameter."""
    rng, model, optimizer = begin(Siamese, chainer.optimizers.SGD(0.1))
    with run.training(model):
        for _ in range(12):
            a, b = pictures(rng)[0], pictures(rng)[0]
            run.record(model, loss=step(model, optimizer, a, b))


@hybridmem.recomputable
class Negate(chainer.Function):
    """Old-style, its own inverse, writes into its input and returns it."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        self.retain_inputs(())
        np.negative(x, out=x)
        return (x,)

    def backward(self, inputs: Any, grads: Any) -> Any:
        return (-grads[0],)


@hybridmem.recomputable
class Scale(chainer.FunctionNode):
    """Writes into its input and returns it; retains what it has written."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        x *= 0.5
        self.retain_outputs((0,))
        return (x,)

    def backward(self, indexes: Any, grads: Any) -> Any:
        (y,) = self.get_retained_outputs()
        return (0.5 * grads[0] + 0 * y,)


@hybridmem.recomputable
class Same(chainer.FunctionNode):
    """Returns its input as it is."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        return inputs

    def backward(self, indexes: Any, grads: Any) -> Any:
        return (grads[0] * F.sign(self.get_retained_inputs()[0]),)


@scenario()
def in_place_functions(run: Run) -> None:
    """Functions that write into their inputs, after functions that retain them."""
    rng, model, optimizer = begin(lambda: Classifier(Trunk(dropout=0.0)))
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x))
            h = Negate()(h)
            h = F.tanh(h)
            (h,) = Scale().apply((h,))
            (h,) = Same().apply((h,))
            h = F.sigmoid(F.max_pooling_2d(h, 2))
            loss = model.loss(h, t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@hybridmem.recomputable
class Parts(chainer.FunctionNode):
    """Two outputs, both retained; either may have no gradient."""

    def forward(self, inputs: Any) -> Any:
        (x,) = inputs
        middle = x.shape[1] // 2
        self.retain_outputs((0, 1))
        return np.tanh(x[:, :middle]), np.tanh(x[:, middle:])

    def backward(self, indexes: Any, grads: Any) -> Any:
        parts = []
        for y, g in zip(self.get_retained_outputs(), grads, strict=True):
            parts.append(y * 0 if g is None else g * (1 - y * y))
        return (F.concat(parts),)


@scenario()
def outputs_that_die(run: Run) -> None:
    """Of functions with several outputs some are never used."""
    rng = seeded()
    model = Classifier()
    model.add_link('lstm', L.StatelessLSTM(8 * 4 * 4, 64))
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = model.trunk(x)
            a, _, c, _ = F.split_axis(h, 4, axis=1)
            _, b = Parts().apply((F.concat((a, c)),))
            _, hidden = model.lstm(None, None, F.average_pooling_2d(h, 4))
            last, _ = model.lstm(None, hidden, F.max_pooling_2d(h, 4))
            del hidden
            loss = model.loss(h, t)
            loss += F.mean(b) + F.mean(last**2)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario()
def empty_and_scalar_arrays(run: Run) -> None:
    """Arrays without elements and without dimensions, among the others."""
    rng = seeded()
    model = Classifier()
    with model.init_scope():
        model.weight = chainer.Parameter(np.array(0.5, np.float32))
        model.nothing = chainer.Parameter(np.zeros((0, 3), np.float32))
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = model.trunk(x)
            none = F.relu(h[:, :0]) * 2
            h = F.concat((none, h * F.broadcast_to(model.weight, h.shape)))
            loss = model.loss(h, t)
            loss = F.exp(loss * model.weight) + F.sum(model.nothing**2) + F.sum(none)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


def typed(run: Run, dtype: Any) -> None:
    rng = seeded()
    with chainer.using_config('dtype', dtype):
        model = Classifier()
        optimizer = start(model)
        data = np.float16 if dtype == chainer.mixed16 else dtype
        if data == np.float16:
            optimizer.loss_scaling()
            optimizer.use_fp32_update()
        with run.training(model):
            for _ in range(12):
                x, t = pictures(rng, dtype=data)
                loss = model(x, t)
                model.cleargrads()
                loss.backward(
                    loss_scale=optimizer._loss_scale if data == np.float16 else None
                )
                optimizer.update()
                run.record(model, loss=loss)


@scenario()
def float16(run: Run) -> None:
    """Half precision."""
    typed(run, np.float16)


@scenario()
def mixed16(run: Run) -> None:
    """Half precision with parameters of single precision."""
    typed(run, chainer.mixed16)


@scenario()
def float64(run: Run) -> None:
    """Double precision."""
    typed(run, np.float64)


@scenario()
def views(run: Run) -> None:
    """Maps that are views: transposed, sliced, reversed, broadcast, strided."""
    rng = seeded()
    model = Classifier()
    model.add_link('dense', L.Linear(16, 16))
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            h = F.sigmoid(model.trunk(x).transpose(0, 2, 3, 1))
            h = F.tanh(h[:, ::-1, 1:, ::2])
            h = F.sigmoid(F.swapaxes(h, 1, 3))
            h = model.dense(F.reshape(h, (-1, 16)))
            h = F.reshape(h, (8, -1, 16)) * F.broadcast_to(h[:1, :1], (8, 1, 16))
            windows = F.as_strided(
                h, (8, h.shape[1] - 2, 3, 16), (h[0].size, 16, 16, 1)
            )
            h = F.flip(F.rollaxis(F.tanh(windows), 2), 0)
            h = F.concat((F.squeeze(F.expand_dims(h, 0), 0), h), axis=1)
            loss = F.softmax_cross_entropy(model.head(F.mean(h, axis=(0, 2))[:8]), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


@scenario(share=100)
def no_feature_map(run: Run) -> None:
    """Nothing is large enough to leave."""
    rng, model, optimizer = begin(lambda: chainer.Sequential(L.Linear(4, 3)))
    with run.training(model):
        for _ in range(12):
            x = rng.rand(2, 4).astype(np.float32)
            loss = F.sum(model(x))
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


# -- the life of a model --------------------------------------------------------------
@scenario()
def learning_rate_changes(run: Run) -> None:
    """Another learning rate, weight decay added."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(13):
            if i == 6:
                optimizer.lr *= 0.1
            if i == 9:
                optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario(share=0.9)
def optimizer_replaced(run: Run) -> None:
    """SGD becomes Adam, whose states appear in the middle."""
    rng, model, optimizer = begin(Classifier, chainer.optimizers.SGD(0.05))
    with run.training(model):
        for i in range(16):
            if i == 8:
                optimizer = start(model, chainer.optimizers.Adam())
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, loss=loss)


@scenario()
def sequential_repeated(run: Run) -> None:
    """``chainer.Sequential`` with ``repeat`` and functions."""
    rng = seeded()
    unit = chainer.Sequential(
        L.Convolution2D(None, 8, 1), L.BatchNormalization(8), F.relu
    )
    model = chainer.Sequential(
        *unit.repeat(5), lambda h: F.max_pooling_2d(h, 2), F.dropout, L.Linear(None, 5)
    )
    optimizer = start(model)
    with run.training(model):
        for _ in range(12):
            x, t = pictures(rng)
            loss = F.softmax_cross_entropy(model(x), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


class LinkTimer(chainer.LinkHook):
    """A link hook of the user's."""

    def forward_preprocess(self, args: Any) -> None:
        self.begin = time.perf_counter()


@scenario()
def hooks_around(run: Run) -> None:
    """Chainer's own hooks, around the session, inside it and on one function."""
    rng, model, optimizer = begin()
    with chainer.function_hooks.TimerHook() as timer:
        with run.training(model):
            for i in range(12):
                hook = chainer.function_hooks.TimerHook()
                hook.name = 'inner'
                within: Any = hook if i % 2 else contextlib.nullcontext()
                with within, LinkTimer():
                    loss = step(model, optimizer, *pictures(rng))
                run.record(model, loss=loss)
    assert timer.call_history


@scenario()
def zerograds(run: Run) -> None:
    """Gradients are filled with zeros instead of being dropped, now and then."""
    rng, model, optimizer = begin()
    with run.training(model):
        for i in range(14):
            loss = model(*pictures(rng))
            if i >= 7 and i % 2:
                optimizer.use_cleargrads(False)
                with np.errstate(all='ignore'):
                    model.zerograds()
            else:
                model.cleargrads()
            loss.backward()
            optimizer.update()
            run.record(model, loss=loss)


@scenario()
def parameters_copied_and_loaded(run: Run) -> None:
    """``copyparams``, a copy of the model, snapshots saved and loaded."""
    rng = seeded()
    model = Classifier()
    model(*pictures(rng))
    optimizer = start(model)
    average = model.copy('copy')
    with run.training(model), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'model.npz')
        for i in range(16):
            loss = step(model, optimizer, *pictures(rng))
            run.record(model, average, loss=loss)
            if i % 6 == 2:
                chainer.serializers.save_npz(path, model)
            if i % 6 == 4:
                chainer.serializers.load_npz(path, model)
            if i % 6 == 5:
                average.copyparams(model)


@scenario()
def trainer(run: Run) -> None:
    """Trainer, updater, evaluator and snapshots with the extension's session."""
    rng, model, optimizer = begin(Classifier, chainer.optimizers.Adam())
    rows = [
        row for _ in range(4) for row in zip(*pictures(rng), strict=True)
    ]  # four batches per epoch
    with tempfile.TemporaryDirectory() as folder:
        updater = training.StandardUpdater(
            chainer.iterators.SerialIterator(rows, 8), optimizer
        )
        loop = training.Trainer(updater, (14, 'iteration'), out=folder)
        test = chainer.iterators.SerialIterator(
            rows[:12], 8, repeat=False, shuffle=False
        )
        loop.extend(extensions.Evaluator(test, Reporting(model)))
        loop.extend(extensions.snapshot(), trigger=(5, 'iteration'))
        loop.extend(extensions.LogReport(trigger=(1, 'iteration')))
        loop.extend(lambda _: run.record(model), trigger=(1, 'iteration'))
        if run.options is None:
            with run.training(model):
                loop.run()
            return
        extension = hybridmem.HybridMemory(**run.options)
        loop.extend(extension)
        loop.run()
        run.session = extension.session


class Reporting(chainer.Chain):
    """Reports the loss of a model."""

    def __init__(self, model: chainer.Link) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, t: Any) -> Any:
        chainer.report({'loss': self.model(x, t)}, self)
