"""Several losses or backwards in one iteration: GANs, penalties, accumulation."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from .adversaries import adversaries, noise
from .classifier import Trunk, pictures
from .loop import begin, learn, seeded, start
from .registry import scenario
from .running import Run


@scenario(signatures=2, deviations=2, evictions=True)
def gan_second_forward(run: Run) -> None:
    """Each network is updated by a forward and a backward of its own."""
    rng = seeded()
    both, generator, discriminator, g_optimizer, d_optimizer = adversaries()
    with run.training(both):
        for _ in range(11):
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
        for _ in range(10):
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
        for _ in range(10):
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
        for _ in range(10):
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
        for _ in range(10):
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
        for _ in range(11):
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
