"""Layouts drawn from a seed, whose optimum is known: a rectangle cut into buffers.

Time and memory are the sides of a rectangle, and every tile is a buffer: its lifetime
and its size. All memory is taken at every moment, so the rectangle's height is the
optimum. Pieces are cut in two from edge to edge (guillotine), along one of the two
sides, or into four blades around a tile in the middle (pinwheel), which no straight
cut goes through. Both ideas are those of omnimalloc's sources ``tiling`` and
``pinwheel`` (github.com/fpedd/omnimalloc), and so are the measures. Of a tiling of
either with gaps, up to half of the tiles are left out, but none of one moment, at
which all memory is taken still.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

from chainer_hybridmem.planning.layouts.trace import Trace, from_lifetimes

LEAST_BUFFERS, MOST_BUFFERS = 100, 2000
MEMORY_BYTES = 2**20
TIME = 2**20
LEAST_BYTES = 2**10
MOST_LEFT_OUT = 0.5
KINDS = ('guillotine', 'pinwheel', 'gaps')


class Tile(NamedTuple):
    """A buffer: moments ``[begin, end)``, bytes ``[low, high)``."""

    begin: int
    end: int
    low: int
    high: int


class Tiling(NamedTuple):
    """Buffers in any order, with the offsets of a layout that nothing is smaller than.

    Attributes:
        kind (str): One of :data:`KINDS`.
        trace (Trace): What is to be laid out.
        offsets (tuple of int): Of a layout of :data:`MEMORY_BYTES`.
    """

    kind: str
    trace: Trace
    offsets: tuple[int, ...]


def draw_tiling(seed: int) -> Tiling:
    """The tiling of a seed: 100 to 2,000 tiles, each kind in turn."""
    rng, kind = random.Random(f'tiling {seed}'), KINDS[seed % len(KINDS)]
    count = rng.randint(LEAST_BUFFERS, MOST_BUFFERS)
    cuts = {'guillotine': _cut_in_two, 'pinwheel': _cut_pinwheel}
    cut = cuts.get(kind) or rng.choice(list(cuts.values()))
    tiles = [Tile(0, TIME, 0, MEMORY_BYTES)]
    while len(tiles) < count:
        areas = [(p.end - p.begin) * (p.high - p.low) for p in tiles]
        (chosen,) = rng.choices(range(len(tiles)), areas)
        tiles[chosen : chosen + 1] = cut(tiles[chosen], rng)
    rng.shuffle(tiles)
    if kind == 'gaps':
        share, full = rng.uniform(0, MOST_LEFT_OUT), rng.randrange(TIME)
        kept = [p.begin <= full < p.end or rng.random() >= share for p in tiles]
        tiles = list(itertools.compress(tiles, kept))
    sizes = [p.high - p.low for p in tiles]
    trace = from_lifetimes(sizes, [p.begin for p in tiles], [p.end for p in tiles])
    return Tiling(kind, trace, tuple(p.low for p in tiles))


def _cut_in_two(tile: Tile, rng: random.Random) -> list[Tile]:
    """Two tiles, one after the other or one above the other; or what is too small."""
    begin, end, low, high = tile
    sides = [end - begin >= 2, high - low >= 2 * LEAST_BYTES]
    if not any(sides):
        return [tile]
    if rng.choice([side for side, fits in enumerate(sides) if fits]):
        level = rng.randint(low + LEAST_BYTES, high - LEAST_BYTES)
        return [tile._replace(high=level), tile._replace(low=level)]
    moment = rng.randint(begin + 1, end - 1)
    return [tile._replace(end=moment), tile._replace(begin=moment)]


def _cut_pinwheel(tile: Tile, rng: random.Random) -> list[Tile]:
    """Four blades around a tile in the middle; or what is too small."""
    begin, end, low, high = tile
    if end - begin < 3 or high - low < 3 * LEAST_BYTES:
        return [tile]
    width = rng.randint(1, (end - begin - 1) // 2)
    height = rng.randint(LEAST_BYTES, (high - low - LEAST_BYTES) // 2)
    left, right, above, below = begin + width, end - width, low + height, high - height
    return [
        Tile(begin, left, above, high),
        Tile(left, end, below, high),
        Tile(right, end, low, below),
        Tile(begin, right, low, above),
        Tile(left, right, above, below),
    ]
