"""Swap-ins that begin earlier, as far as a plan's memory lets them.

Two users: ``capuchin`` brings its swap-ins from the last moment to their triggers, and
a session moves those that were late (Peng et al. 2020: the trigger of a copy that
compute has waited for moves earlier). Actions, replays and everything else stay, so
that the numbers of training and the limit do not change.

One link is one queue: copies keep their order. Whoever moves takes those along that
are in front of it and would begin later, and stops behind one that cannot move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from chainer_hybridmem.plan import Action, MapPlan, Plan
from chainer_hybridmem.simulation import kernel
from chainer_hybridmem.simulation.problem import Problem
from chainer_hybridmem.simulation.timeline import positions_from_plan
from chainer_hybridmem.validation import check_plan

STEP = 0.05  # of a copy's time: the paper's step, and the least of ours


def moved_earlier(problem: Problem, plan: Plan, late: Mapping[int, float]) -> Plan:
    """Moves the triggers of swap-ins that were late.

    Each begins earlier by the time it was late, at least by :data:`STEP` of its copy
    and by one operation, as far as the loads under the plan's own limit allow and
    never before its release or before backward.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        late: Seconds that compute waited for a swap-in, by storage. Storages that
            the plan does not swap do not count.

    Returns:
        Plan: Simulated anew; ``plan`` itself if nothing can move.

    Raises:
        PlanError: If the plan is for another profile or cannot be executed.
    """
    work = positions_from_plan(problem, plan)
    _seconds(problem, work)
    wanted: dict[int, int] = {}
    for m, entry in enumerate(plan.maps):
        if entry.storage in late and entry.action is Action.SWAP:
            least = STEP * float(problem.swap_in_seconds[m])
            step = max(least, late[entry.storage])
            at = entry.swap_in_before
            moment = work.start[at] - step
            before = int(np.searchsorted(work.start, moment, 'right')) - 1
            wanted[entry.storage] = min(before, at - 1)
    return with_swap_ins(problem, plan, reachable(problem, plan, wanted))


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
    moved = dataclasses.replace(plan, maps=maps)
    limit = plan.memory_limit_bytes
    return dataclasses.replace(
        moved,
        predicted_seconds=_seconds(problem, positions_from_plan(problem, moved)),
        predicted_peak_bytes=max(check_plan(problem.profile, moved, limit)),
    )


def _seconds(problem: Problem, work: kernel.Work) -> float:
    return kernel.lanes(
        problem.arrays, problem.swap_out_seconds, problem.swap_in_seconds, work
    )
