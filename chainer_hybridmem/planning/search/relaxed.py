"""A plan whose maps are away for longer, at no cost: swap-ins later, releases earlier.

Planners bring maps back as early as memory allows and give memory back when it is
asked for, so that the load touches the limit again and again. Nothing waits for most
of that. Here every swap-in of a finished plan moves as far back as it can without
making compute wait, and every swap-out's memory is free once its copy has finished.
The load falls everywhere but where it cannot, which leaves room for the layout of
the memory (:mod:`chainer_hybridmem.planning.layouts.offline`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.candidates import accept
from chainer_hybridmem.planning.search.planner_options import SHARE
from chainer_hybridmem.planning.simulation.problem import Problem, copy_seconds
from chainer_hybridmem.planning.simulation.timeline import (
    positions_from_plan,
    run_lanes,
)
from chainer_hybridmem.planning.simulation.work import Work

MARGIN = 0.5
# Tried one after the other where copies slow each other or compute down.
WIDER = (1.0, 2.0, 4.0, 8.0)
ROUNDING = 1e-12  # of the time of the iteration


class _Moved(NamedTuple):
    """New positions, (M,) int64 each."""

    release: np.ndarray
    swap_in: np.ndarray


def relaxed(problem: Problem, plan: Plan, margin: float = MARGIN) -> Plan:
    """Moves swap-ins later and releases earlier without making the plan slower.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        margin: How much longer than predicted each copy is reckoned to take, as a
            share of its time; what is given up then is only what has slack enough.

    Returns:
        Plan: With the same actions and replays, simulated as fast as ``plan`` or
        faster; at every operation its load is that of ``plan`` or lower.

    Raises:
        OptionError: If the margin is below zero.
        PlanError: If the plan is for another profile or cannot be executed.
    """
    SHARE.check('margin', margin)
    before = positions_from_plan(problem, plan)
    seconds = run_lanes(problem, before)
    most = seconds * (1 + ROUNDING)
    work = positions_from_plan(problem, plan)
    for wider in (margin, *(margin + w for w in WIDER)):
        moved = _moved(problem, before, wider)
        work.release[:], work.swap_in[:] = moved
        after = run_lanes(problem, work)
        if after <= most:
            break
    else:
        return plan
    maps = tuple(
        dataclasses.replace(entry, release_before=release, swap_in_before=swap_in)
        if entry.action is Action.SWAP
        else entry
        for entry, release, swap_in in zip(
            plan.maps, moved.release.tolist(), moved.swap_in.tolist(), strict=True
        )
    )
    seconds = min(after, plan.predicted_seconds)
    moved_plan = dataclasses.replace(plan, maps=maps, predicted_seconds=seconds)
    return accept(problem, moved_plan)


def _moved(problem: Problem, work: Work, margin: float) -> _Moved:
    """Positions of a schedule in which every copy ends when it does now.

    Operations of forward are as late, and copies back begin as late, as lets everything
    else stay where it is in time.
    """
    swapped = np.flatnonzero(work.swap_out >= 0)
    n = len(work.start)
    waits = np.zeros((2, n))
    np.add.at(waits[0], work.release[swapped], work.release_stall[swapped])
    np.add.at(waits[1], work.needed[swapped], work.need_stall[swapped])
    issued = work.start - waits[1]  # swap-ins before each operation
    free = (
        issued - waits[0]
    )  # releases before each operation, if compute is not to wait

    # Forward waits for swap-outs anyway. It may do so sooner as long as every
    # copy can begin when it does now.
    b0 = problem.arrays.first_backward
    due = np.full(n + 1, np.inf)
    np.minimum.at(due, work.swap_out[swapped], work.out_start[swapped])
    latest = issued[b0] if b0 < n else work.stop[-1]
    for k in range(b0 - 1, -1, -1):
        seconds = work.stop[k] - work.start[k]
        latest = min(latest, due[k + 1]) - seconds * (1 + margin)
        free[k] = latest = max(latest, work.start[k])

    result = _Moved(work.release.copy(), work.swap_in.copy())
    out_seconds, in_seconds = copy_seconds(problem, work.on_disk)
    done = work.out_end + margin * out_seconds
    release = np.searchsorted(free, done[swapped])
    release = np.maximum(release, problem.arrays.release_from[swapped])
    result.release[swapped] = np.minimum(release, work.release[swapped])

    # From the last copy to the first: the latest moment that is early enough for it
    # and for those that come after it.
    latest, position = np.inf, n
    for m in swapped[np.argsort(work.in_start[swapped], kind='stable')][::-1]:
        seconds = in_seconds[m]
        latest = min(latest, work.start[work.needed[m]]) - seconds * (1 + margin)
        # While the lane is busy, a copy need not be issued before it begins.
        latest = max(latest, work.in_start[m])
        last = int(np.searchsorted(issued, latest, 'right')) - 1
        position = max(min(last, work.needed[m], position), work.swap_in[m])
        result.swap_in[m] = position
    return result
