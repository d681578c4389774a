"""Plans whose arena fits the limit, before anything has run."""

from __future__ import annotations

from collections.abc import Callable

from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.pools import planned_trace
from chainer_hybridmem.pools.arena import Arena, IterationLog, logs_of
from chainer_hybridmem.pools.fitting import fit
from chainer_hybridmem.records.plan import Plan
from chainer_hybridmem.search.deadline import Deadline
from chainer_hybridmem.search.relaxed import relaxed
from chainer_hybridmem.simulation.problem import Problem

Place = Callable[[tuple[IterationLog, IterationLog]], Arena]
MOST_SLOWDOWN = 0.05  # that an arena may cost where there is a choice; it saves faults


class _NoTime(Exception):
    """Ends the search for an arena that the limit does not need."""


def plan_with_arena(
    problem: Problem,
    make_plan_for: Callable[[int], Plan],
    place: Place,
    limit_bytes: int,
    spare_bytes: int,
    optional: bool,
    deadline: Deadline | None = None,
) -> tuple[Plan, bool]:
    """Plans until the arena fits, as far as a plan's trace tells.

    Args:
        problem: What is planned.
        make_plan_for: Makes a plan for a limit in bytes.
        place: Lays out two logged iterations.
        limit_bytes: What arena and all beside it must fit.
        spare_bytes: What they must leave of it.
        optional: Whether the limit is kept without an arena, too: then a plan is not
            made slower for it than :data:`MOST_SLOWDOWN`.
        deadline: After it, no more plans and arenas are tried.

    Returns:
        tuple: The plan, and whether its arena fits.

    Raises:
        InfeasibleError: If there is no plan for the limit.
    """
    deadline = deadline or Deadline()
    room_bytes = limit_bytes - spare_bytes
    made: list[Plan] = []  # as the planner makes them
    arenas: list[Arena] = []  # of those, or of what is relaxed

    def arena_of(plan: Plan) -> Arena:
        return place(logs_of(planned_trace(problem.profile, plan)))

    def make(planned_bytes: int) -> Plan:
        plan = make_plan_for(planned_bytes)
        made.append(plan)
        if optional and deadline.is_over:
            raise _NoTime
        arena = arena_of(plan)
        if arena.footprint_bytes > room_bytes and not deadline.is_over:
            # Only now: copies that may begin early forgive a slow link the most.
            plan = relaxed(problem, plan)
            arena = arena_of(plan)
        arenas.append(arena)
        return plan

    try:
        fitted = fit(make, lambda plan: arenas[-1], room_bytes, deadline=deadline)
    except _NoTime:
        return made[0], False
    except InfeasibleError:
        if not spare_bytes:
            raise
        return make_plan_for(limit_bytes), False
    plan, first = fitted.plan, made[0]
    if optional and (
        not fitted.fits
        or plan.predicted_seconds > first.predicted_seconds * (1 + MOST_SLOWDOWN)
    ):
        return first, False
    return plan, fitted.fits
