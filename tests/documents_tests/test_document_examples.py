"""Python examples of README and guide run, with a small model that fits."""

from __future__ import annotations

import pathlib
import re

import pytest

import chainer_hybridmem as hybridmem

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import StandardUpdater, Trainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs' / 'guide').glob('*.md'))]
RUNNABLE = re.compile(r'^```python\n(.*?)^```', re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(page, number, id=f'{page.stem}-{number}')
    for page in PAGES
    for number in range(len(RUNNABLE.findall(page.read_text())))
]
BATCH = 4


def names() -> dict[str, object]:
    """What the examples take for granted."""
    model = L.Classifier(
        chainer.Sequential(L.Linear(6, 8), F.relu, L.Linear(8, 3)), label_key=-1
    )
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    rng = np.random.RandomState(0)
    x = rng.rand(BATCH, 6).astype(np.float32)
    t = rng.randint(0, 3, BATCH).astype(np.int32)
    dataset = chainer.datasets.TupleDataset(x, t)
    iterator = chainer.iterators.SerialIterator(dataset, BATCH)
    trainer = Trainer(StandardUpdater(iterator, optimizer), (3, 'iteration'))
    return {
        'hybridmem': hybridmem,
        'chainer': chainer,
        'model': model.predictor,
        'optimizer': optimizer,
        'trainer': trainer,
        'x': x,
    }


@pytest.mark.parametrize(('page', 'number'), EXAMPLES)
def test_example_runs(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = RUNNABLE.findall(page.read_text())[number]
    exec(compile(source, f'{page.name}, example {number}', 'exec'), names())
