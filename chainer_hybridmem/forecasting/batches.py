"""The largest batch that fits a limit, in-core and planned, and what refuses the next.

What is asked about a batch size is a :class:`Problem`, never a training: nothing runs
out of memory on the way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.planners.make import make_plan
from chainer_hybridmem.planning.planners.registry import DEFAULT
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.planning.simulation.problem import with_profile, with_rules
from chainer_hybridmem.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one batch size costs.

    Attributes:
        batchsize (int): Examples.
        seconds (float): Of an iteration, predicted.
        peak_bytes (int): Of an iteration, predicted.
        speed_share (float): Examples per second over those of the same batch size
            without any limit.
    """

    batchsize: int
    seconds: float
    peak_bytes: int
    speed_share: float

    @property
    def examples_per_second(self) -> float:
        """Speed; infinite if the model says that an iteration takes no time."""
        return self.batchsize / self.seconds if self.seconds else float('inf')


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the next batch size does not do.

    Attributes:
        batchsize (int): The first one that does not.
        reason (str): One sentence.
        operation (str or None): Whose memory says no; None if speed or the planner
            does.
        needed_bytes (int or None): What that operation needs.
    """

    batchsize: int
    reason: str
    operation: str | None = None
    needed_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch under a limit, with a certificate.

    Attributes:
        limit_bytes (int): The limit.
        planner (str): Who plans.
        min_speed (float or None): Least share of the speed without a limit.
        in_core (Batch or None): The largest one that plain Chainer trains; None if not
            even one example fits.
        in_core_refusal (Refusal or None): Of the next one; None if there is no end.
        planned (Batch or None): The largest one with a plan; None if nothing fits.
        refusal (Refusal or None): Of the next one; None if there is no end.
        plan (Plan or None): For ``planned``.
        problem (Problem or None): What it is a plan for.
    """

    limit_bytes: int
    planner: str
    min_speed: float | None
    in_core: Batch | None
    in_core_refusal: Refusal | None
    planned: Batch | None
    refusal: Refusal | None
    plan: Plan | None = dataclasses.field(repr=False)
    problem: Problem | None = dataclasses.field(repr=False)

    @property
    def batchsize(self) -> int:
        """The answer; 0 if nothing fits."""
        return self.planned.batchsize if self.planned else 0


def find_largest_batch(
    problem_of: Callable[[int], Problem],
    limit_bytes: int,
    most: int,
    planner: str = DEFAULT,
    min_speed: float | None = None,
    spare_bytes: int = 0,
    **options: Any,
) -> LargestBatch:
    """Finds the largest batch that fits a limit.

    Memory grows with the batch, so what single operations need ends the search from
    above; the planner is asked about that batch size, and about smaller ones where it
    declines or is too slow.

    Args:
        problem_of: One iteration with a batch size.
        limit_bytes: Most bytes there are.
        most: Not looked beyond.
        planner: Its name.
        min_speed: Least speed as a share of the speed without any limit, in (0, 1].
        spare_bytes: What plans leave of the limit, as those of a session on a GPU.
        options: Of the planner.

    Raises:
        UnknownNameError: If there is no such planner.
        OptionError: If the planner has no such option.
    """
    search = _Search(problem_of, limit_bytes, spare_bytes, planner, min_speed, options)
    return search.run(most)


class _Search:
    def __init__(
        self,
        problem_of: Callable[[int], Problem],
        limit_bytes: int,
        spare_bytes: int,
        planner: str,
        min_speed: float | None,
        options: dict[str, Any],
    ) -> None:
        room_bytes = limit_bytes - spare_bytes
        self.problem_of = functools.lru_cache(maxsize=4)(
            lambda batchsize: with_room_for_trials(problem_of(batchsize), room_bytes)
        )
        self.limit_bytes, self.room_bytes = limit_bytes, room_bytes
        self.planner = planner
        self.min_speed = min_speed
        self.options = options
        self.plans: dict[int, Plan] = {}
        self.refusals: dict[int, Refusal] = {}

    def run(self, most: int) -> LargestBatch:
        in_core = largest_batchsize(
            lambda b: self.problem_of(b).in_core_peak_bytes, self.limit_bytes, most
        )
        possible = largest_batchsize(
            lambda b: least_memory(with_rules(self.problem_of(b), ()))[0],
            self.room_bytes,
            most,
        )
        planned = largest_planned(self._accept, possible)
        if planned < most:
            self._accept(planned + 1)  # or the refusal of another size is known
        plan = self.plans.get(planned)
        return LargestBatch(
            self.limit_bytes,
            self.planner,
            self.min_speed,
            self._in_core(in_core) if in_core else None,
            self._refuse_in_core(in_core + 1) if in_core < most else None,
            self._planned(planned, plan) if plan else None,
            self.refusals.get(planned + 1),
            plan,
            self.problem_of(planned) if plan else None,
        )

    def _in_core(self, batchsize: int) -> Batch:
        problem = self.problem_of(batchsize)
        return Batch(
            batchsize, problem.in_core_seconds, problem.in_core_peak_bytes, 1.0
        )

    def _refuse_in_core(self, batchsize: int) -> Refusal:
        problem = self.problem_of(batchsize)
        needed = problem.in_core_peak_bytes
        return Refusal(
            batchsize,
            f'plain Chainer needs {_more(needed, self.limit_bytes)}',
            needed_bytes=needed,
        )

    def _planned(self, batchsize: int, plan: Plan) -> Batch:
        return Batch(
            batchsize,
            plan.predicted_seconds,
            plan.predicted_peak_bytes,
            _speed_share(plan),
        )

    def _accept(self, batchsize: int) -> bool:
        """Whether there is a plan that is fast enough; keeps it, or why not."""
        if batchsize in self.plans:
            return True
        if batchsize in self.refusals:
            return False
        refusal = self._look_at(batchsize)
        if refusal is not None:
            self.refusals[batchsize] = refusal
        return refusal is None

    def _look_at(self, batchsize: int) -> Refusal | None:
        problem = self.problem_of(batchsize)
        least, worst = least_memory(with_rules(problem, ()))
        if least > self.room_bytes:
            label = problem.profile.operations[worst].label
            reason = (
                f'operation {worst} ({label}) alone needs '
                f'{_more(least, self.room_bytes)}, with all that never leaves'
            )
            return Refusal(batchsize, reason, label, least)
        try:
            plan = make_plan(problem, self.room_bytes, self.planner, **self.options)
        except InfeasibleError as error:
            return Refusal(batchsize, f'planner {self.planner} finds no plan: {error}')
        except OptionError as error:  # it cannot obey the rules
            if not problem.rules:
                raise
            return Refusal(batchsize, str(error))
        share = _speed_share(plan)
        if self.min_speed is not None and share < self.min_speed:
            return Refusal(
                batchsize,
                f'its speed would be {share:.1%} of that without a limit, less than '
                f'{self.min_speed:.1%}',
            )
        self.plans[batchsize] = plan
        return None


def _more(needed_bytes: int, room_bytes: int) -> str:
    more = format_bytes(needed_bytes - room_bytes)
    return f'{format_bytes(needed_bytes)}, {more} more than the limit'


def _speed_share(plan: Plan) -> float:
    if not plan.predicted_seconds:
        return 1.0
    return plan.in_core_seconds / plan.predicted_seconds


def with_room_for_trials(problem: Problem, limit_bytes: int) -> Problem:
    """The problem with the recipes that a session can prove inside a limit.

    A replay is tried right after its operation, while everything else has left: what
    the operation has read and made is there, and once more what the replay takes, in
    parts if need be. What has no room for that is never made again.

    Args:
        problem: One iteration; its recipes may be proven elsewhere.
        limit_bytes: Most bytes there are.
    """
    load, least = _load_after(problem), _least_peaks(problem.profile)
    recipes = tuple(
        recipe
        for recipe in problem.profile.recipes
        if recipe.covers
        or load[recipe.operation] + least[recipe.operation] <= limit_bytes
    )
    if len(recipes) == len(problem.profile.recipes):
        return problem
    profile = dataclasses.replace(problem.profile, recipes=recipes)
    return with_profile(problem, profile)


def _least_peaks(profile: Profile) -> dict[int, int]:
    """What a replay of each operation takes at least, in bytes."""
    least = {recipe.operation: recipe.peak_bytes for recipe in profile.recipes}
    for split in profile.splits:
        if split.function == 0 and split.operation in least:
            least[split.operation] = min(least[split.operation], split.peak_bytes)
    return least


def _load_after(problem: Problem) -> np.ndarray:
    """(b0,) bytes after each forward operation, with what it has read and made."""
    a, n_maps, profile = problem.arrays, len(problem.maps), problem.profile
    b0, storages = a.first_backward, problem.profile.storages
    change = np.zeros(b0 + 1, np.int64)
    np.add.at(change, np.maximum(a.producer[:n_maps], 0), a.size[:n_maps])
    np.subtract.at(change, a.copy_from, a.size[:n_maps])
    there: np.ndarray = np.cumsum(change)[:b0] + a.fixed_start[1 : b0 + 1]
    planned = {storage.id for storage in problem.maps}
    for op in profile.operations[:b0]:  # what it reads dies only when it is complete
        span = profile.span_of(op.index)
        there[op.index] += sum(
            storages[s].nbytes
            for s in set(op.reads) - planned
            if span[0] <= storages[s].freed_at < span[1]
        )
    return there


def largest_batchsize(
    needed_bytes: Callable[[int], int], limit_bytes: int, most: int
) -> int:
    """Largest batch size that fits; 0 if not even one does.

    What is needed grows almost in proportion to the batch: interpolation finds the
    answer in a few steps, and falls back to bisection where it does not.

    Args:
        needed_bytes: Bytes that a batch size needs; never less for a larger one.
        limit_bytes: Most bytes there are.
        most: Not looked beyond.
    """
    need = needed_bytes(1)
    if need > limit_bytes:
        return 0
    low, low_need = 1, need
    high, high_need = most + 1, 0  # 0: not known yet
    guess, steps = 2, 0
    while high - low > 1:
        middle = min(max(guess, low + 1), high - 1)
        need = needed_bytes(middle)
        if need <= limit_bytes:
            low, low_need = middle, need
        else:
            high, high_need = middle, need
        steps += 1
        if high_need == 0:
            guess = max(2 * low, low * limit_bytes // max(1, low_need))
        elif steps % 4 == 3:
            guess = (low + high) // 2
        else:
            slope = (high_need - low_need) / (high - low)
            guess = low + round((limit_bytes - low_need) / slope)
    return low


def largest_planned(planned: Callable[[int], bool], most: int) -> int:
    """Largest batch size up to ``most`` for which a plan is found, by bisection.

    Args:
        planned: Whether a plan is found; if one is, so it is for smaller ones.
        most: Tried first.
    """
    if most < 1 or planned(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if planned(middle):
            low = middle
        else:
            high = middle
    return low
