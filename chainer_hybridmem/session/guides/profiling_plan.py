"""The plan of profiling iterations, and what its recordings tell."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from chainer_hybridmem.recording.stopwatch import Times
from chainer_hybridmem.recording.trials import SHORT_SECONDS
from chainer_hybridmem.records.plan import Action, MapPlan, Part, Plan
from chainer_hybridmem.records.profile import (
    PERSISTENT,
    Operation,
    Phase,
    Profile,
    Recipe,
)
from chainer_hybridmem.records.splits import Splitting
from chainer_hybridmem.simulation.problem import (
    CrossIteration,
    Problem,
    decided_by,
    make_problem,
)
from chainer_hybridmem.simulation.timeline import undisturbed_seconds


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


def with_median_times(profile: Profile, timings: Sequence[Sequence[Times]]) -> Profile:
    """The profile with the median times of timed iterations.

    Args:
        profile: Of the iterations.
        timings: Per iteration, the times of its operations.
    """
    medians = [
        Times(*map(statistics.median, zip(*times, strict=True)))
        for times in zip(*timings, strict=True)
    ]
    operations = tuple(
        dataclasses.replace(
            op,
            device_seconds=median.device_seconds,
            host_seconds=median.host_seconds,
        )
        for op, median in zip(profile.operations, medians, strict=True)
    )
    totals = [sum(t.device_seconds + t.replay_seconds for t in row) for row in timings]
    replays = sum(median.replay_seconds for median in medians)
    operations = _with_waiting(operations, statistics.median(totals) - replays)
    recipes = _with_replay_times(profile.recipes, timings)
    return dataclasses.replace(profile, operations=operations, recipes=recipes)


def _with_replay_times(
    recipes: tuple[Recipe, ...], timings: Sequence[Sequence[Times]]
) -> tuple[Recipe, ...]:
    """The recipes with the median times of their replays, where all have run.

    The others take longer or shorter in the same ratio, where it is that of a time
    long enough to tell.
    """
    found = {
        recipe.operation: [times[recipe.operation].replay_seconds for times in timings]
        for recipe in recipes
    }
    medians = {k: statistics.median(taken) for k, taken in found.items() if all(taken)}
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


def make_undisturbed_problem(
    profile: Profile,
    plan: Plan,
    cross_iteration: CrossIteration,
    host_limit_bytes: int | None,
    splitting: Splitting,
    parts: tuple[Part, ...] = (),
) -> Problem:
    """The problem without what the copies of the recorded plan cost compute.

    Args:
        profile: Recorded while the plan was followed.
        plan: The plan.
        cross_iteration: As in :func:`.simulation.make_problem`, like the rest.
        host_limit_bytes: Likewise.
        splitting: Likewise.
        parts: Likewise.
    """
    crossed = decided_by(profile, plan)
    problem = make_problem(profile, crossed, host_limit_bytes, splitting, parts)
    decided = {storage.id for storage in problem.maps}
    followed = tuple(entry for entry in plan.maps if entry.storage in decided)
    plan = dataclasses.replace(plan, maps=followed)
    operations = tuple(
        dataclasses.replace(op, device_seconds=seconds)
        for op, seconds in zip(
            profile.operations, undisturbed_seconds(problem, plan), strict=True
        )
    )
    if operations == profile.operations and crossed == cross_iteration:
        return problem
    profile = dataclasses.replace(profile, operations=operations)
    return make_problem(profile, cross_iteration, host_limit_bytes, splitting, parts)
