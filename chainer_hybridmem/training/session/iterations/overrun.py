"""Goes beyond the limit once, to say what limit does.

Note: [beyond the limit]
    An allocation that does not fit, whatever leaves, would end the program with the
    limit that gets past this allocation: the next one would end it again. So the limit
    gives way by what is missing, and no more: everything that can leave has left, and
    goes on leaving. What has been needed in the end is a limit with which it runs.

    A pass shows little of that: gradients of several passes may be summed for an
    update, one model may be trained several times for each time of another, and
    optimizers make their states in their first update. So training goes on until every
    parameter has been updated twice: a whole step lies between the two, with all states
    there. Passes of the same operations are recorded meanwhile, as ever, which tells
    what plans need, and plain Chainer. Then the error is raised, where the next
    iteration begins or the session ends, and the limit holds again. This happens once
    in a session; what does not fit later is refused at once.

    Where passes differ (trees, sentences), others may need more than those seen, and
    where some parameters are not updated for long, what that takes is not known. The
    error says so.

    What the machine does not have is refused as ever, and so is what something else
    can be done about: a function that may run in parts, a trial.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import traceback
from collections.abc import Callable

from chainer_hybridmem.errors import OutOfMemoryError
from chainer_hybridmem.planning.planners import find_planner
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.training.session.guides.forecast import with_spare
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.iterations.iteration import Iteration
from chainer_hybridmem.training.session.iterations.out_of_memory import (
    Codes,
    FailedAllocation,
    Moment,
    OutOfMemoryExplainer,
    enough,
)
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.planning_time import outside_limit
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.units import format_bytes, format_count

UPDATES = 2  # of each parameter; a step that has all its states lies between them
FEWEST_ITERATIONS = 2  # beyond the limit, also where nothing is updated
MOST_ITERATIONS = 64  # where something waits for its update
SMALL_BYTES = 4096  # of small arrays that a program makes later, whatever it needs


@dataclasses.dataclass(frozen=True)
class Needs:
    """What iterations need, as far as it has been found out.

    Attributes:
        enough_bytes (int): With this limit, iterations like those seen run.
        iterations (int): So many have been seen.
        plan_bytes (int or None): Least memory of any plan.
        plain_bytes (int or None): Peak of plain Chainer.
        kept_bytes (int or None): Less than that, where it is not known.
        complete (bool): Whether a whole step has been seen, and come again.
    """

    enough_bytes: int
    iterations: int = 0
    plan_bytes: int | None = None
    plain_bytes: int | None = None
    kept_bytes: int | None = None
    complete: bool = False

    @property
    def in_core_bytes(self) -> int:
        """What they need if nothing leaves, as far as it is known."""
        return self.plain_bytes or self.kept_bytes or self.enough_bytes

    @property
    def named_bytes(self) -> int:
        """See [limits that are named]; beyond what plain Chainer needs, none is."""
        named = with_spare(self.enough_bytes, self.in_core_bytes)
        if self.plain_bytes is None:
            return named
        return max(self.enough_bytes + SMALL_BYTES, min(named, self.plain_bytes))

    def __str__(self) -> str:
        beside = []
        if self.plain_bytes is not None:
            beside.append(f'plain Chainer needs {_exactly(self.plain_bytes)}')
        elif self.kept_bytes is not None:
            beside.append(
                f'plain Chainer needs more than {_exactly(self.kept_bytes)}, as it '
                f'runs no function in parts'
            )
        if self.plan_bytes is not None:
            least = _exactly(self.plan_bytes)
            beside.append(f'the least memory of any plan is {least}')
        told = f'a limit known to do is {enough(self.named_bytes)}'
        if not self.complete:
            seen = format_count(self.iterations, 'pass', 'passes')
            told += f', for the {seen} seen; others may need more'
        return '; '.join([told, *beside])


class Overrun:
    """See [beyond the limit].

    Args:
        runtime (Runtime): Runs iterations.
        arrays (ModelArrays): Of the model; updates make more of them.
        explainer (OutOfMemoryExplainer): Says what was refused.

    Attributes:
        needs (Needs or None): What has been found out; None before that.
        told (str): The error that has been raised for it; empty before that.
        raise_limit (callable or None): Gets what iterations need, and tells whether
            another limit takes the place of an error; the session is left before the
            next function then.
    """

    def __init__(
        self,
        runtime: Runtime,
        arrays: ModelArrays,
        explainer: OutOfMemoryExplainer,
    ) -> None:
        self._memory = runtime.device.memory
        self._maps = runtime.executor.maps
        self._tell = runtime.tell
        self._options = runtime.options
        self._arrays = arrays
        self._explainer = explainer
        self._failed: FailedAllocation | None = None  # the first one
        self._beyond_bytes = 0
        self._counted_bytes = 0  # most that was wanted at once, whatever had left
        self._model_bytes = 0  # when it was refused
        self._updates: dict[int, int] = {}  # of each parameter, when it was refused
        self._kinds: collections.Counter[tuple[int, int]] = collections.Counter()
        self._guides: dict[tuple[int, int], Guide | None] = {}  # by kind
        self._held_bytes: collections.Counter[tuple[int, int]] = (
            collections.Counter()
        )  # by the program when they begin, beside feature maps, at most
        self._concluded = False
        self._is_replaced = False  # the limit, by another one
        self.told = ''
        self.raise_limit: Callable[[Needs], bool] | None = None
        self.needs: Needs | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the limit may give way."""
        ends = self._concluded and not self._is_replaced
        return not ends and self._memory.reclaim_error is None

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has gone beyond the limit, and that is still to say."""
        return self._failed is not None and not self._concluded

    def exceed(
        self,
        short_bytes: int,
        find_moment: Callable[[Codes], Moment],
    ) -> None:
        """Lets what does not fit exceed the limit, if it may.

        Args:
            short_bytes: What is missing after all that can leave has left.
            find_moment: Tells when something happened.
        """
        memory = self._memory
        if not self.is_possible or memory.trying:
            return
        if not memory.wanted_bytes:  # it fits by count, and may find a place by now
            return
        if not self._memory.raise_limit(short_bytes):
            return
        wanted_bytes = memory.used_bytes + memory.wanted_bytes
        self._counted_bytes = max(self._counted_bytes, wanted_bytes)
        self._beyond_bytes += short_bytes
        if self._failed is None:
            self._model_bytes = outside_limit(lambda: self._arrays.kept_bytes)
            self._updates = self._arrays.find_updates()
            under_way = traceback.walk_stack(sys._getframe(1))
            moment = find_moment({frame.f_code for frame, _ in under_way})
            self._failed = outside_limit(
                self._explainer.describe,
                memory.wanted_bytes,
                self._memory.used_bytes,
                moment,
            )
            self._tell(
                'an allocation does not fit the memory limit: the limit gives way, to '
                'find out what is needed'
            )

    def end(self, iteration: Iteration) -> None:
        """An iteration has ended; if it went beyond the limit, its needs are known."""
        if not self.is_under_way:
            return
        kind = iteration.find_fingerprint(), iteration.position
        self._kinds[kind] += 1
        self._guides[kind] = iteration.following.guide
        held_bytes = max(self._held_bytes[kind], iteration.held_bytes)
        self._held_bytes[kind] = held_bytes
        self.needs = outside_limit(self._find_needs)

    @property
    def _iterations(self) -> int:
        """That have ended since."""
        return self._kinds.total()

    @property
    def _has_seen_step(self) -> bool:
        """Whether every parameter has been updated twice."""
        before = self._updates
        return all(
            number - before.get(rule, 0) >= UPDATES
            for rule, number in self._arrays.find_updates().items()
        )

    def conclude(self) -> None:
        """The next iteration is about to begin.

        Raises:
            OutOfMemoryError: If enough has been found out, and no limit is raised.
        """
        if not self.is_under_way or self._iterations < FEWEST_ITERATIONS:
            return
        if not (self._has_seen_step or self._iterations >= MOST_ITERATIONS):
            return
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> OutOfMemoryError | None:
        """The error for what went beyond the limit, once; the limit holds again.

        None if nothing did, or if another limit takes its place.
        """
        failed = self._failed
        if failed is None or self._concluded:
            return None
        self.needs = outside_limit(self._find_needs)  # updates have needed more
        if self.raise_limit is not None and self.raise_limit(self.needs):
            # Beyond the limit until the session is left.
            self._concluded = self._is_replaced = True
            return None
        self._memory.restore_limit()
        hint = '' if self.needs.complete else self._explainer.hint_at_recording()
        self._concluded = True
        self.told = (
            f'{failed.text} Training went on beyond the limit to find out what does, '
            f'so the traceback is of a later line: {self.needs}. Raise memory_limit '
            f'or lower the batch size{failed.hints}{hint}.'
        )
        return OutOfMemoryError(
            self.told,
            failed.requested_bytes,
            self._options.limit_bytes,
            failed.used_bytes,
        )

    def _find_needs(self) -> Needs:
        """What all that has been seen needs."""
        seen = self._options.limit_bytes + self._beyond_bytes
        whole = self._has_seen_step
        if not whole:
            seen += max(0, self._arrays.kept_bytes - self._model_bytes)
        found = [
            _find_plan_needs(guide, self._held_bytes[kind])
            for kind, guide in self._guides.items()
        ]
        known = [needs for needs in found if needs is not None]
        count = self._iterations
        if not known or len(known) < len(found):
            return Needs(seen, count)
        plain = [needs.plain_bytes for needs in known]
        needs = Needs(
            max(seen, *(needs.enough_bytes for needs in known)),
            count,
            max(needs.plan_bytes or 0 for needs in known),
            None if None in plain else max(nbytes or 0 for nbytes in plain),
            max(needs.kept_bytes or 0 for needs in known),
            whole and min(self._kinds.values()) >= UPDATES,
        )
        if needs.in_core_bytes < self._counted_bytes:
            # Other iterations than the guides' need more, or the program holds more.
            enough = needs.enough_bytes if self._options.plans_anyway else seen
            return Needs(enough, count, complete=needs.complete)
        if not self._options.plans_anyway:  # what no plan fits runs without one
            enough = max(seen, needs.plan_bytes or 0)
            return dataclasses.replace(needs, enough_bytes=enough)
        enough = needs.enough_bytes + 2 * self._maps.held_bytes
        if Action.SWAP not in find_planner(self._options.planner).actions:
            enough = max(enough, needs.plain_bytes or needs.kept_bytes or 0)
        return dataclasses.replace(needs, enough_bytes=enough)


def _find_plan_needs(guide: Guide | None, held_bytes: int) -> Needs | None:
    """What plans for a guide's iterations need; None if nothing tells that.

    Args:
        guide: Of iterations that have been seen.
        held_bytes: By the program when they begin, beside feature maps.
    """
    if guide is None:
        return None
    foreign_bytes = guide.count_foreign(held_bytes)
    if guide.problem is not None:
        least, _ = least_memory(guide.problem)
        least += max(guide.foreign.nbytes, foreign_bytes)
        in_core = guide.problem.in_core
        plain, kept = in_core.plain_peak_bytes, in_core.peak_bytes
        return Needs(least, 1, least, plain, kept)
    found = guide.forecast
    if found is None:
        return None
    plain, kept = found.plain_bytes, found.kept_bytes
    enough, least = found.enough_bytes + foreign_bytes, found.plan_bytes + foreign_bytes
    return Needs(enough, 1, least, plain, kept)


def _exactly(nbytes: int) -> str:
    return f'{format_bytes(nbytes)} ({nbytes} bytes)'
