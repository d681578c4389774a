"""Profile and plan in, timeline out: the judge of every plan.

The judge reads positions from the plan; it does not decide anything.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.errors import PlanError
from chainer_hybridmem.planning.records.plan import (
    Action,
    MapPlan,
    Plan,
    Replay,
    Source,
    Tier,
)
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.timeline import Interval, Timeline
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.simulation.lanes import time_lanes
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    copy_seconds,
    decided_by,
    make_problem,
)
from chainer_hybridmem.planning.simulation.work import KEEP, RUN, STAY, Work, make_work


def plan_from_positions(
    problem: Problem, action: np.ndarray, positions: Work
) -> tuple[tuple[MapPlan, ...], tuple[Replay, ...], tuple[Source, ...]]:
    """The kernel's flat arrays as plan entries; sources that no replay reads go."""
    actions = (Action.KEEP, Action.SWAP, Action.RECOMPUTE)
    maps = tuple(
        MapPlan(
            storage=storage.id,
            action=actions[min(action[m], len(actions) - 1)],
            swap_out_before=int(positions.swap_out[m]),
            release_before=int(positions.release[m]),
            swap_in_before=int(positions.swap_in[m]),
            needed_before=int(positions.needed[m]),
            drop_before=int(positions.drop[m]),
            tier=Tier.DISK if positions.on_disk[m] else Tier.RAM,
        )
        for m, storage in enumerate(problem.maps)
        if problem.arrays.read[m]
    )
    sources = tuple(
        Source(storage.id, int(positions.drop[m]))
        for m, storage in enumerate(problem.maps)
        if not problem.arrays.read[m]
        and action[m] == KEEP
        and positions.drop[m] > problem.arrays.first_backward
    )
    replays: list[Replay] = []
    for before, kind, what in positions.program.tolist():
        if kind == RUN:
            replays.append(Replay(before, what))
            continue
        last, storage_id = replays[-1], problem.items[what]
        if kind == STAY:
            last = dataclasses.replace(last, keeps=(*last.keeps, storage_id))
        else:
            last = dataclasses.replace(last, frees=(*last.frees, storage_id))
        replays[-1] = last
    return maps, tuple(replays), sources


def positions_from_plan(problem: Problem, plan: Plan) -> Work:
    """Plan entries as the kernel's flat arrays.

    Raises:
        PlanError: If the plan is for another profile.
    """
    _check_profile(problem, plan)
    work = make_work(problem.arrays)
    _write_maps(problem, plan, work)
    _write_replays(problem, plan, work)
    return work


def _check_profile(problem: Problem, plan: Plan) -> None:
    fingerprint = problem.profile.fingerprint()
    if plan.profile_fingerprint != fingerprint:
        raise PlanError(
            f'The plan was made for profile {plan.profile_fingerprint}, this is '
            f'profile {fingerprint}; name its own, or plan again with `hybridmem plan`.'
        )
    if [m.storage for m in plan.maps] != [s.id for s in problem.maps]:
        raise PlanError(
            f'The plan decides about {len(plan.maps)} feature maps, the profile has '
            f'{len(problem.maps)}; plan again with `hybridmem plan`.'
        )


def _write_maps(problem: Problem, plan: Plan, positions: Work) -> None:
    n = len(problem.profile.operations)
    positions.on_disk[:] = [m.tier is Tier.DISK for m in plan.maps]
    if positions.on_disk.any() and problem.profile.disk_link is None:
        raise PlanError(
            f'The plan swaps {int(positions.on_disk.sum())} maps to the disk, but the '
            'profile has no disk link; record it with swap_dir and host_limit.'
        )
    for name, column in (
        ('swap_out_before', positions.swap_out),
        ('release_before', positions.release),
        ('swap_in_before', positions.swap_in),
        ('needed_before', positions.needed),
        ('drop_before', positions.drop),
    ):
        values = [getattr(m, name) for m in plan.maps]
        if not all(-1 <= value <= n for value in values):
            raise PlanError(f'A {name} lies outside the {n} operations of the profile.')
        column[:] = values


def _write_replays(problem: Problem, plan: Plan, positions: Work) -> None:
    n, a = len(problem.profile.operations), problem.arrays
    for replay in plan.replays:
        if not (0 <= replay.before < n and 0 <= replay.operation < n):
            raise PlanError(f'{replay} lies outside the {n} operations of the profile.')
        seconds = a.recipe_seconds[replay.operation]
        if seconds < 0:
            raise PlanError(
                f'The plan replays operation {replay.operation}, which the profile '
                f'has not shown to be repeatable.'
            )
        positions.replay_seconds[replay.before] += seconds
        host_seconds = a.host_seconds[replay.operation]
        positions.replay_host_seconds[replay.before] += host_seconds


def run_lanes(problem: Problem, work: Work) -> float:
    """Seconds of an iteration with everything at the given positions.

    When it all happens stands in ``work`` afterwards.
    """
    out_seconds, in_seconds = copy_seconds(problem, work.on_disk)
    return time_lanes(problem.arrays, out_seconds, in_seconds, work)


def find_moving(problem: Problem, work: Work) -> np.ndarray:
    """(n,) seconds of compute that copies which start before each operation cost."""
    moving = np.zeros(len(problem.arrays.seconds) + 1)
    swapped = work.swap_out >= 0
    for starts in (work.swap_out, work.swap_in):
        np.add.at(moving, starts[swapped], problem.arrays.move_seconds[swapped])
    return moving[:-1]


def simulate(profile: Profile | Problem, plan: Plan) -> Timeline:
    """Replays a plan on its profile.

    Args:
        profile: The profile, or the problem made of it.
        plan: A plan for exactly this profile.

    Returns:
        Timeline: Intervals on three lanes, load per operation, every stall
        with its cause.

    Raises:
        PlanError: If the plan is for another profile or breaks a rule.
    """
    if isinstance(profile, Problem):
        problem = profile
    else:
        problem = make_problem(profile, decided_by(profile, plan))
    work = positions_from_plan(problem, plan)
    loads = check_plan(problem.profile, plan)
    total = run_lanes(problem, work)
    stall = float(work.release_stall.sum() + work.need_stall.sum())
    return Timeline(
        total_seconds=total,
        peak_bytes=max(loads),
        stall_seconds=stall,
        host_stall_seconds=total - float(work.stop[-1]) + float(work.host_stall.sum()),
        recompute_seconds=float(work.replay_seconds.sum()),
        load_bytes=tuple(loads),
        intervals=tuple(_intervals(problem, plan, work)),
    )


def undisturbed_seconds(problem: Problem, plan: Plan) -> list[float]:
    """What operations would take without copies beside them.

    Args:
        problem: With times measured while a plan was followed, its copies included.
        plan: That plan.

    Returns:
        list of float: Seconds per operation, without the session's own work;
        :func:`simulate` of the plan with these gives the measured times again.
    """
    a = problem.arrays
    alone = np.array([op.device_seconds for op in problem.profile.operations])
    if a.out_compute_share == a.in_compute_share == 1:
        return list(alone.tolist())
    work = positions_from_plan(problem, plan)
    as_measured = dataclasses.replace(a, out_compute_share=1.0, in_compute_share=1.0)
    time_lanes(as_measured, *copy_seconds(problem, work.on_disk), work)
    swapped = work.swap_out >= 0
    moments = np.concatenate(
        [work.began[:, swapped], work.ended[:, swapped]], axis=None
    )
    moments = np.unique(np.append(moments, [0.0, work.stop[-1]]))
    speed = np.ones(len(moments) - 1)
    for lane, share in enumerate((a.out_compute_share, a.in_compute_share)):
        # Copies of one lane do not overlap: some are under way where more have
        # begun than ended.
        began = np.searchsorted(np.sort(work.began[lane, swapped]), moments, 'right')
        ended = np.searchsorted(np.sort(work.ended[lane, swapped]), moments, 'right')
        speed[(began > ended)[:-1]] *= share
    done = np.append(0.0, np.cumsum(speed * np.diff(moments)))
    first = work.start + work.replay_seconds + find_moving(problem, work)
    work_done = np.interp(work.stop, moments, done) - np.interp(first, moments, done)
    return list(np.maximum(work_done - (a.seconds - alone), 0.0).tolist())


def _intervals(problem: Problem, plan: Plan, work: Work) -> list[Interval]:
    result = []
    recipe = problem.arrays.recipe_seconds
    clock = work.start.copy()
    # Beside copies, compute may be slower than it is alone.
    own = problem.arrays.seconds + find_moving(problem, work)
    alone = work.replay_seconds + own
    slower = np.ones_like(alone)
    np.divide(work.stop - work.start, alone, out=slower, where=alone > 0)
    operations = problem.profile.operations
    for replay in plan.replays:
        k = replay.before
        start = float(clock[k])
        clock[k] = end = start + float(recipe[replay.operation] * slower[k])
        label = operations[replay.operation].label
        result.append(Interval('compute', 'recompute', label, start, end))
    for op in operations:
        k = op.index
        start = float(clock[k])
        end = start + float(own[k] * slower[k])
        result.append(Interval('compute', op.phase.value, op.label, start, end))
        if work.host_stall[k] > 0:
            # Before anything else that happens in front of operation k.
            last = float(work.stop[k - 1] + work.host_stall[k])
            result.append(
                Interval(
                    'compute',
                    'stall',
                    'waits for the host',
                    last - float(work.host_stall[k]),
                    last,
                )
            )
    for m, storage in enumerate(problem.maps):
        if work.swap_out[m] < 0:
            continue
        label, copies = storage.label, (
            ('d2h', 'swap-out', work.out_start[m], work.out_end[m]),
            ('h2d', 'swap-in', work.in_start[m], work.in_end[m]),
        )  # fmt: skip
        for lane, kind, first, last in copies:
            result.append(
                Interval(lane, kind, label, float(first), float(last), storage.id)
            )
        for verb, last, stall in (
            ('swap-out', work.out_end[m], work.release_stall[m]),
            ('swap-in', work.in_end[m], work.need_stall[m]),
        ):
            if stall > 0:
                cause = f'waits for {verb} of {label}'
                result.append(
                    Interval(
                        'compute',
                        'stall',
                        cause,
                        float(last - stall),
                        float(last),
                        storage.id,
                    )
                )
    return sorted(result, key=lambda i: (i.start_seconds, i.end_seconds))
