"""The order in which iterations come, and what it says about the next one.

Note: [the step that repeats]
    A session sees an iteration for each backward pass. A step of a program may hold
    several of them: the passes of virtual adversarial training or meta-learning, those
    of the networks of a GAN. What repeats then is the step, not the iteration. A step
    of n iterations has repeated when the newest n have each been of the kind that came
    n before; a step of one iteration must have come three times, because two alike tell
    too little. The next iteration is expected to be of the kind that came n before it.
    Where several n fit, the one that has fitted for longest counts: a pass that comes
    four times in a row inside of a step of five is no step.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import NamedTuple

LONGEST_STEP = 64  # iterations
FEWEST_REPEATS = 2  # iterations in a row that were as expected, before a step counts

Kind = Hashable  # of an iteration, also of one without a guide


class Past(NamedTuple):
    """An iteration that has ended.

    Attributes:
        kind (Kind): It is equal for iterations that do the same.
        missed (bool): Whether it was worth recording and has not been.
    """

    kind: Kind
    missed: bool = False


class IterationOrder:
    """Finds out what the next iteration will be; see [the step that repeats]."""

    def __init__(self) -> None:
        self._newest: collections.deque[Past] = collections.deque(maxlen=LONGEST_STEP)
        # For each length of a step, so many of the newest iterations have been what
        # came one step before.
        self._as_before = [0] * (LONGEST_STEP + 1)

    def note(self, past: Past) -> None:
        """An iteration has ended."""
        as_before = self._as_before
        for length, before in enumerate(reversed(self._newest), 1):
            as_before[length] = as_before[length] + 1 if before.kind == past.kind else 0
        self._newest.append(past)

    @property
    def _length(self) -> int:
        """Length of the step that has fitted for longest; the shortest one of several.

        It is 0 if none fits.
        """
        longest = max(self._as_before)
        return self._as_before.index(longest) if longest else 0

    @property
    def expected(self) -> Past | None:
        """What the next iteration is expected to be like; None if that is open."""
        length = self._length
        return self._newest[-length] if length else None

    @property
    def repeats(self) -> bool:
        """Whether a step has repeated, so that what is expected is likely to come."""
        length = self._length
        return bool(length) and self._as_before[length] >= max(length, FEWEST_REPEATS)
