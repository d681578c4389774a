"""Iterations that begin in the same way, and what learning them may cost.

Note: [what learning may cost]
    To learn a signature takes a recording, two iterations that swap everything, and a
    plan. That is worth it for what comes again. Which signature an iteration has, only
    its end tells, so in a family of many (lengths of a sequence) most tries meet
    another one than they wait for. So nothing is learnt in a family of several
    signatures before its passive iterations have lost, by evicting and restoring, as
    many seconds as learning has taken so far and the next try will take. Learning then
    costs at most as much as never learning has cost: the rule for renting skis, whose
    result is at most twice the best one in hindsight. Where signatures do not come
    again (the lengths of episodes), no try ever pays: a family in which few of the
    newest iterations were like an earlier one is not learnt. A family of one is learnt
    at once if all families together have lost as much as learning has cost them. What
    belongs to a step that has repeated is learnt in any case: which signature comes is
    known, so no try is in vain. Where plans that are followed turn out to be those of
    other iterations, most iterations of the family follow none.
"""

from __future__ import annotations

import collections

from chainer_hybridmem.session.guides.program_habits import ProgramHabits

MOST_FINGERPRINTS = 4096
TRY_ITERATIONS = 4  # that a try is expected to cost, until one has cost more
NEWEST = 16  # iterations that tell whether plans fit, or signatures come again
SELDOM = 8  # where they do not, one iteration in so many follows a plan
LEAST_AGAIN = 4  # one in so many of the newest iterations is like an earlier one


class Family:
    """What is known of iterations whose first operation is the same.

    Attributes:
        fingerprints (dict): Of iterations without a plan, in order.
        habits (ProgramHabits): What the program does with maps in all of them.
    """

    __slots__ = (
        '_again', '_begun', '_fitting', '_lost_seconds', '_most_seconds',
        '_spent_seconds', '_usual_seconds', 'fingerprints', 'habits',
    )  # fmt: skip

    def __init__(self) -> None:
        self.fingerprints: dict[int, None] = {}
        self.habits = ProgramHabits()
        self._lost_seconds = 0.0  # by passive iterations
        self._spent_seconds = 0.0  # for learning
        self._most_seconds = 0.0  # that one try has cost
        self._usual_seconds = 0.0  # of an iteration that loses nothing
        # Of the newest iterations, whether each was like an earlier one.
        self._again: collections.deque[bool] = collections.deque(maxlen=NEWEST)
        self._fitting: collections.deque[bool] = collections.deque(maxlen=NEWEST)
        self._begun = 0  # iterations that could have followed a plan

    def note_passive(
        self, fingerprint: int, seconds: float, lost_seconds: float
    ) -> bool:
        """An iteration without a plan has ended.

        Args:
            fingerprint: Of its operations.
            seconds: It took; 0 if it has left a plan.
            lost_seconds: Of these, for evicting and restoring.

        Returns:
            bool: Whether one like it is known.
        """
        own = max(seconds - lost_seconds, 0.0)
        usual = self._usual_seconds
        if seconds:
            self._usual_seconds = (usual + own) / 2 if usual else own
        self._lost_seconds += lost_seconds
        return self._note(fingerprint)

    def _note(self, fingerprint: int) -> bool:
        """Takes a fingerprint in; whether it is known."""
        known = fingerprint in self.fingerprints
        self._again.append(known)
        self.fingerprints[fingerprint] = None
        if len(self.fingerprints) > MOST_FINGERPRINTS:
            del self.fingerprints[next(iter(self.fingerprints))]
        return known

    def note_learning(self, fingerprint: int, seconds: float) -> float:
        """An iteration has been recorded.

        Args:
            fingerprint: Of its operations.
            seconds: It took, with planning.

        Returns:
            float: Of these, what learning has cost.
        """
        self._note(fingerprint)
        cost = max(seconds - self._usual_seconds, 0.0)
        self._spent_seconds += cost
        self._most_seconds = max(self._most_seconds, cost)
        return cost

    def note_plan(self, fits: bool) -> None:
        """An iteration has begun with a plan; whether it was its own."""
        self._fitting.append(fits)

    @property
    def has_begun(self) -> bool:
        """Whether something has been spent for learning."""
        return self._spent_seconds > 0

    @property
    def may_learn(self) -> bool:
        """Whether another try is paid for; see [what learning may cost]."""
        if len(self.fingerprints) < 2:
            return True
        if LEAST_AGAIN * sum(self._again) < len(self._again):
            return False
        most = max(self._most_seconds, TRY_ITERATIONS * self._usual_seconds)
        return self._lost_seconds >= self._spent_seconds + most

    def follows_plans(self) -> bool:
        """Whether the iteration that begins is to follow a plan."""
        fitting = self._fitting
        if len(fitting) < NEWEST or 2 * sum(fitting) >= NEWEST:
            return True
        self._begun += 1
        return self._begun % SELDOM == 0
