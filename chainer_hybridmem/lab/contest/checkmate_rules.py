"""Checks schedules against Checkmate's own constraints, apart from our simulator.

Jain et al. 2020, section 4, as MONeT's authors ran it. T operations, T stages; stage t
runs operation t for the first time:

======  ==========================================================================
symbol  meaning
======  ==========================================================================
R       (T, T) whether operation i runs in stage t
S       (T, T) whether the product of operation i is there when stage t begins
U       memory in use after operation k has run in stage t
======  ==========================================================================

Within a stage, operations run in the order of their numbers. A product is freed after
the last operation of the stage that reads it, unless it is there when the next stage
begins. The objective is the time of all of R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.lab.importing.checkmate import KIB, UNIT_SECONDS, TrainingGraph
from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan
from chainer_hybridmem.planning.records.profile import Phase, Profile

Rows = Sequence[bytes | bytearray]
"""A matrix of zeros and ones."""


class ScheduleCost(NamedTuple):
    """What a schedule that keeps all constraints costs.

    Attributes:
        units (int): Time of everything that runs, in units of 10 µs.
        peak_kib (int): Highest memory, with what is there all the time.
    """

    units: int
    peak_kib: int


def judge_plan(profile: Profile, plan: Plan, budget_bytes: int) -> ScheduleCost:
    """A plan without swaps as a schedule of Checkmate's.

    Args:
        profile: An iteration whose operations make one buffer each.
        plan: Made for it.
        budget_bytes: Limit, what is there all the time included.

    Raises:
        PlanError: Naming the constraint that it breaks.
    """
    graph = graph_of(profile)
    return judge(graph, *schedule_of(profile, plan), budget_bytes // KIB)


def judge(
    graph: TrainingGraph, runs: Rows, kept: Rows, budget_kib: int
) -> ScheduleCost:
    """Checks R and S of a schedule against all constraints.

    Raises:
        PlanError: Naming the constraint that it breaks, with stage and operation.
    """
    _check_form(graph.size, runs, kept)
    readers: list[list[int]] = [[] for _ in range(graph.size)]
    for v, sources in enumerate(graph.reads):
        for u in sources:
            readers[u].append(v)
    units, peak = 0, 0
    for t in range(graph.size):
        after = kept[t + 1] if t + 1 < graph.size else bytes(graph.size)
        _check_stage(graph, t, runs[t], kept[t], after)
        load = graph.fixed_kib + sum(
            size for size, there in zip(graph.kib, kept[t], strict=True) if there
        )
        peak = max(peak, load)
        for k in (k for k, runs_now in enumerate(runs[t]) if runs_now):
            units += graph.units[k]
            load += graph.kib[k]
            peak = max(peak, load)
            for i in graph.reads[k]:
                read_later = any(j > k and runs[t][j] for j in readers[i])
                load -= 0 if read_later or after[i] else graph.kib[i]
        if peak > budget_kib:
            raise PlanError(
                f'Stage {t} ({graph.labels[t]}) needs {peak} KiB; the budget is '
                f'{budget_kib} KiB.'
            )
    return ScheduleCost(units, peak)


def _check_form(size: int, runs: Rows, kept: Rows) -> None:
    if any(
        len(rows) != size or {len(row) for row in rows} != {size}
        for rows in (runs, kept)
    ):
        raise PlanError(f'The schedule is not one of {size} stages.')
    for t in range(size):
        if not runs[t][t] or any(runs[t][t + 1 :]):
            raise PlanError(f'Stage {t} does not end with operation {t}.')
        if any(kept[t][t:]):
            raise PlanError(f'Stage {t} begins with something that no stage has made.')


def _check_stage(
    graph: TrainingGraph,
    t: int,
    runs: bytes | bytearray,
    kept: bytes | bytearray,
    after: bytes | bytearray,
) -> None:
    for i in range(graph.size):
        check_operation(t, i, graph.reads[i], runs, kept, bool(after[i]))


def check_operation(
    t: int,
    i: int,
    reads: Sequence[int],
    runs: bytes | bytearray,
    kept: bytes | bytearray,
    stays: bool,
    lost: bool = False,
) -> None:
    """What stage t has of operation i, in Checkmate's form and in MONeT's.

    Args:
        t: The stage.
        i: The operation.
        reads: Operations whose products it reads.
        runs: Which operations run in the stage.
        kept: Whose products are there when it begins.
        stays: Whether that of operation i is there after it.
        lost: Whether another one writes over it.

    Raises:
        PlanError: If something is there that nobody has made.
    """
    if stays and (lost or not (kept[i] or runs[i])):
        raise PlanError(
            f'The product of operation {i} is there after stage {t}, but neither kept '
            'nor made in it.'
        )
    for u in reads if runs[i] else ():
        if not (runs[u] or kept[u]):
            raise PlanError(
                f'Operation {i} runs in stage {t} without the product of operation {u}.'
            )


# -- a profile and a plan in this form ----------------------------------------
def graph_of(profile: Profile) -> TrainingGraph:
    """The graph of a profile, from what its operations read and write.

    Raises:
        PlanError: If it is not accounted as Checkmate does.
    """
    operations = [op for op in profile.operations if op.phase is not Phase.UPDATE]
    maker = {s: op.index for op in operations for s in op.writes}
    fixed = profile.initial_bytes
    kib, units = [], []
    for op in operations:
        if len(op.writes) != 1:
            raise PlanError(
                f'Operation {op.index} ({op.label}) makes {len(op.writes)} buffers; '
                "in Checkmate's form each makes one."
            )
        kib.append(-(-profile.storages[op.writes[0]].nbytes // KIB))
        units.append(round(op.device_seconds / UNIT_SECONDS))
    return TrainingGraph(
        kib=tuple(kib),
        units=tuple(units),
        reads=tuple(
            tuple(maker[s] for s in op.reads if s in maker) for op in operations
        ),
        labels=tuple(op.label for op in operations),
        forward=tuple(op.forward for op in operations),
        fixed_kib=-(-fixed // KIB),
    )


def schedule_of(profile: Profile, plan: Plan) -> tuple[Rows, Rows]:
    """R and S of a plan: what runs in each stage, and what is there when it begins.

    Raises:
        PlanError: If it swaps something.
    """
    size = len(profile.operations) - 1
    runs = [bytearray(size) for _ in range(size)]
    kept = [bytearray(size) for _ in range(size)]
    for t in range(size):
        runs[t][t] = 1
    for replay in plan.replays:
        runs[replay.before][replay.operation] = 1
    entries = {entry.storage: entry for entry in plan.maps}
    staying = {source.storage: source.drop_before for source in plan.sources}
    for op in profile.operations[:size]:
        for s in op.writes:
            storage = profile.storages[s]
            uses = (op.index, *storage.forward_uses, *storage.backward_uses)
            spans = [(op.index + 1, staying.get(s, max(uses) + 1))]
            if s in entries:
                spans = _spans(entries[s], op.index, max(uses))
            for begin, end in spans:
                for t in range(begin, min(end, size)):
                    kept[t][op.index] = 1
    return runs, kept


def _spans(entry: MapPlan, producer: int, last: int) -> list[tuple[int, int]]:
    """Stages that begin with a map, half-open."""
    if entry.action is Action.SWAP:
        raise PlanError(
            f'Feature map {entry.storage} is swapped, which Checkmate does not know.'
        )
    end = last + 1 if entry.drop_before < 0 else entry.drop_before
    if entry.action is Action.KEEP:
        return [(producer + 1, end)]
    return [(producer + 1, entry.release_before), (entry.needed_before + 1, end)]
