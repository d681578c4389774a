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
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.profile import Profile, Split
from chainer_hybridmem.planning.records.splits import IN_PLACE

_Group = tuple[int, int, str, str, bool]  # operation, function, class, cut, exact
_Point = tuple[int, int, int]  # B, r, peak in bytes
_Points = tuple[int, int, tuple[int, ...]]  # B, r, peaks of the stages in bytes
_Formula = tuple[Fraction, Fraction, Fraction]  # c, a, b
TESTED_SIZES = 3  # of parts: with two, a step between them looks like a slope
NEAR = 0.01  # of the load
CHANNELS = 'channels'
WINDOWS = 'windows'
BY_NUMBER = CHANNELS, IN_PLACE  # what depends on the number of parts, not their size


class _Range(NamedTuple):
    """Where one formula holds in each stage.

    Attributes:
        first (int): Smallest r; of channels, the number of parts.
        last (float): Largest one.
        formulas (list): One for each stage.
    """

    first: int
    last: float
    formulas: list[_Formula]

    def peak_bytes(self, batchsize: int, r: int) -> int:
        """Highest load with a batch size, rounded up."""
        peak = max(c + a * batchsize + b * r for c, a, b in self.formulas)
        return max(0, math.ceil(peak))


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
        samples = [_grouped(profile.splits) for profile in (small, large)]
        self._points: dict[_Group, list[_Points]] = {
            group: [
                (b, split.parts if group[3] in BY_NUMBER else b // split.parts, stages)
                for b, sample in zip(batchsizes, samples, strict=True)
                for split in sample.get(group, ())
                if group[3] in BY_NUMBER or b % split.parts == 0
                for stages in [split.stages or (split.peak_bytes,)]
            ]
            for group in samples[1]
        }
        self._ranges = {
            group: list(_find_ranges(group[3], points))
            for group, points in self._points.items()
        }

    def at(self, batchsize: int, splits: Sequence[Split]) -> Iterator[Split]:
        """Splits with a batch size, those of a function by their number.

        Args:
            batchsize: Any.
            splits: Those of the larger sample, with the storages of the profile that
                the result is for.
        """
        for group, there in _grouped(splits).items():
            for parts, r in self._numbers(group, batchsize):
                for found in self._ranges[group]:
                    if found.first <= r <= found.last:
                        peak_bytes = found.peak_bytes(batchsize, r)
                        yield dataclasses.replace(
                            there[0], parts=parts, peak_bytes=peak_bytes
                        )

    def _numbers(self, group: _Group, batchsize: int) -> Iterator[tuple[int, int]]:
        """Numbers of parts that a session tries, and r; of channels the number."""
        if group[3] in BY_NUMBER:
            yield from ((found.first, found.first) for found in self._ranges[group])
        elif group[3] == WINDOWS:
            if batchsize > 1:
                yield batchsize, 1
        elif self._ranges[group]:
            least = min(2, min(r for _, r, _ in self._points[group]))
            parts = 2
            while parts * least <= batchsize:
                yield parts, -(-batchsize // parts)
                parts *= 2


def _grouped(splits: Sequence[Split]) -> dict[_Group, list[Split]]:
    groups: dict[_Group, list[Split]] = {}
    for s in splits:
        key = s.operation, s.function, s.name, s.cut, s.exact
        groups.setdefault(key, []).append(s)
    return groups


def _find_ranges(cut: str, points: Sequence[_Points]) -> Iterator[_Range]:
    if len({len(stages) for _, _, stages in points}) != 1:
        return
    if cut in (*BY_NUMBER, WINDOWS):  # a line for each r
        for r in sorted({r for _, r, _ in points}):
            formulas = _fit_stages([p for p in points if p[1] == r], _line)
            if formulas is not None:
                yield _Range(r, r, formulas)
        return
    ranges = list(_planes(points))
    formulas = None if ranges else _fit_stages(points, _near_plane)
    yield from ranges
    if formulas is not None:
        yield _Range(1, math.inf, formulas)


def _planes(points: Sequence[_Points]) -> Iterator[_Range]:
    """Ranges of r whose points are all in one plane, the longest from each r on."""
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
                yield _Range(first, last, formulas)
                break
        begin = end if formulas is not None else begin + 1


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
    near = (abs(missing) <= NEAR * peaks).all()
    if rank < 3 or len(points) <= TESTED_SIZES or not near:
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
