"""Which replays a recording inside a memory limit can try."""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.records.profile import Profile
from chainer_hybridmem.simulation.problem import Problem, with_profile


def with_room_for_trials(problem: Problem, limit_bytes: int) -> Problem:
    """The problem with the recipes that a session can prove inside a limit.

    A replay is tried right after its operation, while everything else has left: what
    the operation has read and made is there, and once more what the replay takes, in
    parts if need be. What has no room for that is never made again.

    Args:
        problem: One iteration; its recipes may be proven elsewhere.
        limit_bytes: Most bytes there are.
    """
    load, least = _load_after(problem), _least_peaks(problem.profile)
    recipes = tuple(
        recipe
        for recipe in problem.profile.recipes
        if recipe.covers
        or load[recipe.operation] + least[recipe.operation] <= limit_bytes
    )
    if len(recipes) == len(problem.profile.recipes):
        return problem
    profile = dataclasses.replace(problem.profile, recipes=recipes)
    return with_profile(problem, profile)


def _least_peaks(profile: Profile) -> dict[int, int]:
    """What a replay of each operation takes at least, in bytes."""
    least = {recipe.operation: recipe.peak_bytes for recipe in profile.recipes}
    for split in profile.splits:
        if split.function == 0 and split.operation in least:
            least[split.operation] = min(least[split.operation], split.peak_bytes)
    return least


def _load_after(problem: Problem) -> np.ndarray:
    """(b0,) bytes after each forward operation, with what it has read and made."""
    a, n_maps, profile = problem.arrays, len(problem.maps), problem.profile
    b0, storages = a.first_backward, problem.profile.storages
    change = np.zeros(b0 + 1, np.int64)
    np.add.at(change, np.maximum(a.producer[:n_maps], 0), a.size[:n_maps])
    np.subtract.at(change, a.copy_from, a.size[:n_maps])
    there: np.ndarray = np.cumsum(change)[:b0] + a.fixed_start[1 : b0 + 1]
    planned = {storage.id for storage in problem.maps}
    for op in profile.operations[:b0]:  # what it reads dies only when it is complete
        span = profile.span_of(op.index)
        there[op.index] += sum(
            storages[s].nbytes
            for s in set(op.reads) - planned
            if span[0] <= storages[s].freed_at < span[1]
        )
    return there
