"""Layouts by gluing: blocks that fill a rectangle of time and memory become one.

Three rules find them, from lives and sizes alone:

- what lives at the same time lies one above the other;
- of two blocks of one size, the second begins where the first one ends;
- five blocks are a pinwheel: one in the middle, and four around it of which each ends
  or begins with one of its sides.

Where memory is full at every moment, little else is possible; elsewhere it is a guess.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.layouts.canonical import find_sections
from chainer_hybridmem.planning.layouts.placement import Blocks


class Piece(NamedTuple):
    """A block, or several that fill a rectangle.

    Attributes:
        number (int): Of the block; of several, the least.
        begin (int): Section in which it begins.
        end (int): First section without it.
        size (int): Bytes.
        parts (tuple): Pairs of a piece and its offset; empty for a block.
    """

    number: int
    begin: int
    end: int
    size: int
    parts: tuple[tuple[Piece, int], ...] = ()


def glue(blocks: Blocks) -> tuple[Blocks, Callable[[np.ndarray], np.ndarray]]:
    """Glues blocks as long as a rule finds some; those with two intervals stay apart.

    Returns:
        tuple: What is to be placed, whose moments are sections and which has no
        members, and a function from its offsets to those of all blocks, (n,) int64.
    """
    ranges, sections = find_sections(blocks.spans)
    again = ranges[:, 3] > ranges[:, 2]
    twice = np.flatnonzero(again)
    pieces = [
        Piece(i, int(ranges[i, 0]), int(ranges[i, 1]), int(blocks.size[i]))
        for i in np.flatnonzero(~again).tolist()
    ]
    count = len(pieces) + 1
    while len(pieces) < count:
        count = len(pieces)
        pieces = _pinwheels(_stacked(_in_turn(pieces)))

    def take_apart(offset: np.ndarray) -> np.ndarray:
        result = np.zeros(len(blocks.size), np.int64)
        result[twice] = offset[len(pieces) :]
        left = list(zip(pieces, offset.tolist(), strict=False))
        while left:
            piece, where = left.pop()
            result[piece.number] = where
            left += [(part, where + above) for part, above in piece.parts]
        return result

    lives = np.array([(p.begin, p.end, 0, 0) for p in pieces], np.int64).reshape(-1, 4)
    sizes = np.array([p.size for p in pieces], np.int64)
    glued = dataclasses.replace(
        blocks,
        size=np.concatenate([sizes, blocks.size[twice]]),
        spans=np.concatenate([lives, ranges[twice]]),
        end=sections,
        members=(),
        times=np.arange(sections + 1),
    )
    return glued, take_apart


def _stacked(pieces: list[Piece]) -> list[Piece]:
    """What lives at the same time is one above the other."""
    together: dict[tuple[int, int], Piece] = {}
    for piece in pieces:
        lives = piece.begin, piece.end
        low = together.get(lives)
        if low is not None:
            parts = ((low, 0), (piece, low.size))
            piece = low._replace(size=low.size + piece.size, parts=parts)
        together[lives] = piece
    return list(together.values())


def _in_turn(pieces: list[Piece]) -> list[Piece]:
    """Of two of one size, the second begins where the first one ends."""
    ended: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        before = ended[piece.begin, piece.size]
        if before:
            first = before.pop()
            parts = ((first, 0), (piece, 0))
            piece = first._replace(end=piece.end, parts=parts)
        ended[piece.end, piece.size].append(piece)
    return [piece for group in ended.values() for piece in group]


def _pinwheels(pieces: list[Piece]) -> list[Piece]:
    """Five that are a pinwheel become one; no two live at the same time."""
    by_lives = {(p.begin, p.end): p for p in pieces}
    begun: dict[int, list[Piece]] = defaultdict(list)
    ended: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        begun[piece.begin].append(piece)
        ended[piece.end].append(piece)
    wheels = []
    for middle in pieces:
        for top, bottom in itertools.product(begun[middle.begin], ended[middle.end]):
            left = by_lives.get((bottom.begin, middle.begin))
            right = by_lives.get((middle.end, top.end))
            if left is None or right is None:
                continue
            five = (left, right, middle, top, bottom)
            lives = [(piece.begin, piece.end) for piece in five]
            free = all(by_lives.get(k) is p for k, p in zip(lives, five, strict=True))
            sizes = left.size - top.size, right.size - bottom.size
            if free and sizes == (middle.size, middle.size):
                low, high = bottom.size, bottom.size + middle.size
                parts = tuple(zip(five, (low, 0, low, high, 0), strict=True))
                whole = (bottom.number, bottom.begin, top.end, high + top.size, parts)
                wheels.append(Piece(*whole))
                for key in lives:
                    del by_lives[key]
                break
    return [*by_lives.values(), *wheels]
