"""Programs after public bug reports about Chainer and other frameworks.

Each trains from a fixed seed inside ``run.training(model)`` and records what must be
equal after every update, as the scenarios do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer_hybridmem  # before chainer, which it makes importable  # noqa: F401

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.link_hooks import SpectralNormalization

from .scenarios.loop import learn, seeded, start
from .scenarios.running import Run

Activation = Callable[[Any], Any]


# -- links whose parameters are replaced while they run ------------------------
class WeightStandardization(chainer.LinkHook):
    """Gives a convolution weights of mean 0 and variance 1 while it runs."""

    name = 'WeightStandardization'

    def forward_preprocess(self, args: Any) -> None:
        link = args.link
        self.kept = link.W
        mean = F.mean(link.W, axis=(1, 2, 3), keepdims=True)
        centred = link.W - F.broadcast_to(mean, link.W.shape)
        scale = F.sqrt(F.mean(centred * centred, axis=(1, 2, 3), keepdims=True) + 1e-5)
        link.W = centred / F.broadcast_to(scale, link.W.shape)

    def forward_postprocess(self, args: Any) -> None:
        args.link.W = self.kept


class Discriminator(chainer.Chain):
    """Convolutions, each under a hook that replaces its weights."""

    def __init__(self, hook: Callable[[], chainer.LinkHook]) -> None:
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 16, 3, pad=1)
            self.c2 = L.Convolution2D(16, 16, 3, pad=1)
            self.c3 = L.Convolution2D(16, 16, 2, stride=2)
            self.last = L.Linear(16 * 8 * 8, 1)
        for link in (self.c1, self.c2, self.c3):
            link.add_hook(hook())

    def forward(self, x: Any) -> Any:
        h = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x))))
        return self.last(F.leaky_relu(self.c3(h)))


class Generator(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.l0 = L.Linear(16, 16 * 8 * 8)
            self.b0 = L.BatchNormalization(16 * 8 * 8)
            self.d1 = L.Deconvolution2D(16, 16, 2, stride=2)
            self.b1 = L.BatchNormalization(16)
            self.last = L.Convolution2D(16, 3, 1)

    def forward(self, z: Any) -> Any:
        h = F.relu(self.b0(self.l0(z))).reshape(len(z), 16, 8, 8)
        return F.tanh(self.last(F.relu(self.b1(self.d1(h)))))


def _adversaries(run: Run, hook: Callable[[], chainer.LinkHook]) -> None:
    rng = seeded()
    generator, discriminator = Generator(), Discriminator(hook)
    model = chainer.Chain(generator=generator, discriminator=discriminator)
    one = start(generator, chainer.optimizers.Adam(2e-4))
    two = start(discriminator, chainer.optimizers.Adam(2e-4))
    with run.training(model):
        for _ in range(10):
            z = rng.normal(size=(8, 16)).astype(np.float32)
            real = rng.rand(8, 3, 16, 16).astype(np.float32)
            fake = generator(z)
            y_fake = discriminator(fake)
            loss = F.mean(F.softplus(-y_fake))
            learn(generator, one, loss)
            fake.unchain_backward()
            y_fake = discriminator(fake)
            loss = F.mean(F.softplus(-discriminator(real))) + F.mean(F.softplus(y_fake))
            learn(discriminator, two, loss)
            run.record(model, loss=loss)
            del fake, y_fake, loss


def spectral_normalization(run: Run) -> None:
    _adversaries(run, SpectralNormalization)


def weight_standardization(run: Run) -> None:
    _adversaries(run, WeightStandardization)


# -- gradient penalties ---------------------------------------------------------
class Critic(chainer.Chain):
    """Linear layers or convolutions, with an activation that keeps its output."""

    def __init__(self, activation: Activation, convolutions: bool) -> None:
        super().__init__()
        self.activation = activation
        with self.init_scope():
            if convolutions:
                self.l1 = L.Convolution2D(3, 16, 3, pad=1)
                self.l2 = L.Convolution2D(16, 16, 3, pad=1)
            else:
                self.l1 = L.Linear(3 * 8 * 8, 512)
                self.l2 = L.Linear(512, 512)
            self.last = L.Linear(None, 1)

    def forward(self, x: Any) -> Any:
        h = self.activation(self.l1(x))
        return self.last(self.activation(self.l2(h)))


def _penalty(run: Run, activation: Activation, convolutions: bool) -> None:
    rng = seeded()
    critic = Critic(activation, convolutions)
    shape = (8, 3, 16, 16) if convolutions else (150, 3, 8, 8)
    critic(rng.rand(*shape).astype(np.float32))
    optimizer = start(critic, chainer.optimizers.SGD(1e-3))
    with run.training(critic):
        for _ in range(9):
            real = rng.rand(*shape).astype(np.float32)
            fake = rng.rand(*shape).astype(np.float32)
            mix = rng.rand(shape[0], 1, 1, 1).astype(np.float32)
            between = chainer.Variable(mix * real + (1 - mix) * fake)
            (slope,) = chainer.grad(
                [critic(between)], [between], enable_double_backprop=True
            )
            norm = F.sqrt(F.sum(slope * slope, axis=(1, 2, 3)) + 1e-8)
            loss = F.mean(critic(fake)) - F.mean(critic(real))
            loss += 10 * F.mean((norm - 1) ** 2)
            learn(critic, optimizer, loss)
            run.record(critic, loss=loss)
            del between, slope, norm, loss


def penalty_of_relu(run: Run) -> None:
    _penalty(run, F.relu, False)


def penalty_of_leaky_relu(run: Run) -> None:
    _penalty(run, F.leaky_relu, False)


def penalty_of_convolutions(run: Run) -> None:
    _penalty(run, F.leaky_relu, True)


# -- graphs over several iterations ---------------------------------------------
class Stateful(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(50, 64)
            self.lstm = L.LSTM(64, 64)
            self.last = L.Linear(64, 50)

    def forward(self, words: Any) -> Any:
        return self.last(self.lstm(self.embed(words)))


def cycle(run: Run, length: int, steps: int = 4, iterations: int = 48) -> None:
    """A stateful LSTM that is unchained every ``length`` iterations only."""
    rng = seeded()
    model = Stateful()
    optimizer = start(model, chainer.optimizers.Adam(1e-3))
    with run.training(model):
        for i in range(iterations):
            loss: Any = 0
            for _ in range(steps):
                words = rng.randint(0, 50, 40).astype(np.int32)
                target = rng.randint(0, 50, 40).astype(np.int32)
                loss += F.softmax_cross_entropy(model(words), target)
            learn(model, optimizer, loss)
            if i % length == length - 1:
                loss.unchain_backward()
                model.lstm.reset_state()
            run.record(model, loss=loss)


# -- distillation -----------------------------------------------------------------
class Layers(chainer.Chain):
    """Convolutions one after the other."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        with self.init_scope():
            self.convs = chainer.ChainList(
                *(L.Convolution2D(None, channels, 3, pad=1) for _ in range(count))
            )
            self.last = L.Linear(None, 10)

    def forward(self, x: Any) -> Any:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.last(F.average_pooling_2d(x, 2))


def distillation(run: Run) -> None:
    """A teacher that is no part of the model tells what is to be learnt."""
    rng = seeded()
    teacher, student = Layers(16, 4), Layers(8, 3)
    x = rng.rand(16, 3, 16, 16).astype(np.float32)
    teacher(x), student(x)
    optimizer = start(student)
    with run.training(student):
        for _ in range(16):
            x = rng.rand(16, 3, 16, 16).astype(np.float32)
            with chainer.no_backprop_mode(), chainer.using_config('train', False):
                soft = F.softmax(teacher(x) / 2.0)
            loss = -F.mean(F.sum(soft * F.log_softmax(student(x) / 2.0), axis=1))
            learn(student, optimizer, loss)
            run.record(student, loss=loss)


# -- iterations that are new each time ---------------------------------------------
def new_sizes(run: Run) -> None:
    """Pictures have a new size each time."""
    rng = seeded()
    model = Layers(8, 5)
    model(rng.rand(1, 3, 2, 2).astype(np.float32))
    optimizer = start(model)
    with run.training(model):
        for _ in range(30):
            height, width = (int(n) for n in rng.randint(12, 40, 2))
            x = rng.rand(4, 3, height, width).astype(np.float32)
            t = rng.randint(0, 10, 4).astype(np.int32)
            h: Any = chainer.as_variable(x)
            for conv in model.convs:
                h = F.relu(conv(h))
            loss = F.softmax_cross_entropy(model.last(F.mean(h, axis=(2, 3))), t)
            del h
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


class EncoderLayer(chainer.Chain):
    """Attention over all positions, then two layers for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.qkv = L.Linear(width, 3 * width)
            self.out = L.Linear(width, width)
            self.norm1, self.norm2 = (
                L.LayerNormalization(width),
                L.LayerNormalization(width),
            )
            self.wide, self.narrow = (
                L.Linear(width, 2 * width),
                L.Linear(2 * width, width),
            )

    def forward(self, x: Any, batch: int) -> Any:
        rows, width = x.shape
        qkv = self.qkv(x).reshape(batch, rows // batch, 3, self.heads, -1)
        q, k, v = F.separate(F.transpose(qkv, (2, 0, 3, 1, 4)))
        scores = F.matmul(q, k, transb=True) * (width // self.heads) ** -0.5
        mixed = F.matmul(F.softmax(scores, axis=-1), v)
        mixed = F.transpose(mixed, (0, 2, 1, 3)).reshape(rows, width)
        x = self.norm1(x + F.dropout(self.out(mixed), 0.1))
        return self.norm2(x + F.dropout(self.narrow(F.relu(self.wide(x))), 0.1))


class Encoder(chainer.Chain):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(100, width)
            self.layers = chainer.ChainList(
                *(EncoderLayer(width, heads) for _ in range(layers))
            )
            self.last = L.Linear(width, 100)

    def forward(self, words: Any) -> Any:
        h = self.embed(words.ravel())
        for layer in self.layers:
            h = layer(h, len(words))
        return self.last(h)


def new_lengths(run: Run, iterations: int = 48, scale: int = 1) -> None:
    """A Transformer's encoder gets sentences of another length each time."""
    rng = seeded()
    model = Encoder(width=64 * scale)
    optimizer = start(model, chainer.optimizers.Adam(1e-3))
    with run.training(model):
        for length in 12 + rng.permutation(iterations):
            words = rng.randint(0, 100, (16, length)).astype(np.int32)
            target = rng.randint(0, 100, words.size).astype(np.int32)
            loss = F.softmax_cross_entropy(model(words), target)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del loss


class Policy(chainer.Chain):
    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(16, width)
            self.l2 = L.Linear(width, width)
            self.actions = L.Linear(width, 4)
            self.value = L.Linear(width, 1)

    def forward(self, x: Any) -> Any:
        h = F.tanh(self.l2(F.tanh(self.l1(x))))
        return F.log_softmax(self.actions(h)), self.value(h)


def episodes(run: Run, iterations: int = 48, scale: int = 1) -> None:
    """Policy gradients of many environments, each episode as long as it lasts."""
    rng = seeded()
    model = Policy(64 * scale)
    optimizer = start(model, chainer.optimizers.Adam(1e-3))
    with run.training(model):
        for length in 12 + rng.permutation(iterations):
            steps = []
            for _ in range(length):
                x = rng.randn(64, 16).astype(np.float32)
                log_policy, value = model(x)
                action = rng.randint(0, 4, len(x)).astype(np.int32)
                reward = x[np.arange(len(x)), action]
                steps.append((F.select_item(log_policy, action), value, reward))
            loss: Any = 0
            total = np.zeros(64, np.float32)
            for chosen, value, reward in reversed(steps):
                total = reward + np.float32(0.95) * total
                gain = total - value.reshape(len(total))
                loss += F.mean(gain * gain) - F.mean(chosen * gain.array)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del steps, chosen, value, gain, log_policy


class Speech(chainer.Chain):
    def __init__(self, width: int) -> None:
        super().__init__()
        with self.init_scope():
            self.lstm = L.NStepBiLSTM(1, 40, width, 0.0)
            self.last = L.Linear(2 * width, 30)

    def forward(self, sounds: Any) -> Any:
        _, _, found = self.lstm(None, None, sounds)
        return F.stack([self.last(h) for h in found], axis=1)


def new_durations(run: Run, iterations: int = 32, scale: int = 1) -> None:
    """A bidirectional LSTM with CTC hears sounds of another duration each time."""
    rng = seeded()
    model = Speech(64 * scale)
    optimizer = start(model, chainer.optimizers.Adam(1e-3))
    with run.training(model):
        for duration in 12 + rng.permutation(iterations):
            sounds = [rng.randn(duration, 40).astype(np.float32) for _ in range(16)]
            target = rng.randint(1, 30, (16, 8)).astype(np.int32)
            y = model(sounds)
            loss = F.connectionist_temporal_classification(
                [y[i] for i in range(duration)], target, 0
            )
            del y
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del loss


# -- several backward passes a step ---------------------------------------------------
def adversarial_training(run: Run, steps: int = 24, searches: int = 1) -> None:
    """Virtual adversarial training: backwards find the direction, another learns."""
    rng = seeded()
    model = Layers(8, 3)
    model(rng.rand(1, 3, 16, 16).astype(np.float32))
    optimizer = start(model)
    with run.training(model):
        for _ in range(steps):
            x = rng.rand(12, 3, 16, 16).astype(np.float32)
            t = rng.randint(0, 10, 12).astype(np.int32)
            y = model(x)
            fixed = F.softmax(y).array
            away = 1e-2 * rng.randn(*x.shape).astype(np.float32)
            for _ in range(searches):
                push = chainer.Variable(away.astype(np.float32))
                other = F.log_softmax(model(x + push))
                distance = -F.mean(F.sum(fixed * other, axis=1))
                model.cleargrads()
                distance.backward()
                away = push.grad / (np.abs(push.grad).max() + 1e-8)
            model.cleargrads()
            other = F.log_softmax(model(x + away.astype(np.float32)))
            loss = F.softmax_cross_entropy(y, t) - F.mean(F.sum(fixed * other, axis=1))
            learn(model, optimizer, loss)
            run.record(model, loss=loss)
            del y, push, other, distance, loss


def several_critics(run: Run, steps: int = 20, critics: int = 2) -> None:
    """A GAN whose critic learns several times for each time its generator does."""
    rng = seeded()
    generator, critic = Generator(), Layers(16, 3)
    model = chainer.Chain(generator=generator, critic=critic)
    critic(rng.rand(1, 3, 16, 16).astype(np.float32))
    one = start(generator, chainer.optimizers.Adam(2e-4))
    two = start(critic, chainer.optimizers.Adam(2e-4))
    with run.training(model):
        for _ in range(steps):
            for _ in range(critics):
                real = rng.rand(16, 3, 16, 16).astype(np.float32)
                z = rng.normal(size=(16, 16)).astype(np.float32)
                with chainer.no_backprop_mode():
                    fake = generator(z).array
                loss = F.mean(F.softplus(-critic(real))) + F.mean(
                    F.softplus(critic(fake))
                )
                learn(critic, two, loss)
                run.record(model, loss=loss)
            z = rng.normal(size=(16, 16)).astype(np.float32)
            loss = F.mean(F.softplus(-critic(generator(z))))
            learn(generator, one, loss)
            run.record(model, loss=loss)
            del fake, loss


def accumulation(run: Run, steps: int = 20, parts: int = 3) -> None:
    """Gradients of several backward passes are summed before each update."""
    rng = seeded()
    model = Layers(16, 4)
    model(rng.rand(1, 3, 16, 16).astype(np.float32))
    optimizer = start(model)
    with run.training(model):
        for _ in range(steps):
            model.cleargrads()
            for _ in range(parts):
                x = rng.rand(16, 3, 16, 16).astype(np.float32)
                t = rng.randint(0, 10, 16).astype(np.int32)
                loss = F.softmax_cross_entropy(model(x), t) / parts
                loss.backward()
            optimizer.update()
            run.record(model, loss=loss)
            del loss


def meta_learning(run: Run, steps: int = 12) -> None:
    """Two inner steps of gradient descent, then the outer one through them."""
    rng = seeded()
    size = 200
    model = chainer.Chain()
    with model.init_scope():
        for name, shape in (('w1', (64, 128)), ('w2', (128, 128)), ('w3', (128, 1))):
            value = rng.randn(*shape).astype(np.float32) * 0.1
            setattr(model, name, chainer.Parameter(value))
    optimizer = start(model, chainer.optimizers.Adam(1e-3))

    def predict(weights: Any, x: Any) -> Any:
        for w in weights[:-1]:
            x = F.tanh(F.matmul(x, w))
        return F.matmul(x, weights[-1])

    with run.training(model):
        for _ in range(steps):
            total: Any = 0
            for _ in range(2):
                x = rng.rand(size, 64).astype(np.float32)
                y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
                weights = [model.w1, model.w2, model.w3]
                for _ in range(2):
                    inner = F.mean_squared_error(predict(weights, x), y)
                    slopes = chainer.grad([inner], weights, enable_double_backprop=True)
                    weights = [
                        w - 0.1 * g for w, g in zip(weights, slopes, strict=True)
                    ]
                total += F.mean_squared_error(predict(weights, x), y)
            learn(model, optimizer, total)
            run.record(model, loss=total)
            del total, inner, slopes, weights


# -- three dimensions -----------------------------------------------------------------
class Volumes(chainer.Chain):
    """A U-Net of one level for volumes."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution3D(1, 8, 3, pad=1)
            self.low = L.Convolution3D(8, 16, 3, pad=1, stride=2)
            self.up = L.Deconvolution3D(16, 8, 2, stride=2)
            self.join = L.Convolution3D(16, 8, 3, pad=1)
            self.last = L.Convolution3D(8, 2, 1)

    def forward(self, x: Any) -> Any:
        side = F.relu(self.down(x))
        h = F.relu(self.up(F.relu(self.low(side))))
        return self.last(F.relu(self.join(F.concat([h, side]))))


def volumes(run: Run) -> None:
    """A segmentation of volumes: one convolution takes most of the memory."""
    rng = seeded()
    model = Volumes()
    optimizer = start(model)
    with run.training(model):
        for _ in range(8):
            x = rng.rand(2, 1, 12, 12, 12).astype(np.float32)
            t = rng.randint(0, 2, (2, 12, 12, 12)).astype(np.int32)
            loss = F.softmax_cross_entropy(model(x), t)
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


# -- maps that are too small to move ---------------------------------------------------
def small_maps(run: Run) -> None:
    """Many functions, each of whose maps is smaller than 4 KiB."""
    rng = seeded()
    model = chainer.ChainList(*(L.Linear(30, 30) for _ in range(4)))
    optimizer = start(model)
    with run.training(model):
        for _ in range(10):
            h: Any = rng.rand(30, 30).astype(np.float32)
            for i in range(120):
                h = F.tanh(model[i % 4](h))
            loss = F.mean(h * h)
            del h
            learn(model, optimizer, loss)
            run.record(model, loss=loss)


PROGRAMS: dict[str, Callable[[Run], None]] = {
    program.__name__: program
    for program in (
        spectral_normalization,
        weight_standardization,
        penalty_of_relu,
        penalty_of_leaky_relu,
        penalty_of_convolutions,
        distillation,
        new_sizes,
        new_lengths,
        episodes,
        new_durations,
        adversarial_training,
        meta_learning,
        several_critics,
        accumulation,
        volumes,
        small_maps,
    )
}
