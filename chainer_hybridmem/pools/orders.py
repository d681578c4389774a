"""Ways to place blocks one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.pools import placement
from chainer_hybridmem.pools.blocks import Blocks
from chainer_hybridmem.pools.placement import BEST_FIT, FIRST_FIT


class Start(NamedTuple):
    """One way to place."""

    name: str
    order: np.ndarray  # (n,) int64
    fit: int
    above: np.ndarray  # (n,) bool, see placement


class Found(NamedTuple):
    """What it leads to."""

    nbytes: int
    offset: np.ndarray  # (n,) int64
    start: Start


def place_in_order(blocks: Blocks, start: Start) -> Found:
    """Places the blocks."""
    n = len(blocks.size)
    offset, work = np.zeros(n, np.int64), np.zeros(n, np.int64)
    nbytes = placement.place(
        start.order,
        blocks.size,
        blocks.spans,
        start.fit,
        start.above,
        blocks.capacity,
        offset,
        work,
    )
    return Found(nbytes, offset, start)


def list_starts(blocks: Blocks) -> Iterator[Start]:
    """Ways to place that are worth a try, SmartPool's first.

    In the last ones, what lives shorter than the mean goes to the top of the pool.
    """
    length = blocks.lengths()
    nowhere = np.zeros(len(length), bool)
    short = length < length.mean() if len(length) else nowhere
    for above, where in ((nowhere, ''), (short, ', short ones above')):
        for name, order in _orders(blocks, length):
            yield Start(f'{name}, best fit{where}', order, BEST_FIT, above)
            yield Start(f'{name}, first fit{where}', order, FIRST_FIT, above)


def _orders(blocks: Blocks, length: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    size, start, end = blocks.size, blocks.spans[:, 0], blocks.spans[:, 1]
    highest = blocks.highest_loads()
    yield 'size', np.lexsort((start, -length, -size))
    yield 'load and size', np.lexsort((start, -length, -size, -highest))
    yield 'lifetime', np.lexsort((start, -size, -length))
    yield 'area', np.lexsort((start, -(size * length.astype(float))))
    yield 'load and lifetime', np.lexsort((start, -size, -length, -highest))
    yield 'start', np.lexsort((-size, -length, start))
    yield 'end', np.lexsort((-size, -length, -end))
