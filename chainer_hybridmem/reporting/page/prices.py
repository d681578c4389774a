"""What memory costs in time: prices from the multipliers of the proven bound.

The bound is the value of a linear program, and convex in the limit. So its multiplier
at one limit tells how fast it falls from there: no amount of memory more lowers it by
more than the amount times the price.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.units import format_enough

# Of the bound: a difference below it is the solver's tolerance, and none to show.
LEAST_SHARE = 1e-5
WORTH = 0.005  # of an iteration: less is nothing to change a limit for
STEPS_TO_LIMIT = 10  # of memory more, at least
ROUND_NUMBERS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclasses.dataclass(frozen=True)
class Prices:
    """What memory costs at one limit.

    Attributes:
        seconds_per_byte (ndarray): (n,) by how much the bound falls with each byte less
            at each operation.
        bound_seconds (float): The proven bound at the limit.
        more_bytes (int): A round number of bytes.
        bound_with_more_seconds (float): The proven bound at so much more.
    """

    seconds_per_byte: np.ndarray
    bound_seconds: float
    more_bytes: int
    bound_with_more_seconds: float

    def advise(self, limit_bytes: int, seconds: float) -> dict[str, Any] | None:
        """More memory that saves something.

        Args:
            limit_bytes: The limit.
            seconds: Of an iteration at the limit.

        Returns:
            dict or None: ``bytes`` more, the ``seconds`` by which the bound falls, and
            the new ``limit`` as options have it; None if it is not worth a change.
        """
        saved = self.bound_seconds - self.bound_with_more_seconds
        if saved <= WORTH * seconds:
            return None
        limit = format_enough(limit_bytes + self.more_bytes).replace(' ', '')
        return {'bytes': self.more_bytes, 'seconds': saved, 'limit': limit}


def find_prices(problem: Problem, limit_bytes: int) -> Prices:
    """Prices at a limit.

    Args:
        problem: What is planned.
        limit_bytes: Memory limit.
    """
    bound = lower_bound(problem, limit_bytes)
    more = _round_part(limit_bytes)
    with_more = lower_bound(problem, limit_bytes + more).seconds
    least = LEAST_SHARE * bound.seconds
    counts = bound.prices * limit_bytes > least
    return Prices(
        seconds_per_byte=np.where(counts, bound.prices, 0.0),
        bound_seconds=bound.seconds,
        more_bytes=more,
        # What holds with less memory holds with more, whatever the solver finds.
        bound_with_more_seconds=(
            with_more if with_more < bound.seconds - least else bound.seconds
        ),
    )


def _round_part(limit_bytes: int) -> int:
    """A round number of bytes, KiB, MiB or GiB, at most a tenth of the limit."""
    most = max(limit_bytes // STEPS_TO_LIMIT, 1)
    sizes = (step << 10 * unit for unit in range(6) for step in ROUND_NUMBERS)
    return max(size for size in sizes if size <= most)


def sweep_bound(
    problem: Problem, count: int, time_budget: float
) -> list[tuple[int, float]]:
    """The proven bound at limits from the least memory of any plan to the in-core peak.

    Args:
        problem: What is planned.
        count: Number of limits.
        time_budget: Seconds after which no further limit is begun, nor one that would
            end after them if it took as long as the one before.

    Returns:
        list of tuple: Limits in bytes, ascending, those among them at which the bound
        is known already, and bounds in seconds, descending: what is proven for a limit
        holds for all limits below.
    """
    deadline = timing.now() + time_budget
    least, most = least_memory(problem)[0], problem.whole_bytes
    span = max(most - least, 0)
    limits = {least + span * i // max(count - 1, 1) for i in range(count)}
    found = {
        limit: bound.seconds
        for limit, bound in problem.bounds.items()
        if least <= limit <= most
    }
    for limit in _easy_first(sorted(limits)):
        began = timing.now()
        found[limit] = lower_bound(problem, limit).seconds
        now = timing.now()
        if now + (now - began) >= deadline:
            break
    highest, curve = 0.0, []
    for limit, seconds in sorted(found.items(), reverse=True):
        highest = max(highest, seconds)
        curve.append((limit, highest))
    return curve[::-1]


def _easy_first(limits: list[int]) -> list[int]:
    """The highest limit, then halves and quarters; the lowest, and hardest, last."""
    order: dict[int, None] = {}
    step = len(limits) - 1
    while step > 0:
        order |= dict.fromkeys(limits[:0:-step])
        step //= 2
    return [*order, limits[0]]
