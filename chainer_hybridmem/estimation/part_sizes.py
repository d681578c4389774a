"""Memory of functions in parts, extrapolated to any batch size.

A batch of B samples in p parts has r = ⌈B/p⌉ samples in its largest part. Whole outputs
grow with B and the temporaries of a part with r, so that the highest load is

    peak(B, r) = c + a B + b r

in each stage of the function: which stage needs most may change with the batch. Two
recordings tell a, b and c where they have tried enough numbers of parts, and every
point more is a test of the formula. Cut along channels, the load is affine in B for
each number of parts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil

from chainer_hybridmem.records.profile import Profile, Split

_Group = tuple[int, int, str, str, bool]  # operation, function, class, cut, exact
_Point = tuple[int, int, int]  # B, r, peak in bytes
_Formula = tuple[Fraction, Fraction, Fraction]  # c, a, b
CHANNELS = 'channels'
WINDOWS = 'windows'


class PartSizes:
    """Splits that two samples tell about.

    Args:
        small (Profile): With the smaller batch.
        large (Profile): With the larger batch.
        batchsizes (tuple of int): Of both.
    """

    def __init__(
        self, small: Profile, large: Profile, batchsizes: tuple[int, int]
    ) -> None:
        self._batchsizes = batchsizes
        self._small = _grouped(small.splits)
        self._large = _grouped(large.splits)

    def at(self, batchsize: int, splits: Sequence[Split]) -> Iterator[Split]:
        """Splits with a batch size, those of a function by their number.

        Args:
            batchsize: Any.
            splits: Those of the larger sample, with the storages of the profile that
                the result is for.
        """
        for group, splits_there in _grouped(splits).items():
            template = splits_there[0]
            small, large = self._small.get(group, []), self._large[group]
            if group[3] == CHANNELS:
                found = self._in_channels(small, large, batchsize)
            else:
                found = self._in_samples(small, large, batchsize)
            for parts, peak in found:
                yield dataclasses.replace(
                    template, parts=parts, peak_bytes=max(0, ceil(peak))
                )

    def _in_channels(
        self, small: Sequence[Split], large: Sequence[Split], batchsize: int
    ) -> Iterator[tuple[int, Fraction]]:
        b1, b2 = self._batchsizes
        before = {split.parts: _stages(split) for split in small}
        for split in large:
            pairs = list(zip(before.get(split.parts, ()), _stages(split), strict=False))
            if pairs:
                yield (
                    split.parts,
                    max(
                        n2 + Fraction(n2 - n1, b2 - b1) * (batchsize - b2)
                        for n1, n2 in pairs
                    ),
                )

    def _in_samples(
        self, small: Sequence[Split], large: Sequence[Split], batchsize: int
    ) -> Iterator[tuple[int, Fraction]]:
        points = [
            (b, b // split.parts, _stages(split))
            for b, splits in zip(self._batchsizes, (small, large), strict=True)
            for split in splits
            if b % split.parts == 0
        ]
        if len({len(stages) for _, _, stages in points}) != 1:
            return
        least = min(2, min(r for _, r, _ in points))
        formulas = _fit_stages(points)
        if formulas is None and least == 1:
            # A matrix product of one sample alone may do without copies.
            least, points = 2, [point for point in points if point[1] > 1]
            formulas = _fit_stages(points)
        if formulas is None:
            return
        for parts in _numbers(large[0].cut, least, batchsize):
            r = -(-batchsize // parts)
            yield parts, max(c + a * batchsize + b * r for c, a, b in formulas)


def _stages(split: Split) -> tuple[int, ...]:
    return split.stages or (split.peak_bytes,)


def _grouped(splits: Sequence[Split]) -> dict[_Group, list[Split]]:
    groups: dict[_Group, list[Split]] = {}
    for s in splits:
        key = s.operation, s.function, s.name, s.cut, s.exact
        groups.setdefault(key, []).append(s)
    return groups


def _numbers(cut: str, least: int, batchsize: int) -> Iterator[int]:
    """Numbers of parts that a session tries."""
    if cut == WINDOWS:  # one sample at a time
        if batchsize > 1:
            yield batchsize
        return
    parts = 2
    while parts * least <= batchsize:
        yield parts
        parts *= 2


def _fit_stages(
    points: Sequence[tuple[int, int, tuple[int, ...]]],
) -> list[_Formula] | None:
    """The formula of each stage; None if one has none."""
    if not points:
        return None
    formulas = [
        _fit([(b, r, stages[i]) for b, r, stages in points])
        for i in range(len(points[0][2]))
    ]
    found = [formula for formula in formulas if formula is not None]
    return found if len(found) == len(formulas) else None


def _fit(points: Sequence[_Point]) -> _Formula | None:
    """``(c, a, b)`` that all points agree on; None if there are none, or several."""
    if len({b for b, _, _ in points}) < 2:
        return None
    if len({r for _, r, _ in points}) == 1:
        pairs = {b: peak for b, _, peak in points}
        (b1, p1), (b2, p2) = sorted(pairs.items())[:2]
        slope = Fraction(p2 - p1, b2 - b1)
        formula = p1 - slope * b1, slope, Fraction(0)
        return formula if _agree(formula, points) else None
    for three in itertools.combinations(points, 3):
        formula3 = _through(*three)
        if formula3 is not None:
            return formula3 if _agree(formula3, points) else None
    return None


def _agree(formula: _Formula, points: Sequence[_Point]) -> bool:
    c, a, b = formula
    return all(c + a * batch + b * r == peak for batch, r, peak in points)


def _through(p: _Point, q: _Point, s: _Point) -> _Formula | None:
    """The plane through three points by Cramer's rule; None if they are in line."""
    (b1, r1, y1), (b2, r2, y2), (b3, r3, y3) = p, q, s
    area = (b2 - b1) * (r3 - r1) - (b3 - b1) * (r2 - r1)
    if area == 0:
        return None
    a = Fraction((y2 - y1) * (r3 - r1) - (y3 - y1) * (r2 - r1), area)
    b = Fraction((b2 - b1) * (y3 - y1) - (b3 - b1) * (y2 - y1), area)
    return y1 - a * b1 - b * r1, a, b
