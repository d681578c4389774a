"""Layouts drawn from a seed, whose optimum is known: a rectangle cut into buffers.

Time and memory are the sides of a rectangle, and every piece is a buffer: its lifetime
and its size. All memory is taken at every moment, so the rectangle's height is the
optimum. Pieces are cut in two from edge to edge (guillotine), along one of the two
sides, or into four blades around a piece in the middle (pinwheel), which no straight
cut goes through. Both ideas are those of omnimalloc's sources ``tiling`` and
``pinwheel`` (github.com/fpedd/omnimalloc), and so are the measures. Of a tiling of
either with gaps, up to half of the pieces are left out, but none of one moment, at
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


class Piece(NamedTuple):
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
    """The tiling of a seed: 100 to 2,000 pieces, each kind in turn."""
    rng, kind = random.Random(f'tiling {seed}'), KINDS[seed % len(KINDS)]
    count = rng.randint(LEAST_BUFFERS, MOST_BUFFERS)
    cuts = {'guillotine': _cut_in_two, 'pinwheel': _cut_pinwheel}
    cut = cuts.get(kind) or rng.choice(list(cuts.values()))
    pieces = [Piece(0, TIME, 0, MEMORY_BYTES)]
    while len(pieces) < count:
        areas = [(p.end - p.begin) * (p.high - p.low) for p in pieces]
        (chosen,) = rng.choices(range(len(pieces)), areas)
        pieces[chosen : chosen + 1] = cut(pieces[chosen], rng)
    rng.shuffle(pieces)
    if kind == 'gaps':
        share, full = rng.uniform(0, MOST_LEFT_OUT), rng.randrange(TIME)
        kept = [p.begin <= full < p.end or rng.random() >= share for p in pieces]
        pieces = list(itertools.compress(pieces, kept))
    sizes = [p.high - p.low for p in pieces]
    trace = from_lifetimes(sizes, [p.begin for p in pieces], [p.end for p in pieces])
    return Tiling(kind, trace, tuple(p.low for p in pieces))


def _cut_in_two(piece: Piece, rng: random.Random) -> list[Piece]:
    """Two pieces, one after the other or one above the other; or what is too small."""
    begin, end, low, high = piece
    sides = [end - begin >= 2, high - low >= 2 * LEAST_BYTES]
    if not any(sides):
        return [piece]
    if rng.choice([side for side, fits in enumerate(sides) if fits]):
        level = rng.randint(low + LEAST_BYTES, high - LEAST_BYTES)
        return [piece._replace(high=level), piece._replace(low=level)]
    moment = rng.randint(begin + 1, end - 1)
    return [piece._replace(end=moment), piece._replace(begin=moment)]


def _cut_pinwheel(piece: Piece, rng: random.Random) -> list[Piece]:
    """Four blades around a piece in the middle; or what is too small."""
    begin, end, low, high = piece
    if end - begin < 3 or high - low < 3 * LEAST_BYTES:
        return [piece]
    width = rng.randint(1, (end - begin - 1) // 2)
    height = rng.randint(LEAST_BYTES, (high - low - LEAST_BYTES) // 2)
    left, right, above, below = begin + width, end - width, low + height, high - height
    return [
        Piece(begin, left, above, high),
        Piece(left, end, below, high),
        Piece(right, end, low, below),
        Piece(begin, right, low, above),
        Piece(left, right, above, below),
    ]
