"""Swap-ins that begin earlier, as far as a plan's memory lets them.

``capuchin`` brings its swap-ins from the last moment to their triggers, and moves those
that are late (Peng et al. 2020: the trigger of a copy that compute has waited for moves
earlier). Actions, replays and everything else stay.

One link is one queue: copies keep their order. A swap-in that moves takes those along
that are in front of it and would begin later. It stops behind one that cannot move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.candidates import accept
from chainer_hybridmem.planning.simulation.problem import Problem, copy_seconds
from chainer_hybridmem.planning.simulation.timeline import (
    positions_from_plan,
    run_lanes,
)
from chainer_hybridmem.planning.simulation.work import Work

STEP = 0.05  # of a copy's time: the paper's step, and the least of ours
LEAST = 0.01  # of a copy's time: smaller delays are ignored


def moved_earlier(problem: Problem, plan: Plan, late: Mapping[int, float]) -> Plan:
    """Moves the triggers of swap-ins that were late.

    Each begins earlier by the time it was late, at least by :data:`STEP` of its copy
    and by one operation, as far as the loads under the plan's own limit allow, and
    never before its release or before backward.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        late: Seconds that compute waited for a swap-in, by storage. What the plan
            does not swap does not count.

    Returns:
        Plan: Simulated anew; ``plan`` itself if nothing can move.

    Raises:
        PlanError: If the plan is for another profile or cannot be executed.
    """
    work = _simulated(problem, plan)[1]
    start, in_seconds = work.start, copy_seconds(problem, work.on_disk)[1]
    wanted: dict[int, int] = {}
    for m, entry in enumerate(plan.maps):
        if entry.storage in late and entry.action is Action.SWAP:
            at = entry.swap_in_before
            least = STEP * float(in_seconds[m])
            moment = start[at] - max(least, late[entry.storage])
            before = int(np.searchsorted(start, moment, 'right')) - 1
            wanted[entry.storage] = min(before, at - 1)
    return with_swap_ins(problem, plan, reachable(problem, plan, wanted))


def rehearsed(problem: Problem, plan: Plan, iterations: int) -> Plan:
    """The plan that feedback makes of another in simulated iterations.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        iterations: How many at most; they end when nothing can move.

    Returns:
        Plan: The fastest on the way.
    """
    best = plan
    for _ in range(iterations):
        stall = _simulated(problem, plan)[1].need_stall
        late = {s.id: stall[m] for m, s in enumerate(problem.maps)}
        moved = moved_earlier(problem, plan, noticeable(problem, late))
        if moved is plan:
            break
        plan = moved
        if plan.predicted_seconds < best.predicted_seconds:
            best = plan
    return best


def noticeable(problem: Problem, late: Mapping[int, float]) -> dict[int, float]:
    """Swap-ins late by more than :data:`LEAST` of their copy."""
    copy_seconds = {
        s.id: problem.swap_in_seconds[m] for m, s in enumerate(problem.maps)
    }
    return {
        storage: seconds
        for storage, seconds in late.items()
        if seconds > LEAST * copy_seconds.get(storage, np.inf)
    }


def reachable(
    problem: Problem, plan: Plan, wanted: Mapping[int, int]
) -> dict[int, int]:
    """How far the swap-ins of a plan can move towards earlier positions.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        wanted: Positions wanted, by storage.

    Returns:
        dict: The position of every swap-in by storage, none later than now.
    """
    queue = sorted(
        (entry for entry in plan.maps if entry.action is Action.SWAP),
        key=lambda e: (e.swap_in_before, e.needed_before, e.storage),
    )
    goals = _goals(queue, wanted)
    loads = check_plan(problem.profile, plan)
    reached: dict[int, int] = {}
    previous = problem.arrays.first_backward
    for entry, goal in zip(queue, goals, strict=True):
        room = plan.memory_limit_bytes - problem.profile.storages[entry.storage].nbytes
        first = max(goal, entry.release_before, previous)
        at = entry.swap_in_before
        while at > first and loads[at - 1] <= room:
            at -= 1
            loads[at] += plan.memory_limit_bytes - room
        reached[entry.storage] = previous = at
    return reached


def _goals(queue: list[MapPlan], wanted: Mapping[int, int]) -> list[int]:
    """Where each copy of a queue is to begin: no later than those behind it."""
    goals = []
    latest = queue[-1].swap_in_before if queue else 0
    for entry in reversed(queue):
        at = entry.swap_in_before
        latest = min(latest, at, wanted.get(entry.storage, at))
        goals.append(latest)
    return goals[::-1]


def with_swap_ins(problem: Problem, plan: Plan, positions: Mapping[int, int]) -> Plan:
    """The plan with swap-ins at other positions, simulated and checked.

    Args:
        problem: What the plan is for.
        plan: The plan.
        positions: Of swap-ins, by storage.

    Returns:
        Plan: ``plan`` itself if that is where they are.
    """
    maps = tuple(
        dataclasses.replace(entry, swap_in_before=positions[entry.storage])
        if entry.storage in positions
        else entry
        for entry in plan.maps
    )
    if maps == plan.maps:
        return plan
    plan = dataclasses.replace(plan, maps=maps)
    plan = accept(problem, plan, plan.memory_limit_bytes)
    seconds, _ = _simulated(problem, plan)
    return dataclasses.replace(plan, predicted_seconds=seconds)


def _simulated(problem: Problem, plan: Plan) -> tuple[float, Work]:
    """Seconds of a plan's iteration, and when everything happens in it."""
    work = positions_from_plan(problem, plan)
    return run_lanes(problem, work), work
