"""Every signature that a session has met, and which one an iteration is to follow.

A signature is known only once its iteration has ended. Until then the iteration may be
any of those that have begun like it: it follows one of them, and another one where it
differs. An iteration that has begun like none of them is passive from there.

Note: [when to learn]
    Recording must begin with the iteration, before its signature is known.
    (1) After an iteration of an unknown signature, the next ones that begin like it are
    recorded beside what they follow: one that is new becomes a draft. Where drafts
    never come again (pictures of a new size each time, ever other paths through the
    network), this is done only after one that has come before, however it begins.
    (2) A draft is profiled in iterations that swap everything, and verify replays.
    They are tried as long as it is a draft that comes; tries in vain, which take
    several times as long as others, are no more than a small share of all iterations,
    and no draft is tried while one after the other does not come again.
    (3) Iterations come in an order: the two of a GAN, those of a graph that lives over
    several, the passes of one step of meta-learning. An iteration begins with the guide
    of what is expected. Once a step has repeated, each of its iterations is learnt
    where it comes, and none is tried in the place of another; see [the step that
    repeats].
    (4) As long as no plan is asked for, this is worth it only for what comes again: in
    a step that repeats, or as far as it pays; see [what learning may cost]. What
    begins in a new way is recorded when something begins so once more. While an
    earlier draft has not come again, it is recorded only once the same signature has
    come twice.

Note: [the step that repeats]
    A session sees an iteration for each backward pass. A step of a program may hold
    several of them: the passes of virtual adversarial training or meta-learning, those
    of the networks of a GAN. What repeats then is the step, not the iteration. A step
    of n iterations has repeated when the newest n have each been of the kind that came
    n before; a step of one iteration must have come three times, because two alike tell
    too little. The next iteration is expected to be of the kind that came n before it.
    Where several n fit, the one that has fitted for longest counts: a pass that comes
    four times in a row inside of a step of five is no step.

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
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from chainer_hybridmem.planning.records.profile import Slot
from chainer_hybridmem.training.session.guides.guide import Guide, ProgramHabits, Stage
from chainer_hybridmem.training.session.guides.operation_key import OperationKey

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
        """What the next iteration is expected to be like; None if that is open.

        Where no step has repeated, it is what most often came after one like the
        newest: what comes once in a while is not expected in the place of the usual.
        """
        length = self._length
        if not length:
            return None
        if self.repeats:
            return self._newest[-length]
        followed = [
            self._newest[-n]
            for n in range(length, len(self._newest) + 1)
            if self._as_before[n]
        ]
        kinds = collections.Counter(past.kind for past in followed)
        return max(followed, key=lambda past: kinds[past.kind])

    @property
    def step(self) -> list[Kind]:
        """Kinds of the iterations of the step that repeats, in order; else none."""
        newest = list(self._newest)[-self._length :] if self.repeats else []
        return [past.kind for past in newest]

    @property
    def repeats(self) -> bool:
        """Whether a step has repeated, so that what is expected is likely to come."""
        length = self._length
        return bool(length) and self._as_before[length] >= max(length, FEWEST_REPEATS)


MOST_FINGERPRINTS = 4096
TRY_ITERATIONS = 4  # that a try is expected to cost, until one has cost more
NEWEST = 16  # iterations that tell whether plans fit, or signatures come again
SELDOM_FITTING = 8  # where they do not, one iteration in so many follows a plan
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
        return self._begun % SELDOM_FITTING == 0


LARGEST_GUIDE_COUNT = 128
DRAFTS_AFTER_UNKNOWN = 4  # iterations that are recorded after an unknown one
MOST_UNUSED_DRAFTS = 8  # in a row; then only of what has come before
FREE_TRIES = 8  # to profile, in vain
ITERATIONS_PER_TRY = 32  # beyond these


class GuideBook:
    """Guides by how their iterations begin; the one met last comes first.

    Args:
        cautious (bool): Whether only what pays is learnt.
    """

    def __init__(self, cautious: bool = False) -> None:
        self._cautious = cautious
        self._families: dict[OperationKey, Family] = {}
        self._guides: list[Guide] = []
        self._drafting: collections.Counter[OperationKey] = collections.Counter()
        self._unused = 0  # drafts made since one has come again
        self._met = 0  # iterations
        self._vain = 0  # tries to profile among them
        self._lost_seconds = 0.0  # by passive iterations of all families
        self._spent_seconds = 0.0  # for learning, likewise
        self._outdated: list[OperationKey] = []  # families that recompute no more
        self._order = IterationOrder()
        self._by_kind: dict[Kind, Guide] = {}

    def __iter__(self) -> collections.abc.Iterator[Guide]:
        return iter(self._guides)

    def __len__(self) -> int:
        return len(self._guides)

    # -- which one to follow --------------------------------------------------
    def begin(self, key: OperationKey) -> Guide | None:
        """The guide to follow when an iteration begins; None if none begins so."""
        found = [guide for guide in self._guides if guide.signature[0] == key]
        if not found:
            return None
        past = self._order.expected
        expected = None if past is None else self._by_kind.get(past.kind)
        if self._order.repeats and (expected is None or expected in found):
            return expected
        found.sort(key=lambda guide: guide is not expected)
        drafts = [guide for guide in found if guide.stage is Stage.PROFILING]
        guided = [guide for guide in found if guide.stage is Stage.GUIDED]
        passive = [guide for guide in found if guide.stage is Stage.PASSIVE]
        known = guided or passive
        if self._cautious:
            family = self._family(key)
            if not self._may_learn(family):
                drafts = []
            unknown = expected is None and past is not None
            if guided and not drafts and (unknown or not family.follows_plans()):
                known = []
        elif known:
            if self._vain >= FREE_TRIES + self._met // ITERATIONS_PER_TRY:
                drafts = []
        elif len(drafts) > 1 and self._unused >= FREE_TRIES:
            drafts = []  # what has come so far does not come again
        if expected in known:
            drafts = []
        return next(iter(drafts or known), None)

    def _may_learn(self, family: Family) -> bool:
        """Whether a family may be learnt; see [what learning may cost]."""
        if not family.may_learn:
            return False
        return family.has_begun or self._lost_seconds >= self._spent_seconds

    def _family(self, key: OperationKey) -> Family:
        return self._families.setdefault(key, Family())

    def find_alternative(
        self, begun: Sequence[OperationKey], stage: Stage
    ) -> Guide | None:
        """Another guide for an iteration that has begun like this.

        Args:
            begun: The iteration's operations so far.
            stage: Of the guide it has followed; one like it is preferred.
        """
        n, start = len(begun), list(begun)
        found = [
            guide
            for guide in self._guides
            if len(guide.signature) > n and guide.signature[:n] == start
        ]
        found.sort(key=lambda g: (g.stage is not stage, g.stage is not Stage.GUIDED))
        return found[0] if found else None

    def find(
        self, operations: Sequence[OperationKey], fingerprint: int | None = None
    ) -> Guide | None:
        """The guide of exactly these operations.

        Args:
            operations: Of an iteration.
            fingerprint: Of its forward functions, if that is known.
        """
        complete = list(operations)
        return next(
            (
                guide
                for guide in self._guides
                if fingerprint in (None, guide.fingerprint)
                and guide.signature == complete
            ),
            None,
        )

    def find_others(self, guide: Guide, key: OperationKey) -> list[Guide]:
        """The guides that begin as this one does, with the same operation."""
        return [g for g in self._guides if g is not guide and g.signature[0] == key]

    def find_planned(self) -> Guide | None:
        """The guide with a plan that was met last."""
        return next((g for g in self._guides if g.plan is not None), None)

    def find_step(self) -> list[Guide | None]:
        """Guides of the step that repeats, in order; empty as long as none has.

        None stands for an iteration of an unknown signature.
        """
        return [self._by_kind.get(kind) for kind in self._order.step]

    # -- what to learn --------------------------------------------------------
    def wants_draft(self, key: OperationKey) -> bool:
        """Whether an iteration that begins so is recorded whatever it follows."""
        if self._order.repeats:
            past = self._order.expected
            return past is not None and past.missed and past.kind not in self._by_kind
        if not self._drafting[key]:
            return False
        return not self._cautious or self._may_learn(self._family(key))

    @property
    def hopes(self) -> bool:
        """Whether what is recorded is likely to come again; see [when to learn] (1)."""
        return self._unused < MOST_UNUSED_DRAFTS

    def wants_trial(self, key: OperationKey) -> bool:
        """Whether a draft that begins so waits for its replays to be verified."""
        return any(guide.trial for guide in self._guides if guide.signature[0] == key)

    def take_in(self, guides: Sequence[Guide]) -> None:
        """Guides that earlier runs have made, the newest one first.

        A plan that recomputes what the habits of its family forbid is not followed: its
        signature is learnt again.
        """
        for guide in guides:
            self._family(guide.signature[0]).habits.add(guide.habits)
        for guide in guides:
            habits = self._family(guide.signature[0]).habits
            if guide.habits.recomputes == habits.recomputes:
                guide.habits = habits
                self._guides.append(guide)

    # -- what later iterations ask of one -------------------------------------
    def outlive(self, key: OperationKey, slots: Iterable[Slot], updated: bool) -> None:
        """A later iteration has asked for maps of one that began so.

        Args:
            key: Of the first operation of the iteration that has made them.
            slots: Of the maps.
            updated: Whether parameters have been updated in between.
        """
        habits = self._family(key).habits
        habits.outliving.update(slots)
        if updated and habits.recomputes:
            habits.recomputes = False
            self._outdated.append(key)

    def take_outdated(self) -> list[Guide]:
        """Guides whose plans recompute what may not be recomputed any more."""
        keys, self._outdated = self._outdated, []
        return [
            guide
            for guide in self._guides
            if guide.signature[0] in keys and guide.stage is Stage.GUIDED
        ]

    # -- what an iteration has been -------------------------------------------
    def meet(self, guide: Guide, tried: bool) -> None:
        """An iteration has turned out to be this guide's.

        Args:
            guide: One of these.
            tried: Whether it has followed a draft from the start.
        """
        self._met += 1
        if guide.stage is Stage.PROFILING:
            self._unused = 0
        elif tried:
            self._vain += 1
        key = guide.signature[0]
        self._drafting[key] = max(0, self._drafting[key] - 1)
        self._guides = [guide, *(g for g in self._guides if g is not guide)]

    def end(
        self,
        guide: Guide | None,
        fingerprint: int,
        position: int,
        missed: bool = False,
    ) -> None:
        """An iteration has ended.

        Args:
            guide: Its own; None if its signature is unknown, or not looked at.
            fingerprint: Of its forward functions.
            position: Operations that it has run.
            missed: Whether it was worth recording and has not been.
        """
        kind: Kind = fingerprint, position
        self._order.note(Past(kind, missed))
        if guide is not None:
            self._by_kind[kind] = guide

    def end_plan(self, key: OperationKey, fits: bool) -> None:
        """An iteration that began so has followed a plan; whether it was its own."""
        self._family(key).note_plan(fits)

    def end_learning(self, key: OperationKey, fingerprint: int, seconds: float) -> None:
        """An iteration that began so was recorded.

        Args:
            key: Of its first operation.
            fingerprint: Of its forward functions.
            seconds: It took, with what was made of it.
        """
        self._spent_seconds += self._family(key).note_learning(fingerprint, seconds)

    def miss(
        self,
        key: OperationKey,
        fingerprint: int,
        seconds: float = 0.0,
        lost_seconds: float = 0.0,
    ) -> None:
        """An iteration that began so was unknown and has not been recorded.

        Args:
            key: Of its first operation.
            fingerprint: Of its forward functions.
            seconds: It took.
            lost_seconds: Of these, for evicting and restoring.
        """
        family, hopes = self._family(key), self.hopes
        self._lost_seconds += lost_seconds
        if self._cautious:
            hopes = not (family.fingerprints or self._has_unmet_draft())
        if family.note_passive(fingerprint, seconds, lost_seconds) or hopes:
            self._drafting[key] = DRAFTS_AFTER_UNKNOWN

    def _has_unmet_draft(self) -> bool:
        """Whether a draft has not come again so far."""
        return any(
            guide.stage is Stage.PROFILING and not guide.recordings
            for guide in self._guides
        )

    def add(self, guide: Guide) -> None:
        """Takes a guide in whose first iteration has been recorded."""
        key = guide.signature[0]
        habits = self._family(key).habits
        habits.add(guide.habits)
        guide.habits = habits
        self._unused += bool(self._guides)
        alone = all(other.signature[0] != key for other in self._guides)
        more = self.hopes and not alone  # as long as nothing else begins so
        self._drafting[key] = DRAFTS_AFTER_UNKNOWN if more else 0
        self._guides.insert(0, guide)
        while len(self._guides) > LARGEST_GUIDE_COUNT:
            drafts = [g for g in self._guides if g.stage is not Stage.GUIDED]
            dropped = (drafts or self._guides)[-1]
            dropped.forget_copies()
            self._guides.remove(dropped)
            kinds = self._by_kind.items()
            self._by_kind = {k: guide for k, guide in kinds if guide is not dropped}
