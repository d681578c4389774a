"""The processes that measure one link together, and when their copies ran.

Note: [late copies]
    Processes that share a link start their copies at the same moment, but on a busy
    machine one can be late, and the others have the link for themselves meanwhile. So
    each tells the others when its copies ran. At a moment at which k of n processes
    copy, a copy has n / k of what it has while all copy; what it would take then is
    the integral of n / k over the time that it took.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Copied(NamedTuple):
    """When a link carried a copy, on a clock that all processes of a machine share.

    Attributes:
        began_seconds (float): When that began.
        ended_seconds (float): When it ended.
        taken_seconds (float): What the copy took in its process.
    """

    began_seconds: float
    ended_seconds: float
    taken_seconds: float


# By kind of measurement and run of it, the copies of one process.
Runs = list[list[list[Copied]]]


class LinkUsers:
    """The processes that measure one link; here, only this one."""

    def gather(self) -> None:
        """Waits until all are there; called before copies are timed."""

    def agree(self, nbytes: int) -> int:
        """What all copy in a run: else one would have the link for itself at the end.

        Args:
            nbytes: What this process would copy.
        """
        return nbytes

    def exchange(self, runs: Runs) -> list[Runs]:
        """When the copies of the other processes ran, for each of them.

        Args:
            runs: When those of this one ran.
        """
        return []


def seconds_among(own: Runs, others: Sequence[Runs]) -> list[list[float]]:
    """What each run's copies would take if all processes copied all the time.

    Args:
        own: When the copies of this process ran.
        others: Likewise, for each of the others; a run that is missing has no copies.

    Returns:
        list of list of float: Seconds, by kind of measurement and run; see
        Note: [late copies].
    """
    return [
        [
            _seconds_among(copies, [_of_run(other[kind], i) for other in others])
            for i, copies in enumerate(runs)
        ]
        for kind, runs in enumerate(own)
    ]


def _of_run(runs: list[list[Copied]], i: int) -> list[Copied]:
    return runs[i] if i < len(runs) else []


def _seconds_among(own: list[Copied], others: Sequence[list[Copied]]) -> float:
    if not others:
        return sum(copy.taken_seconds for copy in own)
    copies = list(itertools.chain(own, *others))
    moments = sorted({moment for copy in copies for moment in copy[:2]})
    seconds = 0.0
    for began, ended in itertools.pairwise(moments):
        if _is_busy(own, began, ended):
            count = 1 + sum(_is_busy(other, began, ended) for other in others)
            seconds += (ended - began) * (1 + len(others)) / count
    return seconds


def _is_busy(copies: list[Copied], began: float, ended: float) -> bool:
    """Whether a copy runs between two moments at which none begins or ends."""
    return any(c.began_seconds <= began and ended <= c.ended_seconds for c in copies)
