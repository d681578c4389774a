"""Chainer's example models on small synthetic data, one function per program.

A program is made anew for every run, from a fixed seed: equal runs give equal bits.
Models, converters and updaters are those of the examples; sizes are small enough for
seconds per run.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

NOT_NEEDED = ('nltk', 'nltk.translate', 'progressbar')  # by what is run here


@dataclasses.dataclass
class Program:
    """One training run that has not begun.

    Attributes:
        model: What :func:`chainer_hybridmem.optimize` gets.
        step: Trains the batch with this number; returns its loss.
    """

    model: chainer.Link | list[chainer.Link]
    step: Callable[[int], float]

    @property
    def links(self) -> list[chainer.Link]:
        """The models, as a list."""
        return self.model if isinstance(self.model, list) else [self.model]


def example(source: str, folder: str, module: str) -> Any:
    """A module of one of Chainer's examples.

    Raises:
        FileNotFoundError: If the folder is no source tree of Chainer.
    """
    path = os.path.join(source, 'examples', folder)
    if not os.path.isfile(os.path.join(path, f'{module}.py')):
        raise FileNotFoundError(
            f'{path} has no {module}.py; give the path of a Chainer source tree.'
        )
    for name in NOT_NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    sys.modules['nltk.translate'].__dict__.setdefault('bleu_score', None)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(module)


def _words(
    rng: np.random.RandomState, shortest: int, longest: int, vocabulary: int
) -> np.ndarray:
    length = rng.randint(shortest, longest + 1)
    return rng.randint(2, vocabulary, length).astype(np.int32)


def train_on(
    model: chainer.Link, optimizer: chainer.Optimizer, batches: Sequence[Any]
) -> Program:
    """Batches as arguments of the model, which returns the loss."""
    optimizer.setup(model)

    def step(i: int) -> float:
        batch = batches[i]
        arguments, keywords = ((), batch) if isinstance(batch, dict) else (batch, {})
        loss = model(*arguments, **keywords)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return float(loss.array)

    return Program(model, step)


def seq2seq(source: str, count: int) -> Program:
    """Translation: lengths differ in every batch, and so does every signature."""
    module = example(source, 'seq2seq', 'seq2seq')
    rng = np.random.RandomState(1)
    batches = [
        {
            'xs': [_words(rng, 3, 10, 400) for _ in range(8)],
            'ys': [_words(rng, 3, 10, 400) for _ in range(8)],
        }
        for _ in range(count)
    ]
    model = module.Seq2seq(2, 400, 400, 64)
    return train_on(model, chainer.optimizers.Adam(), batches)


def pos(source: str, count: int) -> Program:
    """Part-of-speech tagging with a CRF: lengths differ in every batch."""
    module = example(source, 'pos', 'postagging')
    rng = np.random.RandomState(1)
    batches = []
    for _ in range(count):
        xs = [_words(rng, 3, 20, 500) for _ in range(30)]
        ys = [rng.randint(0, 40, len(x)).astype(np.int32) for x in xs]
        batches.append({'xs': xs, 'ys': ys})
    return train_on(module.CRF(500, 40), chainer.optimizers.Adam(), batches)


def _tree(rng: np.random.RandomState, leaves: int) -> Any:
    label = str(rng.randint(0, 5))
    if leaves == 1:
        return (label, f'word{rng.randint(0, 300)}')
    left = rng.randint(1, leaves)
    return (label, _tree(rng, left), _tree(rng, leaves - left))


def sentiment(source: str, count: int) -> Program:
    """Recursive networks over trees of 3 to 20 words, in batches of 25."""
    module = example(source, 'sentiment', 'train_recursive_minibatch')
    rng = np.random.RandomState(1)
    vocabulary: dict[str, int] = {}
    batches = []
    for _ in range(count):
        trees = [
            module.linearize_tree(vocabulary, _tree(rng, rng.randint(3, 21)))
            for _ in range(25)
        ]
        names = ('lefts', 'rights', 'dests', 'labels', 'words', 'leaf_labels')
        batches.append(tuple(tree[name] for name in names for tree in trees))
    model = module.ThinStackRecursiveNet(len(vocabulary), 30, 5)
    return train_on(model, chainer.optimizers.AdaGrad(0.1), batches)


def ptb(source: str, count: int) -> Program:
    """A language model with truncated backpropagation through 35 words."""
    module = example(source, 'ptb', 'train_ptb')
    rng = np.random.RandomState(1)
    words = rng.randint(0, 500, 20 * 35 * (count + 1)).astype(np.int32)
    model = L.Classifier(module.RNNForLM(500, 100))
    model.compute_accuracy = False
    optimizer = chainer.optimizers.SGD(lr=1.0).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
    iterator = module.ParallelSequentialIterator(words, 20)
    updater = module.BPTTUpdater(iterator, optimizer, 35, chainer.get_device('@numpy'))
    return Program(model, update_with(updater, model))


def update_with(updater: Any, *models: chainer.Link) -> Callable[[int], float]:
    """An updater's iterations; the sum of the losses that they report."""
    reporter = chainer.Reporter()
    for number, model in enumerate(models):
        reporter.add_observer(f'model{number}', model)

    def step(i: int) -> float:
        del i
        observation: dict[str, Any] = {}
        with reporter.scope(observation):
            updater.update_core()
        losses = [v for name, v in observation.items() if name.endswith('loss')]
        return float(sum(float(_number(loss)) for loss in losses))

    return step


def _number(loss: Any) -> Any:
    return loss.array if isinstance(loss, chainer.Variable) else loss


def mnist(source: str, count: int) -> Program:
    """The perceptron of 1000 units."""
    module = example(source, 'mnist', 'train_mnist')
    rng = np.random.RandomState(1)
    batches = [
        (
            rng.rand(100, 784).astype(np.float32),
            rng.randint(0, 10, 100).astype(np.int32),
        )
        for _ in range(count)
    ]
    model = L.Classifier(module.MLP(1000, 10))
    return train_on(model, chainer.optimizers.Adam(), batches)


def word2vec(source: str, count: int) -> Program:
    """Skip-gram with negative sampling: four widths of the window."""
    module = example(source, 'word2vec', 'train_word2vec')
    rng = np.random.RandomState(1)
    words = rng.randint(0, 1000, 1000 * (count + 2)).astype(np.int32)
    counts = np.bincount(words, minlength=1000).tolist()
    loss = L.NegativeSampling(100, counts, 5)
    loss.W.array[...] = 0
    model = module.SkipGram(1000, 100, loss)
    np.random.seed(2)
    iterator = module.WindowIterator(words, 5, 500)
    batches = [next(iterator) for _ in range(count)]
    return train_on(model, chainer.optimizers.Adam(), batches)


def memnn(source: str, count: int) -> Program:
    """Memory networks with three hops."""
    module = example(source, 'memnn', 'memnn')
    rng = np.random.RandomState(1)
    network = module.MemNN(20, 80, module.make_encoder('pe'), 50, 3)
    model = L.Classifier(network, label_key='answer')
    batches = [
        {
            'sentences': rng.randint(0, 80, (10, 50, 7)).astype(np.int32),
            'question': rng.randint(0, 80, (10, 7)).astype(np.int32),
            'answer': rng.randint(0, 80, 10).astype(np.int32),
        }
        for _ in range(count)
    ]
    return train_on(model, chainer.optimizers.Adam(), batches)


def text_classification(source: str, count: int) -> Program:
    """Sentences of 5 to 20 words through an LSTM."""
    module = example(source, 'text_classification', 'nets')
    rng = np.random.RandomState(1)
    batches = [
        (
            [_words(rng, 5, 20, 500) for _ in range(32)],
            [rng.randint(0, 2, 1).astype(np.int32) for _ in range(32)],
        )
        for _ in range(count)
    ]
    encoder = module.RNNEncoder(1, 500, 100, 0.4)
    model = module.TextClassifier(encoder, 2)
    return train_on(model, chainer.optimizers.Adam(), batches)


def vae(source: str, count: int) -> Program:
    """A variational autoencoder for pictures of digits."""
    module = example(source, 'vae', 'net')
    rng = np.random.RandomState(1)
    encoder = module.make_encoder(784, 20, 500)
    decoder = module.make_decoder(784, 20, 500)
    model = module.AvgELBOLoss(encoder, decoder, module.make_prior(20))
    batches = [(rng.rand(100, 784).astype(np.float32),) for _ in range(count)]
    return train_on(model, chainer.optimizers.Adam(), batches)


def dcgan(source: str, count: int) -> Program:
    """Two networks, two optimizers, two backward passes over one graph."""
    module = example(source, 'dcgan', 'net')
    updaters = example(source, 'dcgan', 'updater')
    rng = np.random.RandomState(1)
    pictures = (rng.rand(8 * count, 3, 32, 32) * 255).astype(np.float32)
    generator, discriminator = module.Generator(100, ch=32), module.Discriminator(ch=32)
    optimizers = {
        name: chainer.optimizers.Adam(alpha=0.0002, beta1=0.5).setup(model)
        for name, model in (('gen', generator), ('dis', discriminator))
    }
    updater = updaters.DCGANUpdater(
        models=(generator, discriminator),
        iterator=chainer.iterators.SerialIterator(pictures, 8, shuffle=False),
        optimizer=optimizers,
        device=chainer.get_device('@numpy'),
    )
    return Program(
        [generator, discriminator], update_with(updater, generator, discriminator)
    )


def gentxt(source: str, count: int) -> Program:
    """Text from a language model: 60 words with their graph, and never a backward."""
    del count
    module = example(source, 'ptb', 'train_ptb')
    model = module.RNNForLM(500, 100)

    def step(i: int) -> float:
        rng = np.random.RandomState(i)
        total = 0.0
        model.reset_state()
        word = np.array([i % 500], np.int32)
        with chainer.using_config('train', False):
            for _ in range(60):
                chances = F.softmax(model(chainer.Variable(word, requires_grad=False)))
                wanted = chances.array[0].astype(np.float64)
                wanted /= wanted.sum()
                word = rng.choice(500, 1, p=wanted).astype(np.int32)
                total += float(wanted.max())
        return total

    return Program(model, step)


def data_parallel(source: str, count: int) -> Program:
    """The perceptron under ParallelUpdater: two copies, here on one device."""
    module = example(source, 'mnist', 'train_mnist')
    rng = np.random.RandomState(1)
    pictures = [
        (rng.rand(784).astype(np.float32), np.int32(rng.randint(10)))
        for _ in range(100 * count)
    ]
    model = L.Classifier(module.MLP(1000, 10))
    updater = chainer.training.updaters.ParallelUpdater(
        chainer.iterators.SerialIterator(pictures, 100, shuffle=False),
        chainer.optimizers.Adam().setup(model),
        devices={'main': '@numpy', 'second': '@numpy'},
    )
    return Program(model, update_with(updater, *updater._models.values()))


def chainermn_mnist(source: str, count: int) -> Program:
    """The perceptron under ChainerMN, in each of the processes."""
    import chainermn

    module = example(source, 'chainermn/mnist', 'train_mnist')
    communicator = chainermn.create_communicator('naive')
    rng = np.random.RandomState(1 + communicator.rank)
    batches = [
        (
            rng.rand(100, 784).astype(np.float32),
            rng.randint(0, 10, 100).astype(np.int32),
        )
        for _ in range(count)
    ]
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), communicator
    )
    return train_on(L.Classifier(module.MLP(1000, 10)), optimizer, batches)


class _Layers(chainer.ChainList):
    """Layers of one size, applied in any order and number."""

    def __init__(self) -> None:
        super().__init__(*(L.Linear(128, 128) for _ in range(4)))

    def forward(self, x: Any, numbers: Iterable[int]) -> Any:
        for n in numbers:
            x = F.tanh(self[n](x)) + x
        return F.sum(x * x)


def all_new(source: str, count: int) -> Program:
    """A synthetic loop: layers in an order drawn anew, in batches of any size.

    No iteration has the signature of another one.
    """
    del source
    rng = np.random.RandomState(1)
    sizes = 64 + rng.permutation(max(count, 64))[:count]
    batches = [
        (
            rng.rand(int(size), 128).astype(np.float32) / 100,
            rng.randint(0, 4, 30).tolist(),
        )
        for size in sizes
    ]
    return train_on(_Layers(), chainer.optimizers.SGD(1e-6), batches)


PROGRAMS: dict[str, Callable[[str, int], Program]] = {
    program.__name__: program
    for program in (
        seq2seq, pos, sentiment, ptb, all_new, mnist, word2vec, memnn,
        text_classification, vae, dcgan, gentxt, data_parallel, chainermn_mnist,
    )
}  # fmt: skip
