"""Plans whose placement, not only their load, fits a limit.

A plan keeps its limit to the byte, but what it leaves free is not always in one piece:
its layout may need more. How much is known before training starts, and the next plan
is made for a limit that is lower by as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.planning.records.plan import Plan

ROUNDS = 5


class Placed(Protocol):
    """Where a plan's memory lies; a :class:`.layout.Layout` is one."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes it takes in all."""
        ...


Placement = TypeVar('Placement', bound=Placed)


@dataclasses.dataclass(frozen=True)
class Fitted(Generic[Placement]):
    """A plan and where its memory lies.

    Attributes:
        plan (Plan): The plan.
        placed (Placed): Its placement.
        fits (bool): Whether that is inside the limit.
        planned_bytes (int): Limit that the plan was made for.
        rounds (int): Plans made.
    """

    plan: Plan
    placed: Placement
    fits: bool
    planned_bytes: int
    rounds: int


def fit(
    make_placed_for: Callable[[int], tuple[Plan, Placement]],
    limit_bytes: int,
    rounds: int = ROUNDS,
) -> Fitted[Placement]:
    """Plans for lower and lower limits until the placement fits.

    Args:
        make_placed_for: Makes a plan for a limit in bytes, and places its memory.
        limit_bytes: What the placement must fit.
        rounds: Plans to make at most.

    Returns:
        Fitted: The first that fits; if none does, the one with the smallest footprint.

    Raises:
        InfeasibleError: If there is no plan for the limit itself.
        OptionError: If ``rounds`` is below one.
    """
    if rounds < 1:
        raise OptionError(f'rounds must be at least 1; {rounds} was given.')
    target, best = limit_bytes, None
    for number in range(1, rounds + 1):
        try:
            plan, placed = make_placed_for(target)
        except InfeasibleError:
            if best is None:
                raise
            break
        fits = placed.footprint_bytes <= limit_bytes
        found = Fitted(plan, placed, fits, target, number)
        if best is None or placed.footprint_bytes < best.placed.footprint_bytes:
            best = found
        if fits:
            break
        # A plan below its limit would be made again for any limit above its peak.
        target = min(target, plan.predicted_peak_bytes)
        target -= placed.footprint_bytes - limit_bytes
        if target <= 0:
            break
    assert best is not None
    return dataclasses.replace(best, rounds=number)
