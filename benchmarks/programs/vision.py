"""Programs about pictures and sound: Chainer's larger examples, and chainercv's.

As in models.py. chainercv is imported from a source tree beside Chainer's, or from
where it is installed; its one Cython module is of use on a GPU only and may be missing.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from benchmarks.programs import models


def _pictures(count: int, size: int, labels: int, batch: int) -> list[Any]:
    rng = np.random.RandomState(1)
    return [
        (
            rng.rand(batch, 3, size, size).astype(np.float32),
            rng.randint(0, labels, batch).astype(np.int32),
        )
        for _ in range(count)
    ]


def cifar(source: str, count: int) -> models.Program:
    """The VGG network for pictures of 32 x 32, with its dropout."""
    module = models.example(source, 'cifar/models', 'VGG')
    model = L.Classifier(module.VGG(10))
    return models.train_on(
        model, chainer.optimizers.MomentumSGD(0.01), _pictures(count, 32, 10, 16)
    )


def _imagenet(source: str, count: int, name: str, network: str) -> models.Program:
    module = models.example(source, 'imagenet', name)
    model = getattr(module, network)()
    return models.train_on(
        model,
        chainer.optimizers.MomentumSGD(0.001),
        _pictures(count, model.insize, 1000, 2),
    )


def nin(source: str, count: int) -> models.Program:
    """Network in network, 227 x 227."""
    return _imagenet(source, count, 'nin', 'NIN')


def googlenet(source: str, count: int) -> models.Program:
    """GoogLeNet with its three losses, 224 x 224."""
    return _imagenet(source, count, 'googlenet', 'GoogLeNet')


def resnet50(source: str, count: int) -> models.Program:
    """ResNet-50, 224 x 224."""
    return _imagenet(source, count, 'resnet50', 'ResNet50')


def wavenet(source: str, count: int) -> models.Program:
    """Dilated convolutions over 1,024 samples of sound."""
    module = models.example(source, 'wavenet', 'net')
    rng = np.random.RandomState(1)
    encoder = module.UpsampleNet(10, 32, [32, 32], [8, 8])
    decoder = module.WaveNet(2, 5, 64, 32, 64, False)
    model = L.Classifier(module.EncoderDecoderModel(encoder, decoder))
    batches = []
    for _ in range(count):
        sound = rng.randint(0, 64, (2, 1025))
        one_hot = np.eye(64, dtype=np.float32)[sound[:, :-1]].transpose(0, 2, 1)
        condition = rng.rand(2, 20, 16).astype(np.float32)
        batches.append((one_hot.copy(), condition, sound[:, 1:].astype(np.int32)))
    return models.train_on(model, chainer.optimizers.Adam(1e-4), batches)


def image_captioning(source: str, count: int) -> models.Program:
    """The captions' LSTM with dropout: lengths differ from batch to batch."""
    module = models.example(source, 'image_captioning', 'model')
    rng = np.random.RandomState(1)
    model = module.LSTMLanguageModel(500, 128, 0.5, -1)
    batches = [
        (
            rng.rand(16, 256).astype(np.float32),
            rng.randint(0, 500, (16, rng.randint(8, 20))).astype(np.int32),
        )
        for _ in range(count)
    ]
    return models.train_on(model, chainer.optimizers.Adam(), batches)


def pix2pix(source: str, count: int) -> models.Program:
    """Pictures to pictures: three networks, three losses, graphs cut in between."""
    net = models.example(source, 'pix2pix', 'net')
    module = models.example(source, 'pix2pix', 'updater')
    rng = np.random.RandomState(1)
    pairs = [
        (
            rng.rand(12, 256, 256).astype(np.float32),
            rng.rand(3, 256, 256).astype(np.float32),
        )
        for _ in range(2)
    ] * count
    links = (net.Encoder(12), net.Decoder(3), net.Discriminator(12, 3))
    optimizers = {
        name: chainer.optimizers.Adam(alpha=0.0002, beta1=0.5).setup(link)
        for name, link in zip(('enc', 'dec', 'dis'), links, strict=True)
    }
    updater = module.FacadeUpdater(
        models=links,
        iterator={'main': chainer.iterators.SerialIterator(pairs, 1, shuffle=False)},
        optimizer=optimizers,
        device=chainer.get_device('@numpy'),
    )
    return models.Program(list(links), models.update_with(updater, *links))


def dqn(source: str, count: int) -> models.Program:
    """Reinforcement learning: four forwards and one backward per step."""
    with _stand_in('gym'):
        module = models.example(source, 'reinforcement_learning', 'dqn_cartpole')
    rng = np.random.RandomState(1)
    model = module.QFunction(4, 2, n_units=200)
    target = copy.deepcopy(model)
    optimizer = chainer.optimizers.Adam(eps=1e-2).setup(model)
    memory = [
        (rng.rand(4), rng.randint(2), rng.rand(), rng.rand() < 0.1, rng.rand(4))
        for _ in range(128 * count)
    ]

    def step(i: int) -> float:
        samples = memory[128 * i : 128 * (i + 1)]
        module.update(model, target, optimizer, samples)
        return float(sum(float(np.abs(p.grad).sum()) for p in model.params()))

    return models.Program(model, step)


def static_graph(source: str, count: int) -> models.Program:
    """A perceptron under Chainer's ``@static_graph``."""
    folder = 'static_graph_optimizations/mnist'
    module = _module_of(source, folder, 'train_mnist', 'static_graph_mnist')
    rng = np.random.RandomState(1)
    batches = [
        (
            rng.rand(100, 784).astype(np.float32),
            rng.randint(0, 10, 100).astype(np.int32),
        )
        for _ in range(count)
    ]
    model = L.Classifier(module.MLP(500, 10))
    return models.train_on(model, chainer.optimizers.Adam(), batches)


def _module_of(source: str, folder: str, file: str, name: str) -> Any:
    """A module whose file has the name of another example's."""
    path = os.path.join(source, 'examples', folder, f'{file}.py')
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _stand_in(name: str) -> Iterator[None]:
    """A module that an example imports and that what runs here does not use."""
    missing = importlib.util.find_spec(name) is None
    if missing:
        sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        if missing:
            del sys.modules[name]


def _chainercv(source: str) -> Any:
    """chainercv, from a tree beside Chainer's or installed.

    Raises:
        ImportError: If it is in neither place.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(source)), 'chainercv')
    if os.path.isdir(beside) and beside not in sys.path:
        sys.path.insert(0, beside)
    if importlib.util.find_spec('chainercv') is None:
        raise ImportError(
            f'chainercv is not installed, and {beside} does not exist; put its source '
            f'tree there.'
        )
    return importlib.import_module('chainercv.links')


def _boxes(rng: np.random.RandomState, size: int) -> np.ndarray:
    """(3, 4) boxes of a picture: top, left, bottom, right."""
    corner = rng.rand(3, 2) * size / 2
    extent = size / 8 + rng.rand(3, 2) * size / 3
    return np.hstack([corner, corner + extent]).astype(np.float32)


def ssd300(source: str, count: int) -> models.Program:
    """SSD300: one shot detection of boxes, its loss mines negatives."""
    links = _chainercv(source)
    ssd = importlib.import_module('chainercv.links.model.ssd')
    rng = np.random.RandomState(1)
    model = links.SSD300(n_fg_class=3)
    optimizer = chainer.optimizers.MomentumSGD(1e-4).setup(model)
    pictures = [rng.rand(1, 3, 300, 300).astype(np.float32) for _ in range(count)]
    targets = [
        model.coder.encode(_boxes(rng, 300), rng.randint(0, 3, 3).astype(np.int32))
        for _ in range(count)
    ]

    def step(i: int) -> float:
        locs, confidences = model(pictures[i])
        loc, label = targets[i]
        losses = ssd.multibox_loss(locs, confidences, loc[None], label[None], 3)
        loss = losses[0] + losses[1]
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return float(loss.array)

    return models.Program(model, step)


def segnet(source: str, count: int) -> models.Program:
    """SegNet: what max pooling has chosen crosses to the unpooling half."""
    links = _chainercv(source)
    rng = np.random.RandomState(1)
    network = links.SegNetBasic(n_class=4)
    model = L.Classifier(network)
    model.compute_accuracy = False
    batches = [
        (
            rng.rand(2, 3, 96, 96).astype(np.float32),
            rng.randint(0, 4, (2, 96, 96)).astype(np.int32),
        )
        for _ in range(count)
    ]
    return models.train_on(model, chainer.optimizers.MomentumSGD(0.01), batches)


def faster_rcnn(source: str, count: int) -> models.Program:
    """Faster R-CNN: proposals, and with them shapes, differ in every iteration."""
    links = _chainercv(source)
    module = importlib.import_module('chainercv.links.model.faster_rcnn')
    rng = np.random.RandomState(1)
    network = links.FasterRCNNVGG16(n_fg_class=3, min_size=160, max_size=240)
    model = module.FasterRCNNTrainChain(network)
    batches = [
        (
            rng.rand(1, 3, 160, 208).astype(np.float32),
            _boxes(rng, 160)[None],
            rng.randint(0, 3, (1, 3)).astype(np.int32),
            np.ones(1, np.float32),
        )
        for _ in range(count)
    ]
    return models.train_on(model, chainer.optimizers.MomentumSGD(1e-4), batches)


def yolo_v2(source: str, count: int) -> models.Program:
    """YOLO v2's network; chainercv has no loss for it, squares stand in."""
    links = _chainercv(source)
    rng = np.random.RandomState(1)
    model = links.YOLOv2(n_fg_class=3)
    optimizer = chainer.optimizers.MomentumSGD(1e-6).setup(model)
    pictures = [rng.rand(1, 3, 416, 416).astype(np.float32) for _ in range(count)]

    def step(i: int) -> float:
        loss = sum(F.mean(y * y) for y in model(pictures[i]))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        return float(loss.array)

    return models.Program(model, step)


PROGRAMS = {
    program.__name__: program
    for program in (
        cifar, nin, googlenet, resnet50, wavenet, image_captioning, pix2pix, dqn,
        static_graph, ssd300, segnet, faster_rcnn, yolo_v2,
    )
}  # fmt: skip
SLOW = ('nin', 'googlenet', 'resnet50', 'pix2pix', 'ssd300', 'faster_rcnn', 'yolo_v2')
