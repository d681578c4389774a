"""A plan without drops that nothing needs.

Planners drop what is kept after its last use. Where memory is not short by then, that
can wait for the death of the graph, as in plain Chainer: a function whose maps a plan
leaves alone costs an iteration nothing (execution, [idle functions]).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.records.plan import Action, Plan
from chainer_hybridmem.records.validation import check_plan
from chainer_hybridmem.simulation.problem import Problem

LARGEST_BYTES = 2**20  # functions that make more take longer than a look for it


def without_needless_drops(problem: Problem, plan: Plan, room: float = 1.0) -> Plan:
    """Leaves as many kept maps to the graph as memory allows, small ones first.

    Args:
        problem: What the plan is for.
        plan: Any plan that can be executed.
        room: Share of the memory that is free under the plan's highest load, and that
            may be taken.

    Returns:
        Plan: With the same actions, times and replays; its peak is not higher. The same
        plan if the graph outlives the iteration.

    Raises:
        PlanError: If the plan is for another profile or cannot be executed.
    """
    profile = problem.profile
    storages = profile.storages
    dropped = [
        entry
        for entry in plan.maps
        if entry.action is Action.KEEP
        and entry.drop_before >= 0
        and not storages[entry.storage].persistent
        and storages[entry.storage].nbytes <= LARGEST_BYTES
    ]
    if not dropped or profile.graph_end_event >= len(profile.events):
        return plan
    loads = np.array(check_plan(profile, plan))
    peak_bytes = int(loads.max())
    free_bytes = ((peak_bytes - loads) * room).astype(np.int64)
    left: set[int] = set()
    for entry in sorted(dropped, key=lambda m: storages[m.storage].nbytes):
        nbytes = storages[entry.storage].nbytes
        later = free_bytes[entry.drop_before :]
        if nbytes <= later.min(initial=peak_bytes):
            later -= nbytes
            left.add(entry.storage)
    if not left:
        return plan
    maps = tuple(
        dataclasses.replace(entry, drop_before=-1) if entry.storage in left else entry
        for entry in plan.maps
    )
    result = dataclasses.replace(plan, maps=maps)
    if max(check_plan(profile, result)) > peak_bytes:
        return plan
    return result
