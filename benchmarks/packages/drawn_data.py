"""Data for Chainer's examples: what they would download, small and drawn at random."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable

import numpy as np

IMAGES, TEST_IMAGES = 320, 64
DIGITS, TEST_DIGITS = 4000, 400
WORDS, TEST_WORDS = 20_000, 1000
VOCABULARY = 500
TREES, TEST_TREES = 200, 20
STORIES, SENTENCES = 100, 200


def draw(datasets: pathlib.Path, examples: pathlib.Path) -> None:
    """Writes all of it.

    Args:
        datasets: Becomes ``CHAINER_DATASET_ROOT``.
        examples: A copy of Chainer's examples, some of which read files beside them.
    """
    rng = np.random.RandomState(0)
    _draw_digits(rng, datasets / 'pfnet/chainer/mnist')
    _draw_images(rng, datasets / 'pfnet/chainer/cifar')
    _draw_words(rng, datasets / 'pfnet/chainer/ptb')
    _draw_trees(rng, examples / 'sentiment/trees')
    _draw_stories(rng, examples / 'memnn')
    _draw_sentences(rng, examples / 'seq2seq')


def _pixels(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    return rng.randint(0, 256, shape).astype(np.uint8)


def _labels(rng: np.random.RandomState, count: int) -> np.ndarray:
    return rng.randint(0, 10, count).astype(np.uint8)


def _draw_digits(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for name, count in (('train', DIGITS), ('test', TEST_DIGITS)):
        np.savez(folder / name, x=_pixels(rng, count, 784), y=_labels(rng, count))


def _draw_images(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    np.savez(
        folder / 'cifar-10',
        train_x=_pixels(rng, IMAGES, 3072),
        train_y=_labels(rng, IMAGES),
        test_x=_pixels(rng, TEST_IMAGES, 3072),
        test_y=_labels(rng, TEST_IMAGES),
    )


def _draw_words(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    counts = {'train': WORDS, 'valid': TEST_WORDS, 'test': TEST_WORDS}
    for name, count in counts.items():
        words = rng.randint(0, VOCABULARY, count).astype(np.int32)
        words[-VOCABULARY:] = np.arange(VOCABULARY)
        np.savez(folder / name, x=words)
    _write(folder / 'vocab.txt', (f'w{i}' for i in range(VOCABULARY)))


def _draw_trees(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)

    def tree(leaves: int) -> str:
        if leaves == 1:
            return f'({rng.randint(5)} w{rng.randint(VOCABULARY)})'
        left = rng.randint(1, leaves)
        return f'({rng.randint(5)} {tree(left)} {tree(leaves - left)})'

    for name, count in (('train', TREES), ('dev', TEST_TREES), ('test', TEST_TREES)):
        _write(folder / f'{name}.txt', (tree(rng.randint(2, 12)) for _ in range(count)))


def _draw_stories(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    people, rooms = ('mary', 'john', 'sandra'), ('kitchen', 'garden', 'office', 'hall')

    def story() -> Iterable[str]:
        for first in range(1, 12, 3):
            who = [people[i] for i in rng.randint(3, size=2)]
            where = [rooms[i] for i in rng.randint(4, size=2)]
            for number in (0, 1):
                yield f'{first + number} {who[number]} went to the {where[number]}.'
            yield f'{first + 2} Where is {who[1]}?\t{where[1]}\t{first + 1}'

    for name in ('train', 'test'):
        stories = (story() for _ in range(STORIES))
        _write(folder / f'{name}.txt', itertools.chain.from_iterable(stories))


def _draw_sentences(rng: np.random.RandomState, folder: pathlib.Path) -> None:
    def sentence() -> str:
        return ' '.join(
            f'w{i}' for i in rng.randint(VOCABULARY, size=rng.randint(3, 9))
        )

    for name in ('source', 'target'):
        _write(folder / f'{name}.txt', (sentence() for _ in range(SENTENCES)))
        _write(folder / f'{name}-vocabulary.txt', (f'w{i}' for i in range(VOCABULARY)))


def _write(path: pathlib.Path, lines: Iterable[str]) -> None:
    path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
