"""Checks schedules against MONeT's own constraints, apart from our simulator.

Shah et al. 2021, section 4, with the formulas of its solver. Stage 0 is the forward
pass; stage t > 0 runs operations of forward again, in the order of their numbers, and
then operation ``loss + t`` of backward, which runs once. Operations up to ``loss``:

======  ==========================================================================
symbol  meaning
======  ==========================================================================
R       (stages, loss + 1) whether operation i runs in stage t
S       (stages + 1, loss + 1) whether its product is kept from before stage t;
        what the operation of backward in stage t reads is kept in t + 1, or made
        in t
IP      (stages, loss + 1) whether it writes over what it reads
======  ==========================================================================
"""

from __future__ import annotations

import math

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.lab.contest.checkmate_rules import (
    ScheduleCost,
    check_operation,
    schedule_of,
)
from chainer_hybridmem.lab.importing.checkmate import KIB
from chainer_hybridmem.lab.importing.monet import (
    AGAIN,
    FIRST,
    IN_PLACE,
    MonetGraph,
    Schedule,
    operations_of,
)
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile


def judge_plan(
    graph: MonetGraph, profile: Profile, plan: Plan, budget_bytes: int
) -> ScheduleCost:
    """A plan without swaps as a schedule of MONeT's.

    Args:
        graph: What the profile is made of.
        profile: Its iteration.
        plan: Made for it.
        budget_bytes: Limit, what is there all the time included.

    Raises:
        PlanError: Naming the constraint that it breaks.
    """
    return judge(graph, as_schedule(graph, profile, plan), budget_bytes // KIB)


def as_schedule(graph: MonetGraph, profile: Profile, plan: Plan) -> Schedule:
    """R, S and IP of a plan; what may write in place does so where it saves time.

    Raises:
        PlanError: If it swaps something, or runs something twice in forward.
    """
    runs_of, kept_before = schedule_of(profile, plan)
    width, stages = graph.loss + 1, len(graph.kib) - graph.loss
    if any(sum(row) > 1 for row in runs_of[:width]):
        raise PlanError(
            "The plan runs an operation again in forward, which MONeT's form does not "
            'have.'
        )
    places = operations_of(graph)
    runs, kept = [bytes([1] * width)], [bytes(width)]
    for t in range(stages):
        last = graph.loss + t
        first = places[last - 1] + 1
        if t:
            ran = [runs_of[k][:width] for k in range(first, places[last] + 1)]
            runs.append(bytes(map(max, zip(*ran, strict=True))))
        after = bytearray(width)
        if t + 1 < stages:
            after[:] = kept_before[places[last] + 1][:width]
        for u in graph.reads[last]:  # what it reads stays until it has run
            if t and u < width and kept_before[first][u]:
                after[u] = 1
        kept.append(bytes(after))
    in_place = [bytearray(width) for _ in range(stages)]
    for v, u in graph.over.items():
        if graph.units[IN_PLACE][v] > graph.units[FIRST][v]:
            continue
        for t in range(stages):
            read = u in graph.reads[graph.loss + t]
            if runs[t][v] and not read and not kept[t + 1][u]:
                in_place[t][v] = 1
    return Schedule(runs, kept, [bytes(row) for row in in_place])


def judge(
    graph: MonetGraph, schedule: Schedule, budget_kib: float = math.inf
) -> ScheduleCost:
    """Checks a schedule against all constraints.

    Raises:
        PlanError: Naming the constraint that it breaks, with stage and operation.
    """
    width, stages = graph.loss + 1, len(graph.kib) - graph.loss
    runs, in_place = schedule.runs, schedule.in_place
    _check_form(width, stages, schedule)
    units = sum(graph.units[FIRST][width:])
    peak = 0
    for t in range(stages):
        _check_stage(graph, schedule, t)
        way = AGAIN if t else FIRST
        units += sum(graph.units[way][i] for i in range(width) if runs[t][i])
        units += sum(
            graph.units[IN_PLACE][i] - graph.units[FIRST][i]
            for i in range(width)
            if in_place[t][i]
        )
        load = _stage_peak(graph, schedule, t)
        if load > budget_kib:
            raise PlanError(
                f'Stage {t} ({graph.labels[graph.loss + t]}) needs {load} KiB; the '
                f'budget is {budget_kib} KiB.'
            )
        peak = max(peak, load)
    return ScheduleCost(units, peak)


def _check_form(width: int, stages: int, schedule: Schedule) -> None:
    wanted = ((schedule.runs, stages), (schedule.kept, stages + 1))
    for rows, height in (*wanted, (schedule.in_place, stages)):
        if len(rows) != height or {len(row) for row in rows} != {width}:
            raise PlanError(
                f'The schedule is not one of {stages} stages and {width} operations.'
            )
    if not all(schedule.runs[0]) or any(schedule.kept[0]):
        raise PlanError('Stage 0 is not a whole forward pass that begins with nothing.')


def _check_stage(graph: MonetGraph, schedule: Schedule, t: int) -> None:
    runs, kept = schedule.runs[t], schedule.kept[t]
    after, in_place = schedule.kept[t + 1], schedule.in_place[t]
    width = graph.loss + 1
    over = {graph.over.get(v, -1) for v in range(width) if in_place[v]}
    for i in range(width):
        if in_place[i] and not (runs[i] and i in graph.over):
            raise PlanError(f'Operation {i} cannot write in place in stage {t}.')
        check_operation(t, i, graph.reads[i], runs, kept, bool(after[i]), i in over)
    for u in graph.reads[graph.loss + t] if t else ():
        if u < width and not (after[u] or (runs[u] and u not in over)):
            raise PlanError(
                f'Operation {graph.loss + t} runs without the product of operation {u}.'
            )


def _stage_peak(graph: MonetGraph, schedule: Schedule, t: int) -> int:
    """Highest memory of a stage in KiB, as MONeT's solver counts it."""
    kib, width, last = graph.kib, graph.loss + 1, graph.loss + t
    runs, kept, after = schedule.runs[t], schedule.kept[t], schedule.kept[t + 1]
    spaces = graph.workspace_kib[AGAIN if t else FIRST]
    base = graph.fixed_kib[last - 1] + (graph.held_kib[last] if t else 0)
    peak = 0
    needed = 0  # by the stage's own operation of backward, made before j
    waiting = sum(kib[i] for i in range(width) if kept[i])  # from j on
    ready = 0  # before j
    for j in range(width):
        peak = max(peak, base + waiting + ready + needed)
        waiting -= kib[j] if kept[j] else 0
        load = base + waiting + needed + ready
        load -= sum(kib[i] for i in graph.held[j] if i < j and after[i])
        if runs[j]:
            place = schedule.in_place[t][j]
            load += graph.workspace_kib[IN_PLACE][j] if place else spaces[j]
            load += kib[j] + graph.held_kib[j]
        peak = max(peak, load)
        ready += kib[j] if after[j] else 0
        needed += kib[j] if j in graph.reads[last] and not after[j] else 0
    if t:
        reads = [i for i in graph.reads[last] if i < width]
        load = graph.workspace_kib[FIRST][last] + graph.held_kib[last]
        load += graph.fixed_kib[last] + kib[last] + sum(kib[i] for i in reads)
        load += sum(kib[i] for i in range(width) if after[i] and i not in reads)
        peak = max(peak, load)
    return peak
