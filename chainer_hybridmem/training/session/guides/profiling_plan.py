"""The plan of profiling iterations, and what its recordings tell."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from chainer_hybridmem.planning.records.plan import Action, MapPlan, Plan
from chainer_hybridmem.planning.records.profile import (
    PERSISTENT,
    MoveCost,
    Operation,
    Phase,
    Profile,
    Recipe,
)
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    decided_by,
    make_problem,
    with_profile,
)
from chainer_hybridmem.planning.simulation.timeline import undisturbed_seconds
from chainer_hybridmem.training.recording.stopwatch import Times
from chainer_hybridmem.training.recording.trials import SHORT_SECONDS


def swap_everything(profile: Profile) -> Plan:
    """The plan of profiling iterations: everything out at once, back at need.

    It needs no planning and no more memory than single operations do, so that
    a profile can be made where in-core training is impossible.
    """
    maps = []
    b0 = profile.first_backward
    for storage in profile.feature_maps():
        out = max((storage.producer, *storage.forward_uses)) + 1
        need = storage.backward_uses[0]
        if out > b0 or need < b0:
            continue
        drop_before = storage.backward_uses[-1] + 1
        if out == need:  # there is no time to leave: obedience, [no choice]
            maps.append(MapPlan(storage.id, Action.KEEP, drop_before=drop_before))
            continue
        maps.append(
            MapPlan(
                storage=storage.id,
                action=Action.SWAP,
                swap_out_before=out,
                release_before=out,
                swap_in_before=need,
                needed_before=need,
                drop_before=drop_before,
            )
        )
    return Plan(
        planner='profiling',
        options={},
        profile_fingerprint=profile.fingerprint(),
        memory_limit_bytes=0,
        maps=tuple(maps),
        replays=(),
        predicted_seconds=0.0,
        predicted_peak_bytes=0,
        in_core_seconds=profile.compute_seconds,
        lower_bound_seconds=profile.compute_seconds,
    )


def merge_recordings(recordings: Sequence[Profile], recomputes: bool) -> Profile:
    """One profile with the best times of several recordings of one signature.

    The fastest of several is the one least disturbed by other users of the machine.

    Args:
        recordings: With the same operations.
        recomputes: Whether anything may be recomputed.
    """
    base = recordings[0]
    rows = zip(*(profile.operations for profile in recordings), strict=True)
    operations = tuple(
        dataclasses.replace(
            row[0],
            device_seconds=min(op.device_seconds for op in row),
            host_seconds=min(op.host_seconds for op in row),
        )
        for row in rows
    )
    recipes: tuple[Recipe, ...] = ()
    if recomputes:
        recipes = tuple(_with_best_time(r, operations) for r in base.recipes)
    return dataclasses.replace(base, operations=operations, recipes=recipes)


def makes_states(profile: Profile) -> bool:
    """Whether the next iteration begins with more parameters or optimizer states."""
    made_bytes = 0
    for storage in profile.storages:
        if storage.category in PERSISTENT:
            made_bytes += storage.nbytes * (storage.producer >= 0)
            made_bytes -= storage.nbytes * (storage.freed_at >= 0)
    return made_bytes > 0


def _with_best_time(recipe: Recipe, operations: Sequence[Operation]) -> Recipe:
    """A long replay was timed once; it is the forward without Chainer around it."""
    if recipe.covers or recipe.seconds < SHORT_SECONDS:
        return recipe
    forward_seconds = operations[recipe.operation].device_seconds
    return dataclasses.replace(recipe, seconds=min(recipe.seconds, forward_seconds))


def with_median_times(
    profile: Profile, timings: Sequence[Sequence[Times]], plan: Plan
) -> Profile:
    """The profile with the median times of timed iterations.

    Args:
        profile: Of the iterations.
        timings: Per iteration, the times of its operations.
        plan: That they have followed.
    """
    medians = [
        Times(*map(statistics.median, zip(*times, strict=True)))
        for times in zip(*timings, strict=True)
    ]
    if all(op.phase is not Phase.ALL_REDUCE for op in profile.operations):
        medians = _with_rare_times(medians, timings)
    maps, nbytes = _count_moves(profile, plan)
    move_cost = _find_move_cost(profile.move_cost, medians, maps, nbytes)
    operations = tuple(
        dataclasses.replace(
            op,
            device_seconds=median.device_seconds,
            host_seconds=median.host_seconds,
            # Drops alone are no moves of maps that come back.
            session_seconds=median.session_seconds + median.move_seconds * (not moved),
        )
        for op, median, moved in zip(profile.operations, medians, maps, strict=True)
    )
    totals = [sum(t.device_seconds + t.replay_seconds for t in row) for row in timings]
    replays = sum(median.replay_seconds for median in medians)
    operations = _with_waiting(operations, statistics.median(totals) - replays)
    recipes = _with_replay_times(profile.recipes, timings, move_cost.seconds_per_map)
    return dataclasses.replace(
        profile, operations=operations, recipes=recipes, move_cost=move_cost
    )


def _with_rare_times(
    medians: list[Times], timings: Sequence[Sequence[Times]]
) -> list[Times]:
    """The medians, so that they take what the least disturbed iteration has taken.

    The update aside. What comes now in one operation and now in another, as the
    collection of garbage, is in no median; what disturbs all of them is in each. What
    is late in an iteration with an all-reduce is that one's, and a GPU's times stay.
    """
    issued = any(median.host_seconds > 0 for median in medians)
    before = _sum_own(medians)
    if issued or before <= 0:
        return medians
    ratio = min(map(_sum_own, timings)) / before
    if abs(ratio - 1) < LEAST_RARE:
        return medians
    scaled = [
        Times(*(ratio * one for one in median))._replace(
            replay_seconds=median.replay_seconds
        )
        for median in medians[:-1]
    ]
    return [*scaled, medians[-1]]


def _sum_own(times: Sequence[Times]) -> float:
    """Seconds of operations and hooks before the update, without replays."""
    return sum(sum(one) - one.replay_seconds for one in times[:-1])


def _count_moves(profile: Profile, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(n,) maps that a plan moves before each operation, and their bytes.

    Each counts as a quarter where it begins to leave, has left, begins to come back,
    and is needed.
    """
    maps, nbytes = np.zeros((2, len(profile.operations) + 1))
    for entry in plan.maps:
        if entry.action is Action.SWAP:
            for before in (
                entry.swap_out_before,
                entry.release_before,
                entry.swap_in_before,
                entry.needed_before,
            ):
                maps[before] += 0.25
                nbytes[before] += 0.25 * profile.storages[entry.storage].nbytes
    return maps[:-1], nbytes[:-1]


LEAST_RARE = 1e-3  # of the time of an iteration; less is rounding
FEW_MAPS = 3  # moves of fewer tell nothing of others


def _find_move_cost(
    known: MoveCost, medians: Sequence[Times], maps: np.ndarray, nbytes: np.ndarray
) -> MoveCost:
    """What a map costs that is moved; altogether, as much as has been measured."""
    seconds = np.array([median.move_seconds for median in medians]) * (maps > 0)
    if maps.sum() < FEW_MAPS or not seconds.any():
        return known
    found = _fit(np.stack([maps, nbytes], axis=1), seconds)
    expected = found[0] * maps.sum() + found[1] * nbytes.sum()
    ratio = seconds.sum() / expected if expected > 0 else 0.0
    return MoveCost(float(found[0] * ratio), float(found[1] * ratio))


def _fit(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(2,) factors of (n, 2) columns by least squares; neither is negative.

    As ``scipy.optimize.nnls``, which each program would have to import.
    """
    found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    if (found >= 0).all():
        return found
    squares = (columns**2).sum(axis=0)
    alone = columns.T @ seconds / squares  # of each column without the other one
    explained = alone**2 * squares
    return np.where(explained == explained.max(), alone, 0.0)


def _with_replay_times(
    recipes: tuple[Recipe, ...],
    timings: Sequence[Sequence[Times]],
    move_seconds: float,
) -> tuple[Recipe, ...]:
    """The recipes with the median times of their replays, where all have run.

    The others take longer or shorter in the same ratio, where it is that of a time
    long enough to tell. What the move of a map costs is no part of them.
    """
    found = {
        recipe.operation: [times[recipe.operation].replay_seconds for times in timings]
        for recipe in recipes
    }
    medians = {
        k: max(statistics.median(taken) - move_seconds, 0.0)
        for k, taken in found.items()
        if all(taken)
    }
    expected = sum(recipe.seconds for recipe in recipes if recipe.operation in medians)
    ratio = 1.0
    if expected >= SHORT_SECONDS:
        ratio = sum(medians.values()) / expected
    return tuple(
        dataclasses.replace(
            recipe, seconds=medians.get(recipe.operation, recipe.seconds * ratio)
        )
        for recipe in recipes
    )


def _with_waiting(
    operations: tuple[Operation, ...], total_seconds: float
) -> tuple[Operation, ...]:
    """The operations; an all-reduce takes so long that they take the given time.

    All processes wait for the slowest one, which now is late in this operation and now
    in that, or in a replay: medians of single ones leave out nearly all of it.
    """
    late = total_seconds - sum(op.device_seconds for op in operations)
    places = [op.index for op in operations if op.phase is Phase.ALL_REDUCE]
    if not places or late <= 0:
        return operations
    k = places[-1]
    summed = operations[k]
    summed = dataclasses.replace(summed, device_seconds=summed.device_seconds + late)
    return (*operations[:k], summed, *operations[k + 1 :])


def make_undisturbed(problem: Problem, plan: Plan) -> Problem:
    """The problem without what the copies of a plan cost compute.

    Args:
        problem: Of a profile that was recorded while the plan was followed.
        plan: The plan.
    """
    profile, recorded = problem.profile, problem
    crossed = decided_by(profile, plan)
    if problem.rules or crossed != problem.cross_iteration:
        recorded = make_problem(profile, crossed, parts=problem.parts)
    decided = {storage.id for storage in recorded.maps}
    followed = tuple(entry for entry in plan.maps if entry.storage in decided)
    plan = dataclasses.replace(plan, maps=followed)
    operations = tuple(
        dataclasses.replace(op, device_seconds=seconds)
        for op, seconds in zip(
            profile.operations, undisturbed_seconds(recorded, plan), strict=True
        )
    )
    if operations == profile.operations:
        return problem
    return with_profile(problem, dataclasses.replace(profile, operations=operations))
