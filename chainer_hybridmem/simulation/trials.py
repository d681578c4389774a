"""Which replays a recording inside a memory limit can try."""

from __future__ import annotations

import dataclasses

import numpy as np

from chainer_hybridmem.simulation.problem import Problem, with_profile


def with_room_for_trials(problem: Problem, limit_bytes: int) -> Problem:
    """The problem with the recipes that a session can prove inside a limit.

    A replay is tried right after its operation, while everything else has left: what
    the operation has read and made is there, and once more what the replay takes. What
    has no room for that is never made again.

    Args:
        problem: One iteration; its recipes may be proven elsewhere.
        limit_bytes: Most bytes there are.
    """
    load = _load_after(problem)
    recipes = tuple(
        recipe
        for recipe in problem.profile.recipes
        if recipe.covers or load[recipe.operation] + recipe.peak_bytes <= limit_bytes
    )
    if len(recipes) == len(problem.profile.recipes):
        return problem
    profile = dataclasses.replace(problem.profile, recipes=recipes)
    return with_profile(problem, profile)


def _load_after(problem: Problem) -> np.ndarray:
    """(b0,) bytes after each forward operation, with the maps it has read and made."""
    a, n_maps = problem.arrays, len(problem.maps)
    b0 = a.first_backward
    change = np.zeros(b0 + 1, np.int64)
    np.add.at(change, np.maximum(a.producer[:n_maps], 0), a.size[:n_maps])
    np.subtract.at(change, a.copy_from, a.size[:n_maps])
    there: np.ndarray = np.cumsum(change)[:b0]
    return there + a.fixed_start[1 : b0 + 1]
