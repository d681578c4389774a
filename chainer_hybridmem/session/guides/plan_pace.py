"""When a plan is timed, and when it may change for the sake of time."""

from __future__ import annotations

import statistics

from chainer_hybridmem.recording.stopwatch import Times
from chainer_hybridmem.search.feedback import Feedback

TIMING_RUNS = 3  # iterations whose times replace those of profiling
LONGEST_WAIT = 4  # iterations, at most, for an arena before a plan is timed
LONGEST_REST = 64  # iterations, at most, between changes for the sake of time
STALE_RUNS = 8  # iterations, at least, that are faster than the bound for their times
STALE_SHARE = 0.97  # of the bound, below which they are


class PlanPace:
    """Times of a plan's iterations, and how often the plan has changed for them.

    A plan's first iterations are slow: their memory is new, an arena is laid out after
    them, and other processes may still plan. So a plan is timed after one iteration at
    its offsets, or two where other ranks follow it late. Times are noisy, and each
    change costs the arena: the next one takes two iterations to be laid out. So an
    arena is used for a while before each change, twice as long as before the last one.

    Attributes:
        timings (list): Times of the operations, per timed guided iteration.
        timed_again (bool): The plan has changed after it was timed.
        feedback (Feedback): Late swap-ins of the plan.
        iterations (int): Those that have followed this plan or another one.
    """

    def __init__(self) -> None:
        self.timings: list[list[Times]] = []
        self.timed_again = False
        self.feedback = Feedback()
        self.iterations = 0
        self._followed = 0  # iterations of the plan
        self._rested = 0  # those of them at their offsets, if it has any
        self._changes = 0  # of the planner's plan, for the sake of time
        self._seconds: list[float] = []  # of iterations since it was timed
        self._stale = 0  # how often times were found to be stale
        self._lag = 0  # iterations by which other ranks change plans later

    # -- times ----------------------------------------------------------------
    @property
    def wants_times(self) -> bool:
        """Whether the plan's next iteration is to be timed."""
        lag = self._lag
        waited = self._rested > lag or self._followed >= LONGEST_WAIT + lag
        return waited and not self.timed

    @property
    def timed(self) -> bool:
        """Whether enough iterations have been timed."""
        return len(self.timings) >= TIMING_RUNS

    def note_times(self, times: list[Times]) -> None:
        """A guided iteration has been timed."""
        self.timings.append(times)

    def assume(self, times: list[Times]) -> None:
        """Earlier runs have timed enough iterations, with these times."""
        self.timings = [times] * TIMING_RUNS

    def forget_times(self) -> None:
        """The times are those of another plan."""
        self.timings.clear()

    def change_timed_plan(self) -> None:
        """Another plan suits the times better; its own times tell more."""
        self.timed_again = True
        self.timings.clear()

    def time_again(self) -> None:
        """Times of another day count, and another plan may follow from them."""
        self.timings.clear()
        self.timed_again = False

    def are_stale(self, seconds: float, bound_seconds: float) -> bool:
        """Whether iterations are faster than any can be with the recorded times.

        The times are those of a slower machine then, or of one that was busy. If timing
        does not help, it is tried less and less often.

        Args:
            seconds: Of the iteration that has ended, which has followed the plan.
            bound_seconds: The lower bound for the recorded times.
        """
        if not self.timed:
            self._seconds.clear()
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < STALE_RUNS << self._stale:
            return False
        median = statistics.median(self._seconds)
        self._seconds.clear()
        if median >= STALE_SHARE * bound_seconds:
            return False
        self._stale += 1
        return True

    def wait_for_ranks(self) -> None:
        """Other ranks take this plan's changes over an iteration later.

        Until their arenas stand, this rank waits for them in all-reduce operations.
        """
        self._lag = 1

    # -- changes --------------------------------------------------------------
    def begin_anew(self) -> None:
        """A plan is made without regard to former ones."""
        self._changes = 0

    def rest(self, at_offsets: bool) -> None:
        """An iteration has followed the plan, with its arena if there is to be any."""
        self.iterations += 1
        self._followed += 1
        self._rested += at_offsets

    def change_plan(self) -> None:
        """Another plan is followed from now on."""
        self._followed = self._rested = 0
        self._seconds.clear()
        self.feedback = Feedback()

    @property
    def may_change(self) -> bool:
        """Whether there may be another plan for the sake of time now."""
        return self._rested >= min(1 << self._changes, LONGEST_REST)

    def count_change(self) -> None:
        """The plan changes for the sake of time, or cannot."""
        self._changes += 1
        self._rested = 0
