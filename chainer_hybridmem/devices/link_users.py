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
    """When a copy ran, in seconds of a clock that all processes of a machine share.

    Attributes:
        began_seconds (float): When it began.
        ended_seconds (float): When it ended.
    """

    began_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_seconds - self.began_seconds


Runs = list[list[Copied]]  # one list of copies for each time that they were measured


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

    def exchange(self, tracks: list[Runs]) -> list[list[Runs]]:
        """When the copies of the other processes ran, for each of them.

        Args:
            tracks: When those of this one ran: the runs of each kind of measurement.
        """
        return []


def seconds_among(own: Runs, others: Sequence[Runs]) -> list[float]:
    """What each run's copies would take if all processes copied all the time.

    Args:
        own: When the copies of this process ran.
        others: Likewise, for each of the others; a run that is missing has no copies.

    Returns:
        list of float: Seconds; see Note: [late copies].
    """
    return [
        _seconds_among(copies, [runs[i] if i < len(runs) else [] for runs in others])
        for i, copies in enumerate(own)
    ]


def _seconds_among(own: list[Copied], others: Sequence[list[Copied]]) -> float:
    if not others:
        return sum(copy.seconds for copy in own)
    copies = itertools.chain(own, *others)
    moments = sorted({moment for copy in copies for moment in copy})
    seconds = 0.0
    for began, ended in itertools.pairwise(moments):
        if _runs(own, began, ended):
            busy = 1 + sum(_runs(copies, began, ended) for copies in others)
            seconds += (ended - began) * (1 + len(others)) / busy
    return seconds


def _runs(copies: list[Copied], began: float, ended: float) -> bool:
    """Whether a copy runs between two moments at which none begins or ends."""
    return any(c.began_seconds <= began and ended <= c.ended_seconds for c in copies)
