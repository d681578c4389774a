"""Two recorded iterations of one network, extrapolated to any batch size.

Every size and every dimension is an affine function of the batch size B,

    n(B) = n₂ + (n₂ - n₁) (B - B₂) / (B₂ - B₁),

with B₁ < B₂ the batch sizes of the samples. It is computed in rational numbers,
so that it is exact where the two samples are. What does not depend on B (parameters,
statistics) stays as it is. The structure is that of the larger sample.

NumPy reuses the memory of large temporaries in expressions and not that of small
ones, so that the two samples may differ in temporaries of single operations. These
are aligned; one that only the larger sample has counts like others of its size, or
grows with the batch. Everything else must be the same in both, but for feature maps
that are too small in the smaller sample to be recorded as such. A recipe whose pass
covers other functions in one sample than in the other counts as a whole forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from chainer_hybridmem.errors import OptionError, ProfileMismatchError
from chainer_hybridmem.forecasting.estimation.costs import whole_forward
from chainer_hybridmem.forecasting.estimation.part_sizes import PartSizes
from chainer_hybridmem.forecasting.estimation.structure import (
    assemble,
    events_by_operation,
    passing,
)
from chainer_hybridmem.planning.records.profile import (
    MINIMUM_MAP_BYTES,
    Category,
    Operation,
    Profile,
    Recipe,
    Storage,
)
from chainer_hybridmem.planning.records.specs import parse_spec


def check_ascending(batchsizes: Any, name: str = 'batchsizes') -> tuple[int, int]:
    """Returns the two batch sizes of a pair of recordings.

    Args:
        batchsizes: Whole numbers above zero, the second above the first.
        name: What they are, for the error message.

    Raises:
        OptionError: If they are something else.
    """
    whole = isinstance(batchsizes, tuple | list) and all(
        isinstance(size, int) and not isinstance(size, bool) for size in batchsizes
    )
    if whole and len(batchsizes) == 2 and 0 < batchsizes[0] < batchsizes[1]:
        return batchsizes[0], batchsizes[1]
    raise OptionError(
        f'{name} is {batchsizes!r}; two ascending numbers above zero are needed, such '
        f'as 8 and 16.'
    )


class Kind(NamedTuple):
    """A kind of iteration in a step of a program.

    A GAN has one for its generator and one for its discriminator.

    Attributes:
        profile (Profile): One iteration.
        repeats (int): How often it comes in a step.
        older_bytes (int): What plain Chainer has beside it where a step needs most:
            maps of earlier iterations whose losses the program holds, say.
    """

    profile: Profile
    repeats: int = 1
    older_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class SamplePair:
    """Two recorded iterations that differ in nothing but the batch size.

    If there is one iteration only, nothing is said about other batch sizes.

    Attributes:
        small (Profile): With the smaller batch.
        large (Profile): With the larger batch.
        batchsizes (tuple of int): Of both, ascending.
        smaller_bytes (tuple): For each storage of ``large``, the bytes that it
            has in ``small``; a fraction where that is only supposed.
        older_bytes (tuple of int): Of both; see :class:`Kind`.
    """

    small: Profile
    large: Profile
    batchsizes: tuple[int, int]
    smaller_bytes: tuple[int | Fraction, ...]
    older_bytes: tuple[int, int] = (0, 0)

    @classmethod
    def match(
        cls, small: Profile, large: Profile, batchsizes: tuple[int, int]
    ) -> SamplePair:
        """Finds the storages of one sample in the other.

        Args:
            small: With the smaller batch.
            large: With the larger batch.
            batchsizes: Of both.

        Raises:
            OptionError: If the batch sizes are not ascending.
            ProfileMismatchError: Naming the first operation that differs.
        """
        batchsizes = check_ascending(batchsizes)
        return cls(small, large, batchsizes, _Matcher(small, large, batchsizes).run())

    @classmethod
    def of_one(cls, kind: Kind) -> SamplePair:
        """One recorded iteration, of a batch size that is not known."""
        profile, _, older = kind
        smaller = tuple(storage.nbytes for storage in profile.storages)
        return cls(profile, profile, (1, 1), smaller, (older, older))

    @property
    def is_one(self) -> bool:
        """Whether nothing is known of other batch sizes."""
        return self.large is self.small

    @functools.cached_property
    def _part_sizes(self) -> PartSizes:
        return PartSizes(self.small, self.large, self.batchsizes)

    def at(self, batchsize: int) -> Profile:
        """The profile of one iteration with any batch size.

        Times are affine, too, with neither part below zero: what takes less
        time with the larger batch counts as constant, what takes more than in
        proportion to it as proportional.
        """
        large = self.large
        if self.is_one:
            return large
        storages = [
            dataclasses.replace(s, nbytes=self._bytes(n, s.nbytes, batchsize))
            for s, n in zip(large.storages, self.smaller_bytes, strict=True)
        ]
        profile = assemble(
            large,
            events_by_operation(large),
            storages,
            self._recipes(batchsize),
            self._initial_bytes(batchsize),
        )
        operations = tuple(
            self._operation(a, b, batchsize)
            for a, b in zip(self.small.operations, profile.operations, strict=True)
        )
        return dataclasses.replace(
            profile,
            operations=operations,
            splits=tuple(self._part_sizes.at(batchsize, profile.splits)),
        )

    def older_bytes_at(self, batchsize: int) -> int:
        """Maps of earlier iterations beside one with any batch size."""
        return self._bytes(*self.older_bytes, batchsize)

    def _initial_bytes(self, batchsize: int) -> int:
        """More with the smaller batch was something else, such as garbage."""
        before = min(self.small.initial_bytes, self.large.initial_bytes)
        return self._bytes(before, self.large.initial_bytes, batchsize)

    def _bytes(self, n1: int | Fraction, n2: int, batchsize: int) -> int:
        if n1 == n2:
            return n2
        b1, b2 = self.batchsizes
        change, rest = divmod(n2 - n1, b2 - b1)
        if rest == 0:
            return max(0, n2 + int(change) * (batchsize - b2))
        return max(0, ceil(n2 + Fraction(n2 - n1) * (batchsize - b2) / (b2 - b1)))

    def _seconds(self, t1: float, t2: float, batchsize: int) -> float:
        b1, b2 = self.batchsizes
        slope = min(max(0.0, (t2 - t1) / (b2 - b1)), max(0.0, t2) / b2)
        return max(0.0, t2 + slope * (batchsize - b2))

    def _operation(self, a: Operation, b: Operation, batchsize: int) -> Operation:
        return dataclasses.replace(
            b,
            device_seconds=self._seconds(a.device_seconds, b.device_seconds, batchsize),
            host_seconds=self._seconds(a.host_seconds, b.host_seconds, batchsize),
            specs=tuple(
                self._spec(left, right, batchsize)
                for left, right in zip(a.specs, b.specs, strict=True)
            ),
        )

    def _spec(self, left: str, right: str, batchsize: int) -> str:
        dtype, ones = parse_spec(left)
        _, twos = parse_spec(right)
        if left == right or len(ones) != len(twos):
            return right
        pairs = zip(ones, twos, strict=True)
        shape = [str(self._bytes(one, two, batchsize)) for one, two in pairs]
        return f'{dtype}[{",".join(shape)}]'

    def _recipes(self, batchsize: int) -> list[Recipe]:
        """What both samples have shown to be repeatable."""
        before = {recipe.operation: recipe for recipe in self.small.recipes}
        result = []
        for b in self.large.recipes:
            a = before.get(b.operation)
            if a is not None and (a.covers, a.formula) != (b.covers, b.formula):
                # A map too small to be one in the smaller sample ends a pass there.
                a, b = whole_forward(self.small, a), whole_forward(self.large, b)
            if a is None or (a.sources, a.attributes) != (b.sources, b.attributes):
                continue
            result.append(
                dataclasses.replace(
                    b,
                    seconds=self._seconds(a.seconds, b.seconds, batchsize),
                    peak_bytes=self._bytes(a.peak_bytes, b.peak_bytes, batchsize),
                    exact=a.exact and b.exact,
                )
            )
        return result


def match_kinds(
    small: Sequence[Kind], large: Sequence[Kind], batchsizes: tuple[int, int]
) -> list[tuple[SamplePair, int]]:
    """Finds the kinds of iteration of one step in the other, with how often each comes.

    Args:
        small: Of the step with the smaller batch; it may begin at any of them.
        large: Of the step with the larger batch.
        batchsizes: Of both.

    Raises:
        OptionError: If the batch sizes are not ascending.
        ProfileMismatchError: Naming the first operation that differs.
    """
    left = sorted(small, key=lambda kind: _outline_operations(kind.profile))
    right = sorted(large, key=lambda kind: _outline_operations(kind.profile))
    if len(left) != len(right):
        first, second = batchsizes
        raise ProfileMismatchError(
            f'The steps differ: {len(left)} kinds of iteration with batch size '
            f'{first}, but {len(right)} with {second}. An estimate needs a program '
            f'that computes the same for every batch size.'
        )
    found = []
    for a, b in zip(left, right, strict=True):
        pair = SamplePair.match(a.profile, b.profile, batchsizes)
        older = a.older_bytes, b.older_bytes
        found.append((dataclasses.replace(pair, older_bytes=older), b.repeats))
    return found


def same_sizes(small: Sequence[Kind], large: Sequence[Kind]) -> bool:
    """Whether two steps need the same memory, so that the batch size is not theirs."""
    left, right = (
        sorted([s.nbytes for s in kind.profile.storages] for kind in kinds)
        for kinds in (small, large)
    )
    return left == right


def _outline_operations(profile: Profile) -> list[tuple[str, str]]:
    return [(op.label, op.phase.value) for op in profile.operations]


class _Matcher:
    """Finds the storages of one profile in another."""

    def __init__(
        self, small: Profile, large: Profile, batchsizes: tuple[int, int]
    ) -> None:
        self.small, self.large = small, large
        self.batchsizes = batchsizes
        self.found: dict[int, int] = {}  # bytes in small, by storage of large

    def run(self) -> tuple[int | Fraction, ...]:
        self._check_operations()
        self._match_initial()
        groups = zip(
            events_by_operation(self.small),
            events_by_operation(self.large),
            strict=True,
        )
        for index, (left, right) in enumerate(groups):
            self._match_events(index, left, right)
        # Of something only the larger sample has, others of its size may tell.
        by_size = {self.large.storages[s].nbytes: n for s, n in self.found.items()}
        ratio = Fraction(self.batchsizes[0], self.batchsizes[1])
        return tuple(
            self.found[s.id]
            if s.id in self.found
            else by_size.get(s.nbytes, s.nbytes * ratio)
            for s in self.large.storages
        )

    def _mismatch(self, what: str, left: object, right: object) -> ProfileMismatchError:
        b1, b2 = self.batchsizes
        return ProfileMismatchError(
            f'The two sample iterations differ: {what} {left} with batch size {b1}, '
            f'but {right} with {b2}. An estimate needs a network that computes the '
            f'same for every batch size; record this one at its real size instead '
            f'(hybridmem profile).'
        )

    def _check_operations(self) -> None:
        left, right = self.small.operations, self.large.operations
        for a, b in zip(left, right, strict=False):
            if (a.label, a.phase) != (b.label, b.phase):
                names = [f'{op.label} ({op.phase.value})' for op in (a, b)]
                raise self._mismatch(f'operation {a.index} is', *names)
            if (a.forward, len(a.specs)) != (b.forward, len(b.specs)):
                shapes = [f'{op.forward} with {len(op.specs)} inputs' for op in (a, b)]
                what = f'operation {a.index} ({a.label}) belongs to forward operation'
                raise self._mismatch(what, *shapes)
        if len(left) != len(right):
            raise self._mismatch('the number of operations is', len(left), len(right))

    def _match_initial(self) -> None:
        left, right = (
            [s for s in profile.storages if s.producer < 0]
            for profile in (self.small, self.large)
        )
        if not _are_alike_before(left, right):  # what is of older graphs may differ
            left, right = (
                [s for s in side if not _is_older(s)] for side in (left, right)
            )
        if not _are_alike_before(left, right):
            what = 'the number of arrays there before the iteration is'
            raise self._mismatch(what, len(left), len(right))
        self._accept(left, right)

    def _accept(self, left: Sequence[Storage], right: Sequence[Storage]) -> None:
        for a, b in zip(left, right, strict=True):
            self.found[b.id] = a.nbytes

    def _match_events(
        self, index: int, left: Sequence[int], right: Sequence[int]
    ) -> None:
        ours = [self.small.storages[e - 1] for e in left if e > 0]
        others = [self.large.storages[e - 1] for e in right if e > 0]
        here = (passing(left), passing(right))
        staying = [
            [s for s in side if s.id not in gone or s.slots]
            for side, gone in zip((ours, others), here, strict=True)
        ]
        if not _are_all_alike(*staying):
            own = [[s for s in side if _is_own(s)] for side in staying]
            if len(own[0]) < len(own[1]):
                staying = [[s for s in side if not _is_own(s)] for side in staying]
                self._match_own(*own)
        if not _are_all_alike(*staying):
            what = f'operation {index} ({self.large.operations[index].label}) leaves'
            counts = [f'{len(side)} arrays' for side in staying]
            if counts[0] == counts[1]:
                counts = [f'{counts[0]} ({_outline(side)})' for side in staying]
            raise self._mismatch(what, *counts)
        self._accept(*staying)
        temporary = [
            [s for s in side if s.id in gone and not s.slots]
            for side, gone in zip((ours, others), here, strict=True)
        ]
        for a, b in self._align(*temporary):
            self.found[b.id] = a.nbytes

    def _match_own(self, left: Sequence[Storage], right: Sequence[Storage]) -> None:
        """Arrays of the program: with more examples it may keep more of them.

        Such as the boxes of each picture. What only the larger sample has grows from
        nothing, so that all of them together are of the right size.
        """
        self.found.update((b.id, 0) for b in right)
        for a, b in self._align(left, right):
            self.found[b.id] = a.nbytes

    def _align(
        self, left: Sequence[Storage], right: Sequence[Storage]
    ) -> list[tuple[Storage, Storage]]:
        """Longest common subsequence of temporaries whose sizes go together."""
        if len(left) == len(right) and all(map(self._plausible, left, right)):
            return list(zip(left, right, strict=True))
        n, m = len(left), len(right)
        best = [[0] * (m + 1) for _ in range(n + 1)]
        for i in reversed(range(n)):
            for j in reversed(range(m)):
                pair = 1 + best[i + 1][j + 1]
                alone = max(best[i + 1][j], best[i][j + 1])
                plausible = self._plausible(left[i], right[j])
                best[i][j] = max(pair, alone) if plausible else alone
        pairs, i, j = [], 0, 0
        while i < n and j < m:
            if self._plausible(left[i], right[j]) and (
                best[i][j] == 1 + best[i + 1][j + 1]
            ):
                pairs.append((left[i], right[j]))
                i, j = i + 1, j + 1
            elif best[i + 1][j] >= best[i][j + 1]:
                i += 1
            else:
                j += 1
        return pairs

    def _plausible(self, a: Storage, b: Storage) -> bool:
        """Whether both may be one storage: between constant and proportional."""
        b1, b2 = self.batchsizes
        return a.nbytes <= b.nbytes and b.nbytes * b1 <= a.nbytes * b2


def _alike(a: Storage, b: Storage) -> bool:
    """Whether both play the same part; a feature map may be too small in one."""
    if a.forward_uses != b.forward_uses:
        return False
    left, right = ((s.category, s.slots, s.backward_uses) for s in (a, b))
    return left == right or a.nbytes < MINIMUM_MAP_BYTES


def _are_all_alike(left: Sequence[Storage], right: Sequence[Storage]) -> bool:
    return len(left) == len(right) and all(map(_alike, left, right))


def _is_own(storage: Storage) -> bool:
    """Whether the program has made it, and no function reads or keeps it."""
    used = storage.forward_uses or storage.backward_uses or storage.slots
    return not used and storage.category in (Category.INPUT, Category.WORKSPACE)


def _alike_before(a: Storage, b: Storage) -> bool:
    """Likewise, of arrays that are there before the iteration."""
    if (a.category, a.forward_uses) != (b.category, b.forward_uses):
        return False
    return a.backward_uses == b.backward_uses or a.nbytes < MINIMUM_MAP_BYTES


def _are_alike_before(left: Sequence[Storage], right: Sequence[Storage]) -> bool:
    return len(left) == len(right) and all(map(_alike_before, left, right))


def _is_older(storage: Storage) -> bool:
    """Whether it is there and nothing of the iteration: of an older graph, say."""
    uses = storage.forward_uses or storage.backward_uses or storage.slots
    return storage.category is Category.INPUT and not uses


def _outline(storages: Sequence[Storage]) -> str:
    return ', '.join(s.category.value for s in storages)
