"""Memory of functions in parts, extrapolated to any batch size.

A batch of B samples in p parts has r = ⌈B/p⌉ samples in its largest part. Whole outputs
grow with B and the temporaries of a part with r, so that the highest load is

    peak(B, r) = c + a B + b r

in each stage of the function: which stage needs most may change with the batch. Two
recordings tell a, b and c where they have tried enough numbers of parts, and every
point more is a test of the formula. NumPy reuses the memory of large temporaries, and a
part of one sample may need no copies, so that the formula may differ between ranges of
r; what lies between two ranges is left out. Where memory depends on the data (LeakyReLU
copies the negative numbers), a plane near all points counts, raised above them. Cut
along channels, the load is affine in B for each number of parts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from chainer_hybridmem.records.profile import Profile, Split

_Group = tuple[int, int, str, str, bool]  # operation, function, class, cut, exact
_Point = tuple[int, int, int]  # B, r, peak in bytes
_Points = tuple[int, int, tuple[int, ...]]  # B, r, peaks of the stages in bytes
_Formula = tuple[Fraction, Fraction, Fraction]  # c, a, b
TESTED_SIZES = 3  # of parts: with two, a step between them looks like a slope
NEAR = 0.01  # of the load
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
                    template, parts=parts, peak_bytes=max(0, math.ceil(peak))
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
        if large[0].cut == WINDOWS:  # one sample at a time
            formulas = _fit_stages(points, _line)
            if formulas is not None and batchsize > 1:
                yield batchsize, max(c + a * batchsize for c, a, _ in formulas)
            return
        ranges = list(_ranges(points)) or list(_near_range(points))
        least = min(2, min(r for _, r, _ in points))
        parts = 2
        while parts * least <= batchsize:  # as many as a session tries
            r = -(-batchsize // parts)
            for first, last, formulas in ranges:
                if first <= r <= last:
                    yield parts, max(c + a * batchsize + b * r for c, a, b in formulas)
            parts *= 2


def _stages(split: Split) -> tuple[int, ...]:
    return split.stages or (split.peak_bytes,)


def _grouped(splits: Sequence[Split]) -> dict[_Group, list[Split]]:
    groups: dict[_Group, list[Split]] = {}
    for s in splits:
        key = s.operation, s.function, s.name, s.cut, s.exact
        groups.setdefault(key, []).append(s)
    return groups


def _ranges(points: Sequence[_Points]) -> Iterator[tuple[int, float, list[_Formula]]]:
    """Ranges of r with one formula: the first r, the last one, the formulas."""
    sizes = sorted({r for _, r, _ in points})
    begin = 0
    while begin < len(sizes):
        for end in range(len(sizes), begin, -1):
            inside = [p for p in points if sizes[begin] <= p[1] <= sizes[end - 1]]
            whole = (begin, end) == (0, len(sizes))
            formulas = None
            if whole or (end - begin >= TESTED_SIZES and len(inside) > TESTED_SIZES):
                formulas = _fit_stages(inside, _plane)
            if formulas is not None:
                first = 1 if begin == 0 else sizes[begin]
                last = math.inf if end == len(sizes) else sizes[end - 1]
                yield first, last, formulas
                break
        begin = end if formulas is not None else begin + 1


def _near_range(
    points: Sequence[_Points],
) -> Iterator[tuple[int, float, list[_Formula]]]:
    """One range for all r, if a plane is near all points of each stage."""
    formulas = _fit_stages(points, _near_plane)
    if formulas is not None:
        yield 1, math.inf, formulas


def _fit_stages(
    points: Sequence[_Points], fit: Callable[[Sequence[_Point]], _Formula | None]
) -> list[_Formula] | None:
    """The formula of each stage; None if one has none."""
    formulas = [
        fit([(b, r, stages[i]) for b, r, stages in points])
        for i in range(len(points[0][2]))
    ]
    found = [formula for formula in formulas if formula is not None]
    return found if len(found) == len(formulas) else None


def _line(points: Sequence[_Point]) -> _Formula | None:
    """``(c, a, 0)`` that all points agree on; None if there is none."""
    peaks = {b: peak for b, _, peak in points}
    if len(peaks) < 2:
        return None
    (b1, p1), (b2, p2) = sorted(peaks.items())[:2]
    slope = Fraction(p2 - p1, b2 - b1)
    formula = p1 - slope * b1, slope, Fraction(0)
    return formula if _agree(formula, points) else None


def _plane(points: Sequence[_Point]) -> _Formula | None:
    """``(c, a, b)`` that all points agree on; None if there is none, or several."""
    for three in itertools.combinations(points, 3):
        formula = _through(*three)
        if formula is not None:
            return formula if _agree(formula, points) else None
    return None


def _near_plane(points: Sequence[_Point]) -> _Formula | None:
    """The plane of least squares, raised above all points; None if it is not near."""
    factors = np.array([(1.0, b, r) for b, r, _ in points])
    peaks = np.array([float(peak) for _, _, peak in points])
    plane, _, rank, _ = np.linalg.lstsq(factors, peaks, rcond=None)
    missing = peaks - factors @ plane
    if rank < 3 or len(points) <= TESTED_SIZES or abs(missing / peaks).max() > NEAR:
        return None
    c, a, b = (Fraction(float(value)) for value in plane)
    return c + Fraction(float(missing.max())), a, b


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
